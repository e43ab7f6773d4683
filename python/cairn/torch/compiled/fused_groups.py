"""Groups of results that a fusing compiler computes in one kernel: one node of the problem each.

A pointwise value that nothing outside of one kernel reads is never in memory, and to keep it would help nobody: whoever
needs it needs the kernel's result. Without these groups the problem would count such values as memory, and its least
budget would be far above that of the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import cairn

from .joint_graph import JointGraph
from .problem import Costs

#: Indices of results, ascending; the last one is what the kernel leaves in memory.
Groups = Sequence[Sequence[int]]


def groups_of(joint: JointGraph, costs: Costs, kept: Set[int]) -> Groups:
    """The groups of a joint graph, in the order of their last results; of one result each without a fusing compiler.

    kept: results that stay in memory to the end of the step.
    """
    count = len(joint.results)
    readers: list[list[int]] = [[] for _ in range(count)]
    for index, result in enumerate(joint.results):
        for dep in result.deps:
            readers[dep].append(index)
    fixed = kept | {r.alias_of for r in joint.results if r.alias_of is not None}
    last = list(range(count))  # of the group that each result is in
    for index in reversed(range(count)):
        ends = {last[reader] for reader in readers[index]}
        if len(ends) == 1 and index not in fixed and _is_inside(joint, costs, index):
            [end] = ends
            if _ends_kernel(joint, costs, end, joint.results[index].is_backward):
                last[index] = end
    members: dict[int, list[int]] = {}
    for index in range(count):
        members.setdefault(last[index], []).append(index)
    return [members[end] for end in sorted(members)]


def in_groups(graph: cairn.Graph, groups: Groups) -> cairn.Graph:
    """A problem with one node for each group, of one with a node for each result.

    Times add up; the last result alone is in memory.
    """
    if len(groups) == len(graph.nodes):
        return graph
    place = {group[-1]: number for number, group in enumerate(groups)}
    nodes = []
    for group in groups:
        last, read = graph.nodes[group[-1]], {dep for index in group for dep in graph.nodes[index].deps}
        alias = None if last.alias_of is None else place[last.alias_of]
        deps = sorted(place[dep] for dep in read.difference(group))
        cost_ns = sum(graph.nodes[index].cost_ns for index in group)
        nodes.append(dataclasses.replace(last, cost_ns=cost_ns, deps=tuple(deps), alias_of=alias))
    begins = graph.backward_begins_at
    return cairn.Graph(
        nodes,
        fixed_bytes=graph.fixed_bytes,
        backward_begins_at=None if begins is None else sum(group[-1] < begins for group in groups),
        machine=graph.machine,
        name=graph.name,
        provenance=graph.provenance,
    )


def by_result(ops: Iterable[Sequence[Any]], groups: Groups) -> Iterator[tuple[Any, ...]]:
    """A schedule's operations, with those on groups as operations on results."""
    for kind, number, *others in ops:
        if kind == "compute":
            yield from ((kind, index, *others) for index in groups[number])
        else:
            yield (kind, groups[number][-1], *others)


def _is_inside(joint: JointGraph, costs: Costs, index: int) -> bool:
    """Whether a kernel may hold a result in its registers."""
    result = joint.results[index]
    if result.call is None or result.no_recompute or result.alias_of is not None:
        return False
    return costs.fused.get(result.call, False) and len(joint.members(result.call)) == 1


def _ends_kernel(joint: JointGraph, costs: Costs, index: int, is_backward: bool) -> bool:
    """Whether a result is what a fused kernel of the same pass leaves in memory."""
    result = joint.results[index]
    if (
        result.call is None
        or result.call not in costs.fused
        or result.is_backward != is_backward
        or result.alias_of is not None
    ):
        return False
    return len(joint.members(result.call)) == 1
