"""The memory of the two graphs as generated code runs them: every value is freed behind its last reader.

The simulator judges the schedule; this judges what was made of it. It knows what the problem rounds up (a call makes
all members of a tuple at once) and what torch adds (a saved tensor is held by the backward's list of inputs).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from torch import fx

from .emission import ORIGIN
from .joint_graph import JointGraph, returned_by
from .problem import Costs, Surroundings


@dataclasses.dataclass(frozen=True)
class Moment:
    """A peak of memory: how many bytes, in which graph, during which node, and what is resident then by node."""

    peak_bytes: int
    phase: str
    node: str
    resident: dict[str, int]

    def __str__(self) -> str:
        return self.phase if self.phase == self.node else f"{self.phase}, operator {self.node}"


def peak(joint: JointGraph, costs: Costs, around: Surroundings, forward: fx.Graph, backward: fx.Graph) -> Moment:
    """The peak of a step, what is fixed included."""
    first = _Phase(joint, costs, forward, "forward")
    saved = {node.name for node in backward.nodes if node.op == "placeholder"}
    returned = returned_by(forward)
    handed = returned[: len(joint.outputs)]
    held = handed if around.holds_output else []
    kept = [node for node in returned if isinstance(node, fx.Node) and (node.name in saved or node in held)]
    found = first.run(returned, 0)
    between = first.bytes_of([*handed, *kept])
    loss = sum(between.values()) + around.loss_workspace_bytes
    if loss > found.peak_bytes:
        found = Moment(loss, "loss", "loss", between)
    beside = {name: size for name, size in first.bytes_of(held).items() if name not in saved}
    second = _Phase(joint, costs, backward, "backward")
    last = second.run(returned_by(backward), sum(beside.values()))
    found = last if last.peak_bytes > found.peak_bytes else found
    return dataclasses.replace(found, peak_bytes=found.peak_bytes + around.fixed_bytes)


class _Phase:
    """One graph: which storage each node shows, and when it is freed."""

    def __init__(self, joint: JointGraph, costs: Costs, graph: fx.Graph, name: str) -> None:
        self._joint, self._costs, self._graph, self._name = joint, costs, graph, name
        self._nodes = list(graph.nodes)
        self._root: dict[fx.Node, fx.Node] = {}
        self._size: dict[fx.Node, int] = {}
        for node in self._nodes:
            self._enter(node)

    def bytes_of(self, nodes: Iterable[fx.Node | None]) -> dict[str, int]:
        """Sizes of the storages that nodes show, by the name of the node that made each."""
        roots = {self._root[node] for node in nodes if node is not None and node in self._root}
        return {root.name: self._size[root] for root in roots}

    def run(self, returned: Iterable[fx.Node | None], beside_bytes: int) -> Moment:
        """The peak, with `beside_bytes` resident all along."""
        ends = self._ends(returned)
        here = {root: self._size[root] for root in self._size if root.op == "placeholder"}
        level = beside_bytes + sum(here.values())
        best = Moment(level, self._name, "inputs", {node.name: size for node, size in here.items()})
        dying: dict[fx.Node, list[fx.Node]] = {}
        for root, end in ends.items():
            dying.setdefault(end, []).append(root)
        for node in self._nodes:
            made = self._made.get(node, [])
            for root in made:
                here[root] = self._size[root]
                level += self._size[root]
            total = level + self._workspace(node)
            if total > best.peak_bytes:
                best = Moment(total, self._name, node.name, {root.name: size for root, size in here.items()})
            for root in (*dying.get(node, []), *(root for root in made if root not in ends)):
                level -= here.pop(root, 0)
        return best

    def _ends(self, returned: Iterable[fx.Node | None]) -> dict[fx.Node, fx.Node]:
        """The node behind which each storage is freed; absent for those that are returned, or never read."""
        ends: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            for source in node.all_input_nodes:
                if source in self._root:
                    ends[self._root[source]] = node
            if node in self._root and self._root[node] is not node:
                ends[self._root[node]] = node
        [output] = self._graph.find_nodes(op="output")
        ends.update({self._root[node]: output for node in returned if node is not None and node in self._root})
        return ends

    def _workspace(self, node: fx.Node) -> int:
        origin = node.meta.get(ORIGIN)
        return 0 if origin is None or node.op != "call_function" else self._costs.workspace_bytes.get(origin, 0)

    def _enter(self, node: fx.Node) -> None:
        origin = node.meta.get(ORIGIN)
        index = None if origin is None else self._joint.base.get(origin)
        if index is None:
            return
        result = self._joint.results[index]
        if result.node is origin and result.alias_of is None:
            self._root[node], self._size[node] = node, result.nbytes
            return
        sources = [s for s in node.all_input_nodes if s in self._root and self._shows(s, index)]
        if sources:
            self._root[node] = self._root[sources[0]]
        elif node.op == "placeholder":
            self._root[node], self._size[node] = node, result.nbytes

    def _shows(self, node: fx.Node, index: int) -> bool:
        base = self._joint.base.get(node.meta[ORIGIN])
        return base == index or self._joint.results[index].alias_of == base

    @functools.cached_property
    def _made(self) -> dict[fx.Node, list[fx.Node]]:
        """By call, the storages that appear when it runs: of a tuple, all members that are read."""
        made: dict[fx.Node, list[fx.Node]] = {}
        for root in self._size:
            if root.op == "placeholder":
                continue
            origin = self._joint.results[self._joint.base[root.meta[ORIGIN]]]
            is_member = origin.node is not origin.call
            call = root.all_input_nodes[0] if is_member else root
            made.setdefault(call, []).append(root)
        return made
