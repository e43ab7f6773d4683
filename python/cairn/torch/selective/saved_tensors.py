"""What autograd's graph keeps in place of a block's saved tensors, and the hooks that fill it.

A first run puts one `Holder` into the graph for every tensor that autograd saves: full, or empty if the schedule drops
what the block saves. A later run refills the holders, matched by the order in which tensors are packed; the backward
only reads. The graph owns the holders; the executor knows them by weak references, so that what autograd is done with
is gone. A holder of a tensor that is one of the block's arguments (or a view of one) holds nothing: it asks for the
argument, which the executor keeps once for all its readers.

All holders of a block's run share one `Lease`. When the last of them goes, the block's backward is over and its graph
freed, and what was kept for running the block again is freed with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..base import _compat
from ..base.errors import RecomputationError, Unsupported
from ..base.layouts import Look, first_byte
from ..rerun_state.module_state import Record

Meta = tuple[torch.Size, torch.dtype, torch.device]
View = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset
Pack = Callable[[torch.Tensor], Any]  # a hook on what autograd saves
Unpack = Callable[[Any], torch.Tensor]  # and on what it reads of that again


class Step(Protocol):
    """The training step that a block's run belongs to: what leases and holders ask of it."""

    def name(self, stage: int) -> str:
        """The name of a stage, for people."""

    def argument_of(self, stage: int, index: int, view: View | Look | None) -> torch.Tensor:
        """A tensor that a block saved and that is one of its arguments, or a view of one."""

    def record_of(self, stage: int) -> Record:
        """What a block's first run found."""

    def refuse_changed(self, stage: int, record: Record) -> None:
        """Raises if a block's parameters and buffers were written since its first run."""

    def missing(self, holder: Holder) -> torch.Tensor:
        """A tensor that a backward wants and that is not there."""

    def rebuilt(self, holder: RebuiltHolder) -> torch.Tensor | None:
        """A tensor that a block did not keep; None if the block must be recomputed as a whole."""


