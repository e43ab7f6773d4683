"""Analysis of AOTAutograd's joint graph: which call produces which storage, and what may be recomputed.

AOTAutograd traces the forward and the backward of a step into one functional graph. Its storages determine its memory:
a view (transpose, expand, slice) shares the storage of another node and costs nothing, and a call that returns a tuple
produces several storages at once. `read` runs the graph on fake tensors, which have shapes and storages but no memory.
One storage produced by one call is a `Result`. A schedule computes, keeps and drops results. Views are no results. They
are computed anew from their base wherever they are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..base import _compat
from ..base.errors import Unsupported


@dataclasses.dataclass(frozen=True)
class Result:
    """One storage that one call produces.

    Attributes
    ----------
    node
        The node whose value has the storage: the call itself, or a member of its tuple. None for the end of the
        forward, where its outputs are handed over.
    call
        The call of the operator; for a tangent its placeholder. None for the end of the forward.
    nbytes
        Size of the storage in bytes.
    deps
        Indices of the results that the call reads, through views too, ascending.
    alias_of
        Index of the result whose storage an operator with side effects returns; None for a new storage.
    is_backward
        Whether it is computed in the backward.
    no_recompute
        Whether it must not be recomputed: random numbers, collectives, side effects, and results that depend on a
        buffer that the step writes.
    """

    node: fx.Node | None
    call: fx.Node | None
    nbytes: int
    deps: tuple[int, ...]
    alias_of: int | None = None
    is_backward: bool = False
    no_recompute: bool = False


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A training step: its results, in the order in which they are first computed.

    Attributes
    ----------
    module
        The joint graph.
    results
        The results of the forward, the end of the forward, the tangents, and the results of the backward.
    end_of_forward
        Index of the result that stands for the end of the forward.
    base
        For each node with a tensor, the index of the result whose storage it has. Nodes that share a placeholder's or
        a constant's storage are absent: that storage is always resident.
    outputs, grads
        The outputs of the forward, and of the backward; None in place of an output that is no node.
    values
        The fake tensor, or the size, of each node.
    written
        The inputs whose contents the step replaces.
    """

    module: fx.GraphModule
    results: tuple[Result, ...]
    end_of_forward: int
    base: dict[fx.Node, int]
    outputs: tuple[fx.Node | None, ...]
    grads: tuple[fx.Node | None, ...]
    values: dict[fx.Node, Any]
    written: set[fx.Node]

    def members(self, call: fx.Node) -> list[int]:
        """Indices of the results of one call."""
        return self._by_call[call]

    def readers(self, index: int) -> list[fx.Node]:
        """The calls that read a result, through views too."""
        return self._by_result.get(index, [])

    @functools.cached_property
    def _by_result(self) -> dict[int, list[fx.Node]]:
        readers: dict[int, list[fx.Node]] = {}
        for call in self._by_call:
            for index in {self.base[source] for source in call.all_input_nodes if source in self.base}:
                readers.setdefault(index, []).append(call)
        return readers

    def bases(self, nodes: Sequence[fx.Node | None]) -> set[int]:
        """Indices of the results whose storages the nodes have."""
        return {self.base[node] for node in nodes if node is not None and node in self.base}

    def calls(self) -> list[fx.Node]:
        """The calls that produce results, in order."""
        return list(self._by_call)

    @functools.cached_property
    def _by_call(self) -> dict[fx.Node, list[int]]:
        members: dict[fx.Node, list[int]] = {}
        for index, result in enumerate(self.results):
            if result.call is not None:
                members.setdefault(result.call, []).append(index)
        return members


def read(module: fx.GraphModule, num_fwd_outputs: int) -> JointGraph:
    """Analyse a joint graph.

    Parameters
    ----------
    module
        The graph that AOTAutograd passes to a partition function. It is changed: inputs that the step writes get a
        copy, which the step reads.
    num_fwd_outputs
        The number of its outputs that belong to the forward.
    """
    written = _written(module.graph)
    _read_through_copies(module, written)
    return _Analysis(module, num_fwd_outputs, written).read()


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The inputs that the step writes (statistics of BatchNorm), in the graph or after it in AOTAutograd's wrapper."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {*_compat.written_inputs(graph), *(node.args[0] for node in copies)}


def _read_through_copies(module: fx.GraphModule, written: set[fx.Node]) -> None:
    """Make a step read copies of the inputs that it writes, so that forward and backward read the same values."""
    placeholders = module.graph.find_nodes(op="placeholder")
    for node in [placeholder for placeholder in placeholders if placeholder in written]:
        readers = [user for user in node.users if user.op == "call_function" and not _writes(user, node)]
        if not readers:
            continue
        with module.graph.inserting_after(placeholders[-1]):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        with _fake_mode(module):
            copy.meta = {**node.meta, "val": node.meta["val"].clone()}
        for reader in readers:
            reader.replace_input_with(node, copy)


