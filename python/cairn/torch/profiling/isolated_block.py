"""Running one block alone, with a backward whose memory is that of the real step.

How the backward is begun decides what is measured: `y.backward(d)` keeps y and d alive for the whole backward, which
no training step does. So the block stands between two functions that save nothing: `_Source` hands over the inputs and
is where their gradients end; `_Sink` takes the outputs, and in the backward makes their gradients and hands them over
as their only owner. `bridge` joins the surroundings of a block, without the block, in one autograd graph. It is two
functions: between them in the backward, what arrived has gone, unless others wait for it, too.

How a gradient lies in memory matters as well: some kernels copy one that does not lie as the output does. So gradients
are made with the layout in which they arrive, once that is known. One that others wait for, too, does not go when the
block has read it: that of a sum around the block, or a view of one of which others have views (those of what was
concatenated, say). Those of several outputs may lie in one storage, as that of their sum, which goes with the last.
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
from ..base.layouts import Layouts, layouts_of, made, saving_nothing
from ..base.tree import Tree, children, fill, tensors_in
from ..rerun_state.kv_caches import own_caches
from .captured_inputs import InputFinder, Replacing, reaches_back


@dataclasses.dataclass
class Hooks:
    """What a handler is told while autograd runs."""

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
        grads = made(ctx.grads)
        ctx.shared = [g for g, layout in zip(grads, ctx.grads, strict=True) if layout is not None and layout.waits]
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
        result = made(ctx.grads)
        ctx.hooks.begun()
        return None, None, None, *result


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage without history and without being a view to autograd, so that it may be changed in place."""
    is_plain = type(tensor) in _compat.PLAIN_CLASSES and not _compat.is_fake(tensor)
    if not is_plain or not memory.has_storage(tensor):
        return tensor.detach()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


# -- arguments -----------------------------------------------------------------------------------------------


class Arguments:
    """The arguments of one call of a block, which can be passed on with fresh graph inputs; and after `capture`, what
    it reads beside them.

    Attributes
    ----------
    tensors
        All of them.
    differentiable
        Those with gradients.
    captured
        What it reads with a history without having it from its arguments, once that is known.
    writes_captured
        It has written some of that in place.
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
        """Calls the block with what `source` gave."""
        if not self.captured:
            return function(*args, **kwargs)
        fresh, self._fresh = self._fresh, ()
        replacing = Replacing(self.differentiable, fresh)
        with replacing:
            result = function(*args, **kwargs)
        self.writes_captured |= replacing.wrote()
        return replacing.given(result)

    def reach_back(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a backward from what a run made runs on into what was there before the block."""
        return reaches_back(tensors, self._since)

    def capture(self, function: Callable[..., Any]) -> None:
        """Runs the block, and takes what it reads with a history and is not passed for inputs."""
        args, kwargs = self.source(Hooks())
        finding = InputFinder(self._since)
        with self.saving_nothing(), finding:
            finding.given(function(*args, **kwargs))
        self.captured = finding.tensors
        passed = set(map(id, self._tree.leaves))
        self._take([tensor for tensor in self.captured if id(tensor) not in passed])

    def lent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ContainerCopies:
        """To be asked before the run that is passed these, if it is the one that the caller sees."""
        return ContainerCopies(self._value, (args, kwargs))

    def refuse_iterators(self, name: str) -> None:
        """Raises if the block of this name is passed something that its first run uses up."""
        for value in self._tree.opaque:
            if isinstance(value, Iterator):
                raise Unsupported(
                    f"'{name}' is passed an iterator ({type(value).__name__}), which its first run uses up, so that it "
                    "cannot be recomputed from it: pass what is taken from it, or a list"
                )


