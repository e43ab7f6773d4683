"""Holders of saved tensors: the objects that the autograd graph has in place of the tensors that a block saves.

A saved tensor that is an argument of the block, or a view of one, gets an `ArgumentHolder`. That holds no tensor. It
asks the step for the argument, which is kept once for all its readers. The hooks that make and fill holders are in
`pack_hooks.py`.

Ownership: the autograd graph owns the holders, and the step has only weak references to them. So a saved tensor is
freed as soon as autograd has used it. All holders of one run of a block share a `Lease`. The lease ends with the last
holder: then the block's backward is over, and all that was kept to recompute the block is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..base import _compat
from ..base.layouts import ByteView
from ..rerun_state.module_state import Record

Meta = tuple[torch.Size, torch.dtype, torch.device]
View = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset
Pack = Callable[[torch.Tensor], Any]  # pack hook: called with each tensor that autograd saves
Unpack = Callable[[Any], torch.Tensor]  # unpack hook: called when the backward reads a saved tensor


class Step(Protocol):
    """The training step that a run of a block belongs to. Leases and holders call these methods."""

    def name(self, stage: int) -> str:
        """The name of a stage, for messages."""

    def argument_of(self, stage: int, index: int, view: View | ByteView | None) -> torch.Tensor:
        """A tensor that a block saved and that is one of its arguments, or a view of one."""

    def record_of(self, stage: int) -> Record:
        """The parameters and buffers that were recorded when the block ran in the forward."""

    def refuse_changed(self, stage: int, record: Record) -> None:
        """Raises if a block's parameters or buffers were written since its forward."""

    def missing(self, holder: Holder) -> None:
        """Recomputes or prefetches a saved tensor whose holder is empty."""

    def recomputed(self, holder: RecomputableHolder) -> torch.Tensor | None:
        """Recomputes one saved tensor of a block; None if the whole block must be recomputed."""


class Lease:
    """A token that lives as long as autograd may still read a saved tensor of one run of a block.

    The holders of the run own it, and it owns the step.
    """

    __slots__ = ("__weakref__", "run", "stage")

    def __init__(self, run: Step, stage: int) -> None:
        self.run, self.stage = run, stage

    def argument(self, index: int) -> torch.Tensor:
        """A tensor among the block's arguments, from which saved tensors are recomputed."""
        return self.saved_argument(index, None)

    def saved_argument(self, index: int, view: View | ByteView | None) -> torch.Tensor:
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
    """Stands for one saved tensor in the autograd graph, which owns it. The holder is empty if `tensor` is None.

    version: the version counter of the tensor when it was saved.
    """

    __slots__ = ("__weakref__", "lease", "tensor", "version")

    def __init__(self, lease: Lease, tensor: torch.Tensor | None, version: int = 0) -> None:
        self.lease, self.tensor, self.version = lease, tensor, version

    def fill(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor, detached: a reference to its `grad_fn` would be a reference cycle."""
        self.tensor = tensor.detach()
        self.version = _compat.saved_version(tensor)

    def empty(self) -> None:
        """Drops the tensor."""
        self.tensor = None

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
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
    """A saved tensor that is an argument of the block, or a view of one. The step keeps the argument."""

    __slots__ = ("_index", "_view")

    def __init__(self, lease: Lease, index: int, view: View | ByteView | None) -> None:
        self.lease, self.tensor, self.version = lease, None, 0
        self._index, self._view = index, view

    def fill(self, tensor: torch.Tensor) -> None:
        """Does nothing: the step has the argument that the recomputation was given."""

    def unpack(self) -> torch.Tensor:
        """The argument, or the view of it."""
        return self.lease.saved_argument(self._index, self._view)


class InnerHolder(Holder):
    """Holds the result of an inner pack hook for a saved tensor. The inner unpack hook restores the tensor."""

    __slots__ = ("_packed",)

    def __init__(self, lease: Lease | None) -> None:
        super().__init__(lease, None)  # type: ignore[arg-type]  # None: it is never empty
        self._packed: tuple[Any, Unpack] | None = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor that the recomputation saved outside of inner hooks."""
        self.keep(tensor, torch.Tensor.detach, torch.Tensor.detach)

    def keep(self, tensor: torch.Tensor, pack: Pack, unpack: Unpack) -> None:
        """Keeps the result of the pack hook, which gets the tensor detached: it could keep the `grad_fn`, a cycle."""
        self._packed = pack(tensor if tensor.is_leaf else tensor.detach()), unpack

    def empty(self) -> None:
        self._packed = None

    @property
    def is_empty(self) -> bool:
        return self._packed is None

    def unpack(self) -> torch.Tensor:
        packed = self._packed
        if packed is None:
            self.lease.missing(self)
            packed = self._packed
            assert packed is not None
        value, unpack = packed
        return unpack(value)


class RecomputeState:
    """State shared by all holders of one run of a block under selective recomputation.

    Attributes
    ----------
    key
        The key of the run's recipe.
    recompute
        The `TensorRecompute` that recomputes single saved tensors; None if the whole block must be recomputed.
    """

    __slots__ = ("key", "recompute")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.recompute: Any = None


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


def geometry(tensor: torch.Tensor) -> View:
    """Size, stride and offset in its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def written(tensor: torch.Tensor, name: str) -> RuntimeError:
    """The error for a saved tensor that was modified in place."""
    return RuntimeError(
        f"one of the tensors that '{name}' saved for its backward "
        f"({describe(meta_of(tensor))}) has been modified by an inplace operation since"
    )


def meta_of(tensor: torch.Tensor) -> Meta:
    """The shape, dtype and device of a tensor."""
    return tensor.shape, tensor.dtype, tensor.device


def describe(meta: Meta) -> str:
    """The shape, dtype and device of a tensor, for messages."""
    return f"{tuple(meta[0])} {str(meta[1]).removeprefix('torch.')} on {meta[2]}"
