"""The compiled code of a block: one callable for each option. An option is a partition of the block's joint graph.

Where a model is not one graph, every block is compiled by itself. Dynamo captures it as one or several graphs, and
AOTAutograd adds the backward to each. An option limits the bytes saved for the backward, and the peak (`Level`). The
graph solver searches the fastest schedule within these limits, and that schedule determines the partition. All options
of a block compute the same numbers by the same kernels, so options may be mixed freely.

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
    """

    def __init__(self, joint: JointGraph, measure: Callable[[JointGraph], Costs]) -> None:
        self.joint, self._measure = joint, measure

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
        """The fastest schedule at a level that the solver finds within its limits."""
        (most_kept, least_kept), (most_peak, least_peak) = self._kept, self._peaks
        kept = least_kept + int(level.kept * (most_kept - least_kept))
        peak = max(kept, least_peak + int(level.peak * (most_peak - least_peak)))
        graph = self._graph(peak - kept)
        if level == EVERYTHING:
            solution = cairn.solve(graph, 2 * most_peak + 1, solver="store-all")
        else:
            least = cairn.limits(graph, solver=SOLVER, iterations=ITERATIONS).least_bytes or peak
            budget = max(peak, least)
            limit = f"{min(MAX_MS, RESULT_MS * len(self.joint.results))}ms"
            solution = cairn.solve(graph, budget, solver=SOLVER, iterations=ITERATIONS, time_limit=limit)
            if solution.schedule is None:  # out of time on a busy machine; the least work ends
                solution = cairn.solve(graph, budget, solver=SOLVER, iterations=1)
        if solution.schedule is None or solution.makespan_ns is None:
            raise Unsupported("no schedule of this graph was found")
        return Partition(_ops_of(solution.schedule), kept, solution.peak_bytes or 0, solution.makespan_ns)


def _ops_of(schedule: cairn.Schedule) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, schedule.ops))


class OptionBackend:
    """The backend of torch.compile for one option of a class of blocks.

    Attributes
    ----------
    curves
        Of the compiled graphs that have a backward.
    not_planned
        For each graph that was cut by torch's default partition: the reason.
    recomputed
        The number of calls that the backwards recompute.
    """

    def __init__(self, level: Level, kernels: str, device: torch.device, partitions: Partitions) -> None:
        self.level, self._kernels, self._device, self._partitions = level, kernels, device, partitions
        self.compilations = 0
        self.curves: list[GraphCurve] = []
        self.not_planned: list[str] = []
        self.recomputed = 0

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles one graph that Dynamo captured."""
        self.compilations += 1
        by_operators = self._kernels == "eager"
        compiled = _compat.compiled_by_operators if by_operators else _compat.compiled_by_inductor
        with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):  # hides active hooks from tracing
            try:
                return compiled(module, inputs, self.partition)
            except PlanMismatch as error:
                return raising(error)

    def partition(
        self, module: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph at this option's level. A graph that cannot be analysed gets torch's default partition."""
        if self.level == UNPLANNED:
            return _compat.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        try:
            joint = read(module, num_fwd_outputs)
            curve = GraphCurve(joint, self._measured)
            if not self._partitions.is_loaded:
                _ = curve.costs  # measured here, while torch compiles
            emitted = emit(joint, self._schedule(curve), saves_views=self._kernels == "eager")
        except Unsupported as error:
            self.not_planned.append(str(error))
            return _compat.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        self.curves.append(curve)
        self.recomputed += emitted.recomputed
        return _compat.cut(emitted.module, emitted.saved, emitted.sizes, num_fwd_outputs)

    def _measured(self, joint: JointGraph) -> Costs:
        measured = kernel_costs.measured if self._kernels == "eager" else fused_costs.estimated
        return measured(joint, self._device)

    def _schedule(self, curve: GraphCurve) -> Sequence[tuple[Any, ...]]:
        """The schedule of a graph at this option's level: a stored one, or a new one."""
        if self.level == EVERYTHING:
            return curve.everything()
        name = level_text(self.level)
        known = self._partitions.ops(name, curve.joint)
        if known is not None:
            return curve.validated(known)
        ops = curve.at(self.level).ops
        self._partitions.add(name, curve.joint, ops)
        return ops


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class BlockCode:
    """The compiled code of one class of blocks.

    Attributes
    ----------
    backends
        By option.
    callables
        By option: the compiled function, which takes the block and its arguments.
    has_graph_breaks
        Whether blocks are captured as several graphs.
    """

    def __init__(
        self, function: Callable[..., Any], kernels: str, device: torch.device, partitions: Partitions
    ) -> None:
        self._function, self._backend_arguments = function, (kernels, device, partitions)
        self.backends: list[OptionBackend] = []
        self.callables: list[Callable[..., Any]] = []
        self.has_graph_breaks = False
        self.add(EVERYTHING)

    def add(self, level: Level) -> int:
        """Add an option and return its number. It is compiled when it is first called."""
        backend = OptionBackend(level, *self._backend_arguments)
        self.backends.append(backend)
        self.callables.append(self._compiled(backend))
        return len(self.callables) - 1

    def _compiled(self, backend: OptionBackend) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            with_own_code(self._function), backend=backend, fullgraph=not self.has_graph_breaks
        )
        return compiled

    def allow_graph_breaks(self) -> None:
        """From now on, allow graph breaks: blocks are captured as several graphs."""
        self.has_graph_breaks = True
        self.callables[:] = map(self._compiled, self.backends)

    def level_of(self, option: int) -> Level:
        """The level of an option."""
        return self.backends[option].level

    def option_of(self, level: Level) -> int:
        """The number of the option of a level, which is added if there is none."""
        numbers = (number for number, backend in enumerate(self.backends) if backend.level == level)
        number = next(numbers, None)
        return self.add(level) if number is None else number


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with its own code object. Dynamo stores compiled code by code object."""
    function = _compat.own_frame(function)
    if not isinstance(function, types.FunctionType):
        return function
    code, module_globals = function.__code__.replace(), function.__globals__
    copied = types.FunctionType(code, module_globals, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    copied.__module__ = function.__module__
    copied.__dict__.update(function.__dict__)
    return copied


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of a module with its hooks, as a function that can be compiled."""
    return module(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Point:
    """Bytes and time of all graphs of a block at a level."""

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
