"""Constructor parameters of the optimizer and the scheduler: their types and defaults follow from `type`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from deepspeed.runtime.config_reader import check_section, prepare, read_section
from deepspeed.runtime.config_report import Report, nearest, show_value
from deepspeed.runtime.config_utils import AUTO, DeepSpeedConfigModel
from deepspeed.runtime.named_class import subclasses_in
from deepspeed.runtime.optimizer_config import BUILT_IN_OPTIMIZERS, OptimizerParams, built_in_optimizer
from deepspeed.runtime.scheduler_config import BUILT_IN_SCHEDULERS, SchedulerParams


@dataclass(frozen=True)
class NamedClassSection:
    """A block {"type": name, "params": {...}}.

    built_in: parameter sections by name. other: section of any other class. module, base: where further classes are."""

    name: str
    built_in: Mapping[str, type[DeepSpeedConfigModel]]
    other: type[DeepSpeedConfigModel]
    module: ModuleType
    base: type

    def canonical_type(self, given: str | None) -> str | None:
        """Returns the built-in name or torch class that `given` means; None if there is none."""
        if self.name == "optimizer" and built_in_optimizer(given) is not None:
            return built_in_optimizer(given)
        return given if given in self.built_in or given in subclasses_in(self.module, self.base) else None

    def params_model(self, given: str | None) -> type[DeepSpeedConfigModel]:
        """Returns the section that types the parameters of this type."""
        return self.built_in.get(self.canonical_type(given) or "", self.other)

    def default_of(self, given: str | None, key: str) -> object:
        """Returns the value that the constructor uses when the parameter is absent; None if it is unknown.

        Raises: KeyError if neither the section nor the class knows the parameter."""
        model = self.params_model(given)
        if key in model.model_fields:
            return model.model_fields[key].default
        canonical = self.canonical_type(given)
        parameter = inspect.signature(subclasses_in(self.module, self.base)[canonical or ""]).parameters[key]
        return None if parameter.default is inspect.Parameter.empty else parameter.default


SECTIONS = {
    "optimizer": NamedClassSection("optimizer", BUILT_IN_OPTIMIZERS, OptimizerParams, torch.optim,
                                   torch.optim.Optimizer),
    "scheduler": NamedClassSection("scheduler", BUILT_IN_SCHEDULERS, SchedulerParams, torch.optim.lr_scheduler,
                                   torch.optim.lr_scheduler.LRScheduler),
}


def read_params(section: NamedClassSection, values: dict[str, object], report: Report) -> None:
    """Replaces `params` in the values of a block by typed ones without "auto"; reports wrong type and parameters."""
    given = values.get("type")
    if isinstance(given, str) and section.canonical_type(given) is None:
        _report_unknown_type(section, given, report)
    params = values.get("params")
    if not isinstance(params, Mapping):
        return
    path = f"{section.name}.params"
    if "max_grad_norm" in params and section.name == "optimizer":
        report.add(f"{path}.max_grad_norm", f"is {show_value(params['max_grad_norm'])}, but optimizers do not clip; "
                                            "remove it and set gradient_clipping at the top level")
    model = section.params_model(given if isinstance(given, str) else None)
    prepared = prepare(model, params, path, report)
    for key in [key for key, value in prepared.items() if isinstance(value, str) and value == AUTO]:
        report.sources[f"{path}.{key}"] = AUTO
        del prepared[key]
    typed = read_section(model, prepared, path, report)
    check_section(typed, path, report)
    values["params"] = {key: getattr(typed, key) for key in prepared if key in typed.model_fields_set}
    if params and given is None and report.sources.get(f"{section.name}.type") != AUTO:
        report.warnings.append(f"{path} has no effect without {section.name}.type.")


def _report_unknown_type(section: NamedClassSection, given: str, report: Report) -> None:
    known = [*section.built_in, *subclasses_in(section.module, section.base)]
    guess = nearest(given, known)
    hint = f'; did you mean "{guess}"?' if guess else ""
    report.add(f"{section.name}.type", f"is {show_value(given)} (expected {', '.join(section.built_in)} or the exact "
                                       f"name of a class of {section.module.__name__}){hint}")
