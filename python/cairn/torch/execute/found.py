"""What an opened block finds when it runs, and which of its recorded runs found the same.

A recording holds for runs that are passed tensors of the same looks, in the same modes, with the same parameters and
constants. Most runs find just what the one before found, and it would cost more to say what that is than to tell that
nothing has changed. So what a run found that followed a recording is kept in a form that one look tells: numbers that
are others once something is put into one of the modules' dicts, the addresses of parameters, and torch's own check of
what tensors look like.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..base import _compat
from ..base.tree import Tree
from ..context import sharded
from ..context.ambient import Modes
from ..context.frozen import frozen
from ..context.state import Before, BlockState, attributes_of, parameters_in

if TYPE_CHECKING:
    from .opened import Entry


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
    weakly, and those that are replaced can go.
    """

    __slots__ = ("_addresses", "_children", "_looks", "_numbers", "entry", "key", "seen")

    def __init__(self, finding: Finding, entry: Entry, seen: Any, numbers: list[int], known: Latest | None) -> None:
        parameters = finding.before.parameters
        self.key, self.entry, self.seen = finding.key, entry, seen
        self._numbers, self._children = numbers, finding.before.children
        self._addresses = _compat.addresses(parameters)
        if known is not None and known._numbers == numbers and known._looks.hold(parameters):
            self._looks: _compat.Looks = known._looks
        else:
            self._looks = _compat.Looks(parameters)

    @classmethod
    def of(cls, finding: Finding, seen: Any, numbers: list[int] | None, known: Latest | None) -> Latest | None:
        """None where each run may find something else: buffers; or where torch does not tell.

        numbers: of what the modules' dicts held.
        known: what an earlier run found.
        """
        before, entry = finding.before, finding.entry
        if entry is None or numbers is None or before.buffers:
            return None
        is_sharded = None in before.parameters or sharded.is_any(before.modules)
        return None if is_sharded else cls(finding, entry, seen, numbers, known)

    def before(self, state: BlockState) -> Before | None:
        """What a run finds now; None if it may be something else."""
        modules, constants = state.modules(), self.entry.constants
        attributes = list(map(attributes_of, modules))
        if not constants.still_hold(modules, attributes, self._numbers):
            return None
        parameters = parameters_in(attributes)
        if _compat.addresses(parameters) != self._addresses or not self._looks.hold(parameters):
            return None
        return Before(
            modules,
            attributes,
            self._children,
            parameters,
            [],
            [],
            {},
            addresses=self._addresses,
            flags=constants.flags,
        )


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


_own_look_of = operator.attrgetter("requires_grad", "shape", "dtype")
_look_of = operator.attrgetter("shape", "dtype", "device", "requires_grad", "is_leaf")
