"""Runs one block alone, with a backward that uses the same memory as in the real step.

`y.backward(d)` keeps y and d alive for the whole backward, which no training step does. So the block runs between two
autograd functions that save nothing. `_Source` passes the inputs, and their gradients end there. `_Sink` takes the
outputs; in the backward it makes their gradients and passes them on as their only owner. `bridge` connects the graph
before and after a block without the block. It consists of two functions, so that in the backward the arriving gradients
are freed between them, unless others hold them.

The layout of a gradient matters as well: some kernels copy a gradient whose layout differs from that of the output. So
gradients are made with the layout in which they arrive, once it is known. A gradient that others hold is not freed when
the block has read it: that of a residual sum, or a view of a gradient that others view too, as after a concatenation.
Gradients of several outputs may share a storage, as those of their sum, which is freed with the last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..base import _compat, memory
from ..base.blocks import Block
from ..base.errors import Unsupported
from ..base.layouts import Layouts, layouts_of, new_tensors, saving_nothing
from ..base.tree import Tree, children, fill, tensors_in
from ..rerun_state.kv_caches import own_caches
from .captured_inputs import InputFinder, Replacing, has_earlier_nodes


@dataclasses.dataclass
class Hooks:
    """Called by a handler while autograd runs."""

    begun: Callable[[], None] = lambda: None  # the gradients of the outputs exist
    arrived: Callable[[Sequence[torch.Tensor | None]], None] = lambda grads: None  # so do those of the inputs


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, inputs: list[torch.Tensor], hooks: Hooks) -> Any:
        ctx.hooks = hooks
        ctx.set_materialize_grads(False)
        return tuple(detached(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.hooks.arrived(grads)
        return None, None, None


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hooks: Hooks, grads: Layouts, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.hooks = hooks
        ctx.grads = grads
        return outputs[0].new_zeros((), dtype=torch.float32)  # not complex

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grads = new_tensors(ctx.grads)
        ctx.shared = [
            g for g, layout in zip(grads, ctx.grads, strict=True) if layout is not None and layout.is_held_by_others
        ]
        ctx.hooks.begun()
        return None, None, *grads


class _Arriving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, hooks: Hooks, outputs: list[torch.Tensor]) -> Any:
        ctx.hooks, ctx.link = hooks, link
        ctx.set_materialize_grads(False)
        taken = tuple(outputs)
        outputs.clear()
        return taken

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.hooks.arrived(grads)
        return ctx.link.detach(), None, None


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hooks: Hooks, grads: Layouts, *inputs: torch.Tensor) -> Any:
        ctx.hooks = hooks
        ctx.grads = grads
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        result = new_tensors(ctx.grads)
        ctx.hooks.begun()
        return None, None, None, *result


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage, detached and no view for autograd, so that it may be changed in place."""
    is_plain = type(tensor) in _compat.PLAIN_CLASSES and not _compat.is_fake(tensor)
    if not is_plain or not memory.has_storage(tensor):
        return tensor.detach()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


# -- arguments -----------------------------------------------------------------------------------------------


