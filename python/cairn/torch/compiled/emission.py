"""From a schedule to the two graphs that AOTAutograd runs.

The schedule lists computations in the order in which they run, recomputations included. The joint graph is written anew
in that order, with a copy of a node for each recomputation, and cut at the end of the forward. Generated code frees a
value after its last reader, so the order of the nodes determines memory, and the schedule's drops need no code. A view
is taken from the current copy of its base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from ..base import _compat_compile
from .joint_graph import JointGraph, Result

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
        Nodes of the forward, and inputs, that the backward reads.
    sizes
        Symbolic sizes that it reads.
    recomputed
        The number of calls that the backward recomputes.
    """

    module: fx.GraphModule
    saved: tuple[fx.Node, ...]
    sizes: tuple[fx.Node, ...]
    recomputed: int


def emit(joint: JointGraph, ops: Iterable[Sequence[Any]]) -> Emitted:
    """Write a schedule's computations as a joint graph.

    ops: operations of a verified schedule of the problem of `joint`; only "compute" needs code.
    """
    order = [int(op[1]) for op in ops if op[0] == "compute"]
    writer = _Writer(joint)
    for index in _with_early_cut(joint, order):
        writer.compute(index)
    return writer.finish()


def _with_early_cut(joint: JointGraph, order: Sequence[int]) -> list[int]:
    """The order, with the end of the forward moved to directly after the forward's last first computation.

    Anything that a schedule recomputes between the two serves the backward alone.
    """
    end = joint.end_of_forward
    others = [index for index in order if index != end]
    begins = others.index(end - 1) + 1 if end else 0
    return [*others[:begins], end, *others[begins:]]


class _Writer:
    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._graph = fx.Graph()
        self._static: dict[fx.Node, fx.Node] = {}  # placeholders, constants, and views of them
        self._current: dict[int, dict[fx.Node, fx.Node]] = {}  # by result, its latest copy and views of that
        self._forward: set[int] = set()  # results whose latest copy the forward computes
        self._saved: dict[fx.Node, None] = {}
        self._sizes: dict[fx.Node, None] = {}
        self._in_backward = False
        self._call: tuple[fx.Node, fx.Node, set[int]] | None = None  # the latest call, its copy, members taken
        self._calls: set[fx.Node] = set()
        self._outputs: list[Any] = []
        self._recomputed = 0
        for node in joint.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._static[node] = self._graph.node_copy(node, self._argument)
                self._static[node].meta[ORIGIN] = node

    def compute(self, index: int) -> None:
        """Writes one computation."""
        result = self._joint.results[index]
        if result.node is None:
            self._outputs = [self._argument(node) for node in self._joint.outputs]
            self._in_backward, self._call = True, None
            return
        if result.node.op == "placeholder":  # a tangent
            self._current[index] = {result.node: self._static[result.node]}
            self._forward.discard(index)
            return
        copy = self._member(index, result)
        self._current[index] = {result.node: copy}
        if self._in_backward:
            self._forward.discard(index)
        else:
            self._forward.add(index)

    def finish(self) -> Emitted:
        """The whole graph."""
        grads = [self._argument(node) for node in self._joint.grads]
        old = self._joint.module.graph.find_nodes(op="output")[0]
        output = self._graph.output((*self._outputs, *grads))
        output.meta = dict(old.meta)
        self._graph.lint()
        module = fx.GraphModule(self._joint.module, self._graph)
        return Emitted(module, tuple(self._saved), tuple(self._sizes), self._recomputed)

    def _member(self, index: int, result: Result) -> fx.Node:
        """The node of a result; one call serves results of the same tuple that are neighbours in the order."""
        assert result.call is not None and result.node is not None
        if self._call is None or self._call[0] is not result.call or index in self._call[2]:
            self._call = (result.call, self._copy(result.call), set())
            self._recomputed += result.call in self._calls
            self._calls.add(result.call)
        call, copy, taken = self._call
        taken.add(index)
        if result.node is call:
            return copy
        return self._copy(result.node, {call: copy})

    def _copy(self, node: fx.Node, known: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
        """Copies a node; its arguments first, for views among them."""
        table = {source: self._argument(source) for source in node.all_input_nodes if source not in (known or {})}
        table.update(known or {})
        copy = self._graph.node_copy(node, lambda source: table[source])
        copy.meta[ORIGIN] = node
        if self._in_backward:
            _compat_compile.mark_backward(copy)
        return copy

    def _argument(self, node: fx.Node | None) -> Any:
        """The node that has the value now; a view is taken of the latest copy of its base."""
        if node is None:
            return None
        index = self._joint.base.get(node)
        self._note_saved(node, index)
        table = self._static if index is None else self._current[index]
        if node not in table:
            table[node] = self._copy(node)
        return table[node]

    def _note_saved(self, node: fx.Node, index: int | None) -> None:
        """Record what the backward reads of the forward: storages, placeholders and sizes, not views."""
        if not self._in_backward:
            return
        if index is not None:
            if index in self._forward:
                made = self._joint.results[index].node
                assert made is not None
                self._saved.setdefault(self._current[index][made])
        elif node.op == "placeholder":
            kept = self._sizes if _is_size(self._joint.values.get(node)) else self._saved
            kept.setdefault(self._static[node])
        else:
            for source in node.all_input_nodes:
                self._note_saved(source, self._joint.base.get(source))


def _is_size(value: Any) -> bool:
    return not hasattr(value, "untyped_storage")
