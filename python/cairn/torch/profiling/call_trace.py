"""The module calls of the sample step, in order: their modules, saved tensors and arguments."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.blocks import Block, takes_gradients
from ..base.errors import Unsupported
from ..base.tree import tensors_in
from ..rerun_state.preserve import Parameters
from .sample import LOSS_DIFFERENTIATES


@dataclasses.dataclass
class Call:
    """One observed call of a module."""

    name: str
    module: nn.Module
    depth: int
    reads: frozenset[int]  # storages of the tensors in its arguments
    takes_gradients: bool = True  # it has a backward
    returns: frozenset[int] = frozenset()
    saves: set[int] = dataclasses.field(default_factory=set)  # storages that autograd saves while it runs
    wrote_input: bool = False
    wrote_parameters: bool = False  # of the model, while it ran
    has_hooks: bool = False  # saved-tensor hooks of the model's own are in force around it
    is_reentrant: bool = False  # it runs in a torch.utils.checkpoint with use_reentrant=True
    is_transformed: bool = False  # it runs within a transform of torch.func
    has_computed_weights: bool = False  # torch.func.functional_call has put tensors with a graph in their places
    has_result: bool = False  # it has ended, and returned something
    has_gradients_inside: bool = False  # it runs a backward of its own forward (autograd.grad)
    output_requires_grad: bool = False


@dataclasses.dataclass
class Trace:
    """All module calls of one forward, in order of their beginning."""

    calls: list[Call]
    storages: list[_compat.StorageRef]  # keeps the identities in `calls` from being given to others
    casts: bool  # autocast was on in some call
    compiled: list[frozenset[int]]  # for each call of a compiled function, the identities of the modules around it
    saved: list[tuple[int, frozenset[int]]]  # storages that autograd saves, and the modules around

    def calls_of(self, module: nn.Module) -> list[Call]:
        return [call for call in self.calls if call.module is module]

    def runs_of(self, modules: Sequence[nn.Module]) -> list[list[Call]]:
        """The calls with gradients of modules that always run directly after one another; none if they do not."""
        return [run for run in runs_of(self, modules) if any(call.takes_gradients for call in run)]

    def call_order(self, blocks: Iterable[Block]) -> list[Block]:
        """The blocks in the order of their calls with gradients; a block called several times occurs several times."""
        first = {id(run[0]): block for block in blocks for run in self.runs_of(block.modules)}
        return [first[id(call)] for call in self.calls if id(call) in first]

    def saved_bytes(self, modules: Sequence[nn.Module]) -> int:
        """Bytes of all tensors that autograd saves while these calls run, without parameters."""
        calls = [call for module in modules for call in self.calls_of(module)]
        return self._sum(set().union(*(call.saves for call in calls)), modules)

    def freed_bytes(self, modules: Sequence[nn.Module]) -> int:
        """Bytes of the saved tensors that recomputing these calls restores: made by them, and saved by no other."""
        calls = [call for module in modules for call in self.calls_of(module)]
        own = {id(module) for module in modules}
        read, made = set[int]().union(*(call.reads for call in calls)), set[int]().union(*(c.returns for c in calls))
        within = {key for key, around in self.saved if around & own and (key in made or key not in read)}
        beside = {key for key, around in self.saved if not around & own}
        return self._sum(within - beside, modules)

    def _sum(self, keys: Set[int], modules: Sequence[nn.Module]) -> int:
        """Bytes of these storages, parameters of the modules left out."""
        own = {_compat.storage_id(p) for module in modules for p in module.parameters() if memory.has_storage(p)}
        return sum(self._bytes.get(key, 0) for key in keys - own)

    @functools.cached_property
    def _bytes(self) -> dict[int, int]:
        return {ref.key: ref.nbytes for ref in self.storages}

    def run_by(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Modules that these modules call, other than themselves and their submodules."""
        callers, own = set(map(id, modules)), {id(part) for module in modules for part in module.modules()}
        called: list[nn.Module] = []
        depth: int | None = None  # of the caller that runs
        for call in self.calls:
            if depth is not None and call.depth <= depth:
                depth = None
            if depth is not None and id(call.module) not in own:
                called.append(call.module)
            elif depth is None and id(call.module) in callers:
                depth = call.depth
        return list(dict.fromkeys(called))

    def runs_compiled(self, modules: Iterable[nn.Module]) -> bool:
        """Whether one of them runs code compiled by torch.compile."""
        own = set(map(id, modules))
        return any(around & own for around in self.compiled)

    def runs_compiled_outside(self, blocks: Iterable[Block]) -> bool:
        """Whether the model runs compiled code itself."""
        own = {id(module) for block in blocks for module in block.modules}
        return any(not around & own for around in self.compiled)


def trace(model: nn.Module, run: Callable[[], Any], parameters: Parameters) -> Trace:
    """Run a forward and record its module calls, without saving tensors for the backward.

    Writes to `parameters` are recorded as well. A forward that contains backwards runs once more, with saved tensors.
    """
    try:
        return _traced(model, run, parameters, _Recorder())
    except _HasBackward:
        return _traced(model, run, parameters, _Recorder(saves=True))


def _traced(model: nn.Module, run: Callable[[], Any], parameters: Parameters, recorder: _Recorder) -> Trace:
    handles = []
    for name, module in _seen(model):
        handles.append(module.register_forward_pre_hook(recorder.enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.leave, with_kwargs=True, always_call=True))
    try:
        watching = parameters.watching(recorder.record_written)
        with (
            torch.autograd.graph.saved_tensors_hooks(*recorder.hooks),
            watching,
            _compat.observed_compiled_calls(recorder.record_compiled),
        ):
            run()
    except RuntimeError as error:
        if "don't yet support saved tensor hooks" in str(error):
            recorder.refuse_transform(error)
        raise
    finally:
        for handle in handles:
            handle.remove()
        recorder.hooks = None, None  # they hold the recorder, and with it the model, in a cycle
    return Trace(recorder.calls, recorder.storages, recorder.casts, recorder.compiled, recorder.saved)


