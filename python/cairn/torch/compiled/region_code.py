"""The compiled code of a block: one callable for each option. An option is a partition of the block's joint graph.

Where a model is not one graph, every block is compiled by itself. Dynamo captures it as one or several graphs, and
AOTAutograd adds the backward to each. An option limits the bytes that the backward may save and its peak (`Level`). The
graph solver searches the fastest schedule within these limits, and the schedule is the partition. All options of a
block compute the same numbers by the same kernels, so options may be mixed freely.

Blocks of one class share one callable for each option; Dynamo's guards decide for which blocks and shapes its code
holds. Each callable has a code object of its own, so that compilations of one option do not count towards Dynamo's
limit for another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import cairn
import torch
from torch import fx, nn

from ..base import _compat
from ..base.errors import PlanMismatch, Unsupported
from ..selective.block_options import thinned
from . import fused_costs, kernel_costs
from .backend import raising
from .emission import emit
from .joint_graph import JointGraph, read
from .partitions import Partitions
from .problem import Costs, Surroundings, graph_of

SOLVER = "graph-search"
#: Work that the solver has for one option of one graph, and its time: milliseconds for each result, and at most.
#: A quarter of the time goes to a lower bound, which is not used here.
ITERATIONS, RESULT_MS, MOST_MS = 4, 1, 1000
MOST_OPTIONS = 8  # of a block; each is compiled and measured


@dataclasses.dataclass(frozen=True)
class Level:
    """How much of a block's memory an option has.

    Attributes
    ----------
    kept
        Bytes saved for the backward: 0 is the least possible, 1 what a step without recomputation saves.
    peak
        The higher peak of forward and backward, on the same scale.
    """

    kept: float
    peak: float


def written(level: Level) -> str:
    """A level as a plan has it."""
    return f"{level.kept:g} {level.peak:g}"


def level_of(text: str) -> Level:
    """The level that was written so."""
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
    """A schedule of one graph at a level, with its bytes and nanoseconds by the graph's problem."""

    ops: tuple[Any, ...]
    kept_bytes: int
    peak_bytes: int
    step_ns: int


class GraphCurve:
    """One captured graph, and its schedules by level.

    measure: gives the costs of the graph's calls, when the first schedule is searched.
    """

    def __init__(self, joint: JointGraph, measure: Callable[[JointGraph], Costs]) -> None:
        self.joint, self._measure = joint, measure

    @functools.cached_property
    def costs(self) -> Costs:
        """Costs of the graph's calls."""
        return self._measure(self.joint)

    @functools.cached_property
    def _peaks(self) -> tuple[int, int]:
        """The peak of a step without recomputation, and the least possible."""
        bare = self._graph(0)
        most = cairn.limits(bare, solver="store-all").store_all_bytes or 0
        return most, cairn.limits(bare, solver=SOLVER, iterations=ITERATIONS).least_bytes or most

    @functools.cached_property
    def _kept(self) -> tuple[int, int]:
        """What a step without recomputation saves for the backward, and the least possible."""
        more = self._peaks[0]
        between = self._graph(more)  # what a step has between the two is then its peak
        most = cairn.limits(between, solver="store-all").store_all_bytes or 0
        least = cairn.limits(between, solver=SOLVER, iterations=ITERATIONS).least_bytes or most
        return most - more, least - more

    def _graph(self, between_bytes: int) -> cairn.Graph:
        """The problem, with other memory in use between forward and backward."""
        return graph_of(self.joint, self.costs, Surroundings(0, False, 0, between_bytes), "block")

    def everything(self) -> tuple[tuple[Any, ...], ...]:
        """The schedule without recomputation, for which nothing has to be measured."""
        graph = graph_of(self.joint, Costs({}, {}), Surroundings(0, False), "block")
        least = cairn.limits(graph, solver="store-all").store_all_bytes or 0
        return _ops_of(cairn.solve(graph, max(1, least), solver="store-all").require())

    def checked(self, ops: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
        """A schedule that was saved, if it is one of this graph. Raises PlanMismatch if not."""
        graph = graph_of(self.joint, Costs({}, {}), Surroundings(0, False), "block")
        try:
            cairn.verify(graph, cairn.Schedule.from_ops(graph, ops), None)
        except cairn.Error as error:
            raise PlanMismatch(
                f"the plan has a schedule that does not hold for the graph of its block: {error}"
            ) from None
        return tuple(map(tuple, ops))

    def at(self, level: Level) -> Partition:
        """The fastest schedule at a level that the solver can find in its limits."""
        (most_kept, least_kept), (most_peak, least_peak) = self._kept, self._peaks
        kept = least_kept + int(level.kept * (most_kept - least_kept))
        peak = max(kept, least_peak + int(level.peak * (most_peak - least_peak)))
        graph = self._graph(peak - kept)
        if level == EVERYTHING:
            solution = cairn.solve(graph, 2 * most_peak + 1, solver="store-all")
        else:
            least = cairn.limits(graph, solver=SOLVER, iterations=ITERATIONS).least_bytes or peak
            budget = max(peak, least)
            limit = f"{min(MOST_MS, RESULT_MS * len(self.joint.results))}ms"
            solution = cairn.solve(graph, budget, solver=SOLVER, iterations=ITERATIONS, time_limit=limit)
            if solution.schedule is None:  # out of time on a busy machine; the least work ends
                solution = cairn.solve(graph, budget, solver=SOLVER, iterations=1)
        if solution.schedule is None or solution.makespan_ns is None:
            raise Unsupported("no schedule of this graph was found")
        return Partition(_ops_of(solution.schedule), kept, solution.peak_bytes or 0, solution.makespan_ns)


def _ops_of(schedule: cairn.Schedule) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, schedule.ops))


