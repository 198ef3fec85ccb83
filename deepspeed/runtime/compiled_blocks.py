"""torch.compile for a sharded model: one compiled region per transformer block, between the engine's hooks.

Note [Outside the region]: what is compiled is the block's `forward`, not the block. `Module.__call__` runs the hooks that
gather and release parameters first, as plain Python, and then the compiled `forward`, which sees ordinary full parameters
and nothing of the engine; so a hook neither breaks a graph nor is part of one. `Module.compile()` would put the hooks
inside. Blocks of one class share the compiled code, because dynamo keeps it with the code of `forward` and guards on
dtypes, shapes and strides of parameters, not on their identity or address: both change under ZeRO stage 3.
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.runtime.zero.grouping import find_blocks, has_forward

logger = logging.getLogger(__name__)

# These let Inductor record CUDA graphs, which replay with the addresses that parameters had when they were recorded.
_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_GRAPH_BACKENDS = ("cudagraphs",)
_GRAPH_OPTION = "triton.cudagraphs"


class CompiledForward:
    """Stands in a module's `forward` and runs it compiled. Copies and pickles of the module get the plain `forward`."""

    def __init__(self, module: nn.Module, options: Mapping[str, Any]):
        self._module = module
        self.replaced = vars(module).get("forward")  # what some library had put there, None for the class's own
        functools.update_wrapper(self, module.forward)
        self._run: Callable[..., Any] = torch.compile(module.forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        if self.replaced is not None:
            return _itself, (self.replaced,)
        return getattr, (self._module, "forward")  # of the copy, which has no attributes of its own yet: its class's forward


def compile_blocks(model: nn.Module, options: Mapping[str, Any], *, granularity_threshold: int,
                   moves_parameters: bool) -> list[nn.Module]:
    """Compile the forward of every block of `model`, or of the model where no blocks are found. Returns what was compiled.

    options: keyword arguments of torch.compile. granularity_threshold: see `find_blocks`. moves_parameters: parameters lie
    at other addresses in the first steps (ZeRO stage 3).
    Raises: UsageError for CUDA graphs where parameters move.
    """
    if moves_parameters and _records_graphs(options):
        raise UsageError("engine.compile: CUDA graphs replay with fixed addresses of parameters, and ZeRO stage 3 gathers them "
                         "elsewhere in the first steps. Use mode=\"max-autotune-no-cudagraphs\", or stage 0, 1 or 2.")
    if not _can_compile(model):
        logger.warning("engine.compile: %s is compiled as a whole already, so that its blocks are left as they are",
                       type(model).__name__)
        return []
    blocks = [module for module in _units(model, granularity_threshold) if _can_compile(module)]
    _allow_variants(len(blocks))
    for block in blocks:
        undo_compiled(block)
        block.forward = CompiledForward(block, options)
    logger.info("torch.compile runs %d block(s) of %s", len(blocks), ", ".join(sorted({type(b).__name__ for b in blocks})))
    return blocks


def undo_compiled(module: nn.Module) -> None:
    """Give the module its own forward back, if `compile_blocks` compiled it."""
    compiled = vars(module).get("forward")
    if not isinstance(compiled, CompiledForward):
        return
    if compiled.replaced is None:
        del module.forward
    else:
        module.forward = compiled.replaced


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _units(model: nn.Module, granularity_threshold: int) -> Iterable[nn.Module]:
    found = [module for _, module in find_blocks(model, granularity_threshold=granularity_threshold)]
    return [module for block in found for module in _runnable(block)] or [model]


def _runnable(block: nn.Module) -> list[nn.Module]:
    """Return the block, or the nearest modules below that have a forward where it has none (a list in a list)."""
    if has_forward(block):
        return [block]
    return [module for child in block.children() for module in _runnable(child)]


def _can_compile(module: nn.Module) -> bool:
    """A module that the user compiled stays as it is; scripted ones are compiled already."""
    return module._compiled_call_impl is None and not isinstance(
        module, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule))


def _records_graphs(options: Mapping[str, Any]) -> bool:
    chosen = options.get("options") or {}
    return (options.get("mode") in _GRAPH_MODES or options.get("backend") in _GRAPH_BACKENDS
            or bool(chosen.get(_GRAPH_OPTION)))


def _allow_variants(count: int) -> None:
    """Let dynamo keep two versions of the code per block beside its usual number: blocks that differ in an attribute, such
    as a layer number, share none, and training and evaluation are compiled apart."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 8 + 2 * count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
