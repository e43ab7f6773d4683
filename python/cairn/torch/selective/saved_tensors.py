"""The saved-tensor hooks of a block: pack hooks that replace each saved tensor by a `Holder`, and the unpack hook.

* *Forward* (`FirstRunPack`). The pack hook puts one `Holder` into the autograd graph for every saved tensor. The holder
  keeps the tensor, or is empty if the schedule drops what the block saves.
* *Recomputation* (`RecomputePack`). The block's forward is recomputed in the backward. Its pack hook fills the empty
  holders. Saved tensors are matched by the order in which autograd packs them.
* *Backward*. The unpack hook reads the holder.

A saved tensor that is an argument of the block, or a view of one, gets an `ArgumentHolder`. That holds no tensor. It
asks the executor for the argument, which is kept once for all its readers.

Where a part of a block has saved-tensor hooks of its own (`save_on_cpu`, a selective checkpoint), torch calls only
these. A block that is recomputed as a whole puts its own around them (`within`): its first run does not call them, and
the recomputation keeps in an `OwnHolder` what they make of a saved tensor. Under selective recomputation they are left
alone.

Ownership: the autograd graph owns the holders, and the executor has only weak references to them. So a saved tensor is
freed as soon as autograd has used it. All holders of one run of a block share a `Lease`. The lease ends with the last
holder: then the block's backward is over, and all that was kept to recompute the block is freed.
"""

from __future__ import annotations

import contextlib
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
_NOTHING = contextlib.nullcontext()
Pack = Callable[[torch.Tensor], Any]  # pack hook: called with each tensor that autograd saves
Unpack = Callable[[Any], torch.Tensor]  # unpack hook: called when the backward reads a saved tensor


class Step(Protocol):
    """The training step that a run of a block belongs to. Leases and holders call these methods."""

    def name(self, stage: int) -> str:
        """The name of a stage, for messages."""

    def argument_of(self, stage: int, index: int, view: View | Look | None) -> torch.Tensor:
        """A tensor that a block saved and that is one of its arguments, or a view of one."""

    def record_of(self, stage: int) -> Record:
        """The parameters and buffers that were recorded when the block ran in the forward."""

    def refuse_changed(self, stage: int, record: Record) -> None:
        """Raises if a block's parameters or buffers were written since its forward."""

    def missing(self, holder: Holder) -> None:
        """Recomputes or prefetches a saved tensor whose holder is empty."""

    def recomputed(self, holder: RecomputableHolder) -> torch.Tensor | None:
        """Recomputes one saved tensor of a block; None if the whole block must be recomputed."""


