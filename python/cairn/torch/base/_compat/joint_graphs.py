"""The joint graph of AOTAutograd: its nodes and sizes, and how it is cut into forward and backward. From torch 2.9 on.

AOTAutograd passes the joint graph of a step to a partition function and runs the two graphs that it returns. The rules
between the two (order of saved values, symbolic sizes, checks of versions) are torch's own. So torch's function that
cuts a joint graph is called here, rather than written again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

#: The namespaces of operators that communicate with other processes.
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")

#: The namespaces of operators without state: they do the same in each call, unless a tag says otherwise.
PURE_NAMESPACES = ("aten", "prims", "inductor_prims")


def is_getitem(target: Any) -> bool:
    """Whether the target of a node is `operator.getitem`, which takes a member out of a tuple."""
    return target is operator.getitem


def is_backward_node(node: fx.Node) -> bool:
    """Whether AOTAutograd traced a node while autograd ran the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def mark_backward(node: fx.Node) -> None:
    """Marks a node as part of the backward. A recomputation is a copy of a node of the forward."""
    node.meta["partitioner_tag"] = "is_backward"


#: The hint for an unbacked size, which is known only when the step runs (how many tokens an expert gets).
UNBACKED_SIZE_HINT = 128


def size_hint(size: Any) -> int:
    """A size as a number. A symbolic size gives the hint that it was traced with, an unbacked one a guess."""
    if isinstance(size, int):
        return size
    if not is_unbacked(size):
        return int(size.node.hint)
    environment, expression = size.node.shape_env, size.node.expr
    name = "backed_var_to_val" if hasattr(environment, "backed_var_to_val") else "var_to_val"
    hints = getattr(environment, name)
    return int(expression.xreplace({s: hints.get(s, UNBACKED_SIZE_HINT) for s in expression.free_symbols}))


def is_unbacked(size: Any) -> bool:
    """Whether a size has no hint, because it is known only when the step runs."""
    return not isinstance(size, int) and size.node.hint is None


def ignoring_unknown_sizes(mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Sizes that fake operators in the body make up, and that are known only when the step runs, are left unclaimed.

    Otherwise the next trace by the same fake mode finds sizes that it did not make.
    """
    ignoring: Any = getattr(getattr(mode, "shape_env", None), "ignore_fresh_unbacked_symbols", contextlib.nullcontext)
    found: contextlib.AbstractContextManager[Any] = ignoring()
    return found


def written_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint graph that AOTAutograd writes after it has run the forward.

    Their new contents are among the forward's outputs, and the outputs' descriptors name the inputs.
    """
    [output] = graph.find_nodes(op="output")
    described = [getattr(desc, "mutated_input", None) for desc in output.meta.get("desc", ())]
    written = {desc for desc in described if desc is not None}
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in written]


@functools.cache
def backward_holds_tangents() -> bool:
    """Whether AOTAutograd's function holds the gradients that the backward receives until it ends, as in torch 2.9.

    A torch that generates the code around the two graphs does not.
    """
    return importlib.util.find_spec("torch._functorch._aot_autograd.subclass_codegen") is None


def graph_module(like: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, with the constants of `like`. Its code is generated at the first call, if possible."""
    from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module

    return make_graph_module(like, graph)


Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def cut(
    joint: fx.GraphModule, saved: Sequence[fx.Node], sizes: Sequence[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a joint graph into forward and backward.

    Parameters
    ----------
    saved
        The saved values: nodes of the forward that the backward reads.
    sizes
        The symbolic sizes that the backward reads.
    num_fwd_outputs
        The number of the joint graph's outputs that belong to the forward.
    """
    from torch._functorch.partitioners import _extract_fwd_bwd_modules as extract

    return _without_dead_forward_calls(*extract(joint, list(saved), list(sizes), num_fwd_outputs=num_fwd_outputs))


def cut_without_recomputation(
    joint: fx.GraphModule, inputs: Sequence[Any], num_fwd_outputs: int, **others: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a joint graph by torch's `default_partition`, whose backward recomputes nothing."""
    from torch._functorch.partitioners import default_partition

    return _without_dead_forward_calls(*default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others))


def _without_dead_forward_calls(
    forward: fx.GraphModule, backward: fx.GraphModule
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs. Calls that were copied from the forward, and that nothing reads, are removed from the backward.

    Torch removes them itself, except random operators if inductor's fallback_random is set or Dynamo is not compiling.
    Such an operator would draw random numbers again.
    """
    if backward.graph.eliminate_dead_code(lambda node: node.op != "call_function" or is_backward_node(node)):
        backward.recompile()
    return forward, backward
