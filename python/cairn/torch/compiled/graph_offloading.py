"""Schedules of a joint graph that offload values: calls the solver `joint-graph`, and removes impossible transfers.

A solver may leave a kept node on the host. So what the step returns gets kept aliases that pin it on the device: the
end of the forward is an alias of the largest output that the loop holds, and each gradient has an alias at the end of
the step. A schedule may offload a gradient before that. Transfers of other outputs are removed from the schedule.

The slab of host memory may be larger than the simulator's host peak: there are gaps between copies, and a copy's range
is only free once its value has arrived on the device. Then the solver is called again with less host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import cairn

from ..base.errors import out_of_time
from .emission import emit
from .fused_groups import Groups, by_result
from .host_memory import HostMemory
from .joint_graph import JointGraph
from .transfers import is_plain, performed, without_transfers_of

SOLVER = "joint-graph"
MAX_SOLUTIONS = 4  # how often the solver is called for one budget


class GraphOffloading:
    """Solves the problem of one joint graph with offloading.

    Attributes
    ----------
    graph
        The problem with a machine: a node for each group of results, and the aliases that pin gradients.
    """

    def __init__(
        self, joint: JointGraph, groups: Groups, graph: cairn.Graph, host: HostMemory, machine: cairn.Machine
    ) -> None:
        self._joint, self._groups, self._host = joint, groups, host
        self._node_of_result = {group[-1]: number for number, group in enumerate(groups)}
        self._machine = machine
        self.graph = self._pinned(graph).replace(machine=machine)
        self._not_offloaded = self._find_not_offloaded()

    def solved(self, budget: int, time_limit: str, solver: str = "auto") -> cairn.Solution:
        """A schedule within a budget whose copies fit into the host budget. Without offloading if none is found."""
        solver, host_bytes = SOLVER if solver == "auto" else solver, self._machine.host_bytes
        for _ in range(MAX_SOLUTIONS):
            machine = dataclasses.replace(self._machine, host_bytes=max(0, host_bytes))
            solution = cairn.solve(self.graph, budget, solver=solver, machine=machine, time_limit=time_limit)
            if solution.schedule is None:
                return solution
            performable = self._performable(solution)
            if performable is None or performable.schedule is None:
                break
            excess = emit(self._joint, self.ops(performable.schedule)).host_bytes - self._machine.host_bytes
            if excess <= 0:
                return performable
            host_bytes -= excess
        machine = dataclasses.replace(self._machine, host_bytes=0)
        return cairn.solve(self.graph, budget, machine=machine, time_limit=time_limit)

    def least(self, time_limit: str) -> cairn.Solution:
        """The schedule of the least device memory that is found. Raises Unsupported if it has none in time."""
        least_bytes = cairn.limits(self.graph, solver=SOLVER, time_limit=time_limit).least_bytes
        solution = None if least_bytes is None else self.solved(least_bytes, time_limit)
        if solution is None or solution.schedule is None:
            raise out_of_time(time_limit)
        return solution

    def ops(self, schedule: cairn.Schedule) -> Iterator[tuple[Any, ...]]:
        """The operations of a schedule as a graph performs them, on results of the joint graph."""
        end = (self.graph.backward_begins_at or 0) - 1
        listed = performed(schedule.ops, self.graph, schedule.budget_bytes or 0, end)
        return by_result((op for op in listed if op[1] < len(self._groups)), self._groups)

    def slowed_ns(self, solution: cairn.Solution) -> int:
        """The time by which transfers slow down concurrent computations. The simulator does not count it."""
        assert solution.schedule is not None
        machine = self._machine
        rates = {"offload": machine.to_host_bytes_per_s, "prefetch": machine.to_device_bytes_per_s}
        busy = dict.fromkeys(rates, 0)
        for name, v in ((str(op[0]), int(op[1])) for op in solution.schedule.ops if op[0] in rates):
            busy[name] += machine.latency_ns + self.graph.nodes[v].bytes * 10**9 // rates[name]
        link = sum(busy.values()) if machine.shared_link else max(busy.values())
        return self._host.to.slowdown_ns(link, solution.stall_ns or 0)

    def _pinned(self, graph: cairn.Graph) -> cairn.Graph:
        """The problem with the aliases that pin outputs and gradients on the device."""
        joint, nodes = self._joint, list(graph.nodes)
        held_outputs = [
            v for v in self._nodes_of(joint.bases(joint.outputs)) if nodes[v].keep and nodes[v].alias_of is None
        ]
        if held_outputs:
            end, largest = self._node_of_result[joint.end_of_forward], max(held_outputs, key=lambda v: nodes[v].bytes)
            nodes[end] = dataclasses.replace(nodes[end], alias_of=largest, keep=True)
        grads = [v for v in self._nodes_of(joint.bases(joint.grads)) if nodes[v].alias_of is None]
        nodes += [cairn.Node(0, 0, (v,), alias_of=v, keep=True) for v in grads]
        return graph.replace(nodes=nodes)

    def _find_not_offloaded(self) -> set[int]:
        """The nodes that are not offloaded: outputs, shared storages, and values that are not plain bytes."""
        joint, device = self._joint, self._host.device
        not_offloaded = set(self._nodes_of(joint.bases(joint.outputs)))
        for result, v in ((joint.results[index], v) for index, v in self._node_of_result.items()):
            if result.alias_of is not None:
                not_offloaded |= {v, self._node_of_result[result.alias_of]}
            elif result.node is None or not is_plain(joint.values[result.node], device):
                not_offloaded.add(v)
        return not_offloaded

    def _nodes_of(self, results: set[int]) -> list[int]:
        return sorted(self._node_of_result[index] for index in results)

    def _performable(self, solution: cairn.Solution) -> cairn.Solution | None:
        """The solution without the transfers of nodes that cannot be offloaded; None if that is not valid."""
        assert solution.schedule is not None
        kept = {v for v in self._not_offloaded if self.graph.nodes[v].keep}
        ops = without_transfers_of(self._not_offloaded, kept, solution.schedule.ops)
        if len(ops) == len(solution.schedule):
            return solution
        schedule = cairn.Schedule.from_ops(self.graph, ops, solver=solution.solver, budget_bytes=solution.budget_bytes)
        replay = cairn.simulate(self.graph, schedule, None)
        if replay.makespan_ns is None:
            return None
        return dataclasses.replace(
            solution,
            schedule=schedule,
            makespan_ns=replay.makespan_ns,
            peak_bytes=replay.peak_bytes,
            host_peak_bytes=replay.host_peak_bytes,
            recompute_ns=replay.recompute_ns,
            stall_ns=replay.stall_ns,
        )