class Saving(Protocol):
    """One run of a block under an option of selective recomputation, which keeps some of its saved tensors."""

    def pack(self, recorder: FirstRunPack | RecomputePack) -> Pack:
        """The pack hook to use."""

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Counts a saved tensor, and says whether the option keeps it."""


class Fingerprints(Protocol):
    """Records fingerprints of values, by which a recomputation is compared with the forward."""

    def saved(self, tensor: torch.Tensor, is_argument: bool = False) -> None:
        """Records a saved tensor."""


class Lease:
    """A token that lives as long as autograd may still read a saved tensor of one run of a block."""

    __slots__ = ("__weakref__", "run", "stage")

    def __init__(self, run: Step, stage: int) -> None:
        self.run, self.stage = run, stage

    def argument(self, index: int) -> torch.Tensor:
        """A tensor among the block's arguments, from which saved tensors are recomputed."""
        return self.saved_argument(index, None)

    def saved_argument(self, index: int, view: View | Look | None) -> torch.Tensor:
        """A tensor that the block saved and that is one of its arguments, or a view of one."""
        return self.run.argument_of(self.stage, index, view)

    def missing(self, holder: Holder) -> None:
        """Recomputes or prefetches a saved tensor whose holder is empty."""
        self.run.missing(holder)

    @property
    def record(self) -> Record:
        """The parameters and buffers that were recorded when the block ran in the forward."""
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
    """One saved tensor in the autograd graph. The holder is empty where its tensor is None."""

    __slots__ = ("__weakref__", "lease", "tensor", "version")

    def __init__(self, lease: Lease, tensor: torch.Tensor | None, version: int = 0) -> None:
        self.lease, self.tensor, self.version = lease, tensor, version

    def fill(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor, detached: a reference to its `grad_fn` would be a cycle."""
        self.tensor = tensor.detach()
        self.version = _compat.saved_version(tensor)

    def empty(self) -> None:
        """Drops the tensor."""
        self.tensor = None

    @property
    def is_empty(self) -> bool:
        """Whether it keeps nothing."""
        return self.tensor is None

    @property
    def is_written(self) -> bool:
        """Whether the tensor was modified in place since it was saved."""
        return self.tensor is not None and _compat.saved_version(self.tensor) != self.version

    def unpack(self) -> torch.Tensor:
        """The saved tensor, for autograd. If the holder is empty, the schedule recomputes or prefetches the tensor."""
        tensor = self.tensor
        if tensor is None:
            self.lease.missing(self)
            tensor = self.tensor
            assert tensor is not None
        if _compat.saved_version(tensor) != self.version:
            raise written(tensor, self.lease.run.name(self.lease.stage))
        return tensor


class ArgumentHolder(Holder):
    """A saved tensor that is an argument of the block, or a view of one. The executor keeps the argument."""

    __slots__ = ("_index", "_view")

    def __init__(self, lease: Lease, index: int, view: View | Look | None) -> None:
        self.lease, self.tensor, self.version = lease, None, 0
        self._index, self._view = index, view

    def fill(self, tensor: torch.Tensor) -> None:
        """Does nothing: the executor also has the argument that the recomputation was given."""

    def unpack(self) -> torch.Tensor:
        """The argument as it is in memory now."""
        return self.lease.saved_argument(self._index, self._view)


class OwnHolder(Holder):
    """The result of the block's own pack hook for a saved tensor. The block's own unpack hook restores the tensor."""

    __slots__ = ("_kept",)

    def __init__(self, lease: Lease | None) -> None:
        super().__init__(lease, None)  # type: ignore[arg-type]  # None: it is never empty
        self._kept: tuple[Any, Unpack] | None = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor that was saved under no such hooks."""
        self.keep(tensor, torch.Tensor.detach, torch.Tensor.detach)

    def keep(self, tensor: torch.Tensor, pack: Pack, unpack: Unpack) -> None:
        """Calls the pack hook. A `grad_fn` is left out: what the hook returns could refer to it, which is a cycle."""
        self._kept = pack(tensor if tensor.is_leaf else tensor.detach()), unpack

    def empty(self) -> None:
        self._kept = None

    @property
    def is_empty(self) -> bool:
        return self._kept is None

    def unpack(self) -> torch.Tensor:
        kept = self._kept
        if kept is None:
            self.lease.missing(self)
            kept = self._kept
            assert kept is not None
        packed, unpack = kept
        return unpack(packed)


class RecomputeState:
    """State shared by all holders of one run of a block under selective recomputation."""

    __slots__ = ("key", "recompute")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.recompute: Any = None  # a TensorRecompute, as long as single saved tensors can be recomputed


class RecomputableHolder(Holder):
    """A saved tensor of a block under selective recomputation: kept, or recomputed when the backward reads it."""

    __slots__ = ("recompute_state", "index")

    def __init__(
        self, lease: Lease, tensor: torch.Tensor | None, version: int, recompute_state: RecomputeState, index: int
    ) -> None:
        self.lease, self.tensor, self.version = lease, tensor, version
        self.recompute_state, self.index = recompute_state, index

    def unpack(self) -> torch.Tensor:
        if self.tensor is None and self.recompute_state.recompute is not None:
            recomputed = self.lease.run.recomputed(self)
            if recomputed is not None:
                return recomputed
        return super().unpack()


class Packed:
    """The saved tensors of a block's forward, in order: weak references to their holders, and their shapes, dtypes and
    devices. Such an entry is None where it is not compared. `digest` computes a hash of the values; None: no hashes.
    `takes_own`: also those saved under hooks of the block's own.
    """

    takes_own = False

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
        """The holders that the autograd graph still owns."""
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                yield holder


class FirstRunPack(Packed):
    """The pack hook while a block runs in the model's forward."""

    def __init__(
        self,
        lease: Lease,
        arguments: Sequence[torch.Tensor],
        keep: bool,
        digest: Callable[[torch.Tensor], Any] | None,
        recompute_state: RecomputeState | None = None,
        saving: Saving | None = None,
        fingerprints: Fingerprints | None = None,
    ) -> None:
        super().__init__(digest=digest)
        self._fingerprints = fingerprints  # fingerprints, compared on the device
        self.lease, self._keep = lease, keep
        self.recompute_state, self.saving = recompute_state, saving  # None without selective recomputation
        self.takes_own = recompute_state is None
        self._own: list[list[Any]] = []  # hooks of the block's own while it runs; they can hold tensors
        self._leaves = list(arguments)
        self.versions = _compat.versions(arguments)
        self._arguments: dict[int, int] | None = None  # index of an argument, by storage; filled at the first use

    def pack(self, tensor: torch.Tensor) -> Holder:
        """Called by autograd with each tensor that it saves."""
        keep = self._keep if self.saving is None else self.saving.keeps(tensor)
        holder = self._referring(tensor)
        if holder is None:
            kept, version = (tensor.detach(), _compat.saved_version(tensor)) if keep else (None, 0)
            if self.recompute_state is None:
                holder = Holder(self.lease, kept, version)
            else:
                holder = RecomputableHolder(self.lease, kept, version, self.recompute_state, len(self.holders))
        return self._note(holder, tensor)

    def within(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """The hooks for a part of the block that has these of its own."""
        own = [pack, unpack] if self._keep else []  # the graph refers to `packed`, so `close` empties this list
        self._own.append(own)

        def packed(tensor: torch.Tensor) -> Holder:
            holder = OwnHolder(self.lease)
            if own:
                holder.keep(tensor, *own)
            return self._note(holder, tensor)

        return _compat.hooks_but_on_traced(packed, _unpack_any)

    def _note(self, holder: Holder, tensor: torch.Tensor) -> Holder:
        self.holders.append(weakref.ref(holder))
        self.metas.append(_meta(tensor))
        if self.digest is not None:
            self.digests.append(self.digest(tensor))
        if self._fingerprints is not None:
            self._fingerprints.saved(tensor, is_argument=isinstance(holder, ArgumentHolder))
        return holder

    def close(self) -> bool:
        """Called after the run: drops all but weak references. True if no holder is alive."""
        self._leaves, self._arguments, self.versions = [], {}, []
        self.recompute_state = self.saving = self._fingerprints = None
        for own in self._own:
            own.clear()
        del self.lease
        return all(reference() is None for reference in reversed(self.holders))

    def _referring(self, tensor: torch.Tensor) -> Holder | None:
        """A holder that refers to an argument; None if the tensor is not a view of one, or that was written since."""
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


class RecomputePack:
    """The pack hook while a block is recomputed: it fills the holders, or only counts saved tensors."""

    def __init__(
        self,
        name: str,
        first: Packed,
        keep: bool,
        check: bool,
        saving: Saving | None = None,
        fingerprints: Fingerprints | None = None,
    ) -> None:
        self._name, self._first, self._keep, self._check = name, first, keep, check
        self.saving, self._fingerprints = (
            saving,
            fingerprints,
        )  # selective recomputation; fingerprints, compared on the device
        self.takes_own = first.takes_own
        self._count = 0

    def pack(self, tensor: torch.Tensor) -> Holder | _Passing | None:
        """Called by autograd with each tensor that it would save."""
        index = self._compared(tensor)
        if index is None:
            return None
        holder = self._first.holders[index]()
        if not (self._keep if self.saving is None else self.saving.keeps(tensor)):
            return holder
        if holder is None:
            return _Passing(tensor.detach())
        holder.fill(tensor)
        return holder

    def within(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """The hooks for a part of the block that has these of its own."""

        def packed(tensor: torch.Tensor) -> Holder | None:
            index = self._compared(tensor)
            if index is None:
                return None
            holder = self._first.holders[index]() or OwnHolder(None)
            if isinstance(holder, OwnHolder):
                holder.keep(tensor, pack, unpack)
            else:
                holder.fill(tensor)
            return holder

        return _compat.hooks_but_on_traced(packed, _unpack_any) if self._keep else hooks(self)

    def _compared(self, tensor: torch.Tensor) -> int | None:
        """Compares a saved tensor with that of the forward. Its number; None if there are more than in the forward."""
        index = self._count
        self._count += 1
        if index >= len(self._first.holders):
            return None  # `finish` raises for it
        meta = self._first.metas[index]
        if self._check and meta is not None and (tensor.shape, tensor.dtype, tensor.device) != meta:
            was, found = _describe(meta), _describe(_meta(tensor))
            raise RecomputationError.differs(
                self._name, f"its saved tensor {index} was {was} and is {found} when recomputed"
            )
        if self._first.digest is not None and self._first.digest(tensor) != self._first.digests[index]:
            raise RecomputationError.differs(
                self._name,
                f"the values of its saved tensor {index} ({_describe(_meta(tensor))}) differ when recomputed",
            )
        if self._fingerprints is not None:
            self._fingerprints.saved(tensor)
        return index

    def finish(self) -> None:
        """Called after the recomputation. Raises if it saved another number of tensors."""
        if self._count != len(self._first.holders):
            saved = len(self._first.holders)
            raise RecomputationError.differs(
                self._name, f"it saved {saved} tensors for its backward and {self._count} when recomputed"
            )


@contextlib.contextmanager
def active(recorder: FirstRunPack | RecomputePack) -> Iterator[None]:
    """The hooks of a recorder are in force, also for what the block saves under hooks of its own, if it takes that."""
    own = _compat.InnerHooks(recorder.within) if recorder.takes_own else _NOTHING
    with torch.autograd.graph.saved_tensors_hooks(*hooks(recorder)), own:
        yield


def hooks(recorder: FirstRunPack | RecomputePack) -> tuple[Pack, Unpack]:
    """The pack and unpack hooks for `saved_tensors_hooks`."""
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
    """A saved tensor in the temporary graph of a recomputation, where the holder in the original graph is gone.

    The block's own forward may read it, by `autograd.grad`.
    """

    __slots__ = ("tensor",)
    version = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> torch.Tensor:
        return self.tensor


def _view_of(argument: torch.Tensor, tensor: torch.Tensor) -> View | Look | None:
    """The view of an argument that a tensor is; None if it is the argument itself."""
    if _kind(tensor) != _kind(argument):
        return Look.of(tensor, first_byte(argument))
    view = geometry(tensor)
    return None if view == geometry(argument) else view


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """The dtype, and the conjugate and negative bits."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def geometry(tensor: torch.Tensor) -> View:
    """Size, stride and offset in its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def written(tensor: torch.Tensor, name: str) -> RuntimeError:
    """The error for a saved tensor that was modified in place."""
    return RuntimeError(
        f"one of the tensors that '{name}' saved for its backward "
        f"({_describe(_meta(tensor))}) has been modified by an inplace operation since"
    )


def _meta(tensor: torch.Tensor) -> Meta:
    return tensor.shape, tensor.dtype, tensor.device


def _describe(meta: Meta) -> str:
    return f"{tuple(meta[0])} {str(meta[1]).removeprefix('torch.')} on {meta[2]}"
