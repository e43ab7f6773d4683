"""The peak memory of the two generated graphs, in which every value is freed after its last reader.

The simulator computes the peak of a schedule; this file computes that of the graphs made from it. It is exact where the
problem rounds up (a call makes all members of a tuple at once), and counts what torch adds (the backward's list of
inputs holds every saved tensor).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from ..base import _compat_compile
from .emission import ORIGIN
from .host_memory import TRANSFERS
from .joint_graph import JointGraph, returned_by
from .problem import Costs, Surroundings

#: How many values in memory a kernel may read for one value that it does not store; for one that several kernels need.
MOST_READS, MOST_SHARED_READS = 12, 4


@dataclasses.dataclass(frozen=True)
class Moment:
    """A peak of memory: its bytes, its graph, the node that runs, and the memory in use then, by node."""

    peak_bytes: int
    phase: str
    node: str
    resident: dict[str, int]

    def __str__(self) -> str:
        return self.phase if self.phase == self.node else f"{self.phase}, operator {self.node}"


def peak(joint: JointGraph, costs: Costs, around: Surroundings, forward: fx.Graph, backward: fx.Graph) -> Moment:
    """The peak of a step, fixed memory included."""
    returned = returned_by(forward)
    first = _Phase(joint, costs, forward, "forward", returned)
    saved = {node.name for node in backward.nodes if node.op == "placeholder"}
    handed = returned[: len(joint.outputs)]
    held = handed if around.holds_output else []
    kept = [node for node in returned if isinstance(node, fx.Node) and (node.name in saved or node in held)]
    found = first.run(0)
    between = first.bytes_of([*handed, *kept])
    loss = sum(between.values()) + around.loss_workspace_bytes
    if loss > found.peak_bytes:
        found = Moment(loss, "loss", "loss", between)
    beside = {name: size for name, size in first.bytes_of(held).items() if name not in saved}
    second = _Phase(joint, costs, backward, "backward", returned_by(backward))
    last = second.run(sum(beside.values()))
    found = last if last.peak_bytes > found.peak_bytes else found
    fixed = around.fixed_bytes + costs.copies_bytes + around.correction_bytes
    return dataclasses.replace(found, peak_bytes=found.peak_bytes + fixed)


#: Operators that inductor computes once for all readers on the CPU.
_COSTLY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")


@dataclasses.dataclass(frozen=True)
class _Expression:
    """A pointwise value as a function of what is in memory: how many values it reads, and whether it is costly.

    Inductor stores it where it reads too many, or where several kernels would compute it again and that is not cheap.
    """

    reads: int
    is_costly: bool

    def is_stored(self, readers: int) -> bool:
        return self.reads > MOST_READS or (readers > 1 and (self.is_costly or self.reads > MOST_SHARED_READS))


def _operator(call: fx.Node) -> str:
    schema = getattr(call.target, "_schema", None)
    return "" if schema is None else str(schema.name.partition("::")[2])


class _Phase:
    """One graph: the storage of each node, whether it is in memory, and when it is freed.

    A fusing compiler computes pointwise operators inside the kernels that read them. A value that only such kernels
    read is not in memory, unless it is costly to compute again, and its inputs stay until the last of those kernels.
    A kernel writes its result over an input of the same size and type that nothing else reads.
    """

    def __init__(
        self, joint: JointGraph, costs: Costs, graph: fx.Graph, name: str, returned: Sequence[fx.Node | None]
    ) -> None:
        self._joint, self._costs, self._graph, self._name = joint, costs, graph, name
        self._nodes = list(graph.nodes)
        self._root: dict[fx.Node, fx.Node] = {}
        self._size: dict[fx.Node, int] = {}
        for node in self._nodes:
            self._enter(node)
        self._returned = {self._root[node] for node in returned if node is not None and node in self._root}
        self._inside = self._read_by_kernels_alone() if costs.fused else set()
        self._sources = self._sources_in_memory()

    def bytes_of(self, nodes: Iterable[fx.Node | None]) -> dict[str, int]:
        """Sizes of the storages that nodes show, by the name of the node that made each."""
        roots = {self._root[node] for node in nodes if node is not None and node in self._root}
        return {root.name: self._size[root] for root in roots}

    def run(self, beside_bytes: int) -> Moment:
        """The peak, with `beside_bytes` resident all along."""
        ends = self._ends()
        here = {root: self._size[root] for root in self._size if root.op == "placeholder"}
        level = beside_bytes + sum(here.values())
        best = Moment(level, self._name, "inputs", {node.name: size for node, size in here.items()})
        dying: dict[fx.Node, list[fx.Node]] = {}
        for root, end in ends.items():
            dying.setdefault(end, []).append(root)
        for node in self._nodes:
            made = [root for root in self._made.get(node, []) if root not in self._inside]
            for root in made:
                over = self._written_over(root, node, dying.get(node, []), here)
                if over is not None:
                    level -= here.pop(over)
                here[root] = self._size[root]
                level += self._size[root]
            total = level + self._workspace(node)
            if total > best.peak_bytes:
                best = Moment(total, self._name, node.name, {root.name: size for root, size in here.items()})
            for root in (*dying.get(node, []), *(root for root in made if root not in ends)):
                level -= here.pop(root, 0)
        return best

    def _read_by_kernels_alone(self) -> set[fx.Node]:
        """The results of pointwise operators that are never in memory."""
        elsewhere = set(self._returned)
        for node in self._nodes:
            if not self._is_view(node) and not self._is_fused(node):
                elsewhere.update(self._root[source] for source in node.all_input_nodes if source in self._root)
        inside: dict[fx.Node, _Expression] = {}
        readers = self._readers()
        for root in self._size:
            if self._is_pointwise(root) and root not in elsewhere:
                expression = self._expression(root, inside)
                if not expression.is_stored(len(readers.get(root, ()))):
                    inside[root] = expression
        return set(inside)

    def _readers(self) -> dict[fx.Node, set[fx.Node]]:
        """By storage, the calls that read it, through views too."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in self._nodes:
            if not self._is_view(node):
                for source in node.all_input_nodes:
                    if source in self._root:
                        found.setdefault(self._root[source], set()).add(node)
        return found

    def _expression(self, root: fx.Node, inside: Mapping[fx.Node, _Expression]) -> _Expression:
        """What a kernel computes for a value that it holds in registers, given those that are held already."""
        call = self._call(root)
        reads, is_costly = 0, _operator(call) in _COSTLY and self._joint.values[root.meta[ORIGIN]].device.type == "cpu"
        for source in call.all_input_nodes:
            part = inside.get(self._root.get(source, source))
            reads += 1 if part is None else part.reads
            is_costly |= part is not None and part.is_costly
        return _Expression(reads, is_costly)

    def _sources_in_memory(self) -> dict[fx.Node, set[fx.Node]]:
        """For each storage: itself if it is in memory, else the storages that fused kernels read instead of it."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for root in self._size:
            if root in self._inside:
                found[root] = {s for node in self._call(root).all_input_nodes if node in self._root
                               for s in found[self._root[node]]}  # fmt: skip
            else:
                found[root] = {root}
        return found

    def _ends(self) -> dict[fx.Node, fx.Node]:
        """The node after which each storage is freed; storages that are returned or never read are absent."""
        ends: dict[fx.Node, fx.Node] = {}
        inside = {self._call(root) for root in self._inside}
        for node in self._nodes:
            if node in inside or (self._costs.fused and self._is_view(node)):
                continue
            for source in node.all_input_nodes:
                if source in self._root:
                    ends.update(dict.fromkeys(self._sources[self._root[source]], node))
            if self._is_view(node):
                ends[self._root[node]] = node
        [output] = self._graph.find_nodes(op="output")
        ends.update(dict.fromkeys(self._returned, output))
        return ends

    def _written_over(
        self, root: fx.Node, call: fx.Node, dying: Iterable[fx.Node], here: Mapping[fx.Node, int]
    ) -> fx.Node | None:
        """The storage that a kernel's result overwrites."""
        if not self._is_fused(call):
            return None
        alike = (old for old in dying if old in here and here[old] == self._size[root] and old is not root)
        return next((old for old in alike if self._type(old) == self._type(root)), None)

    def _is_view(self, node: fx.Node) -> bool:
        return node in self._root and self._root[node] is not node

    def _is_fused(self, node: fx.Node) -> bool:
        origin = node.meta.get(ORIGIN)
        return node.op == "call_function" and (origin in self._costs.fused or self._is_member_of_fused(node))

    def _is_member_of_fused(self, node: fx.Node) -> bool:
        return _compat_compile.is_getitem(node.target) and self._is_fused(node.all_input_nodes[0])

    def _is_pointwise(self, root: fx.Node) -> bool:
        origin = self._call(root).meta.get(ORIGIN)
        return root.op == "call_function" and origin is not None and self._costs.fused.get(origin, False)

    def _type(self, root: fx.Node) -> Any:
        return self._joint.values[root.meta[ORIGIN]].dtype

    def _call(self, root: fx.Node) -> fx.Node:
        """The call that makes a storage, alone or as a member of a tuple."""
        return root.all_input_nodes[0] if _compat_compile.is_getitem(root.target) else root

    def _workspace(self, node: fx.Node) -> int:
        origin = node.meta.get(ORIGIN)
        if origin is None or node.op != "call_function" or node.target in TRANSFERS:
            return 0
        return self._costs.workspace_bytes.get(origin, 0)

    def _enter(self, node: fx.Node) -> None:
        origin = node.meta.get(ORIGIN)
        index = None if origin is None else self._joint.base.get(origin)
        if index is None:
            return
        result = self._joint.results[index]
        sources = [s for s in node.all_input_nodes if s in self._root and self._shows(s, index)]
        if sources:
            self._root[node] = self._root[sources[0]]
        elif node.op == "placeholder" or (result.node is origin and result.alias_of is None):
            self._root[node], self._size[node] = node, result.nbytes

    def _shows(self, node: fx.Node, index: int) -> bool:
        base = self._joint.base.get(node.meta[ORIGIN])
        return base == index or self._joint.results[index].alias_of == base

    @functools.cached_property
    def _made(self) -> dict[fx.Node, list[fx.Node]]:
        """By call, the storages that it allocates: of a tuple, all members that are read."""
        made: dict[fx.Node, list[fx.Node]] = {}
        for root in self._size:
            if root.op == "placeholder":
                continue
            made.setdefault(self._call(root), []).append(root)
        return made