class Arguments:
    """The arguments of one call of a block, which can be passed as fresh leaf tensors, and its captured inputs.

    Attributes
    ----------
    tensors
        All tensors among the arguments.
    differentiable
        Those with gradients.
    captured
        The captured inputs (`captured_inputs.py`), after `capture`.
    writes_captured
        The block has written a captured input in place.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], block: Block) -> None:
        self._value, self._block = (args, kwargs), block
        self._tree = Tree.of(self._value)
        self._since = _compat.history_mark()
        self._fresh: Sequence[torch.Tensor] = ()  # of the latest `source`
        self.captured: list[torch.Tensor] = []
        self.writes_captured = False
        self._take([])

    def _take(self, others: Sequence[torch.Tensor]) -> None:
        self.tensors = [*self._tree.leaves, *others]
        self.differentiable = [t for t in self.tensors if t.requires_grad]

    def source(self, hooks: Hooks) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the differentiable tensors coming out of a `_Source`."""
        fresh: Sequence[torch.Tensor] = ()
        if self.differentiable:
            fresh = _Source.apply(_anchor(self.differentiable[0].device), self.differentiable, hooks)
        self._fresh = fresh if self.captured else ()
        coming = iter(fresh)
        args, kwargs = self._tree.build([next(coming) if t.requires_grad else t for t in self._tree.leaves])
        return own_caches(args, kwargs)

    def saving_nothing(self) -> contextlib.AbstractContextManager[None]:
        """The context of that name, for runs of the block."""
        return saving_nothing(self._block.has_gradients_inside, self._block.has_own_hooks)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block with the arguments that `source` returned."""
        if not self.captured:
            return function(*args, **kwargs)
        fresh, self._fresh = self._fresh, ()
        replacing = Replacing(self.differentiable, fresh)
        with replacing:
            result = function(*args, **kwargs)
        self.writes_captured |= replacing.wrote()
        return replacing.of_arguments(result)

    def has_earlier_nodes(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a backward from the outputs of a run reaches functions from before the block."""
        return has_earlier_nodes(tensors, self._since)

    def capture(self, function: Callable[..., Any]) -> None:
        """Run the block, and take its captured inputs for inputs."""
        args, kwargs = self.source(Hooks())
        finding = InputFinder(self._since)
        with self.saving_nothing(), finding:
            finding.of_arguments(function(*args, **kwargs))
        self.captured = finding.tensors
        passed = set(map(id, self._tree.leaves))
        self._take([tensor for tensor in self.captured if id(tensor) not in passed])

    def with_container_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ContainerCopies:
        """The arguments for the run whose result the caller sees; call this before the run."""
        return ContainerCopies(self._value, (args, kwargs))

    def refuse_iterators(self, name: str) -> None:
        """Raise if the block of this name gets an argument that its first run uses up, such as an iterator."""
        for value in self._tree.opaque:
            if isinstance(value, Iterator):
                raise Unsupported(
                    f"'{name}' is passed an iterator ({type(value).__name__}), which its first run uses up, so that it "
                    "cannot be recomputed from it: pass what is taken from it, or a list"
                )


class ContainerCopies:
    """Copies of the caller's lists, dicts and other containers, which a run of a block may change.

    Every run gets fresh copies, and the caller's containers get the changes of the last run.
    """

    def __init__(self, theirs: tuple[Any, Any], own: tuple[Any, Any]) -> None:
        pairs = list(_pairs(theirs, own))
        self._lent = [
            (value, copied, [(key, _reference_to(item)) for key, item in children(copied) or ()])
            for value, copied in pairs
            if _can_be_filled(copied) and copied is not own[1]  # of the keywords, a function gets a dict of its own
        ]
        self._theirs = {id(copied): (_reference_to(copied), value) for value, copied in pairs} if self._lent else {}

    def apply_changes(self, name: str, result: Any, output: Any) -> None:
        """Apply the changes that the run of the block of this name made in its copies to the caller's containers.

        output: the tensors that replace those of the block's result. Raises Unsupported for a changed tensor that has
        no replacement there.
        """
        if not self._lent:
            return
        for tensor, other in zip(tensors_in(result), tensors_in(output), strict=True):
            self._theirs[id(tensor)] = _reference_to(tensor), other
        for theirs, own, before in self._lent:
            now = children(own) or []
            if len(now) != len(before) or any(a is not b() for (_, a), (_, b) in zip(now, before, strict=True)):
                fill(theirs, [(key, self._counterpart(value, name)) for key, value in now])
        self._lent, self._theirs = [], {}

    def _counterpart(self, value: Any, name: str) -> Any:
        """The value to put into the caller's container for a value in a copy."""
        own, theirs = self._theirs.get(id(value), (lambda: None, None))
        if value is not None and own() is value:  # what is gone may have had the same identity
            return theirs
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise Unsupported(
                f"'{name}' puts a tensor that it does not return into a list, dict or object that it is passed: return "
                "it as well, or let the model put it there"
            )
        if isinstance(value, torch.Tensor):
            return value
        tree = Tree.of(value)
        return tree.build([self._counterpart(tensor, name) for tensor in tree.leaves])


def _can_be_filled(value: Any) -> bool:
    return not isinstance(value, tuple) and children(value) is not None


def _reference_to(value: Any) -> Callable[[], Any]:
    """A structure without tensors and objects that may hold one, in which copied lists and dicts stay."""
    try:
        return weakref.ref(value)
    except TypeError:
        return (lambda: None) if isinstance(value, tuple) else (lambda: value)


