"""The saved-tensor hooks of a block: pack hooks that replace each saved tensor by a `Holder`, and the unpack hook.

* *Forward* (`FirstRunPack`). The pack hook puts one `Holder` into the autograd graph for every saved tensor. The holder
  keeps the tensor, or is empty if the schedule drops what the block saves.
* *Recomputation* (`RecomputePack`). The block's forward is recomputed in the backward. Its pack hook fills the empty
  holders. Saved tensors are matched by the order in which autograd packs them.
* *Backward*. The unpack hook reads the holder.

*Inner hooks* are saved-tensor hooks that the block's own code sets (`save_on_cpu`, a selective checkpoint). Torch calls
only these for what is saved under them. In a block that is recomputed as a whole, `within` replaces them: in the
forward an empty `InnerHolder` is saved instead, and the recomputation fills it with the result of the inner pack hook.
Under selective recomputation inner hooks are left alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..base import _compat
from ..base.errors import RecomputationError, Unsupported
from ..base.layouts import ByteView, first_byte
from .saved_tensors import (
    ArgumentHolder,
    Holder,
    InnerHolder,
    Lease,
    Meta,
    Pack,
    RecomputableHolder,
    RecomputeState,
    Unpack,
    View,
    describe,
    geometry,
    meta_of,
)

_NOTHING = contextlib.nullcontext()


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


class Packed:
    """The saved tensors of a block's forward, in the order of saving.

    Attributes
    ----------
    holders
        Weak references to their holders.
    metas
        Their shapes, dtypes and devices; None for a tensor that is not compared.
    digest, digests
        A function that computes a hash of a tensor's values, and the hashes; None: values are not compared.
    records_inner
        Whether tensors that are saved under inner hooks are among them.
    """

    records_inner = False

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
    """The pack hook while a block runs in the model's forward.

    Parameters
    ----------
    arguments
        The tensors among the block's arguments.
    keep
        Whether holders keep their tensors. With `saving`, that decides instead.
    digest
        As in `Packed`.
    recompute_state, saving
        The run under selective recomputation; None without.
    fingerprints
        Records values, to be compared on the device; None: they are not compared.
    """

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
        self._fingerprints = fingerprints
        self.lease, self._keep = lease, keep
        self.recompute_state, self.saving = recompute_state, saving
        self.records_inner = recompute_state is None
        self._inner_hooks: list[list[Any]] = []  # freed by `close`: they can hold tensors
        self._leaves = list(arguments)
        self.versions = _compat.versions(arguments)
        self._arguments: dict[int, int] | None = None  # index of an argument, by storage; filled at the first use

    def pack(self, tensor: torch.Tensor) -> Holder:
        """Called by autograd with each tensor that it saves."""
        keep = self._keep if self.saving is None else self.saving.keeps(tensor)
        holder = self._argument_holder(tensor)
        if holder is None:
            kept, version = (tensor.detach(), _compat.saved_version(tensor)) if keep else (None, 0)
            if self.recompute_state is None:
                holder = Holder(self.lease, kept, version)
            else:
                holder = RecomputableHolder(self.lease, kept, version, self.recompute_state, len(self.holders))
        return self._record(holder, tensor)

    def within(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """The hooks to set in place of inner hooks."""
        inner_hooks = [pack, unpack] if self._keep else []  # the graph refers to `packed`, so `close` empties this list
        self._inner_hooks.append(inner_hooks)

        def packed(tensor: torch.Tensor) -> Holder:
            holder = InnerHolder(self.lease)
            if inner_hooks:
                holder.keep(tensor, *inner_hooks)
            return self._record(holder, tensor)

        return _compat.hooks_but_on_traced(packed, _unpack)

    def _record(self, holder: Holder, tensor: torch.Tensor) -> Holder:
        self.holders.append(weakref.ref(holder))
        self.metas.append(meta_of(tensor))
        if self.digest is not None:
            self.digests.append(self.digest(tensor))
        if self._fingerprints is not None:
            self._fingerprints.saved(tensor, is_argument=isinstance(holder, ArgumentHolder))
        return holder

    def close(self) -> bool:
        """Called after the run: drops all but weak references. Returns whether no holder is alive."""
        self._leaves, self._arguments, self.versions = [], {}, []
        self.recompute_state = self.saving = self._fingerprints = None
        for inner_hooks in self._inner_hooks:
            inner_hooks.clear()
        del self.lease
        return all(reference() is None for reference in reversed(self.holders))

    def _argument_holder(self, tensor: torch.Tensor) -> Holder | None:
        """A holder for a view of an argument; None if the tensor is none, or the argument was written since."""
        if self._arguments is None:
            last_first = reversed(list(enumerate(self._leaves)))
            self._arguments = {key: i for i, t in last_first if (key := _compat.storage_key(t))}
        index = self._arguments.get(_compat.storage_key(tensor)) if self._arguments else None
        if index is None:
            return None
        argument = self._leaves[index]
        if _compat.version(tensor) != self.versions[index]:
            return None
        return ArgumentHolder(self.lease, index, _view_of(argument, tensor))


class RecomputePack:
    """The pack hook while a block is recomputed: it fills the holders of the forward.

    Parameters
    ----------
    name
        The block's name, for messages.
    first
        The saved tensors of the forward.
    keep
        Whether to fill holders. If False, saved tensors are only compared. With `saving`, that decides instead.
    check
        Whether shapes, dtypes and devices are compared with those of the forward.
    saving, fingerprints
        As in `FirstRunPack`.
    """

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
        )
        self.records_inner = first.records_inner
        self._count = 0

    def pack(self, tensor: torch.Tensor) -> Holder | _TemporaryTensor | None:
        """Called by autograd with each tensor that it would save."""
        index = self._check_next(tensor)
        if index is None:
            return None
        holder = self._first.holders[index]()
        if not (self._keep if self.saving is None else self.saving.keeps(tensor)):
            return holder
        if holder is None:
            return _TemporaryTensor(tensor.detach())
        holder.fill(tensor)
        return holder

    def within(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """The hooks to set in place of inner hooks."""

        def packed(tensor: torch.Tensor) -> Holder | None:
            index = self._check_next(tensor)
            if index is None:
                return None
            holder = self._first.holders[index]() or InnerHolder(None)
            if isinstance(holder, InnerHolder):
                holder.keep(tensor, pack, unpack)
            else:
                holder.fill(tensor)
            return holder

        return _compat.hooks_but_on_traced(packed, _unpack) if self._keep else hooks(self)

    def _check_next(self, tensor: torch.Tensor) -> int | None:
        """Compares the next saved tensor with that of the forward. Its index; None if the forward saved fewer."""
        index = self._count
        self._count += 1
        if index >= len(self._first.holders):
            return None  # `finish` raises for it
        meta = self._first.metas[index]
        if self._check and meta is not None and (tensor.shape, tensor.dtype, tensor.device) != meta:
            expected, actual = describe(meta), describe(meta_of(tensor))
            raise RecomputationError.differs(
                self._name, f"its saved tensor {index} was {expected} and is {actual} when recomputed"
            )
        if self._first.digest is not None and self._first.digest(tensor) != self._first.digests[index]:
            raise RecomputationError.differs(
                self._name,
                f"the values of its saved tensor {index} ({describe(meta_of(tensor))}) differ when recomputed",
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
    """Set the hooks of a recorder for the body, and replace inner hooks if it records what is saved under them."""
    inner = _compat.InnerHooks(recorder.within) if recorder.records_inner else _NOTHING
    with torch.autograd.graph.saved_tensors_hooks(*hooks(recorder)), inner:
        yield


def hooks(recorder: FirstRunPack | RecomputePack) -> tuple[Pack, Unpack]:
    """The pack and unpack hooks for `saved_tensors_hooks`."""
    pack = recorder.pack if recorder.saving is None else recorder.saving.pack(recorder)
    return _compat.hooks_but_on_traced(pack, _unpack)


def _unpack(holder: Holder | _TemporaryTensor | None) -> torch.Tensor:
    if holder is None:
        raise Unsupported("a block computes gradients inside its own forward; keep this block")
    tensor = holder.tensor
    if tensor is not None and _compat.saved_version(tensor) == holder.version:
        return tensor
    return holder.unpack()


class _TemporaryTensor:
    """A saved tensor in the temporary graph of a recomputation, if its holder in the original graph is freed.

    The block's forward may read it by `autograd.grad`.
    """

    __slots__ = ("tensor",)
    version = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> torch.Tensor:
        return self.tensor


def _view_of(argument: torch.Tensor, tensor: torch.Tensor) -> View | ByteView | None:
    """The view of an argument that a tensor is; None if it is the argument itself."""
    if _kind(tensor) != _kind(argument):
        return ByteView.of(tensor, first_byte(argument))
    view = geometry(tensor)
    return None if view == geometry(argument) else view


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """The dtype, and the conjugate and negative bits."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()
