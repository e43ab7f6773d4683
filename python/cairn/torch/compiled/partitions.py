"""The schedules by which graphs of blocks are cut, as data that a saved plan stores.

A graph is identified by its structure: its operators, and what each of them reads. A schedule is valid for every graph
of its structure. Its memory depends on the sizes too, so a schedule made for the same sizes is preferred. Sizes differ
where they depend on data: other tokens reach an expert.
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
    """A schedule of one graph at a level. Sizes are those that it was made for.

    `level` is a `level_text`; `graph` and `sizes` are digests of the structure and of the sizes.
    """

    level: str
    graph: str
    sizes: str
    ops: tuple[tuple[Any, ...], ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SavedPartition:
        """Read what `dataclasses.asdict` wrote."""
        return cls(data["level"], data["graph"], data["sizes"], tuple(map(tuple, data["ops"])))


class Partitions:
    """The schedules of the graphs of a model's blocks: those of a loaded plan, and those that were made since.

    missed: how many schedules were asked for and not there.
    """

    def __init__(self, loaded: Iterable[SavedPartition] = ()) -> None:
        self._known: dict[tuple[str, str, str], SavedPartition] = {}
        self._loaded: dict[tuple[str, str], SavedPartition] = {}
        self.missed = 0
        for partition in loaded:
            self._known[partition.level, partition.graph, partition.sizes] = partition
            self._loaded.setdefault((partition.level, partition.graph), partition)

    def ops(self, level: str, joint: JointGraph) -> Sequence[tuple[Any, ...]] | None:
        """The schedule of a graph at a level; None if there is none."""
        graph, sizes = _keys(joint)
        partition = self._known.get((level, graph, sizes)) or self._loaded.get((level, graph))
        if partition is None:
            self.missed += 1
        return None if partition is None else partition.ops

    def add(self, level: str, joint: JointGraph, ops: Sequence[Sequence[Any]]) -> None:
        """Store a new schedule."""
        graph, sizes = _keys(joint)
        self._known[level, graph, sizes] = SavedPartition(level, graph, sizes, tuple(map(tuple, ops)))

    def at_levels(self, levels: Iterable[str]) -> tuple[SavedPartition, ...]:
        """The stored schedules at these levels."""
        wanted = set(levels)
        return tuple(partition for partition in self._known.values() if partition.level in wanted)

    @property
    def is_loaded(self) -> bool:
        """Whether schedules of a loaded plan are used for graphs of all sizes."""
        return bool(self._loaded)

    def forget_loaded(self) -> None:
        """From now on, use each schedule for graphs of its own sizes only."""
        self._loaded.clear()


def have_same_results(joint: JointGraph, other: JointGraph) -> bool:
    """Whether schedules of one graph are those of another: equal structure, sizes, and results that a step returns."""
    graphs = (joint, other)
    ours, theirs = ((*_keys(each), each.bases(each.outputs), each.bases(each.grads)) for each in graphs)
    return ours == theirs


def _keys(joint: JointGraph) -> tuple[str, str]:
    """The digests of a graph's structure and of its sizes."""
    structure = [
        (str(result.call and result.call.target), result.deps, result.alias_of, result.is_backward, result.no_recompute)
        for result in joint.results
    ]
    return _digest(structure), _digest([result.nbytes for result in joint.results])


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