class Saving(Protocol):
    """One run of a block that saves by an option."""

    def pack(self, recorder: FirstRun | LaterRun) -> Pack:
        """The pack hook to be used."""

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Takes note of a tensor that autograd saves; says whether it is kept."""


class Marks(Protocol):
    """Takes what tells the values of a run from those of another."""

    def saved(self, tensor: torch.Tensor, is_argument: bool = False) -> None:
        """Takes note of a tensor that autograd saves."""


class Lease:
    """Alive as long as autograd may still need what one run of a block saved."""

    __slots__ = ("__weakref__", "run", "stage")

    def __init__(self, run: Step, stage: int) -> None:
        self.run, self.stage = run, stage

    def argument(self, index: int) -> torch.Tensor:
        """A tensor among the block's arguments, for rebuilding what it did not keep."""
        return self.saved_argument(index, None)

    def saved_argument(self, index: int, view: View | Look | None) -> torch.Tensor:
        """A tensor that the block saved and that is one of its arguments, or a view of one."""
        return self.run.argument_of(self.stage, index, view)

    def missing(self, holder: Holder) -> torch.Tensor:
        """A tensor that a backward wants and that is not there."""
        return self.run.missing(holder)

    @property
    def record(self) -> Record:
        """What the block's first run found."""
        return self.run.record_of(self.stage)

    def parameter(self, index: int) -> torch.Tensor:
        """A parameter of the block."""
        return self._unchanged(self.record.parameter(index))

    def buffer(self, index: int) -> torch.Tensor:
        """A buffer of the block."""
        return self._unchanged(self.record.buffer(index))

    def _unchanged(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            self.run.refuse_changed(self.stage, self.record)
        assert tensor is not None
        return tensor


class Holder:
    """Stands for one saved tensor in the graph. Empty: its tensor is None."""

    __slots__ = ("__weakref__", "lease", "tensor", "version")

    def __init__(self, lease: Lease, tensor: torch.Tensor | None, version: int = 0) -> None:
        self.lease, self.tensor, self.version = lease, tensor, version

    def fill(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor: its storage, not its place in the graph, which would be a cycle."""
        self.tensor = tensor.detach()
        self.version = _compat.saved_version(tensor)

    def empty(self) -> None:
        """Lets go of the tensor."""
        self.tensor = None

    @property
    def is_written(self) -> bool:
        """Whether the tensor was modified in place since it was saved."""
        return self.tensor is not None and _compat.saved_version(self.tensor) != self.version

    def unpack(self) -> torch.Tensor:
        """The saved tensor, for autograd. What is not there is brought by the schedule, or is an error."""
        tensor = self.tensor
        if tensor is None:
            tensor = self.lease.missing(self)
        if _compat.saved_version(tensor) != self.version:
            raise written(tensor, self.lease.run.name(self.lease.stage))
        return tensor


class ArgumentHolder(Holder):
    """Stands for a saved tensor that is an argument of the block, or a view of one: the executor has it."""

    __slots__ = ("_index", "_view")

    def __init__(self, lease: Lease, index: int, view: View | Look | None) -> None:
        self.lease, self.tensor, self.version = lease, None, 0
        self._index, self._view = index, view

    def fill(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the executor has the argument of the later run as well."""

    def unpack(self) -> torch.Tensor:
        """The argument as it is in memory now."""
        return self.lease.saved_argument(self._index, self._view)


class Box:
    """What one run of an opened block keeps; shared by its holders."""

    __slots__ = ("key", "rebuild")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.rebuild: Any = None  # a Rebuild, while what was not kept can be recomputed


class RebuiltHolder(Holder):
    """Stands for a saved tensor of an opened block: it may be there, or be rebuilt when it is asked for."""

    __slots__ = ("box", "index")

    def __init__(self, lease: Lease, tensor: torch.Tensor | None, version: int, box: Box, index: int) -> None:
        self.lease, self.tensor, self.version = lease, tensor, version
        self.box, self.index = box, index

    def unpack(self) -> torch.Tensor:
        if self.tensor is None and self.box.rebuild is not None:
            rebuilt = self.lease.run.rebuilt(self)
            if rebuilt is not None:
                return rebuilt
        return super().unpack()


class Packed:
    """What a block's first run saved, in order: references to the holders, and what the tensors look like; None where
    that does not matter. `digest` makes the digests, if there are any.
    """

    def __init__(
        self,
        holders: Iterable[Callable[[], Holder | None]] = (),
        metas: Iterable[Meta | None] = (),
        digest: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self.holders, self.metas = list(holders), list(metas)
        self.digests: list[Any] = []
        self.digest = digest

    def alive(self) -> Iterator[Holder]:
        """The holders that the graph still has."""
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                yield holder


class FirstRun(Packed):
    """Pack hooks of a block's first run."""

    def __init__(
        self,
        lease: Lease,
        arguments: Sequence[torch.Tensor],
        keep: bool,
        digest: Callable[[torch.Tensor], Any] | None,
        box: Box | None = None,
        saving: Saving | None = None,
        marks: Marks | None = None,
    ) -> None:
        super().__init__(digest=digest)
        self._marks = marks  # what is compared on the device
        self.lease, self._keep = lease, keep
        self.box, self.saving = box, saving  # of an opened block
        self._leaves = list(arguments)
        self.versions = _compat.versions(arguments)
        self._arguments: dict[int, int] | None = None  # by storage; made when it is asked for

    def pack(self, tensor: torch.Tensor) -> Holder:
        """Called by autograd with each tensor that it saves."""
        keep = self._keep if self.saving is None else self.saving.keeps(tensor)
        holder = self._referring(tensor)
        if holder is None:
            kept, version = (tensor.detach(), _compat.saved_version(tensor)) if keep else (None, 0)
            if self.box is None:
                holder = Holder(self.lease, kept, version)
            else:
                holder = RebuiltHolder(self.lease, kept, version, self.box, len(self.holders))
        self.holders.append(weakref.ref(holder))
        self.metas.append(_meta(tensor))
        if self.digest is not None:
            self.digests.append(self.digest(tensor))
        if self._marks is not None:
            self._marks.saved(tensor, is_argument=isinstance(holder, ArgumentHolder))
        return holder

    def close(self) -> bool:
        """To be called after the run: lets go of all but weak references. True if no holder is alive."""
        self._leaves, self._arguments, self.versions = [], {}, []
        self.box = self.saving = self._marks = None
        del self.lease
        return all(reference() is None for reference in reversed(self.holders))

    def _referring(self, tensor: torch.Tensor) -> Holder | None:
        """A holder that refers to an argument, if the tensor can be made from one."""
        if self._arguments is None:
            numbered = reversed(list(enumerate(self._leaves)))
            self._arguments = {key: i for i, t in numbered if (key := _compat.storage_key(t))}
        index = self._arguments.get(_compat.storage_key(tensor)) if self._arguments else None
        if index is None:
            return None
        argument = self._leaves[index]
        if _compat.version(tensor) != self.versions[index]:
            return None
        return ArgumentHolder(self.lease, index, _view_of(argument, tensor))


class LaterRun:
    """Pack hooks of a later run of a block: they refill the holders, or only count."""

    def __init__(
        self,
        name: str,
        first: Packed,
        keep: bool,
        check: bool,
        saving: Saving | None = None,
        marks: Marks | None = None,
    ) -> None:
        self._name, self._first, self._keep, self._check = name, first, keep, check
        self.saving, self._marks = saving, marks  # of an opened block; what is compared on the device
        self._count = 0

    def pack(self, tensor: torch.Tensor) -> Holder | _Passing | None:
        """Called by autograd with each tensor that it would save."""
        index = self._count
        self._count += 1
        if index >= len(self._first.holders):
            return None  # `finish` says so
        meta = self._first.metas[index]
        if self._check and meta is not None and (tensor.shape, tensor.dtype, tensor.device) != meta:
            was, found = _describe(meta), _describe(_meta(tensor))
            raise RecomputationError.differs(
                self._name, f"its saved tensor {index} was {was} and is {found} when run again"
            )
        if self._first.digest is not None and self._first.digest(tensor) != self._first.digests[index]:
            raise RecomputationError.differs(
                self._name, f"the values of its saved tensor {index} ({_describe(_meta(tensor))}) differ when run again"
            )
        if self._marks is not None:
            self._marks.saved(tensor)
        holder = self._first.holders[index]()
        if not (self._keep if self.saving is None else self.saving.keeps(tensor)):
            return holder
        if holder is None:
            return _Passing(tensor.detach())
        holder.fill(tensor)
        return holder

    def finish(self) -> None:
        """To be called after the run."""
        if self._count != len(self._first.holders):
            saved = len(self._first.holders)
            raise RecomputationError.differs(
                self._name, f"it saved {saved} tensors for its backward and {self._count} when run again"
            )


def hooks(recorder: FirstRun | LaterRun) -> tuple[Pack, Unpack]:
    """With these hooks autograd saves through the recorder."""
    pack = recorder.pack if recorder.saving is None else recorder.saving.pack(recorder)
    return _compat.hooks_but_on_traced(pack, _unpack_any)


def _unpack_any(holder: Holder | _Passing | None) -> torch.Tensor:
    if holder is None:
        raise Unsupported("a block computes gradients inside its own forward; keep this block")
    tensor = holder.tensor
    if tensor is not None and _compat.saved_version(tensor) == holder.version:
        return tensor
    return holder.unpack()


class _Passing:
    """Stands, in the graph of a later run, for a tensor whose first holder is gone: the block itself used it."""

    __slots__ = ("tensor",)
    version = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> torch.Tensor:
        return self.tensor


def _view_of(argument: torch.Tensor, tensor: torch.Tensor) -> View | Look | None:
    """How a tensor is seen in an argument whose storage it has; None if it is the same."""
    if _kind(tensor) != _kind(argument):
        return Look.of(tensor, first_byte(argument))
    view = geometry(tensor)
    return None if view == geometry(argument) else view


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """What its numbers are."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def geometry(tensor: torch.Tensor) -> View:
    """How a tensor lies in its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def written(tensor: torch.Tensor, name: str) -> RuntimeError:
    """The error that a tensor is not what it was when the block of this name saved it."""
    return RuntimeError(
        f"one of the tensors that '{name}' saved for its backward "
        f"({_describe(_meta(tensor))}) has been modified by an inplace operation since"
    )


def _meta(tensor: torch.Tensor) -> Meta:
    return tensor.shape, tensor.dtype, tensor.device


def _describe(meta: Meta) -> str:
    return f"{tuple(meta[0])} {str(meta[1]).removeprefix('torch.')} on {meta[2]}"