def _seen(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules whose calls can be observed: none inside a compiled one, which is called as a whole."""
    compiled_inner = {id(part) for module in model.modules() for part in _compat.modules_compiled_with(module)}
    return [(name, module) for name, module in model.named_modules() if id(module) not in compiled_inner]


class _HasBackward(Exception):
    """Autograd reads a saved tensor before the forward has ended."""


class _Recorder:
    def __init__(self, saves: bool = False) -> None:
        self._saves = saves
        self.calls: list[Call] = []
        self.storages: list[_compat.StorageRef] = []
        self.casts = False
        self.compiled: list[frozenset[int]] = []
        self.saved: list[tuple[int, frozenset[int]]] = []
        self.hooks: tuple[Any, Any] = _compat.hooks_but_on_traced(self.record_saved, self.record_read)
        self._known: set[int] = set()
        self._open: list[tuple[Call, list[tuple[torch.Tensor, int]], list[int]]] = []

    def enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return  # in the body of a higher-order operator, which is traced
            is_transformed = _compat.transforms_are_active()
            inputs = [] if is_transformed else [t for t in tensors_in((args, kwargs)) if memory.has_storage(t)]
            call = Call(name, module, len(self._open), self._keys(inputs), is_transformed=is_transformed)
            call.takes_gradients = takes_gradients((args, kwargs), module.parameters())
            call.has_computed_weights = not all(p.is_leaf for p in module.parameters())
            self.casts |= any(map(torch.is_autocast_enabled, {t.device.type for t in inputs}))
            call.has_hooks = _compat.saved_tensor_hooks_are_active(self.hooks[0])
            call.is_reentrant = _compat.is_in_reentrant_checkpoint()
            self.calls.append(call)
            versions = [(t, t._version) for t in inputs if not t.is_inference()]
            self._open.append((call, versions, _parameter_storages(module)))

        return hook

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not self._open:
            return
        call, versions, storages = self._open.pop()
        call.has_result = output is not None
        if any(a != b and a and b for a, b in zip(_parameter_storages(module), storages, strict=False)):
            call.wrote_parameters = True
            self.record_written()
        outputs = [] if call.is_transformed else [t for t in tensors_in(output) if memory.has_storage(t)]
        call.returns = self._keys(outputs)
        call.wrote_input = any(t._version != version for t, version in versions)
        call.output_requires_grad = any(t.requires_grad for t in outputs)

    def record_compiled(self) -> None:
        """Record the call of a function compiled by torch.compile."""
        self.compiled.append(self._around())

    def _around(self) -> frozenset[int]:
        """The modules that are running."""
        return frozenset(id(call.module) for call, _, _ in self._open)

    def record_written(self) -> None:
        """Record a write to a parameter."""
        for call, _, _ in self._open:
            call.wrote_parameters = True

    def record_saved(self, tensor: torch.Tensor) -> Any:
        """Called with each tensor that autograd would save."""
        if _compat.transforms_are_active():
            self.refuse_transform()
        if memory.has_storage(tensor):
            saved = self._keys([tensor])
            self.saved += [(key, self._around()) for key in saved]
            for call, _, _ in self._open:
                call.saves |= saved
        return (tensor.detach(), [call for call, _, _ in self._open]) if self._saves else None

    def record_read(self, packed: Any) -> torch.Tensor:
        """Called when autograd reads a saved tensor before the forward has ended.

        The innermost call that contains both the saving and the reading contains the backward.
        """
        if not self._open:
            raise Unsupported(LOSS_DIFFERENTIATES)
        if not self._saves:
            raise _HasBackward
        tensor, saving = packed
        common = [call for call, (other, _, _) in zip(saving, self._open, strict=False) if call is other]
        common[-1].has_gradients_inside = True
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def refuse_transform(self, error: RuntimeError | None = None) -> None:
        """Called when a function transform saves tensors that no hook can see."""
        raise Unsupported(
            f"{self._where()} differentiates by torch.func (grad, vjp, jvp, ...) inside the model's forward, which "
            "saves tensors where no plan can reach them; plan the parts of the model that do not, each by itself"
        ) from error

    def _where(self) -> str:
        """The innermost module that is running, or was when an error occurred."""
        running = (f"'{call.name}'" for call in reversed(self.calls) if call.name and not call.has_result)
        return next(running, "the model")

    def _keys(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        refs = [_compat.StorageRef(t) for t in tensors]
        for ref in refs:
            if ref.key not in self._known:
                self._known.add(ref.key)
                self.storages.append(ref)
        return frozenset(ref.key for ref in refs)


def _parameter_storages(module: nn.Module) -> list[int]:
    return [_compat.storage_key(p) for p in module._parameters.values() if p is not None]


def runs_of(observed: Trace, modules: Sequence[nn.Module]) -> list[list[Call]]:
    """The calls of modules that run directly after one another whenever the first one runs; none if they do not."""
    runs = []
    for number, first in enumerate(observed.calls):
        if first.module is modules[0]:
            beside = (call for call in observed.calls[number + 1 :] if call.depth <= first.depth)
            following = list(itertools.islice(beside, len(modules) - 1))
            if [call.module for call in following] != list(modules[1:]):
                return []
            runs.append([first, *following])
    return runs
