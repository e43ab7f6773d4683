"""From a schedule to the two graphs that AOTAutograd runs.

The schedule lists computations in the order in which they run, recomputations included. The joint graph is written anew
in that order, with a copy of a node for each recomputation, and cut at the end of the forward. Generated code frees a
value after its last reader. So the order of the nodes determines memory, and the schedule's drops need no code. A view
is computed anew from the latest copy of its base. Transfers are calls of operators (`host_memory.py`), where the
schedule has them. A value that was prefetched is one more copy of its node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from ..base import _compat
from .host_memory import ARRIVED, OFFLOAD, PREFETCH, TRANSFERS, WAIT_FOR, handle_like
from .joint_graph import JointGraph, Result
from .transfers import HostSlab, Op, layout_of, moved_bytes

#: In a copy's metadata: the node of the joint graph that it is a copy of.
ORIGIN = "cairn_origin"


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A joint graph in a schedule's order.

    Attributes
    ----------
    module
        The graph.
    saved
        The saved values: nodes of the forward, and inputs, that the backward reads.
    sizes
        The symbolic sizes that the backward reads.
    recomputed
        The number of recomputed calls.
    host_bytes
        Size of the slab in host memory that the offloaded values need.
    """

    module: fx.GraphModule
    saved: tuple[fx.Node, ...]
    sizes: tuple[fx.Node, ...]
    recomputed: int
    host_bytes: int = 0


def emit(joint: JointGraph, ops: Iterable[Sequence[Any]], memory: int = 0, *, saves_views: bool = False) -> Emitted:
    """Write a schedule's computations and transfers as a joint graph.

    Parameters
    ----------
    ops
        Operations on results of `joint`, from a verified schedule; with transfers, the list that `transfers.performed`
        returns. Drops need no code.
    memory
        The number of the `HostMemory` to which values are offloaded.
    saves_views
        Whether views that the forward has taken are saved for the backward. They take no memory. Otherwise their bases
        are saved, and the backward takes the views again.
    """
    writer = _Writer(joint, memory, saves_views)
    for name, index in _with_forward_end_early(joint, [(str(op[0]), int(op[1])) for op in ops]):
        if name != "drop":
            getattr(writer, name)(index)
    return writer.finish()


def _with_forward_end_early(joint: JointGraph, ops: Sequence[Op]) -> list[Op]:
    """The list with the end of the forward moved ahead of recomputations that only the backward needs.

    Those are the computations between the forward's last result and the end of the forward.
    """
    end = ("compute", joint.end_of_forward)
    end_position = ops.index(end)
    after_last_result = ops.index(("compute", end[1] - 1)) + 1 if end[1] else 0
    new_end = next((i for i in range(after_last_result, end_position) if ops[i][0] == "compute"), end_position)
    return [*ops[:new_end], end, *ops[new_end:end_position], *ops[end_position + 1 :]]


