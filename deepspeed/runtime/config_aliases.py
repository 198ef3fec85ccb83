"""Old and alternative names of configuration keys: one table, and the function that replaces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepspeed.runtime.config_report import Report, join_path, show_value


def _cpu_device_if_true(value: object) -> object:
    """Turns the old on/off switch of an offload block into the block, or None (no block) for false and null."""
    truth = {None: False, False: False, True: True, "false": False, "true": True}
    try:
        is_on = truth[value.lower() if isinstance(value, str) else value]
    except (KeyError, TypeError):
        raise ValueError("true or false") from None
    return {"device": "cpu"} if is_on else None


@dataclass(frozen=True)
class Alias:
    """Another name for a key.

    section: dotted path of the block in which both names stand ("" is the top level). target: the current name in the
    same block; None means that the key is accepted and has no effect. convert: turns the old value into the new one,
    ValueError says what was expected. warn: the name is deprecated. target_wins: both names together are allowed and
    the target counts, else they are an error."""

    section: str
    name: str
    target: str | None
    convert: Callable[[object], object] | None = None
    warn: bool = False
    target_wins: bool = False


ALIASES = (
    Alias("", "bfloat16", "bf16", target_wins=True),
    Alias("zero_optimization", "cpu_offload", "offload_optimizer", convert=_cpu_device_if_true, warn=True),
    Alias("zero_optimization", "cpu_offload_param", "offload_param", convert=_cpu_device_if_true, warn=True),
    Alias("zero_optimization", "cpu_offload_use_pin_memory", None, warn=True),
    Alias("zero_optimization", "stage3_gather_fp16_weights_on_model_save",
          "stage3_gather_16bit_weights_on_model_save", warn=True),
    Alias("zero_optimization", "prefetch_bucket_size", "stage3_prefetch_bucket_size"),
    Alias("zero_optimization", "param_persistence_threshold", "stage3_param_persistence_threshold"),
    Alias("zero_optimization", "max_live_parameters", "stage3_max_live_parameters"),
    Alias("zero_optimization", "max_reuse_distance", "stage3_max_reuse_distance"),
    Alias("zero_optimization", "module_granularity_threshold", "stage3_module_granularity_threshold"),
    Alias("zero_optimization", "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
    Alias("zero_optimization", "model_persistence_threshold", "stage3_model_persistence_threshold"),
    Alias("zero_optimization", "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
    Alias("zero_optimization", "allgather_sequential", "stage3_allgather_sequential"),
    Alias("aio", "thread_count", "intra_op_parallelism", target_wins=True),
    Alias("aio", "num_threads", "intra_op_parallelism", target_wins=True),
    Alias("elasticity", "prefer_large_batch", "prefer_larger_batch", target_wins=True),
    Alias("tensor_parallel", "tp", "tensor_parallel"),
    Alias("tensor_parallel", "kernel_inject", "replace_with_kernel_inject"),
)

# Top-level key that only the boolean form of zero_optimization reads.
BOOLEAN_FORM_BUCKET_KEY = "allgather_size"


def aliases_of(section: str | None) -> dict[str, Alias]:
    """Returns the aliases that may stand in the block with this dotted path, by name (none for None)."""
    return {alias.name: alias for alias in ALIASES if alias.section == section}


def canonical_path(path: str) -> str:
    """Returns the dotted path with every alias in it replaced by the current name."""
    done: list[str] = []
    for part in path.split("."):
        alias = aliases_of(".".join(done)).get(part)
        done.append(alias.target if alias is not None and alias.target else part)
    return ".".join(done)


def replace_aliases(section: str | None, values: Mapping[str, object], path: str, report: Report) -> dict[str, object]:
    """Returns the values of one block under their current names; adds a problem where two names contradict.

    section: the block's path in the alias table; path: its dotted path for messages."""
    known = aliases_of(section)
    result = {key: value for key, value in values.items() if key not in known}
    for name in values:
        if name in known:
            _replace(known[name], values[name], result, path, report)
    return result


def _replace(alias: Alias, value: object, result: dict[str, object], path: str, report: Report) -> None:
    here = join_path(path, alias.name)
    if alias.target is None:
        report.warnings.append(f"{here} is deprecated and has no effect; remove it.")
        return
    target = join_path(path, alias.target)
    if alias.warn:
        report.warnings.append(f"{here} is deprecated; use {target}.")
    if alias.target in result:
        _report_both(alias, here, target, value == result[alias.target], report)
        return
    if alias.convert is None or value == "auto":
        result[alias.target] = value
        return
    try:
        converted = alias.convert(value)
    except ValueError as error:
        report.add(here, f"is {show_value(value)} (expected {error})")
        return
    if converted is not None:
        result[alias.target] = converted


def _report_both(alias: Alias, here: str, target: str, is_same: bool, report: Report) -> None:
    if not alias.target_wins:
        report.add(here, f"is given together with {target}, which is the same setting; remove {here}")
    elif not is_same:
        report.warnings.append(f"{here} is ignored because {target} is given as well; remove one of them.")