class ContainerCopies:
    """Lists, dicts and the like that a run of a block is passed as copies of the caller's, which it may change: each
    run finds them as they were, and the caller finds what the last one has left.
    """

    def __init__(self, theirs: tuple[Any, Any], own: tuple[Any, Any]) -> None:
        pairs = list(_pairs(theirs, own))
        self._lent = [
            (value, copied, [(key, _reference_to(item)) for key, item in children(copied) or ()])
            for value, copied in pairs
            if _can_be_filled(copied) and copied is not own[1]  # of the keywords, a function gets a dict of its own
        ]
        self._theirs = {id(copied): (_reference_to(copied), value) for value, copied in pairs} if self._lent else {}

    def hand_back(self, name: str, result: Any, output: Any) -> None:
        """Makes the caller's be as the run of the block of this name left its own. `output` is what stands for its
        result. Raises Unsupported where that does not say what stands for a tensor that is left.
        """
        if not self._lent:
            return
        for tensor, other in zip(tensors_in(result), tensors_in(output), strict=True):
            self._theirs[id(tensor)] = _reference_to(tensor), other
        for theirs, own, before in self._lent:
            now = children(own) or []
            if len(now) != len(before) or any(a is not b() for (_, a), (_, b) in zip(now, before, strict=True)):
                fill(theirs, [(key, self._hooks_and_names_for(value, name)) for key, value in now])
        self._lent, self._theirs = [], {}

    def _hooks_and_names_for(self, value: Any, name: str) -> Any:
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
        return tree.build([self._hooks_and_names_for(tensor, name) for tensor in tree.leaves])


def _can_be_filled(value: Any) -> bool:
    return not isinstance(value, tuple) and children(value) is not None


def _reference_to(value: Any) -> Callable[[], Any]:
    """Keeps no tensor, and nothing that may hold one, but lists and dicts that are lent."""
    try:
        return weakref.ref(value)
    except TypeError:
        return (lambda: None) if isinstance(value, tuple) else (lambda: value)


def _pairs(theirs: Any, own: Any) -> Iterator[tuple[Any, Any]]:
    """What stands in one place in two values that are alike, and is not the same."""
    if theirs is own:
        return
    yield theirs, own
    for (_, one), (_, other) in zip(children(theirs) or (), children(own) or (), strict=True):
        yield from _pairs(one, other)


def differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that have a backward, each once."""
    return list({id(t): t for t in tensors_in(value) if t.requires_grad}.values())


def sink(outputs: Sequence[torch.Tensor], hooks: Hooks, grads: Layouts) -> torch.Tensor:
    """The root from which the backward of outputs (and of tied parameters, which get a gradient first) begins, with
    gradients of these layouts. Outputs without a gradient are left out, as long as there is another.
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
    """Something to differentiate with respect to, so that what comes out of a function has a backward."""
    return torch.zeros((), requires_grad=True, device=device)


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that show the same storage in the same way."""
    if not memory.has_storage(tensor):
        return (id(tensor),)
    return (_compat.storage_id(tensor), tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))


@contextlib.contextmanager
def as_in_backward(device: torch.device) -> Iterator[None]:
    """A backward runs outside the autocast region of its forward, whose copies of parameters are gone by then."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False), _compat.outside_autocast():
        yield


# -- what autograd saves -------------------------------------------------------------------------------------


class _Holder:
    """What the graph keeps for one saved tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Saved(Protocol):
    """Pack hooks under which a block is measured."""

    count: int
    storages: set[int]
    sizes: dict[int, int]  # bytes by storage, of what is kept
    stays: bool  # some of it cannot be offloaded

    def recording(self) -> contextlib.AbstractContextManager[Any]:
        """The hooks, in force."""

    def given(self, args: Any, kwargs: Any) -> None:
        """The arguments that the block is about to be called with."""


class SavedTensors:
    """Pack hooks that keep all saved tensors, as the executor does for a kept block, and count them.

    takes_own: those that are saved under hooks of the block's own as well, as these hooks keep them.
    sees_own_hooks: there are such hooks, and they were left alone.

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
        """Of no importance here."""

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        self.count += 1
        if tensor.device == self._device:
            self.stays |= not memory.can_be_offloaded(tensor)
            if memory.has_storage(tensor):
                self.storages.add(_compat.storage_id(tensor))
                self.sizes[_compat.storage_id(tensor)] = memory.storage_bytes(tensor)
        return _Holder(tensor.detach())
