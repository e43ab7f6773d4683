"""Measures the operations of a traced program, and makes the cairn-graph of it.

The program runs as it was traced, and each value is dropped after its last reader. So each operation has the sizes,
strides and values of training. Operations of one kind (same operators, shapes, strides, types and numbers) get the same
time, the median over all of them and over the passes. They also get the same workspace, the largest one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cairn
import torch

from ..base import clock, memory
from ..base.errors import PlanMismatch
from .graph_program import LiveValues, Program
from .interpreter import below_everything


@dataclass(frozen=True)
class Costs:
    """Times and workspaces of a program's operations, in its order."""

    cost_ns: tuple[int, ...]
    workspace_bytes: tuple[int, ...]


def measured(program: Program, externals: Sequence[torch.Tensor], device: torch.device, passes: int) -> Costs:
    """Runs the program once for its workspaces and `passes` times for its times."""
    kinds = [operation.described for operation in program.operations]
    workspaces = _workspaces(program, externals, device)
    largest: dict[str, int] = {}
    for kind, workspace in zip(kinds, workspaces, strict=True):
        largest[kind] = max(workspace, largest.get(kind, workspace))
    samples: dict[str, list[int]] = {kind: [] for kind in kinds}
    for _ in range(passes):
        for kind, time_ns in zip(kinds, _times(program, externals, device), strict=True):
            samples[kind].append(time_ns)
    median = {kind: int(statistics.median(times)) if times else 0 for kind, times in samples.items()}
    return Costs(tuple(median[kind] for kind in kinds), tuple(largest[kind] for kind in kinds))


def _in_order(program: Program, values: LiveValues, compute: Callable[[int], None]) -> None:
    for name, v in program.store_all():
        if name == "compute":
            compute(v)
        else:
            values.drop(v)


def _times(program: Program, externals: Sequence[torch.Tensor], device: torch.device) -> list[int]:
    values, times = LiveValues(program, externals), []

    def compute(v: int) -> None:
        began = clock.now(device)
        values.compute(v)
        times.append(clock.now(device) - began)

    with below_everything(device):
        _in_order(program, values, compute)
    return times


def _workspaces(program: Program, externals: Sequence[torch.Tensor], device: torch.device) -> list[int]:
    """The workspace of each operation: the allocator's peak, less the memory before it and its result."""
    values, meter = LiveValues(program, externals), memory.meter_for(device)
    marks: list[tuple[int, int]] = []

    def compute(v: int) -> None:
        begin = meter.mark()
        values.compute(v)
        marks.append((begin, meter.mark()))

    with meter, below_everything(device):
        _in_order(program, values, compute)
        values.clear()
    return [
        meter.rise(begin, end) - operation.bytes
        for (begin, end), operation in zip(marks, program.operations, strict=True)
    ]


def with_times_of(graph: cairn.Graph, earlier: cairn.Graph) -> cairn.Graph:
    """The graph with the times of another one, which must be alike in everything else."""
    if len(graph) != len(earlier) or graph.fixed_bytes != earlier.fixed_bytes:
        raise PlanMismatch(
            f"the earlier graph has {len(earlier)} nodes and {earlier.fixed_bytes} fixed bytes, and this step "
            f"{len(graph)} and {graph.fixed_bytes}: it was made from another step"
        )
    nodes = []
    for v, (node, other) in enumerate(zip(graph.nodes, earlier.nodes, strict=True)):
        timed = dataclasses.replace(node, cost_ns=other.cost_ns)
        if timed != dataclasses.replace(other, name=node.name):
            raise PlanMismatch(f"node {v}, {node.name!r}, is another operation in the earlier graph: {other.name!r}")
        nodes.append(timed)
    return graph.replace(nodes=nodes)


def graph_of(program: Program, costs: Costs, fixed_bytes: int, name: str, provenance: Mapping[str, Any]) -> cairn.Graph:
    """The program as a problem for the solvers."""
    nodes = [
        cairn.Node(
            cost_ns=cost_ns,
            bytes=operation.bytes,
            deps=operation.deps,
            name=operation.name,
            workspace_bytes=workspace_bytes,
            alias_of=operation.base,
            keep=operation.keep,
            no_recompute=operation.once,
        )
        for operation, cost_ns, workspace_bytes in zip(
            program.operations, costs.cost_ns, costs.workspace_bytes, strict=True
        )
    ]
    return cairn.Graph(
        nodes,
        fixed_bytes=fixed_bytes,
        backward_begins_at=program.backward_begins_at,
        name=name,
        provenance=provenance,
    )
