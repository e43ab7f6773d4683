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
    """Costs of calls.

    Attributes
    ----------
    ns, workspace_bytes
        Time, and the memory that a call allocates while it runs, its results not counted.
    fused
        Calls that are fused with their neighbours: True if every reader computes the call in its own kernel (pointwise
        operators), False if it is computed once (reductions).
    copies_bytes
        Copies that compiled code makes of the graph's inputs and holds for the whole step.
    """

    ns: Mapping[fx.Node, int]
    workspace_bytes: Mapping[fx.Node, int]
    fused: Mapping[fx.Node, bool] = dataclasses.field(default_factory=dict)
    copies_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Memory and time of a step outside of its graph. Sizes in bytes.

    Attributes
    ----------
    fixed_bytes
        Resident all along: parameters, buffers, existing gradients, optimizer state, inputs.
    holds_output
        The training loop holds the forward's outputs during the backward.
    loss_ns, loss_workspace_bytes
        Time and memory of a loss outside of the graph, forward and backward.
    correction_bytes
        The excess of a measured step over its prediction.
    """

    fixed_bytes: int = 0
    holds_output: bool = True
    loss_ns: int = 0
    loss_workspace_bytes: int = 0
    correction_bytes: int = 0


def graph_of(joint: JointGraph, costs: Costs, around: Surroundings, name: str, provenance: Any = None) -> cairn.Graph:
    """The problem of a joint graph."""
    kept = _kept(joint, around.holds_output)
    nodes = [_node(joint, index, costs, around, index in kept) for index in range(len(joint.results))]
    begins = joint.end_of_forward + 1
    return cairn.Graph(
        nodes,
        fixed_bytes=around.fixed_bytes + costs.copies_bytes,
        backward_begins_at=begins if begins < len(nodes) else None,
        name=name,
        provenance=provenance,
    )


def repeated_ns(joint: JointGraph, costs: Costs) -> int:
    """Time that the problem counts twice: it has one node for each member of a tuple, and the step makes one call."""
    return sum((len(joint.members(call)) - 1) * costs.ns.get(call, 0) for call in joint.calls())


def _kept(joint: JointGraph, holds_output: bool) -> set[int]:
    return joint.bases((*joint.outputs, *joint.grads) if holds_output else joint.grads)


def _node(joint: JointGraph, index: int, costs: Costs, around: Surroundings, keep: bool) -> cairn.Node:
    result = joint.results[index]
    if result.call is None:
        return cairn.Node(
            around.loss_ns,
            0,
            result.deps,
            name="end of the forward",
            workspace_bytes=around.loss_workspace_bytes,
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
    """Bytes that a call allocates besides one of its results: other members of its tuple.

    Members are ordered by size. All others count for the first, which is computed when none of them exists. Only the
    smaller ones count for a later one, which is mostly computed right after them.
    """
    assert result.call is not None
    members = joint.members(result.call)
    later = members[members.index(index) + 1 :]
    beside = sum(joint.results[other].nbytes for other in later)
    if result.no_recompute or index == members[0]:
        return beside
    return beside + sum(joint.results[other].nbytes for other in members[: members.index(index)])