class OptionBackend:
    """The backend of torch.compile by which an option of blocks is compiled."""

    def __init__(self, level: Level, kernels: str, device: torch.device, partitions: Partitions) -> None:
        self.level, self._kernels, self._device, self._partitions = level, kernels, device, partitions
        self.compilations = 0
        self.curves: list[GraphCurve] = []  # of the graphs with a backward
        self.uncut: list[str] = []  # why a graph is as torch cuts it
        self.recomputed = 0

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles one graph that Dynamo captured."""
        self.compilations += 1
        by_operators = self._kernels == "eager"
        compiled = _compat.compiled_by_operators if by_operators else _compat.compiled_by_inductor
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):  # those around must not see what is traced
            try:
                return compiled(module, inputs, self.partition)
            except PlanMismatch as error:
                return raising(error)

    def partition(
        self, module: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph at this option's level; a graph that cannot be read gets torch's default partition."""
        if self.level == UNPLANNED:
            return _compat.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        try:
            joint = read(module, num_fwd_outputs)
            curve = GraphCurve(joint, self._measured)
            if not self._partitions.is_loaded:
                _ = curve.costs  # measured now, where torch compiles
            emitted = emit(joint, self._schedule(curve))
        except Unsupported as error:
            self.uncut.append(str(error))
            return _compat.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        self.curves.append(curve)
        self.recomputed += emitted.recomputed
        return _compat.cut(emitted.module, emitted.saved, emitted.sizes, num_fwd_outputs)

    def _measured(self, joint: JointGraph) -> Costs:
        measured = kernel_costs.measured if self._kernels == "eager" else fused_costs.estimated
        return measured(joint, self._device)

    def _schedule(self, curve: GraphCurve) -> Sequence[tuple[Any, ...]]:
        """The schedule of a graph: the one that is known, or a new one."""
        if self.level == EVERYTHING:
            return curve.everything()
        name = written(self.level)
        known = self._partitions.ops(name, curve.joint)
        if known is not None:
            return curve.checked(known)
        ops = curve.at(self.level).ops
        self._partitions.add(name, curve.joint, ops)
        return ops


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class BlockCode:
    """The callables of one class of blocks, by option; each takes the block and its arguments."""

    def __init__(
        self, function: Callable[..., Any], kernels: str, device: torch.device, partitions: Partitions
    ) -> None:
        self._function, self._how = function, (kernels, device, partitions)
        self.backends: list[OptionBackend] = []
        self.callables: list[Callable[..., Any]] = []
        self.breaks = False  # it is captured as several graphs
        self.add(EVERYTHING)

    def add(self, level: Level) -> int:
        """Add an option and return its number; it is compiled when it is first called."""
        backend = OptionBackend(level, *self._how)
        self.backends.append(backend)
        self.callables.append(self._compiled(backend))
        return len(self.callables) - 1

    def _compiled(self, backend: OptionBackend) -> Callable[..., Any]:
        found: Callable[..., Any] = torch.compile(
            with_own_code(self._function), backend=backend, fullgraph=not self.breaks
        )
        return found

    def allow_breaks(self) -> None:
        """From now on, blocks are captured as several graphs."""
        self.breaks = True
        self.callables[:] = map(self._compiled, self.backends)

    def level_of(self, option: int) -> Level:
        """The level of an option."""
        return self.backends[option].level

    def option_at(self, level: Level) -> int:
        """The option of a level, added if there is none."""
        found = (number for number, backend in enumerate(self.backends) if backend.level == level)
        number = next(found, None)
        return self.add(level) if number is None else number


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, by which Dynamo keeps what it compiles."""
    if not isinstance(function, types.FunctionType):
        return function
    code, names = function.__code__.replace(), function.__globals__
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__module__ = function.__module__
    made.__dict__.update(function.__dict__)
    return made


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of a module with its hooks, as a function that can be compiled."""
    return module(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Point:
    """Bytes and time of all graphs of a block at a level."""

    level: Level
    kept_bytes: int
    peak_bytes: int
    step_ns: int

    def beats(self, other: _Point) -> bool:
        """Whether this dominates another point: no worse in bytes and time, and better in one."""
        ours, theirs = ((p.kept_bytes, p.peak_bytes, p.step_ns) for p in (self, other))
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def useful_levels(curves: Sequence[GraphCurve]) -> list[Level]:
    """The levels with distinct, undominated schedules of a block's graphs; the first one keeps everything."""
    found: dict[tuple[Any, ...], _Point] = {}
    for level in CANDIDATES:
        parts = [curve.at(level) for curve in curves]
        taken = (sum(getattr(part, name) for part in parts) for name in ("kept_bytes", "peak_bytes", "step_ns"))
        found.setdefault(tuple(part.ops for part in parts), _Point(level, *taken))
    everything, *others = found.values()
    useful = [point for point in others if not any(other.beats(point) for other in found.values())]
    useful.sort(key=lambda point: (-point.kept_bytes, point.step_ns))
    stay = {id(min(useful, key=lambda point: (point.peak_bytes, point.step_ns)))} if useful else set()
    points = thinned([everything, *useful], MOST_OPTIONS, lambda point: (point.kept_bytes, point.step_ns), stay)
    return [point.level for point in points]
