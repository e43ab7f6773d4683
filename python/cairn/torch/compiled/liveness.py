"""Liveness analysis of the two generated graphs: their peak memory, where every value is freed after its last reader.

The simulator computes the peak of a schedule. This file computes the peak of the graphs generated from it. It is exact
where the problem rounds up (a call allocates all members of a tuple at once), and counts what torch adds (the
backward's list of inputs holds every saved tensor). What a fusing compiler's kernels leave in memory is estimated,
until the compiler has generated their code.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import fx

from ..base import _compat
from .emission import ORIGIN
from .host_memory import TRANSFERS
from .joint_graph import JointGraph, is_tangent, returned_by
from .problem import Costs, Surroundings

#: A fused pointwise value stays in registers if computing it reads at most so many values from memory. The second limit
#: is for a value that several kernels compute.
MAX_READS, MAX_SHARED_READS = 12, 4
#: The same for the operations of a kernel, by device.
MAX_OPERATIONS_ON_CPU, MAX_OPERATIONS = 50, 30


@dataclasses.dataclass(frozen=True)
class GraphPeak:
    """The moment of a memory peak.

    Attributes
    ----------
    peak_bytes
        Memory in use.
    phase
        "forward", "loss" or "backward".
    node
        Name of the node that runs.
    resident
        The storages in memory: bytes by the name of the node that allocates each. Fixed memory and workspaces are not
        among them.
    """

    peak_bytes: int
    phase: str
    node: str
    resident: dict[str, int]

    def __str__(self) -> str:
        return self.phase if self.phase == self.node else f"{self.phase}, operator {self.node}"


class Liveness:
    """The storages of a forward and a backward graph, and when each is freed.

    The graphs are read at construction. A compiler may change them later.

    Parameters
    ----------
    forward, backward
        The graphs that `emit` and `cut` made for `joint`.
    """

    def __init__(self, joint: JointGraph, costs: Costs, forward: fx.Graph, backward: fx.Graph) -> None:
        returned = returned_by(forward)
        self._forward = _Phase(joint, costs, forward, "forward", returned)
        self._backward = _Phase(joint, costs, backward, "backward", returned_by(backward), _held_tangents(backward))
        self._saved = {node.name for node in backward.nodes if node.op == "placeholder"}
        self._outputs = returned[: len(joint.outputs)]
        self._kept = [node for node in returned if isinstance(node, fx.Node) and node.name in self._saved]
        self._copies_bytes = costs.copies_bytes

    def peak(self, surroundings: Surroundings, code: _compat.GeneratedCode | None = None) -> GraphPeak:
        """The peak of a step, fixed memory included: of the forward, the loss and the backward.

        code: the allocations in the code that a compiler generated for the two graphs. They are estimated without it.
        """
        held = self._outputs if surroundings.holds_output else []
        held_outputs = {name: size for name, size in self._forward.bytes_of(held).items() if name not in self._saved}
        held_bytes = sum(held_outputs.values())
        live_between = self._forward.bytes_of([*self._outputs, *self._kept])  # between forward and backward
        between_bytes = sum(live_between.values())
        if code is None or code.forward is None or code.backward is None:
            copies_bytes = self._copies_bytes
            first, last = self._forward.run(copies_bytes), self._backward.run(held_bytes + copies_bytes)
        else:
            first, end_bytes = self._forward.run_code(code.forward, 0)
            copies_bytes = max(
                0, end_bytes - between_bytes
            )  # of inputs: the forward's code returns them for the backward
            last, _ = self._backward.run_code(code.backward, held_bytes + copies_bytes)
        loss_bytes = between_bytes + copies_bytes + surroundings.loss_workspace_bytes
        loss = GraphPeak(loss_bytes, "loss", "loss", live_between)
        moment = max(first, loss, last, key=lambda one: one.peak_bytes)
        fixed_bytes = surroundings.fixed_bytes + surroundings.correction_bytes
        return dataclasses.replace(moment, peak_bytes=moment.peak_bytes + fixed_bytes)


def _held_tangents(backward: fx.Graph) -> list[fx.Node]:
    """The tangents of a backward graph that are in memory until it ends."""
    if not _compat.backward_holds_tangents():
        return []
    return [
        node for node in backward.find_nodes(op="placeholder") if ORIGIN in node.meta and is_tangent(node.meta[ORIGIN])
    ]


#: Operators that inductor computes once for all readers on the CPU.
_COSTLY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")


@dataclasses.dataclass(frozen=True)
class _Expression:
    """A pointwise value as an expression of values in memory: those that it reads, and the calls that compute it."""

    reads: frozenset[fx.Node]
    calls: frozenset[fx.Node]
    is_on_cpu: bool

    def is_stored(self, readers: int) -> bool:
        """Whether inductor stores the value, given how many kernels read it, instead of computing it in each."""
        most = MAX_OPERATIONS_ON_CPU if self.is_on_cpu else MAX_OPERATIONS
        if len(self.reads) > MAX_READS or self._operations() > most:
            return True
        is_costly = self.is_on_cpu and any(_operator(call) in _COSTLY for call in self.calls)
        return readers > 1 and (is_costly or len(self.reads) > MAX_SHARED_READS)

    def _operations(self) -> int:
        """About how many operations a kernel does for one element, loads and constants included."""
        constants = sum(isinstance(arg, (int, float)) for call in self.calls for arg in call.args)
        return len(self.reads) + len(self.calls) + constants


def _reads_elements_often(call: fx.Node) -> bool:
    """Whether a fused operator reads each element several times. Inductor stores its inputs."""
    return any(part in _operator(call) for part in ("pool", "upsample"))


def _operator(call: fx.Node) -> str:
    schema = _compat.schema_of(call.target)
    return "" if schema is None else str(schema.name.partition("::")[2])


class _Phase:
    """The storages of one graph: which are in memory, and when each is freed.

    A storage is identified by its *root*, the node that allocates it.

    A fusing compiler computes pointwise operators inside the kernels that read them. A value that only such kernels
    read stays in registers, unless it is costly to compute again. Its inputs stay in memory until the last of those
    kernels. A kernel writes its result over an input of the same size and dtype that nothing reads later.
    """

    def __init__(
        self,
        joint: JointGraph,
        costs: Costs,
        graph: fx.Graph,
        name: str,
        returned: Sequence[fx.Node | None],
        held: Sequence[fx.Node] = (),
    ) -> None:
        self._joint, self._costs, self._graph, self._name = joint, costs, graph, name
        self._nodes = list(graph.nodes)
        self._root: dict[fx.Node, fx.Node] = {}  # of the storage of each node
        self._size: dict[fx.Node, int] = {}  # bytes by root
        for node in self._nodes:
            self._add_storage(node)
        self._held = {self._root[node] for node in held if node in self._root}  # by the caller, until the graph ends
        self._returned = {self._root[node] for node in returned if node is not None and node in self._root} | self._held
        self._in_registers = self._find_registers() if costs.fused else set()
        self._memory_read_for = self._find_memory_reads()

    def bytes_of(self, nodes: Iterable[fx.Node | None]) -> dict[str, int]:
        """The storages of nodes: bytes by the name of each root."""
        roots = {self._root[node] for node in nodes if node is not None and node in self._root}
        return {root.name: self._size[root] for root in roots}

    def run(self, other_bytes: int) -> GraphPeak:
        """The peak of the graph, with `other_bytes` resident all along."""
        last_readers = self._find_last_readers()
        live = {root: self._size[root] for root in self._size if root.op == "placeholder"}
        level = other_bytes + sum(live.values())
        best = GraphPeak(level, self._name, "inputs", {node.name: size for node, size in live.items()})
        freed_after: dict[fx.Node, list[fx.Node]] = {}
        for root, reader in last_readers.items():
            freed_after.setdefault(reader, []).append(root)
        for node in self._nodes:
            allocated = [root for root in self._allocated_by.get(node, []) if root not in self._in_registers]
            for root in allocated:
                overwritten = self._overwritten_by(root, node, freed_after.get(node, []), live)
                if overwritten is not None:
                    level -= live.pop(overwritten)
                live[root] = self._size[root]
                level += self._size[root]
            in_use = level + self._workspace(node)
            if in_use > best.peak_bytes:
                best = GraphPeak(in_use, self._name, node.name, {root.name: size for root, size in live.items()})
            for root in (*freed_after.get(node, []), *(root for root in allocated if root not in last_readers)):
                level -= live.pop(root, 0)
        return best

    def run_code(self, events: Iterable[_compat.Event], other_bytes: int) -> tuple[GraphPeak, int]:
        """The peak of the code that a compiler generated for the graph, with `other_bytes` resident all along.

        Also returns the bytes in use at its end.
        """
        nodes = {node.name: node for node in self._nodes}
        root_of_input = {node.name: self._root[node].name for node in self._nodes
                         if node.op == "placeholder" and node in self._root}  # fmt: skip
        inputs_left = collections.Counter(root_of_input.values())  # how many inputs show each storage
        inputs_left.update(root.name for root in self._held)
        live = {name: self._size[nodes[name]] for name in inputs_left}
        producer: dict[str, str] = {}
        level = other_bytes + sum(live.values())
        best = level, "inputs", dict(live)
        for event in events:
            workspace = 0
            if event.kind == "allocate":
                producer[event.name] = event.node or "kernel"
                live[event.name] = event.nbytes
                level += event.nbytes
            elif event.kind == "run":
                workspace = self._workspace(nodes[event.name]) if event.name in nodes else 0
            else:
                name = root_of_input.get(event.name, event.name)
                inputs_left[name] -= 1
                if inputs_left[name] <= 0:
                    level -= live.pop(name, 0)
            if level + workspace > best[0]:
                best = level + workspace, event.node or event.name, dict(live)
        by_node: collections.Counter[str] = collections.Counter()
        for name, size in best[2].items():
            by_node[producer.get(name, name)] += size
        return GraphPeak(best[0], self._name, best[1], dict(by_node)), level

    def _find_registers(self) -> set[fx.Node]:
        """The roots of values that are never in memory: pointwise ones, and products that are merged into sums."""
        in_memory = set(self._returned)
        for node in self._nodes:
            if not self._is_view(node) and (not self._is_fused(node) or _reads_elements_often(node)):
                in_memory.update(self._root[source] for source in node.all_input_nodes if source in self._root)
        in_registers: dict[fx.Node, _Expression] = {}
        readers = self._readers()
        for root in self._size:
            if self._is_pointwise(root) and root not in in_memory:
                expression = self._expression(root, in_registers)
                if not expression.is_stored(len(readers.get(root, ()))):
                    in_registers[root] = expression
        return set(in_registers) | {root for root in self._size if self._is_merged(root, readers.get(root, set()))}

    def _readers(self) -> dict[fx.Node, set[fx.Node]]:
        """By root, the calls that read its storage, through views too."""
        readers: dict[fx.Node, set[fx.Node]] = {}
        for node in self._nodes:
            if not self._is_view(node):
                for source in node.all_input_nodes:
                    if source in self._root:
                        readers.setdefault(self._root[source], set()).add(node)
        return readers

    def _expression(self, root: fx.Node, in_registers: Mapping[fx.Node, _Expression]) -> _Expression:
        """The expression of a pointwise value. in_registers: the expressions of operands that stay in registers."""
        call = self._call(root)
        reads, calls = set[fx.Node](), {call}
        for source in call.all_input_nodes:
            storage = self._root.get(source, source)
            operand = in_registers.get(storage)
            reads |= {storage} if operand is None else operand.reads
            calls |= set() if operand is None else operand.calls
        return _Expression(
            frozenset(reads), frozenset(calls), self._joint.values[root.meta[ORIGIN]].device.type == "cpu"
        )

    def _find_memory_reads(self) -> dict[fx.Node, set[fx.Node]]:
        """By root: the storage itself if it is in memory, else the storages in memory from which it is computed."""
        storages: dict[fx.Node, set[fx.Node]] = {}
        for root in self._size:
            if root in self._in_registers:
                storages[root] = {s for node in self._call(root).all_input_nodes if node in self._root
                               for s in storages[self._root[node]]}  # fmt: skip
            else:
                storages[root] = {root}
        return storages

    def _find_last_readers(self) -> dict[fx.Node, fx.Node]:
        """By root, the node after which its storage is freed. Storages that nothing reads are absent."""
        last_readers: dict[fx.Node, fx.Node] = {}
        fused_calls = {self._call(root) for root in self._in_registers}
        for node in self._nodes:
            if node in fused_calls or (self._costs.fused and self._is_view(node)):
                continue
            for source in node.all_input_nodes:
                if source in self._root:
                    last_readers.update(dict.fromkeys(self._memory_read_for[self._root[source]], node))
            if self._is_view(node):
                last_readers[self._root[node]] = node
        [output] = self._graph.find_nodes(op="output")
        last_readers.update(dict.fromkeys(self._returned, output))
        return last_readers

    def _overwritten_by(
        self, root: fx.Node, call: fx.Node, freed: Iterable[fx.Node], live: Mapping[fx.Node, int]
    ) -> fx.Node | None:
        """The storage that a kernel's result overwrites; None if it needs memory of its own."""
        if not self._is_fused(call):
            return None
        candidates = (old for old in freed if old in live and live[old] == self._size[root] and old is not root)
        return next((old for old in candidates if self._type(old) == self._type(root)), None)

    def _is_view(self, node: fx.Node) -> bool:
        return node in self._root and self._root[node] is not node

    def _is_fused(self, node: fx.Node) -> bool:
        origin = node.meta.get(ORIGIN)
        return node.op == "call_function" and (origin in self._costs.fused or self._is_member_of_fused(node))

    def _is_member_of_fused(self, node: fx.Node) -> bool:
        return _compat.is_getitem(node.target) and self._is_fused(node.all_input_nodes[0])

    def _is_pointwise(self, root: fx.Node) -> bool:
        origin = self._call(root).meta.get(ORIGIN)
        return root.op == "call_function" and origin is not None and self._costs.fused.get(origin, False)

    def _is_merged(self, root: fx.Node, readers: Set[fx.Node]) -> bool:
        """Whether a storage is a product that is computed together with its only reader, a sum."""
        origin = root.meta.get(ORIGIN)
        total = None if origin is None else self._costs.merged.get(origin)
        return total is not None and len(readers) == 1 and next(iter(readers)).meta.get(ORIGIN) is total

    def _type(self, root: fx.Node) -> Any:
        return self._joint.values[root.meta[ORIGIN]].dtype

    def _call(self, root: fx.Node) -> fx.Node:
        """The call that allocates a storage, alone or as a member of a tuple."""
        return root.all_input_nodes[0] if _compat.is_getitem(root.target) else root

    def _workspace(self, node: fx.Node) -> int:
        origin = node.meta.get(ORIGIN)
        if origin is None or node.op != "call_function" or node.target in TRANSFERS:
            return 0
        return self._costs.workspace_bytes.get(origin, 0)

    def _add_storage(self, node: fx.Node) -> None:
        """Map a node to the root of its storage."""
        origin = node.meta.get(ORIGIN)
        index = None if origin is None else self._joint.base.get(origin)
        if index is None:
            return
        result = self._joint.results[index]
        sharing = [
            source for source in node.all_input_nodes if source in self._root and self._has_storage_of(source, index)
        ]
        if sharing:
            self._root[node] = self._root[sharing[0]]
        elif node.op == "placeholder" or (result.node is origin and result.alias_of is None):
            self._root[node], self._size[node] = node, result.nbytes

    def _has_storage_of(self, node: fx.Node, index: int) -> bool:
        base = self._joint.base.get(node.meta[ORIGIN])
        return base == index or self._joint.results[index].alias_of == base

    @functools.cached_property
    def _allocated_by(self) -> dict[fx.Node, list[fx.Node]]:
        """By call, the roots of the storages that it allocates: of a tuple, all members that are read."""
        allocated: dict[fx.Node, list[fx.Node]] = {}
        for root in self._size:
            if root.op == "placeholder":
                continue
            allocated.setdefault(self._call(root), []).append(root)
        return allocated
