"""Torch events -> coordinator: module hooks, autograd hooks, and reads of parameters outside their modules' forward.

Note [Reads of parameters]: `module.weight`, `module.parameters()` and `module.state_dict()` all go through the dict
`module._parameters`. While a module's bucket is not FULL, that dict is replaced by a `WatchedParameters`, which completes
the gather that follows an update (stages 1 and 2: every read shows the new values), or, inside a forward, gathers a sharded
parameter for the module that reads it (a tied weight used through another module), also where it happens to be gathered
still: its backward will need it again. Outside a forward, a sharded parameter is handed out as it is, a placeholder. While
everything is FULL and the module's own scope runs, the plain dict is back and a read costs nothing.
"""
from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed.errors import UsageError
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.coordinator import ParamCoordinator, Scope
from deepspeed.runtime.zero.param_home import home_of
from deepspeed.runtime.zero.reducer import GradientReducer

logger = logging.getLogger(__name__)


class WatchedParameters(dict):
    """Stands in for a module's `_parameters` while some of them are not current; writes go through to the plain dict."""

    def __init__(self, plain: dict[str, nn.Parameter | None], on_read: Callable[[nn.Parameter], None],
                 on_list: Callable[[], None]):
        super().__init__(plain)
        self._plain, self._on_read, self._on_list = plain, on_read, on_list

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._on_read(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def items(self) -> Any:
        self._on_list()
        return super().items()

    def values(self) -> Any:
        self._on_list()
        return super().values()

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        super().__setitem__(name, parameter)
        self._plain[name] = parameter

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._plain[name]

    def __reduce__(self) -> Any:  # copies and pickles of the module get the plain dict
        return dict, (dict(self._plain),)


class ZeroHooks:
    """Installs and removes everything that connects one model to its coordinator and reducer."""

    def __init__(self, root: nn.Module, buckets: Sequence[ParamBucket], coordinator: ParamCoordinator,
                 reducer: GradientReducer):
        self._root, self._coordinator, self._reducer = root, coordinator, reducer
        self._names = {module: name or type(module).__name__ for name, module in root.named_modules()}
        self._scopes: dict[nn.Module, Scope] = {}
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.params}
        self._plain: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
        self._owners: dict[ParamBucket, list[nn.Module]] = {}
        self._buckets_of: dict[nn.Module, set[ParamBucket]] = {}
        self._active: dict[nn.Module, int] = {}  # running forwards of scopes that contain the module
        self._handles: dict[Scope, list[torch.utils.hooks.RemovableHandle]] = {}
        self._running: list[tuple[Scope, _InputGrads | None]] = []  # forwards of hooked modules, outermost first
        self.is_installed = False
        self.find_destroy: Callable[[], Callable[[], None] | None] = lambda: None  # the engine's `destroy`, while it lives
        self._buckets = list(buckets)
        self._know_the_model()
        for bucket in buckets:
            for module in bucket.spec.scopes:
                self.scope_of(module).buckets.append(bucket)
        self.scope_of(root)
        self.install()

    # ---- installation ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put every hook in place: at construction, and again after `remove`."""
        if self.is_installed:
            return
        self.is_installed = True
        self._runs_compiled = any(module._compiled_call_impl is not None for module in self._root.modules())
        for module in self._root.modules():
            self._watch(module)
        for bucket in self._buckets:
            bucket.watchers.append(self._show_or_watch)
            self._show_or_watch(bucket)
        for scope in self._scopes.values():
            self._hook(scope)

    def _hook(self, scope: Scope) -> None:
        """Install what the scope needs: the root and scopes of sharded buckets follow each use, others wait for a gather."""
        module, handles = scope.module, self._handles.setdefault(scope, [])
        while handles:  # it gained a bucket
            handles.pop().remove()
        if module is self._root or scope.is_sharded:
            handles.append(module.register_forward_pre_hook(
                self._undisturbed(lambda _, args, kwargs: self._enter(scope, args, kwargs)), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._undisturbed(lambda _, args, output: self._leave(scope, output))))
        elif any(bucket.pair.shard.size > 1 for bucket in scope.buckets):
            handles.append(module.register_forward_pre_hook(self._undisturbed(lambda _, args: self._wait(scope)), prepend=True))

    def _undisturbed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Keep torch.compile out of a hook of a compiled module: it runs between compiled regions, not inside them."""
        return torch._dynamo.disable(hook) if self._runs_compiled else hook

    def scope_of(self, module: nn.Module) -> Scope:
        """Return the module's scope, a new one without buckets if it has none yet."""
        if module not in self._scopes:
            self._scopes[module] = Scope(module, self._names.get(module, type(module).__name__))
        return self._scopes[module]

    def add_external(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Gather `parameters` together with `module` from now on."""
        buckets = [self._bucket_of[parameter] for parameter in parameters if parameter in self._bucket_of]
        if not buckets:
            return
        scope = self.scope_of(module)
        scope.buckets.extend(bucket for bucket in dict.fromkeys(buckets) if bucket not in scope.buckets)
        scope.owners = None
        if self.is_installed:
            self._hook(scope)

    def remove(self) -> None:
        """Take out every hook and give the modules their plain parameter dicts back."""
        if not self.is_installed:
            return
        self.is_installed = False
        for handle in [handle for handles in self._handles.values() for handle in handles]:
            handle.remove()
        self._handles.clear()
        for module, plain in self._plain.items():
            module.__dict__["_parameters"] = plain
        for bucket in self._buckets:
            bucket.watchers.remove(self._show_or_watch)
        self._plain.clear()
        self._owners.clear()

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """Every parameter that a bucket of the engine holds."""
        return self._bucket_of.keys()

    def _watch(self, module: nn.Module) -> None:
        plain = module.__dict__.get("_parameters")
        if type(plain) is not dict:  # a scripted module keeps its parameters elsewhere
            return
        buckets = {self._bucket_of[parameter] for parameter in plain.values() if parameter in self._bucket_of}
        if buckets:
            self._plain[module] = plain
            self._buckets_of[module] = buckets
            self._active[module] = 0
            for bucket in buckets:
                self._owners.setdefault(bucket, []).append(module)

    def _show_or_watch(self, bucket: ParamBucket) -> None:
        """Called when the bucket becomes FULL or stops being it."""
        for module in self._owners.get(bucket, ()):
            self._refresh(module)

    def _refresh(self, module: nn.Module) -> None:
        """Give the module its plain dict while every read through it is sure to be right, else the watched one."""
        plain, buckets = self._plain[module], self._buckets_of[module]
        is_safe = all(bucket.is_full and (not bucket.is_sharded or self._active[module]) for bucket in buckets)
        if is_safe:
            module.__dict__["_parameters"] = plain
        elif module.__dict__["_parameters"] is plain:
            module.__dict__["_parameters"] = WatchedParameters(plain, self._on_read, self._coordinator.finish_pending)

    def _activate(self, scope: Scope, change: int) -> None:
        """The scope's forward begins (+1) or is over (-1)."""
        for module in self._owners_in(scope):
            self._active[module] += change
            self._refresh(module)

    def _owners_in(self, scope: Scope) -> list[nn.Module]:
        """Return the modules inside the scope that hold parameters of its sharded buckets."""
        if scope.owners is None:
            scope.owners = [module for module in scope.module.modules() if module in self._plain
                            and any(bucket.is_sharded and bucket in scope.buckets for bucket in self._buckets_of[module])]
        return scope.owners

    def _on_read(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(parameter)
        scope = self._coordinator.current_scope
        if bucket is None:
            return
        if not bucket.is_sharded:
            bucket.finish_gather()
        elif scope is not None and (bucket not in scope.buckets or not bucket.is_full):
            self._coordinator.use_outside_scope(bucket)

    def start_backward(self) -> None:
        """A backward begins (told by the reducer)."""
        self._coordinator.start_backward()

    def end_backward(self) -> None:
        """The whole backward is over (told by the reducer)."""
        self._forget_running()  # a recomputation that stopped early never left its forward
        self._coordinator.end_backward()

    # ---- events ------------------------------------------------------------------------------------------------------

    def _notice_compiled(self) -> None:
        """Keep out of the compiled regions of modules that were compiled (`module.compile()`) since the hooks were put in."""
        if not self._runs_compiled and any(module._compiled_call_impl is not None for module in self._scopes):
            self.remove()
            self.install()

    def _warn_of_additions(self) -> None:
        """Warn of parameters that joined the model after the engine took it. Counting is cheap enough for every forward."""
        count = sum(len(module._modules) + len(module._parameters) for module in self._known_modules)
        if count == self._known_count:
            return
        added = [name for name, parameter in self._root.named_parameters() if parameter not in self._known_parameters]
        if added:
            logger.warning("parameters %s joined the model after deepspeed.initialize: they are neither sharded, nor "
                           "optimised, nor averaged over ranks. Add them before.", ", ".join(added))
        self._know_the_model()

    def _take_replaced(self) -> None:
        """Take over the values of parameters whose data was replaced since the last forward (`parameter.data = ...`).

        Raises: UsageError where that has another device, dtype or shape: an update would not reach what the module shows.
        """
        for bucket in self._buckets:
            for index in bucket.replaced_params():
                parameter, view = bucket.params[index], bucket.full_views()[index]
                shown, kept = ((str(tensor.device), str(tensor.dtype), tuple(tensor.shape)) for tensor in (parameter, view))
                if shown != kept:
                    raise UsageError(f"parameter {bucket.param_names[index]} was {', '.join(map(str, kept))} in "
                                     f"deepspeed.initialize and is {', '.join(map(str, shown))} now, so training would not "
                                     "reach it. Move or cast the model before initialize, or back before training goes on.")
                home_of(parameter).write(parameter.data)

    def _know_the_model(self) -> None:
        self._known_modules = list(self._root.modules())
        self._known_parameters = set(self._root.parameters())
        self._known_count = sum(len(module._modules) + len(module._parameters) for module in self._known_modules)

    def _wait(self, scope: Scope) -> None:
        for bucket in scope.buckets:
            bucket.finish_gather()

    def _enter(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward and self._reducer.in_backward:
            self._reducer.abort()  # the last backward was left by an exception
        if not in_backward and (scope.module is self._root or not self._running):
            self._forget_running()  # an exception may have left an earlier forward
            self._notice_compiled()
            self._warn_of_additions()
            is_training = torch.is_grad_enabled() and self._root.training
            if is_training:
                self._take_replaced()
            self._coordinator.start_forward(is_training)
        watch = None
        if torch.is_grad_enabled() and scope.is_sharded and not self._coordinator.is_recomputing(scope):
            watch = _InputGrads(self._coordinator, scope)
        self._running.append((scope, watch))
        self._coordinator.enter(scope)
        self._activate(scope, 1)
        if watch is None:
            return None
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # pytree costs more than all the rest
            return (watch.track(args[0]),), kwargs
        return tree_map(watch.track, (args, kwargs))

    def _leave(self, scope: Scope, output: Any) -> None:
        watch = self._pop(scope)
        is_recomputing = self._coordinator.is_recomputing(scope)
        self._coordinator.leave(scope)
        if torch.is_grad_enabled() and not is_recomputing:
            self._expect_backward(scope, watch is not None and watch.count > 0, output)
        if not self._running and torch._C._current_graph_task_id() == -1:
            self._coordinator.end_forward()

    def _forget_running(self) -> None:
        while self._running:
            self._activate(self._running.pop()[0], -1)

    def _pop(self, scope: Scope) -> _InputGrads | None:
        """Take the running forward of `scope` off, with those inside it that an exception left."""
        if any(running is scope for running, _ in self._running):
            while True:
                running, watch = self._running.pop()
                self._activate(running, -1)
                if running is scope:
                    return watch
        return None

    def _expect_backward(self, scope: Scope, has_input_grads: bool, output: Any) -> None:
        tensors = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
        outputs = [tensor for tensor in tensors if tensor.requires_grad]
        if not outputs:
            return

        # a hook that kept a tensor alive would tie the graph into a cycle that nothing collects
        def before(_: torch.Tensor) -> None:
            self._reducer.begin()
            self._coordinator.enter_backward(scope, has_input_grads)

        if len(outputs) == 1:
            outputs[0].register_hook(before)
        else:
            register_multi_grad_hook(outputs, before, mode="any")


class _InputGrads:
    """Tells the coordinator when the gradients of all inputs of one forward are computed.

    Hooks go on aliases of the inputs: an input that other modules use as well gets its own gradient much later.
    """

    def __init__(self, coordinator: ParamCoordinator, scope: Scope):
        self._coordinator, self._scope = coordinator, scope
        self.count = 0
        self._arrived = 0

    def track(self, leaf: Any) -> Any:
        """Return an alias of a tensor that needs a gradient, with a hook on it; anything else as it is."""
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        alias = leaf.view_as(leaf)
        self.count += 1
        alias.register_hook(self._on_grad)
        return alias

    def _on_grad(self, _: torch.Tensor) -> None:
        self._arrived += 1
        if self._arrived == self.count:
            self._arrived = 0  # the graph may be kept for another backward
            self._coordinator.leave_backward(self._scope)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers that torch knows, in mappings and in dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
