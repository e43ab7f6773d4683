"""What an opened block finds when it runs, and which of its recorded runs found the same.

A recording holds for runs that are passed tensors of the same looks, in the same modes, with the same parameters and
constants. Most runs find just what the one before found, and it would cost more to say what that is than to tell that
nothing has changed. So what a run found that followed a recording is kept in a form that one look tells: a witness of
what was put into the modules' dicts, the addresses of parameters, and torch's own check of what tensors look like.
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
from ..rerun_state.module_state import Before
from ..rerun_state.rng_and_autocast import Modes
from ..rerun_state.snapshot import frozen
from .block_graph import BlockGraph
from .recompute import Recipe


@dataclasses.dataclass
class Entry:
    """A recorded run and what it holds for; without a graph the block cannot be opened."""

    graph: BlockGraph | None
    reason: str
    constants: Constants  # as the run found them
    changed: bool  # by the run itself
    recipes: dict[int, Recipe] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Finding:
    """What a run of an opened block found; of two with equal keys both do the same, as far as one can see before."""

    before: Before
    key: Any = None  # of an opened block
    entry: Entry | None = None  # a recorded run that this one can follow
    is_settled: bool = False  # it is what the latest run found


class Key:
    """A key that is hashed once."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._value == other._value

    def __hash__(self) -> int:
        return self._hash


class Latest:
    """What a run found that followed a recording. It refers to no parameter: torch swaps none that somebody refers to
    weakly, and those that are replaced can go. Nor does it keep those of a module that is gone.
    """

    __slots__ = ("_addresses", "_called", "_children", "_looks", "_owners", "_registries", "entry", "key")

    def __init__(self, finding: Finding, entry: Entry, called: Called, known: Latest | None) -> None:
        before = finding.before
        self.key, self.entry = finding.key, entry
        self._called, self._children = called, before.children
        owners = [module for module in before.modules if module._parameters]
        registries = self._registries = [module._parameters for module in owners]
        self._owners = [weakref.ref(module, lambda _: registries.clear()) for module in owners]
        self._addresses = _compat.addresses(before.parameters)
        looks = known._looks if known is not None else None
        is_known = looks is not None and looks.hold(before.parameters)
        self._looks: _compat.Looks = looks if looks is not None and is_known else _compat.Looks(before.parameters)

    @classmethod
    def of(cls, finding: Finding, called: Called | None, known: Latest | None) -> Latest | None:
        """None where each run may find something else (buffers), or where it cannot be told whether it does.

        known: what an earlier run found.
        """
        before, entry = finding.before, finding.entry
        if entry is None or called is None or before.buffers:
            return None
        if None in before.parameters or sharded.is_any(before.modules):
            return None
        is_watched = entry.constants.watch(before.modules, before.attributes)
        return cls(finding, entry, called, known) if is_watched else None

    def before(self, tree: Tree, modes: Modes, switches: Any) -> Before | None:
        """What a run finds that is called like this; None if it may be something else. The parts of the block and their
        attributes, which are what they were, are left out.
        """
        constants = self.entry.constants
        if not (self._called.is_like(tree, modes, switches) and constants.still_hold()):
            return None
        parameters = list(itertools.chain.from_iterable(map(_values_of, self._registries)))
        if _compat.addresses(parameters) != self._addresses or not self._looks.hold(parameters):
            return None
        return Before((), (), self._children, parameters, [], [], {}, addresses=self._addresses, flags=constants.flags)


class Called:
    """What can be told of a call without looking at its block."""

    __slots__ = ("_are_leaves", "_looks", "_modes", "_offsets", "_shape", "_shared", "_switches")

    def __init__(self, tree: Tree, modes: Modes, switches: Any) -> None:
        self._shape, self._modes, self._switches = _shape_of(tree), modes, switches
        self._looks, self._shared = _compat.Looks(tree.leaves), _shared(tree.leaves)
        self._are_leaves, self._offsets = list(map(_is_leaf, tree.leaves)), list(map(_offset_of, tree.leaves))

    @classmethod
    def of(cls, tree: Tree, modes: Modes, switches: Any) -> Called | None:
        """None where a tensor is passed that does not lie in a storage as others do."""
        is_usual = all(leaf.layout is torch.strided for leaf in tree.leaves)
        return cls(tree, modes, switches) if is_usual else None

    def is_like(self, tree: Tree, modes: Modes, switches: Any) -> bool:
        """Whether another call surely is the same, but for what is in the tensors."""
        leaves = tree.leaves
        return (
            modes == self._modes
            and switches == self._switches
            and _shape_of(tree) == self._shape
            and self._looks.hold(leaves)
            and list(map(_is_leaf, leaves)) == self._are_leaves
            and list(map(_offset_of, leaves)) == self._offsets
            and (len(leaves) < 2 or _shared(leaves) == self._shared)
        )


def _shape_of(tree: Tree) -> Any:
    """Equal for calls that are passed the same beside tensors, options in the same order."""
    return (tree.shape, tuple(tree.shape[1])) if tree.is_plain else frozen(tree.shape)


def seen(tree: Tree, modes: Modes, switches: Any) -> tuple[Any, ...]:
    """What can be told of a call without looking at its block."""
    return frozen(tree.shape), modes, switches, *map(_leaf_look_of, tree.leaves), *_shared(tree.leaves)


def looks_of(own: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Which of a block's parameters and buffers have gradients, how they lie in memory, and which share a storage."""
    return *_looks_of(own), *_shared(own)


def _looks_of(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    try:
        return [*map(_own_look_of, tensors), *map(_place_of, tensors)]  # type: ignore[arg-type]
    except (AttributeError, RuntimeError):  # one is None, or sparse
        known = [None if t is None or t.layout is not torch.strided else _place_of(t) for t in tensors]
        return [*(None if t is None else _own_look_of(t) for t in tensors), *known]


def _shared(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """For each, where there are several, the first that lies in its storage; -1: none does."""
    first: dict[int, int] = {}
    keys = [0 if tensor is None else _compat.storage_key(tensor) for tensor in tensors] if len(tensors) > 1 else ()
    return [first.setdefault(key, index) if key else -1 for index, key in enumerate(keys)]


def _leaf_look_of(leaf: torch.Tensor) -> Any:
    return _look_of(leaf), _place_of(leaf) if leaf.layout is torch.strided else None


def _place_of(tensor: torch.Tensor) -> Any:
    """How a tensor lies in its storage."""
    return tensor.stride(), tensor.storage_offset()


_values_of: Any = dict.values
_is_leaf = operator.attrgetter("is_leaf")
_offset_of = torch.Tensor.storage_offset
_own_look_of = operator.attrgetter("requires_grad", "shape", "dtype")
_look_of = operator.attrgetter("shape", "dtype", "device", "requires_grad", "is_leaf")
