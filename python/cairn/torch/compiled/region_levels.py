"""The options of compiled blocks. An option is a partition of the block's joint graph.

Where a model is not one graph, every block is compiled by itself. Dynamo captures it as one or several graphs, and
AOTAutograd adds the backward to each. An option limits the bytes saved for the backward, and the peak (`Level`). The
graph solver searches the fastest schedule within these limits, and that schedule determines the partition. All options
of a block compute the same numbers by the same kernels, so options may be mixed freely.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import cairn

from ..base.errors import PlanMismatch, Unsupported
from ..selective.block_options import thinned
from .joint_graph import JointGraph
from .problem import Costs, Surroundings, graph_of

SOLVER = "graph-search"
#: Limits of the solver for one option of one graph: iterations, milliseconds for each result, and milliseconds in all.
#: A quarter of the time goes to a lower bound, which is not used here.
ITERATIONS, RESULT_MS, MAX_MS = 4, 1, 1000
MAX_OPTIONS = 8  # of a block; each is compiled and measured


@dataclasses.dataclass(frozen=True)
class Level:
    """The memory limits of an option, as shares of what the block can save by recomputation.

    Attributes
    ----------
    kept
        Bytes saved for the backward: 0 is the least possible, 1 what a step without recomputation saves.
    peak
        The peak of forward and backward, on the same scale.
    """

    kept: float
    peak: float


def level_text(level: Level) -> str:
    """A level as the text that a plan stores."""
    return f"{level.kept:g} {level.peak:g}"


def level_of(text: str) -> Level:
    """The level of a text that `level_text` returned."""
    kept, peak = map(float, text.split())
    return Level(kept, peak)


EVERYTHING = Level(1.0, 1.0)
UNPLANNED = Level(math.inf, math.inf)  # torch's own partition without recomputation
CANDIDATES = (
    EVERYTHING,
    *(Level(kept, peak) for kept in (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0) for peak in (1.0, 0.35)),
    Level(0.0, 0.0),
)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A schedule of one graph at a level, with its predicted bytes and time."""

    ops: tuple[Any, ...]
    kept_bytes: int
    peak_bytes: int
    step_ns: int