def _writes(user: fx.Node, node: fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is node


class _Analysis:
    def __init__(self, module: fx.GraphModule, num_fwd_outputs: int, written: set[fx.Node]) -> None:
        self._module = module
        self._values = _fake_values(module)
        returned = returned_by(module.graph)
        self._outputs, self._grads = returned[:num_fwd_outputs], returned[num_fwd_outputs:]
        placeholders = module.graph.find_nodes(op="placeholder")
        self._tangents = [node for node in placeholders if is_tangent(node)]
        primals = [node for node in placeholders if not is_tangent(node)]
        self._written = written
        self._backward = self._nodes_of_backward()
        self._results: list[Result] = []
        self._base: dict[fx.Node, int] = {}
        self._result_of_storage: dict[int, int] = {}  # index of the latest result with a storage, by storage
        self._static = {_storage(self._values[n]) for n in (*primals, *module.graph.find_nodes(op="get_attr"))
                        if isinstance(self._values.get(n), torch.Tensor)}  # fmt: skip

    def read(self) -> JointGraph:
        calls = [node for node in self._module.graph.nodes if node.op == "call_function"]
        for node in calls:
            if node not in self._backward:
                self._add(node)
        end = self._add_forward_end()
        for node in calls:
            if node in self._backward:
                self._add(node)
        results = tuple(self._results)
        ends = self._outputs, self._grads
        return JointGraph(self._module, results, end, self._base, *ends, self._values, self._written)

    def _nodes_of_backward(self) -> set[fx.Node]:
        """Nodes that depend on a tangent, and nodes that AOTAutograd traced in the backward."""
        backward: set[fx.Node] = set(self._tangents)
        for node in self._module.graph.nodes:
            if node.op == "call_function" and (
                _compat.is_backward_node(node) or any(source in backward for source in node.all_input_nodes)
            ):
                backward.add(node)
        self._refuse_late_outputs(backward)
        return backward

    def _refuse_late_outputs(self, backward: set[fx.Node]) -> None:
        late = [node for node in self._outputs if node in backward]
        if late:
            raise Unsupported(f"the forward returns {late[0].name}, which the backward computes")

    def _add_forward_end(self) -> int:
        """Add the end of the forward, which returns the outputs, and the tangents that the backward receives."""
        outputs = [node for node in self._outputs if node is not None]
        end = self._append(Result(None, None, 0, self._deps(outputs), no_recompute=True))
        for node in self._tangents:
            value = self._values[node]
            if isinstance(value, torch.Tensor):
                index = self._append(Result(node, node, _nbytes(value), (end,), is_backward=True, no_recompute=True))
                self._set_result(node, index)
        return end

    def _append(self, result: Result) -> int:
        self._results.append(result)
        return len(self._results) - 1

    def _set_result(self, node: fx.Node, index: int) -> None:
        """Map a node and its storage to a new result."""
        self._base[node] = index
        self._result_of_storage[_storage(self._values[node])] = index

    def _deps(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        return tuple(sorted({self._base[node] for node in nodes if node in self._base}))

    def _add(self, node: fx.Node) -> None:
        """Add a call's results. A view, or a member of a tuple, is only mapped to the result whose storage it has."""
        value = self._values[node]
        if _is_member(node):
            if isinstance(value, torch.Tensor):
                self._map_to_existing(node)
        elif _has_effects(node):
            self._add_effect(node, value)
        elif isinstance(value, torch.Tensor):
            if not self._map_to_existing(node):
                self._add_results(node, [node])
        elif isinstance(value, (tuple, list)):
            self._add_results(node, self._members_with_new_storage(node))
            self._map_views(node, value)

    def _map_to_existing(self, node: fx.Node) -> bool:
        """Whether a node's storage exists already. If a result has it, the node is mapped to that result."""
        storage = _storage(self._values[node])
        if storage in self._result_of_storage:
            self._base[node] = self._result_of_storage[storage]
            return True
        return storage in self._static

    def _map_views(self, call: fx.Node, value: Sequence[Any]) -> None:
        """Map a call that returns a tuple of views (the pieces of a split) to the result that all of them share."""
        bases = {self._result_of_storage.get(_storage(part)) for part in value if isinstance(part, torch.Tensor)}
        base = bases.pop() if len(bases) == 1 else None
        if base is not None and not any(user in self._nodes_of_results(call) for user in call.users):
            self._base[call] = base

    def _nodes_of_results(self, call: fx.Node) -> set[fx.Node]:
        return {result.node for result in self._results[-len(call.users) :] if result.call is call and result.node}

    def _members_with_new_storage(self, call: fx.Node) -> list[fx.Node]:
        """The members of a tuple that have new storages and are used, smallest first. Each storage counts once."""
        by_storage: dict[int, fx.Node] = {}
        for user in call.users:
            if not _is_member(user):
                raise Unsupported(f"{user.name} takes the tuple of {call.name} whole")
            value = self._values[user]
            if isinstance(value, torch.Tensor) and not self._map_to_existing(user):
                by_storage.setdefault(_storage(value), user)
        return sorted(by_storage.values(), key=lambda member: _nbytes(self._values[member]))

    def _add_results(self, call: fx.Node, nodes: Sequence[fx.Node]) -> None:
        deps = self._deps(call.all_input_nodes)
        is_backward = call in self._backward
        no_recompute = _must_run_once(call) or any(source in self._written for source in _roots(call))
        for node in nodes:
            result = Result(node, call, _nbytes(self._values[node]), deps, None, is_backward, no_recompute)
            self._set_result(node, self._append(result))

    def _add_effect(self, node: fx.Node, value: Any) -> None:
        """Add an operator that writes, communicates or is opaque. Its results must not be recomputed."""
        deps, is_backward = self._deps(node.all_input_nodes), node in self._backward
        members = self._members_with_new_storage(node) if isinstance(value, (tuple, list)) else [node]
        for member in members or [node]:
            member_value = self._values[member]
            is_tensor = isinstance(member_value, torch.Tensor)
            shares_storage = is_tensor and self._map_to_existing(member)
            alias = self._base.get(member) if shares_storage else None
            nbytes = _nbytes(member_value) if is_tensor and not shares_storage else 0
            index = self._append(Result(member, node, nbytes, deps, alias, is_backward, True))
            if is_tensor:
                self._base[member] = index
                if not shares_storage or alias is not None:
                    self._result_of_storage[_storage(member_value)] = index


# -- fake values ---------------------------------------------------------------------------------------------


def _fake_values(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """The value of each node on fake tensors. Views share storages as they do when the step runs."""
    values: dict[fx.Node, Any] = {}
    mode = _fake_mode(module)
    with mode, torch.no_grad(), _compat.ignoring_unknown_sizes(mode):
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = node.meta.get("val")
            elif node.op == "get_attr":
                values[node] = _constant(module, node, mode)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source])
                values[node] = node.target(*args, **kwargs)
    return values


def _constant(module: fx.GraphModule, node: fx.Node, mode: Any) -> Any:
    constant: Any = module
    for name in str(node.target).split("."):
        constant = getattr(constant, name)
    return mode.from_tensor(constant) if isinstance(constant, torch.Tensor) else constant


def _fake_mode(module: fx.GraphModule) -> Any:
    for node in module.graph.find_nodes(op="placeholder"):
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    raise Unsupported("the joint graph has no tensors among its inputs")


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        raise Unsupported(
            f"the graph has a tensor of layout {tensor.layout}, as the gradient of nn.Embedding(sparse=True) is: "
            "how many bytes it takes is not known before the step"
        )
    return _compat.storage_id(tensor)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(_compat.size_hint(tensor.untyped_storage().nbytes()))


# -- nodes ---------------------------------------------------------------------------------------------------


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is a tangent: a gradient that the backward receives."""
    return "tangents" in str(node.target)


def unknown_size(joint: JointGraph) -> str:
    """The name of a node whose size is known only when the step runs; empty if there is none."""
    tensors = ((node, value) for node, value in joint.values.items() if isinstance(value, torch.Tensor))
    return next((node.name for node, value in tensors if any(map(_compat.is_unbacked, value.shape))), "")


def returned_by(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    """The nodes that a graph returns; None for a value that is no node."""
    [output] = graph.find_nodes(op="output")
    returned: Any = output.args[0]
    return tuple(item if isinstance(item, fx.Node) else None for item in returned)


def _is_member(node: fx.Node) -> bool:
    return _compat.is_getitem(node.target)


def _roots(call: fx.Node) -> Iterator[fx.Node]:
    """The placeholders whose contents a call reads, through views."""
    seen: set[fx.Node] = set()
    pending = list(call.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            yield node
        elif node.op == "call_function" and is_view(node):
            pending += node.all_input_nodes


def is_view(node: fx.Node) -> bool:
    """Whether an operator's schema says that it returns a view of an argument."""
    schema = _compat.schema_of(node.target)
    if schema is None:
        return False
    aliases = [returned.alias_info for returned in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _has_effects(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, _compat.HigherOrderOperator):
        return True
    if not isinstance(target, _compat.OpOverload):
        return False
    return _compat.schema_of(target).is_mutable or target.namespace in _compat.COLLECTIVE_NAMESPACES


def _must_run_once(node: fx.Node) -> bool:
    """Whether an operator must not be recomputed: it draws random numbers, or is a custom one that may have state."""
    target = node.target
    if not isinstance(target, _compat.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target.namespace not in _compat.PURE_NAMESPACES


def cost_key(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> str:
    """A key that is equal for calls of equal cost: operator, arguments, and shape, stride and dtype of tensors."""

    def text(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            sizes, strides = (tuple(map(_compat.size_hint, dims)) for dims in (leaf.shape, leaf.stride()))
            return f"{leaf.dtype} {sizes} {strides} {leaf.device}"
        return repr(leaf)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    return f"{node.target} " + "; ".join(map(text, _compat.tree_leaves((args, kwargs))))