class _Writer:
    """Writes the graph, one call for each operation of the list: the method has the operation's name.

    compute
        Computes or recomputes a result.
    offload, wait
        Starts the copy of a value to the host, and waits for it.
    prefetch, last_prefetch
        Starts the copy back to the device; the last prefetch frees the host memory. The copy is
        awaited where its first reader is written.
    """

    def __init__(self, joint: JointGraph, memory: int, saves_views: bool) -> None:
        self._joint, self._memory, self._saves_views = joint, memory, saves_views
        self._forward_views: set[fx.Node] = set()
        self._graph = fx.Graph()
        self._static: dict[fx.Node, fx.Node] = {}  # copies of placeholders, constants, and their views
        self._current: dict[int, dict[fx.Node, fx.Node]] = {}  # by result: its latest copy, and views of it
        self._forward: set[int] = set()  # results whose latest copy is in the forward
        self._saved: dict[fx.Node, None] = {}
        self._sizes: dict[fx.Node, None] = {}
        self._in_backward = False
        self._call: tuple[fx.Node, fx.Node, set[int]] | None = (
            None  # the latest call, its copy, and the members used of it
        )
        self._calls: set[fx.Node] = set()
        self._outputs: list[Any] = []
        self._recomputed = 0
        self._handles: dict[int, fx.Node] = {}  # by result: the handle of its copy on the host
        self._arriving: dict[int, tuple[fx.Node, bool]] = {}  # by result: its prefetch, and whether it is the last
        self._forward_handles: set[fx.Node] = set()  # handles that the forward made
        self._host = HostSlab()
        for node in joint.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._static[node] = self._graph.node_copy(node, self._argument)
                self._static[node].meta[ORIGIN] = node

    def compute(self, index: int) -> None:
        """Computes a result, or ends the forward."""
        result = self._joint.results[index]
        if result.node is None:
            self._outputs = [self._argument(node) for node in self._joint.outputs]
            self._in_backward, self._call = True, None
            return
        if result.node.op == "placeholder":  # a tangent
            self._current[index] = {result.node: self._static[result.node]}
            self._forward.discard(index)
            return
        copy = self._result_copy(index, result)
        self._current[index] = {result.node: copy}
        if self._in_backward:
            self._forward.discard(index)
        else:
            self._forward.add(index)

    def offload(self, index: int) -> None:
        """Starts to copy a value to the host."""
        node = self._node(index)
        self._host.take(index, moved_bytes(self._joint.values[node]))
        arguments = (self._argument(node), node.name, self._memory, 0)
        self._handles[index] = self._transfer(OFFLOAD, arguments, "offloaded", node)

    def wait(self, index: int) -> None:
        """Waits until a value is on the host."""
        node = self._node(index)
        arguments = (self._handle(index), self._argument(node))
        self._handles[index] = self._transfer(WAIT_FOR, arguments, "on_host", node)

    def prefetch(self, index: int) -> None:
        """Starts to copy a value back to the device."""
        node = self._node(index)
        arriving = self._transfer(PREFETCH, (self._handle(index),), "prefetched", node)
        arriving.meta[ORIGIN] = node  # the value's memory is allocated here
        self._arriving[index] = arriving, False

    def last_prefetch(self, index: int) -> None:
        """Starts to copy a value back to the device for the last time."""
        self.prefetch(index)
        self._arriving[index] = self._arriving[index][0], True

    def _await_prefetch(self, index: int) -> None:
        """Waits for a prefetch. The value is one more copy of its node."""
        node = self._node(index)
        arriving, is_last = self._arriving.pop(index)
        self._save_handle(arriving)
        copy = self._transfer(ARRIVED, (arriving, is_last, *layout_of(self._joint.values[node])), "arrived", node)
        copy.meta = {**node.meta, ORIGIN: node}
        if self._in_backward:
            _compat.mark_backward(copy)
        if is_last:
            self._host.free(index)
        self._current[index] = {node: copy}
        (self._forward.discard if self._in_backward else self._forward.add)(index)

    def _transfer(self, target: Any, arguments: tuple[Any, ...], prefix: str, node: fx.Node) -> fx.Node:
        """A call of a transfer's operator, which returns a handle. Its name begins with `prefix`."""
        call = self._graph.create_node("call_function", target, arguments, name=f"{prefix}_{node.name}")
        call.meta["val"] = handle_like(self._joint.values[node])
        if self._in_backward:
            _compat.mark_backward(call)
        else:
            self._forward_handles.add(call)
        return call

    def _handle(self, index: int) -> fx.Node:
        self._save_handle(self._handles[index])
        return self._handles[index]

    def _save_handle(self, handle: fx.Node) -> None:
        """Adds a handle of the forward to the saved values if the backward reads it."""
        if self._in_backward and handle in self._forward_handles:
            self._saved.setdefault(handle)

    def _node(self, index: int) -> fx.Node:
        node = self._joint.results[index].node
        assert node is not None
        return node

    def finish(self) -> Emitted:
        """The whole graph."""
        grads = [self._argument(node) for node in self._joint.grads]
        old = self._joint.module.graph.find_nodes(op="output")[0]
        output = self._graph.output((*self._outputs, *grads))
        output.meta = dict(old.meta)
        self._finish_transfers()
        self._graph.lint()
        module = _compat.graph_module(self._joint.module, self._graph)
        return Emitted(module, tuple(self._saved), tuple(self._sizes), self._recomputed, self._host.most_bytes)

    def _finish_transfers(self) -> None:
        """Removes transfers that nothing reads. The first offload gets the host memory that the step needs."""
        for node in reversed(self._graph.nodes):
            if node.target in TRANSFERS and not node.users:
                self._saved.pop(node, None)
                self._graph.erase_node(node)
        for call in self._graph.find_nodes(op="call_function", target=OFFLOAD)[:1]:
            call.args = (*call.args[:-1], self._host.most_bytes)

    def _result_copy(self, index: int, result: Result) -> fx.Node:
        """A copy of a result's node. Members of one tuple that follow each other share one copy of the call."""
        assert result.call is not None and result.node is not None
        if self._call is None or self._call[0] is not result.call or index in self._call[2]:
            self._call = (result.call, self._copy(result.call), set())
            self._recomputed += result.call in self._calls
            self._calls.add(result.call)
        call, copy, used = self._call
        used.add(index)
        if result.node is call:
            return copy
        return self._copy(result.node, {call: copy})

    def _copy(self, node: fx.Node, replacements: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
        """Copies a node, after its arguments. replacements: copies to use for some of them."""
        arguments = {
            source: self._argument(source) for source in node.all_input_nodes if source not in (replacements or {})
        }
        arguments.update(replacements or {})
        copy = self._graph.node_copy(node, lambda source: arguments[source])
        copy.meta[ORIGIN] = node
        if self._in_backward:
            _compat.mark_backward(copy)
        return copy

    def _argument(self, node: fx.Node | None) -> Any:
        """The copy of a node that holds its value here. A view is computed from the latest copy of its base."""
        if node is None:
            return None
        index = self._joint.base.get(node)
        if index in self._arriving:
            self._await_prefetch(index)
        copies = self._static if index is None else self._current[index]
        if self._in_backward and copies.get(node) in self._forward_views:
            self._saved.setdefault(copies[node])
            return copies[node]
        self._save(node, index)
        if node not in copies:
            copies[node] = self._copy(node)
            if self._saves_views and not self._in_backward and not _is_size(self._joint.values.get(node)):
                self._forward_views.add(copies[node])
        return copies[node]

    def _save(self, node: fx.Node, index: int | None) -> None:
        """Adds to the saved values what the backward reads here. Of a view, its base is saved."""
        if not self._in_backward:
            return
        if index is not None:
            if index in self._forward:
                result_node = self._joint.results[index].node
                assert result_node is not None
                self._saved.setdefault(self._current[index][result_node])
        elif node.op == "placeholder":
            saved = self._sizes if _is_size(self._joint.values.get(node)) else self._saved
            saved.setdefault(self._static[node])
        else:
            for source in node.all_input_nodes:
                self._save(source, self._joint.base.get(source))


def _is_size(value: Any) -> bool:
    return not hasattr(value, "untyped_storage")
