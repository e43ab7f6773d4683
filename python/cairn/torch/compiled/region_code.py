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
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import cairn
import torch
from torch import fx, nn

from ..base import _compat_compile
from ..base.errors import Unsupported
from ..selective.block_options import thinned
from . import fused_costs, kernel_costs
from .emission import emit
from .joint_graph import JointGraph, read
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
    """One captured graph, and its schedules by level."""

    def __init__(self, joint: JointGraph, costs: Costs) -> None:
        self.joint, self._costs = joint, costs
        bare = self._graph(0)
        everything = cairn.limits(bare, solver="store-all")
        self._most_peak = everything.store_all_bytes or 0
        self._least_peak = cairn.limits(bare, solver=SOLVER, iterations=ITERATIONS).least_bytes or self._most_peak
        between = self._graph(self._most_peak)  # what a step has between the two is then its peak
        most = cairn.limits(between, solver="store-all").store_all_bytes or 0
        least = cairn.limits(between, solver=SOLVER, iterations=ITERATIONS).least_bytes or most
        self._most_kept, self._least_kept = most - self._most_peak, least - self._most_peak

    def _graph(self, between_bytes: int) -> cairn.Graph:
        """The problem, with other memory in use between forward and backward."""
        return graph_of(self.joint, self._costs, Surroundings(0, False, 0, between_bytes), "block")

    def at(self, level: Level) -> Partition:
        """The fastest schedule at a level that the solver can find in its limits."""
        kept = self._least_kept + int(level.kept * (self._most_kept - self._least_kept))
        peak = max(kept, self._least_peak + int(level.peak * (self._most_peak - self._least_peak)))
        graph = self._graph(peak - kept)
        if level == EVERYTHING:
            solution = cairn.solve(graph, 2 * self._most_peak + 1, solver="store-all")
        else:
            least = cairn.limits(graph, solver=SOLVER, iterations=ITERATIONS).least_bytes or peak
            budget = max(peak, least)
            limit = f"{min(MOST_MS, RESULT_MS * len(self.joint.results))}ms"
            solution = cairn.solve(graph, budget, solver=SOLVER, iterations=ITERATIONS, time_limit=limit)
            if solution.schedule is None:  # out of time on a busy machine; the least work ends
                solution = cairn.solve(graph, budget, solver=SOLVER, iterations=1)
        if solution.schedule is None or solution.makespan_ns is None:
            raise Unsupported("no schedule of this graph was found")
        ops = tuple(tuple(op) for op in solution.schedule.ops)
        return Partition(ops, kept, solution.peak_bytes or 0, solution.makespan_ns)


class OptionBackend:
    """The backend of torch.compile by which an option of blocks is compiled."""

    def __init__(self, level: Level, kernels: str, device: torch.device) -> None:
        self.level, self._kernels, self._device = level, kernels, device
        self.compilations = 0
        self.curves: list[GraphCurve] = []  # of the graphs with a backward
        self.uncut: list[str] = []  # why a graph is as torch cuts it
        self.recomputed = 0

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles one graph that Dynamo captured."""
        self.compilations += 1
        by_operators = self._kernels == "eager"
        compiled = _compat_compile.compiled_by_operators if by_operators else _compat_compile.compiled_by_inductor
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):  # those around must not see what is traced
            return compiled(module, inputs, self.partition)

    def partition(
        self, module: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph at this option's level; a graph that cannot be read gets torch's default partition."""
        if self.level == UNPLANNED:
            return _compat_compile.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        try:
            joint = read(module, num_fwd_outputs)
            measured = kernel_costs.measured if self._kernels == "eager" else fused_costs.estimated
            curve = GraphCurve(joint, measured(joint, self._device))
            emitted = emit(joint, curve.at(self.level).ops)
        except Unsupported as error:
            self.uncut.append(str(error))
            return _compat_compile.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        self.curves.append(curve)
        self.recomputed += emitted.recomputed
        return _compat_compile.cut(emitted.module, emitted.saved, emitted.sizes, num_fwd_outputs)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class BlockCode:
    """The callables of one class of blocks, by option; each takes the block and its arguments."""

    def __init__(self, function: Callable[..., Any], kernels: str, device: torch.device) -> None:
        self._function, self._kernels, self._device = function, kernels, device
        self.backends: list[OptionBackend] = []
        self.callables: list[Callable[..., Any]] = []
        self.breaks = False  # it is captured as several graphs
        self.add(EVERYTHING)

    def add(self, level: Level) -> int:
        """Add an option and return its number; it is compiled when it is first called."""
        backend = OptionBackend(level, self._kernels, self._device)
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