def _pairs(theirs: Any, own: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs of values that differ at the same place of two equal structures."""
    if theirs is own:
        return
    yield theirs, own
    for (_, one), (_, other) in zip(children(theirs) or (), children(own) or (), strict=True):
        yield from _pairs(one, other)


def differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that require gradients, each once."""
    return list({id(t): t for t in tensors_in(value) if t.requires_grad}.values())


def sink(outputs: Sequence[torch.Tensor], hooks: Hooks, grads: Layouts) -> torch.Tensor:
    """The root of the backward of outputs and of tied parameters, which get a gradient first.

    Gradients have the given layouts. Outputs without a gradient are left out, unless there is no other.
    """
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    if not pairs:
        return _Sink.apply(hooks, grads, *outputs)
    return _Sink.apply(hooks, [grad for _, grad in pairs], *(output for output, _ in pairs))


def bridge(output: Any, inputs: Sequence[torch.Tensor], hooks: Hooks, grads: Layouts = ()) -> Any:
    """`output` as the result of a function of `inputs` that saves nothing; inputs passed through stay themselves.

    `grads` are the layouts of the gradients that it makes for the inputs.
    """
    same = {identity(t): t for t in inputs}
    tree = Tree.of(output)
    made = [t for t in tree.leaves if t.requires_grad and identity(t) not in same]
    taken = [detached(t) for t in made]
    fresh: Iterator[torch.Tensor] = iter(())
    if made:
        link = _Leaving.apply(_anchor(made[0].device), hooks, layouts_of(inputs, grads), *inputs)
        fresh = iter(_Arriving.apply(link, hooks, taken))
    return tree.build([_replaced(t, same, fresh) for t in tree.leaves])


def _replaced(tensor: torch.Tensor, same: dict[Any, torch.Tensor], fresh: Iterator[torch.Tensor]) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    passed_through = same.get(identity(tensor))
    return next(fresh) if passed_through is None else passed_through


@functools.lru_cache
def _anchor(device: torch.device) -> torch.Tensor:
    """A tensor that requires gradients, so that the outputs of a function have a backward."""
    return torch.zeros((), requires_grad=True, device=device)


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors with the same storage, size, stride and offset."""
    if not memory.has_storage(tensor):
        return (id(tensor),)
    return (_compat.storage_id(tensor), tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))


@contextlib.contextmanager
def as_in_backward(device: torch.device) -> Iterator[None]:
    """Leave the autocast region: a backward runs outside of it, when its cached copies of parameters are freed."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False), _compat.outside_autocast():
        yield


# -- what autograd saves -------------------------------------------------------------------------------------


class _Holder:
    """The object that the autograd graph keeps for one saved tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class MeasuringHooks(Protocol):
    """Pack hooks under which a block is measured."""

    count: int
    storages: set[int]
    sizes: dict[int, int]  # bytes of kept tensors, by storage
    stays: bool  # some of it cannot be offloaded

    def recording(self) -> contextlib.AbstractContextManager[Any]:
        """The hooks, in force."""

    def given(self, args: Any, kwargs: Any) -> None:
        """Called with the block's arguments before each call."""


class SavedTensors:
    """Pack hooks that keep all saved tensors, as the executor does for a kept block, and count them.

    takes_own: also tensors that are saved under hooks of the block's own, in the form in which those keep them.
    sees_own_hooks: the block has such hooks, and they were not replaced.

    Tensors on another device take no memory of this one, and need not be offloaded: attention kernels on CUDA save
    their seed on the CPU.
    """

    def __init__(self, device: torch.device, takes_own: bool = False) -> None:
        self._device, self._takes_own = device, takes_own
        self.sees_own_hooks = False
        self.count = 0
        self.storages: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.stays = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with _compat.saved_tensors_hooks(self._pack, lambda holder: holder.tensor), _compat.InnerHooks(self._own):
            yield

    def _own(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> tuple[Any, Any]:
        if not self._takes_own:
            self.sees_own_hooks = True
            return pack, unpack
        self.stays = True

        def packed(tensor: torch.Tensor) -> Any:
            self.count += 1
            return pack(tensor if tensor.is_leaf else tensor.detach())

        return packed, unpack

    def given(self, args: Any, kwargs: Any) -> None:
        """Ignored here."""

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        self.count += 1
        if tensor.device == self._device:
            self.stays |= not memory.can_be_offloaded(tensor)
            if memory.has_storage(tensor):
                self.storages.add(_compat.storage_id(tensor))
                self.sizes[_compat.storage_id(tensor)] = memory.storage_bytes(tensor)
        return _Holder(tensor.detach())
