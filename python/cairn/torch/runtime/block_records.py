"""Records of the runs of blocks in a step: where a recomputation finds their arguments, and what they returned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..base import _compat
from ..base.errors import Unsupported
from ..base.layouts import ByteView
from ..base.tree import Tree, tensors_inside, unique_tensors_in
from ..rerun_state.attributes import Attributes
from ..rerun_state.attributes_and_hooks import AttributesAndHooks
from ..rerun_state.context_variables import Variables
from ..rerun_state.module_state import Record
from ..rerun_state.parametrized import ForwardWeights
from ..rerun_state.rng_and_autocast import Modes, RandomState
from ..schedule.program import Op
from ..selective.pack_hooks import Packed
from ..selective.recompute import TensorRecompute
from ..selective.saved_tensors import Lease, RecomputeState, Step, View, geometry
from ..selective.submodule_calls import Calls
from .recompute_check import Fingerprints


class Outputs:
    """The tensors that a block returned, detached, for the recomputation of the next stage.

    value: what the block returned. wanted: indices of the tensors to keep; None: all. passed: indices of those that
    share storage with the block's arguments.
    """

    __slots__ = ("_versions", "passed", "tensors")

    def __init__(self, value: Any, wanted: frozenset[int] | None = None, passed: frozenset[int] = frozenset()) -> None:
        self.passed = passed
        tensors = {i: t for i, t in enumerate(unique_tensors_in(value)) if wanted is None or i in wanted}
        self.tensors = {i: t.detach() for i, t in tensors.items()}
        self._versions = {i: _compat.version(t) for i, t in tensors.items()}

    @classmethod
    def from_prefetch(cls, tensors: dict[int, torch.Tensor], written: Container[int], staying: Outputs) -> Outputs:
        """Prefetched outputs, and others that stayed on the device. written: those written before offloading."""
        outputs = cls((), passed=staying.passed)
        versions = {i: -1 if i in written else _compat.version(t) for i, t in tensors.items()}
        outputs.tensors, outputs._versions = {**tensors, **staying.tensors}, {**versions, **staying._versions}
        return outputs

    def only(self, indices: Container[int]) -> Outputs:
        """The outputs with these indices."""
        outputs = type(self)((), passed=self.passed)
        outputs.tensors = {i: t for i, t in self.tensors.items() if i in indices}
        outputs._versions = {i: self._versions[i] for i in outputs.tensors}
        return outputs

    def keep_only(self, wanted: frozenset[int]) -> None:
        """Drops the outputs that the next stage does not read."""
        self.tensors = {i: t for i, t in self.tensors.items() if i in wanted}

    def in_storage_of(self, tensor: torch.Tensor) -> int:
        """The index of the first output that shares this tensor's storage; -1 if none does."""
        key = _compat.storage_key(tensor)
        return next((i for i, t in self.tensors.items() if key and _compat.storage_key(t) == key), -1)

    def is_intact(self, index: int) -> bool:
        """Whether an output was not written since it was recorded."""
        return _compat.version(self.tensors[index]) == self._versions[index]


@dataclass
class Returned:
    """A tensor that a block returned to the model."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    requires_grad: bool


@dataclass(slots=True)
class Argument:
    """A tensor among a block's arguments: kept here, or an output of the stage before."""

    requires_grad: bool
    tensor: torch.Tensor | None = None
    version: int = 0
    output: int = -1
    view: View | None = None  # the view of that output that it is; None: the output itself

    @classmethod
    def kept(cls, leaf: torch.Tensor) -> Argument:
        """An argument that is kept here."""
        return cls(leaf.requires_grad, leaf if leaf.is_leaf else leaf.detach(), _compat.version(leaf))

    @classmethod
    def located(cls, leaf: torch.Tensor, returned: Sequence[Returned], outputs: Outputs | None) -> Argument:
        """An argument that is an output of the stage before, if that is kept; otherwise it is kept here."""
        for index, old in enumerate(returned):
            if old.tensor() is leaf and _compat.version(leaf) == old.version:
                return cls(leaf.requires_grad, output=index)
        index = outputs.in_storage_of(leaf) if outputs is not None else -1
        if outputs is not None and 0 <= index < len(returned):
            detached = leaf.requires_grad != returned[index].requires_grad
            if not detached and _is_view_of(leaf, outputs, index):
                return cls(leaf.requires_grad, output=index, view=geometry(leaf))
        return cls.kept(leaf)