class GraphCurve:
    """The schedules of one captured graph by level: its curve of memory against time.

    measure: returns the costs of the graph's calls. It is called when the first schedule is searched.
    searches: how many schedules were searched so far.
    """

    def __init__(self, joint: JointGraph, measure: Callable[[JointGraph], Costs]) -> None:
        self.joint, self._measure = joint, measure
        self._found: dict[Level, Partition] = {}
        self.searches = 0

    @functools.cached_property
    def costs(self) -> Costs:
        """The costs of the graph's calls."""
        return self._measure(self.joint)

    @functools.cached_property
    def _peaks(self) -> tuple[int, int]:
        """The peak of a step without recomputation, and the least possible peak, in bytes."""
        bare = self._graph(0)
        most = cairn.limits(bare, solver="store-all").store_all_bytes or 0
        return most, cairn.limits(bare, solver=SOLVER, iterations=ITERATIONS).least_bytes or most

    @functools.cached_property
    def _kept(self) -> tuple[int, int]:
        """The bytes that a step without recomputation saves for the backward, and the least possible.

        The problem gets so much other memory between forward and backward that its peak lies there.
        """
        peak_bytes = self._peaks[0]
        between = self._graph(peak_bytes)
        most = cairn.limits(between, solver="store-all").store_all_bytes or 0
        least = cairn.limits(between, solver=SOLVER, iterations=ITERATIONS).least_bytes or most
        return most - peak_bytes, least - peak_bytes

    def _graph(self, between_bytes: int) -> cairn.Graph:
        """The problem, with `between_bytes` of other memory in use between forward and backward."""
        return graph_of(self.joint, self.costs, Surroundings(0, False, 0, between_bytes), "block")

    def everything(self) -> tuple[tuple[Any, ...], ...]:
        """The schedule without recomputation. It does not need the costs."""
        graph = graph_of(self.joint, Costs({}, {}), Surroundings(0, False), "block")
        least = cairn.limits(graph, solver="store-all").store_all_bytes or 0
        return _ops_of(cairn.solve(graph, max(1, least), solver="store-all").require())

    def validated(self, ops: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
        """A schedule that was loaded. Raises PlanMismatch if it is not valid for this graph."""
        graph = graph_of(self.joint, Costs({}, {}), Surroundings(0, False), "block")
        try:
            cairn.verify(graph, cairn.Schedule.from_ops(graph, ops), None)
        except cairn.Error as error:
            raise PlanMismatch(
                f"the plan has a schedule that does not hold for the graph of its block: {error}"
            ) from None
        return tuple(map(tuple, ops))

    def at(self, level: Level) -> Partition:
        """The fastest schedule at a level that the solver finds within its limits. It is searched once."""
        if level not in self._found:
            self._found[level] = self._at(level)
        return self._found[level]

    def _at(self, level: Level) -> Partition:
        """The fastest schedule at a level: one that was found for a wider level, if it fits, or a new one.

        Nothing within a level is faster than the fastest of a wider one.
        """
        kept, peak = self._limits(level)
        graph = self._graph(peak - kept)
        if level == EVERYTHING:
            return _partition(cairn.solve(graph, 2 * self._peaks[0] + 1, solver="store-all"), kept)
        wider = (found for other, found in self._found.items() if other.kept >= level.kept and other.peak >= level.peak)
        for found in sorted(wider, key=lambda found: (found.step_ns, found.peak_bytes)):
            peak_bytes = cairn.simulate(graph, cairn.Schedule.from_ops(graph, found.ops), None).peak_bytes
            if peak_bytes is not None and peak_bytes <= peak:
                return dataclasses.replace(found, kept_bytes=kept, peak_bytes=peak_bytes)
        return _partition(self._searched(graph, peak), kept)

    def _limits(self, level: Level) -> tuple[int, int]:
        """The bytes that a level saves for the backward at most, and its largest peak."""
        (most_kept, least_kept), (most_peak, least_peak) = self._kept, self._peaks
        kept = least_kept + int(level.kept * (most_kept - least_kept))
        return kept, max(kept, least_peak + int(level.peak * (most_peak - least_peak)))

    def _searched(self, graph: cairn.Graph, peak: int) -> cairn.Solution:
        """A schedule within a peak, or if there is none, within the least that is possible."""
        self.searches += 1
        limit = f"{min(MAX_MS, RESULT_MS * len(self.joint.results))}ms"
        least = cairn.limits(graph, solver=SOLVER, iterations=ITERATIONS).least_bytes or peak
        budget = max(peak, least)
        solution = cairn.solve(graph, budget, solver=SOLVER, iterations=ITERATIONS, time_limit=limit)
        if solution.schedule is None:  # out of time on a busy machine; the least work ends
            solution = cairn.solve(graph, budget, solver=SOLVER, iterations=1)
        return solution


def _partition(solution: cairn.Solution, kept_bytes: int) -> Partition:
    if solution.schedule is None or solution.makespan_ns is None:
        raise Unsupported("no schedule of this graph was found")
    return Partition(_ops_of(solution.schedule), kept_bytes, solution.peak_bytes or 0, solution.makespan_ns)


def _ops_of(schedule: cairn.Schedule) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, schedule.ops))


@dataclasses.dataclass(frozen=True)
class _Point:
    """Bytes and time of all graphs of a block at a level, as sums that rank levels.

    The sum of peaks is no peak of the block: its graphs run in turn.
    """

    level: Level
    kept_bytes: int
    peak_bytes: int
    step_ns: int

    def dominates(self, other: _Point) -> bool:
        """Whether this point is no worse than the other in bytes and time, and better in one."""
        ours, theirs = ((p.kept_bytes, p.peak_bytes, p.step_ns) for p in (self, other))
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def useful_levels(curves: Sequence[GraphCurve]) -> list[Level]:
    """The levels whose schedules of a block's graphs differ and are not dominated. The first one keeps everything."""
    by_schedules: dict[tuple[Any, ...], _Point] = {}
    for level in CANDIDATES:
        partitions = [curve.at(level) for curve in curves]
        totals = (
            sum(getattr(partition, name) for partition in partitions)
            for name in ("kept_bytes", "peak_bytes", "step_ns")
        )
        by_schedules.setdefault(tuple(partition.ops for partition in partitions), _Point(level, *totals))
    everything, *others = by_schedules.values()
    useful = [point for point in others if not any(other.dominates(point) for other in by_schedules.values())]
    useful.sort(key=lambda point: (-point.kept_bytes, point.step_ns))
    keep_ids = {id(min(useful, key=lambda point: (point.peak_bytes, point.step_ns)))} if useful else set()
    points = thinned([everything, *useful], MAX_OPTIONS, lambda point: (point.kept_bytes, point.step_ns), keep_ids)
    return [point.level for point in points]
