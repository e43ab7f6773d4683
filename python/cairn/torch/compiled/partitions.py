"""The schedules by which graphs of blocks are cut, as data that a saved plan has.

A graph is recognized by its structure: its operators, and what each of them reads. A schedule holds for every graph of
one structure. Its memory depends on the sizes too, so an entry of the same sizes comes first. Sizes differ where they
depend on data: other tokens reach an expert.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .joint_graph import JointGraph


@dataclasses.dataclass(frozen=True)
class SavedPartition:
    """A schedule of one graph at a level, both by their names; `sizes` are those that it was made for."""

    level: str
    graph: str
    sizes: str
    ops: tuple[tuple[Any, ...], ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SavedPartition:
        """Read what `dataclasses.asdict` wrote."""
        return cls(data["level"], data["graph"], data["sizes"], tuple(map(tuple, data["ops"])))


class Partitions:
    """The schedules that a model's blocks have so far: those of a plan that was loaded, and those that were made.

    missed: how many schedules the loaded plan did not have.
    """

    def __init__(self, loaded: Iterable[SavedPartition] = ()) -> None:
        self._known: dict[tuple[str, str, str], SavedPartition] = {}
        self._loaded: dict[tuple[str, str], SavedPartition] = {}
        self.missed = 0
        for each in loaded:
            self._known[each.level, each.graph, each.sizes] = each
            self._loaded.setdefault((each.level, each.graph), each)

    def ops(self, level: str, joint: JointGraph) -> Sequence[tuple[Any, ...]] | None:
        """The schedule of a graph at a level; None if there is none."""
        graph, sizes = _names(joint)
        found = self._known.get((level, graph, sizes)) or self._loaded.get((level, graph))
        if found is None:
            self.missed += 1
        return None if found is None else found.ops

    def add(self, level: str, joint: JointGraph, ops: Sequence[Sequence[Any]]) -> None:
        """Store a schedule that was made."""
        graph, sizes = _names(joint)
        self._known[level, graph, sizes] = SavedPartition(level, graph, sizes, tuple(map(tuple, ops)))

    def of(self, levels: Iterable[str]) -> tuple[SavedPartition, ...]:
        """The schedules at some levels."""
        wanted = set(levels)
        return tuple(each for each in self._known.values() if each.level in wanted)

    @property
    def is_loaded(self) -> bool:
        """Whether they are those of a plan that was loaded."""
        return bool(self._loaded)

    def forget_loaded(self) -> None:
        """From now on, a schedule holds for graphs of its sizes alone."""
        self._loaded.clear()


def _names(joint: JointGraph) -> tuple[str, str]:
    """The names of a graph's structure and of its sizes."""
    structure = [
        (str(result.call and result.call.target), result.deps, result.alias_of, result.is_backward, result.no_recompute)
        for result in joint.results
    ]
    return _digest(structure), _digest([result.nbytes for result in joint.results])


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
