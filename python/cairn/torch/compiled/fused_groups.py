"""Groups of results that inductor computes in one kernel: one node of the problem each.

A pointwise value that only one kernel reads is never in memory. Keeping it would be useless, because its only reader is
that kernel. Without these groups the problem would count such values as memory, and its least budget would be far above
that of the generated graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import cairn

from .joint_graph import JointGraph
from .problem import Costs

#: For each group the indices of its results, ascending. The last one is the result that the kernel writes to memory.
Groups = Sequence[Sequence[int]]


def groups_of(joint: JointGraph, costs: Costs, kept: Set[int]) -> Groups:
    """The groups of a joint graph, ordered by their last results. Without fused calls each group is one result.

    kept: indices of results that stay in memory to the end of the step.
    """
    count = len(joint.results)
    readers: list[list[int]] = [[] for _ in range(count)]
    for index, result in enumerate(joint.results):
        for dep in result.deps:
            readers[dep].append(index)
    in_memory = kept | {r.alias_of for r in joint.results if r.alias_of is not None}
    group_end_of = list(range(count))  # of the group that each result is in
    for index in reversed(range(count)):
        readers_groups = {group_end_of[reader] for reader in readers[index]}
        if len(readers_groups) == 1 and index not in in_memory:
            [group_end] = readers_groups
            if _is_merged(joint, costs, index, group_end) or (
                _stays_in_registers(joint, costs, index)
                and _is_kernel_result(joint, costs, group_end, joint.results[index].is_backward)
            ):
                group_end_of[index] = group_end
    members: dict[int, list[int]] = {}
    for index in range(count):
        members.setdefault(group_end_of[index], []).append(index)
    return [members[group_end] for group_end in sorted(members)]


def in_groups(graph: cairn.Graph, groups: Groups) -> cairn.Graph:
    """The problem with one node for each group, from `graph` with one node for each result.

    The time of a group is the sum of its results' times. Only its last result is in memory.
    """
    if len(groups) == len(graph.nodes):
        return graph
    number_of = {group[-1]: number for number, group in enumerate(groups)}
    nodes = []
    for group in groups:
        last, all_deps = graph.nodes[group[-1]], {dep for index in group for dep in graph.nodes[index].deps}
        alias = None if last.alias_of is None else number_of[last.alias_of]
        deps = sorted(number_of[dep] for dep in all_deps.difference(group))
        cost_ns = sum(graph.nodes[index].cost_ns for index in group)
        nodes.append(dataclasses.replace(last, cost_ns=cost_ns, deps=tuple(deps), alias_of=alias))
    backward_begins = graph.backward_begins_at
    return cairn.Graph(
        nodes,
        fixed_bytes=graph.fixed_bytes,
        backward_begins_at=None if backward_begins is None else sum(group[-1] < backward_begins for group in groups),
        machine=graph.machine,
        name=graph.name,
        provenance=graph.provenance,
    )


def by_result(ops: Iterable[Sequence[Any]], groups: Groups) -> Iterator[tuple[Any, ...]]:
    """The operations of a schedule of groups, as operations on results."""
    for kind, number, *others in ops:
        if kind == "compute":
            yield from ((kind, index, *others) for index in groups[number])
        else:
            yield (kind, groups[number][-1], *others)


def _stays_in_registers(joint: JointGraph, costs: Costs, index: int) -> bool:
    """Whether a result may stay in the registers of the kernel that reads it."""
    result = joint.results[index]
    if result.call is None or result.no_recompute or result.alias_of is not None:
        return False
    return costs.fused.get(result.call, False) and len(joint.members(result.call)) == 1


def _is_merged(joint: JointGraph, costs: Costs, index: int, reader: int) -> bool:
    """Whether a result is a product that is computed together with its reader, a sum of the same pass."""
    product, total = joint.results[index], joint.results[reader]
    if product.call is None or product.is_backward != total.is_backward:
        return False
    return product.call in costs.merged and costs.merged[product.call] is total.call


def _is_kernel_result(joint: JointGraph, costs: Costs, index: int, is_backward: bool) -> bool:
    """Whether a fused kernel of the forward, or of the backward (is_backward), may end with a result."""
    result = joint.results[index]
    if (
        result.call is None
        or result.call not in costs.fused
        or result.is_backward != is_backward
        or result.alias_of is not None
    ):
        return False
    return len(joint.members(result.call)) == 1
