"""The joint graph as a problem for the solvers: a node for each result, with its cost, size and rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import cairn
from torch import fx

from .joint_graph import JointGraph, Result


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of the calls of a joint graph.

    Attributes
    ----------
    ns
        Time of each call in nanoseconds.
    workspace_bytes
        Memory that each call allocates and frees while it runs: its results are not counted.
    fused
        The calls that inductor fuses with their neighbours: True if every reader computes the call in its own kernel
        (pointwise operators), False if it is computed once (reductions). Empty without a fusing compiler.
    merged
        Matrix products that a compiler computes together with the sum that reads them (addmm): the call of the sum by
        the call of the product. The product itself is never in memory.
    copies_bytes
        Copies that compiled code makes of the graph's inputs and holds for the whole step.
    """

    ns: Mapping[fx.Node, int]
    workspace_bytes: Mapping[fx.Node, int]
    fused: Mapping[fx.Node, bool] = dataclasses.field(default_factory=dict)
    merged: Mapping[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    copies_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Memory and time of a step outside of its graph. Sizes in bytes.

    Attributes
    ----------
    fixed_bytes
        Resident during the whole step: parameters, buffers, existing gradients, optimizer state, inputs.
    holds_output
        Whether the training loop holds the forward's outputs during the backward.
    loss_ns, loss_workspace_bytes
        Time and memory of a loss outside of the graph, forward and backward.
    correction_bytes
        The excess of a measured peak over its prediction, which is added to predictions.
    """

    fixed_bytes: int = 0
    holds_output: bool = True
    loss_ns: int = 0
    loss_workspace_bytes: int = 0
    correction_bytes: int = 0


def graph_of(
    joint: JointGraph, costs: Costs, surroundings: Surroundings, name: str, provenance: Any = None
) -> cairn.Graph:
    """The problem of a joint graph, for the solvers: a node for each result. provenance: data to store with it."""
    to_keep = _results_to_keep(joint, surroundings.holds_output)
    nodes = [_node(joint, index, costs, surroundings, index in to_keep) for index in range(len(joint.results))]
    backward_begins = joint.end_of_forward + 1
    return cairn.Graph(
        nodes,
        fixed_bytes=surroundings.fixed_bytes + costs.copies_bytes,
        backward_begins_at=backward_begins if backward_begins < len(nodes) else None,
        name=name,
        provenance=provenance,
    )


def repeated_ns(joint: JointGraph, costs: Costs) -> int:
    """Time that the problem counts twice: it has a node with the call's time for each member of a tuple."""
    return sum((len(joint.members(call)) - 1) * costs.ns.get(call, 0) for call in joint.calls())


def _results_to_keep(joint: JointGraph, holds_output: bool) -> set[int]:
    return joint.bases((*joint.outputs, *joint.grads) if holds_output else joint.grads)


def _node(joint: JointGraph, index: int, costs: Costs, surroundings: Surroundings, keep: bool) -> cairn.Node:
    result = joint.results[index]
    if result.call is None:
        return cairn.Node(
            surroundings.loss_ns,
            0,
            result.deps,
            name="end of the forward",
            workspace_bytes=surroundings.loss_workspace_bytes,
            no_recompute=True,
        )
    return cairn.Node(
        costs.ns.get(result.call, 0),
        result.nbytes,
        result.deps,
        name=result.node.name if result.node is not None else "",
        workspace_bytes=costs.workspace_bytes.get(result.call, 0) + _other_members_bytes(joint, index, result),
        alias_of=result.alias_of,
        keep=keep,
        no_recompute=result.no_recompute,
    )


def _other_members_bytes(joint: JointGraph, index: int, result: Result) -> int:
    """Bytes of the other members of a result's tuple that its call allocates, too.

    A result that must not be recomputed is computed right after the members before it, which exist by then. Only the
    members after it count. All others count for a result that may be recomputed, because that may happen by itself.
    """
    assert result.call is not None
    members = joint.members(result.call)
    position = members.index(index)
    before, after = members[:position], members[position + 1 :]
    others = after if result.no_recompute else [*before, *after]
    return sum(joint.results[other].nbytes for other in others)
