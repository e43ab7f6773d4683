"""Finds, before a block runs, a recording whose guards hold.

A recording is valid for runs with arguments of the same metadata (shapes, strides, dtypes), in the same modes, with the
same parameters and constants. In most steps nothing has changed since the step before, and comparing all of that would
cost more than the block gains. So the state of the latest run that followed a recording is also kept in a form that is
cheap to compare (`LatestRun`): change counters of the modules' dicts, the addresses of parameters, and PyTorch's own
guard on tensor metadata.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..base import _compat
from ..base.tree import Tree
from ..rerun_state import sharded
from ..rerun_state.constant_guards import Constants
from ..rerun_state.module_state import StateBefore
from ..rerun_state.rng_and_autocast import Modes
from ..rerun_state.snapshot import frozen
from .block_graph import BlockGraph
from .recompute import Recipe


@dataclasses.dataclass
class Entry:
    """A recording and its guards. Without a graph the block cannot be recomputed selectively; `reason` says why."""

    graph: BlockGraph | None
    reason: str
    constants: Constants  # before the run
    changed: bool  # the run itself changed them
    recipes: dict[int, Recipe] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class RunInputs:
    """The state that a run of a block reads. Runs with equal keys do the same, as far as one can tell beforehand."""

    before: StateBefore
    key: Any = None  # None without selective recomputation
    entry: Entry | None = None  # a recording that this run can follow
    is_settled: bool = False  # the state is that of the latest run


class Key:
    """A key that is hashed once."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._value == other._value

    def __hash__(self) -> int:
        return self._hash


class LatestRun:
    """The state that was read by the latest run that followed a recording.

    It has no reference to a parameter, weak or strong: `torch.utils.swap_tensors` refuses tensors with weak references,
    and a parameter that is replaced must be freed. Nor does it keep parameters of a module that is gone.
    """

    __slots__ = ("_addresses", "_call_guards", "_children", "_tensor_guard", "_owners", "_registries", "entry", "key")

    def __init__(self, inputs: RunInputs, entry: Entry, call_guards: CallGuards, known: LatestRun | None) -> None:
        before = inputs.before
        self.key, self.entry = inputs.key, entry
        self._call_guards, self._children = call_guards, before.children
        owners = [module for module in before.modules if module._parameters]
        registries = self._registries = [module._parameters for module in owners]
        self._owners = [weakref.ref(module, lambda _: registries.clear()) for module in owners]
        self._addresses = _compat.addresses(before.parameters)
        guard = known._tensor_guard if known is not None else None
        is_known = guard is not None and guard.hold(before.parameters)
        self._tensor_guard: _compat.TensorGuard = (
            guard if guard is not None and is_known else _compat.TensorGuard(before.parameters)
        )

    @classmethod
    def of(cls, inputs: RunInputs, call_guards: CallGuards | None, known: LatestRun | None) -> LatestRun | None:
        """None where each run may read other state (buffers), or where a change cannot be detected cheaply.

        known: that of an earlier run.
        """
        before, entry = inputs.before, inputs.entry
        if entry is None or call_guards is None or before.buffers:
            return None
        if None in before.parameters or sharded.is_any(before.modules):
            return None
        is_watched = entry.constants.watch(before.modules, before.attributes)
        return cls(inputs, entry, call_guards, known) if is_watched else None

    def before(self, tree: Tree, modes: Modes, backend_flags: Any) -> StateBefore | None:
        """The state that a call with these arguments reads; None if it may have changed.

        Submodules and their attributes, which have not changed, are left out.
        """
        constants = self.entry.constants
        if not (self._call_guards.hold(tree, modes, backend_flags) and constants.still_hold()):
            return None
        parameters = list(itertools.chain.from_iterable(map(_values_of, self._registries)))
        if _compat.addresses(parameters) != self._addresses or not self._tensor_guard.hold(parameters):
            return None
        return StateBefore(
            (), (), self._children, parameters, [], [], {}, addresses=self._addresses, flags=constants.flags
        )


class CallGuards:
    """Guards on the arguments and modes of a call."""

    __slots__ = ("_are_leaves", "_tensor_guard", "_modes", "_offsets", "_shape", "_shared", "_backend_flags")

    def __init__(self, tree: Tree, modes: Modes, backend_flags: Any) -> None:
        self._shape, self._modes, self._backend_flags = _shape_of(tree), modes, backend_flags
        self._tensor_guard, self._shared = _compat.TensorGuard(tree.leaves), _shared(tree.leaves)
        self._are_leaves, self._offsets = list(map(_is_leaf, tree.leaves)), list(map(_offset_of, tree.leaves))

    @classmethod
    def of(cls, tree: Tree, modes: Modes, backend_flags: Any) -> CallGuards | None:
        """None where an argument is a tensor without strides, such as a sparse one."""
        is_usual = all(leaf.layout is torch.strided for leaf in tree.leaves)
        return cls(tree, modes, backend_flags) if is_usual else None

    def hold(self, tree: Tree, modes: Modes, backend_flags: Any) -> bool:
        """Whether another call is surely the same, apart from the values in the tensors."""
        leaves = tree.leaves
        return (
            modes == self._modes
            and backend_flags == self._backend_flags
            and _shape_of(tree) == self._shape
            and self._tensor_guard.hold(leaves)
            and list(map(_is_leaf, leaves)) == self._are_leaves
            and list(map(_offset_of, leaves)) == self._offsets
            and (len(leaves) < 2 or _shared(leaves) == self._shared)
        )


def _shape_of(tree: Tree) -> Any:
    """A key that is equal for calls with the same arguments besides tensors, keywords in the same order."""
    return (tree.shape, tuple(tree.shape[1])) if tree.is_plain else frozen(tree.shape)


def call_key(tree: Tree, modes: Modes, backend_flags: Any) -> tuple[Any, ...]:
    """A key of the arguments and modes of a call."""
    return frozen(tree.shape), modes, backend_flags, *map(_leaf_metadata, tree.leaves), *_shared(tree.leaves)


def metadata_of(own: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """A key of a block's parameters and buffers: which require gradients, their strides, and which share a storage."""
    return *_metadata_of_all(own), *_shared(own)


def _metadata_of_all(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    try:
        return [*map(_own_metadata, tensors), *map(_place_of, tensors)]  # type: ignore[arg-type]
    except (AttributeError, RuntimeError):  # one is None, or sparse
        known = [None if t is None or t.layout is not torch.strided else _place_of(t) for t in tensors]
        return [*(None if t is None else _own_metadata(t) for t in tensors), *known]


def _shared(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """For each of several tensors: the index of the first in the same storage; -1 for tensors without one."""
    first: dict[int, int] = {}
    keys = [0 if tensor is None else _compat.storage_key(tensor) for tensor in tensors] if len(tensors) > 1 else ()
    return [first.setdefault(key, index) if key else -1 for index, key in enumerate(keys)]


def _leaf_metadata(leaf: torch.Tensor) -> Any:
    return _metadata(leaf), _place_of(leaf) if leaf.layout is torch.strided else None


def _place_of(tensor: torch.Tensor) -> Any:
    """Stride and offset in its storage."""
    return tensor.stride(), tensor.storage_offset()


_values_of: Any = dict.values
_is_leaf = operator.attrgetter("is_leaf")
_offset_of = torch.Tensor.storage_offset
_own_metadata = operator.attrgetter("requires_grad", "shape", "dtype")
_metadata = operator.attrgetter("shape", "dtype", "device", "requires_grad", "is_leaf")