@dataclass(slots=True)
class BlockRun:
    """The record of a block's run in the forward, from which the block is recomputed. The step owns it."""

    forward: Callable[..., Any]
    tree: Tree
    arguments: list[Argument]
    in_objects: list[tuple[str, torch.Tensor, int]]  # tensors inside objects that were passed: path, tensor, version
    modes: Modes
    random_state: RandomState | None
    variables: Variables
    state: Record | None = None
    first: Packed | None = None
    recompute_state: RecomputeState | None = None  # selective recomputation
    calls: Calls | None = None  # calls of submodules under hooks; None: the hooks are active in the whole block
    weights: ForwardWeights | None = None  # weights that `parametrize.cached()` had
    samples: list[Any] | None = None  # fingerprints of the returned tensors; None: not compared
    fingerprints: Fingerprints | None = None  # of returned and saved tensors, on an accelerator
    attributes_after: AttributesAndHooks | None = None  # after the run, where others change them later
    attributes_before: Attributes | None = None  # before the run, where runs change their contents in place
    copies: frozenset[int] = frozenset()  # storages of the buffers in the latest recomputation that saved tensors

    def argument_name(self, index: int) -> str:
        """The name of a tensor argument, for messages."""
        where = self.tree.path(index)  # in (args, kwargs)
        if where.startswith("1["):
            return where[1:].replace("[", "", 1).replace("]", "", 1)
        return f"args{where[1:]}"

    def refuse_written(self, name: str, versions: Sequence[int]) -> None:
        """Raises if the block of this name wrote its arguments. versions: those before the run."""
        now = _compat.versions(self.tree.leaves)
        for index, version in enumerate(versions if now != versions else ()):
            if now[index] != version:
                raise Unsupported(
                    f"'{name}' modifies its argument {self.argument_name(index)} in place, so it cannot be recomputed "
                    "from it; keep this block, or merge it with the one before"
                )
        for value in self.tree.opaque:
            tensors = [(id(tensor), _compat.version(tensor)) for _, tensor in tensors_inside(value)]
            before = [(id(tensor), version) for _, tensor, version in self.in_objects]
            if not set(tensors) <= set(before):
                raise Unsupported(
                    f"'{name}' puts tensors into an object that it is passed ({type(value).__name__}), and would do so "
                    "again when it is recomputed; keep this block"
                )


def tensors_in_objects(objects: Iterable[Any], name: str) -> list[tuple[str, torch.Tensor, int]]:
    """The tensors inside objects that are passed to the block of this name, with their versions."""
    tensors = [(n, t, _compat.version(t)) for value in objects for n, t in tensors_inside(value)]
    for path, tensor, _ in tensors:
        if tensor.requires_grad:
            cache = " (for a cache of keys and values: use_cache=False)" if "Cache" in path else ""
            raise Unsupported(
                f"'{name}' is passed an object that holds a tensor with gradients, {path}: it cannot be recomputed "
                f"from that; keep this block, or pass the tensor itself{cache}"
            )
    return tensors


class RecomputingStep(Step, Protocol):
    """The step that a run of a block belongs to: finds its arguments, and recomputes it."""

    def find(self, stage: int, block: BlockRun, index: int) -> torch.Tensor:
        """A tensor argument of a block, as it is in memory now."""

    def view_of(self, tensor: torch.Tensor, view: View | ByteView | None) -> torch.Tensor:
        """A tensor, or a view of one."""

    def in_backward(self) -> int:
        """Compares the backend flags with the forward's, once in each backward. Returns the backward's number."""

    def recompute_tensor(self, recompute: TensorRecompute, index: int, where: Lease) -> torch.Tensor | None:
        """Recomputes one saved tensor under the forward's backend flags; None if that fails."""

    def recompute_block(self, op: Op, block: BlockRun) -> Any:
        """Recomputes a block, which fills its holders, and returns its output."""

    def new_fingerprints(self) -> Fingerprints | None:
        """Fingerprints of a forward's values, where recomputations are compared on the device; else None."""

    def record_returned(self, block: BlockRun, output: Any) -> None:
        """Records fingerprints of the tensors that a block returned, to compare its recomputation with them."""

    def note_whole_recompute(self, stage: int) -> None:
        """Notes that a saved tensor could not be recomputed alone, and the whole block was recomputed."""

    def refuse_other_values(self, stage: int) -> None:
        """Raises if a recomputation gave other values, unless `determinism_check` accepts that."""


def _is_view_of(leaf: torch.Tensor, outputs: Outputs, index: int) -> bool:
    output = outputs.tensors[index]
    return (
        leaf.dtype == output.dtype
        and leaf.is_conj() == output.is_conj()
        and leaf.is_neg() == output.is_neg()
        and outputs.is_intact(index)
        and _compat.version(leaf) == _compat.version(output)
    )
