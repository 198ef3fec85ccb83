"""Where Ulysses meets transformers: its registries of attention functions and of mask functions.

The entries of one attention implementation are replaced, once per process, by those of an `Interface`. It passes calls
of registered models on to their `UlyssesSPAttentionHF`, and all others to the functions that were there before.
"""
from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.errors import PlanError, UsageError

if TYPE_CHECKING:
    from deepspeed.runtime.sequence_parallel.attention import UlyssesSPAttentionHF

logger = logging.getLogger(__name__)

EAGER = "eager"
LAYERS_WITHOUT_ATTENTION = ("linear_attention", "mamba", "recurrent", "conv", "rwkv")


class Interface:
    """The functions of one attention implementation, for models with and without Ulysses.

    attention, mask: the functions that were registered before.
    """

    def __init__(self, attention: Callable[..., Any], mask: Callable[..., Any] | None) -> None:
        self.core_attention, self._core_mask = attention, mask
        # by identity, because configurations are compared by value; the reference tells when the number is used again
        self._models: dict[int, tuple[weakref.ref[Any], UlyssesSPAttentionHF]] = {}

    @classmethod
    def install(cls, name: str) -> Interface:
        """Return the interface of the implementation `name`; the first time it is put into transformers' registries."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        present = ALL_ATTENTION_FUNCTIONS.get(name)
        owner = getattr(present, "__self__", None)
        if isinstance(owner, cls):
            return owner
        if present is None and name != EAGER:
            raise PlanError(f'transformers has no attention implementation "{name}"; it has '
                            f"{sorted(ALL_ATTENTION_FUNCTIONS.keys())}.")
        masks = ALL_MASK_ATTENTION_FUNCTIONS
        interface = cls(_eager if present is None else present, masks.get(name))
        ALL_ATTENTION_FUNCTIONS.register(name, interface.attention)
        if masks.get(name) is not None:
            masks.register(name, interface.mask)
        return interface

    def add(self, config: Any, ulysses: UlyssesSPAttentionHF) -> None:
        """Pass the calls of modules with this configuration object to `ulysses`."""
        self._models[id(config)] = (weakref.ref(config), ulysses)

    def _find(self, config: Any) -> UlyssesSPAttentionHF | None:
        reference, ulysses = self._models.get(id(config), (None, None))
        return ulysses if reference is not None and reference() is config else None

    def attention(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the attention function returns."""
        ulysses = self._find(getattr(module, "config", None))
        return (self.core_attention if ulysses is None else ulysses)(module, *args, **kwargs)

    def mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask: of whole sequences while a registered model runs its forward, Note [Whole masks]."""
        ulysses = self._find(kwargs.get("config"))
        view = None if ulysses is None else ulysses.view
        if view is None:
            return self._core_mask(*args, **kwargs)
        lengths = (kwargs["q_length"], kwargs["kv_length"])
        if lengths != (view.local_length, view.local_length) or int(kwargs["q_offset"]):
            raise UsageError(f"a mask of {kwargs['q_length']} queries and {kwargs['kv_length']} keys was asked for, "
                             f"but every rank has {view.local_length} tokens. Sequence parallelism cannot use past "
                             "keys, prefixes or cross attention.")
        whole = {"q_length": view.length, "kv_length": view.length, "attention_mask": view.padding}
        if view.documents is not None:
            from transformers.masking_utils import and_masks, packed_sequence_mask_function

            whole["mask_function"] = and_masks(kwargs["mask_function"], packed_sequence_mask_function(view.documents))
            skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
            whole.update({name: False for name in skips if name in kwargs})
        return self._core_mask(*args, **{**kwargs, **whole})


def attach(ulysses: UlyssesSPAttentionHF, model: nn.Module, implementation: str | None) -> None:
    """Make the attention of `model` run through `ulysses`. implementation: the attention function's name, None the
    model's.

    Raises: PlanError for an unknown implementation; UsageError for a model that cannot be cut along the sequence.
    """
    text = config_of(model)
    name = text._attn_implementation if implementation is None else implementation
    if name != text._attn_implementation:
        logger.info("sequence parallelism switches attention from %s to %s", text._attn_implementation, name)
        _pretrained(model).set_attn_implementation(name)
    interface = Interface.install(name)
    for config in _configs(model, text.model_type):
        interface.add(config, ulysses)
    ulysses.bind(model, interface.core_attention)
    for part in _text_models(model, text.model_type):
        if part not in _attached:
            part.register_forward_pre_hook(_begin_forward, with_kwargs=True)
            part.register_forward_hook(_end_forward, always_call=True)
        _attached[part] = ulysses


# Model -> the attention that its forward hooks tell; a copy of a model has the hooks, but no entry.
_attached: weakref.WeakKeyDictionary[nn.Module, UlyssesSPAttentionHF] = weakref.WeakKeyDictionary()


def _begin_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    ulysses = _attached.get(model)
    return None if ulysses is None else ulysses.begin_forward(model, args, kwargs)


def _end_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if model in _attached:
        _attached[model].end_forward(model, has_failed=output is None)


def config_of(model_or_path: Any) -> Any:
    """Return the text configuration of a model, or of the name or path of one.

    Raises: UsageError for a model without one, or whose layers exchange tokens in other ways than attention.
    """
    from transformers import AutoConfig

    is_model = isinstance(model_or_path, nn.Module)
    config = getattr(model_or_path, "config", None) if is_model else AutoConfig.from_pretrained(model_or_path)
    if config is None or not hasattr(config, "get_text_config"):
        raise UsageError(f"a {type(model_or_path).__name__} has no configuration of transformers. For other models use "
                         "deepspeed.sequence.layer.DistributedAttention.")
    if config.is_encoder_decoder:
        raise UsageError(f"{config.model_type} is an encoder-decoder; sequence parallelism is for models with one "
                         "sequence.")
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None) or ()
    unfit = sorted({layer for layer in layers if any(word in layer for word in LAYERS_WITHOUT_ATTENTION)})
    if unfit:
        raise UsageError(f"{config.model_type} has layers of type {unfit}, which carry state from token to token; "
                         "only attention can be spread over sequence-parallel ranks.")
    return text


def _configs(model: nn.Module, model_type: str) -> Iterator[Any]:
    """Yield the distinct text configurations that the modules of `model` hold."""
    from transformers import PreTrainedConfig

    seen = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config.model_type == model_type and id(config) not in seen:
            seen.add(id(config))
            yield config


def _text_models(model: nn.Module, model_type: str) -> list[nn.Module]:
    """Return the models of transformers, the innermost included, through which a forward may begin."""
    from transformers import PreTrainedModel

    return [part for part in model.modules() if isinstance(part, PreTrainedModel)
            and part.config.get_text_config().model_type == model_type]


def _pretrained(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    return next(part for part in model.modules() if isinstance(part, PreTrainedModel))


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the eager attention of the file in which the attention module's class is."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)
    raise UsageError(f"{type(module).__name__} has no eager attention function; use another attention implementation.")
