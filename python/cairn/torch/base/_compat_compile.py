"""Private interfaces of torch that compiled steps need, each with what it is for. They are in torch from 2.9 on.

AOTAutograd hands the joint graph of a step to a partition function and runs the two graphs that it returns. The rules
between the two (order of saved values, symbolic sizes, checks of versions) are torch's own, so its function that cuts a
joint graph is called here rather than written again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from .errors import Unsupported

#: Operators of these talk to other processes.
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")

#: Operators of these do the same whenever they are called, but for those with a tag that says otherwise.
PURE_NAMESPACES = ("aten", "prims", "inductor_prims")


def is_getitem(target: Any) -> bool:
    """Whether a node takes a member out of a tuple."""
    return target is operator.getitem


def is_backward_node(node: fx.Node) -> bool:
    """Whether AOTAutograd traced a node while autograd ran the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def mark_backward(node: fx.Node) -> None:
    """Marks a copy of a forward's node that belongs to the backward."""
    node.meta["partitioner_tag"] = "is_backward"


def not_captured() -> type[Exception]:
    """What Dynamo raises for code that it cannot capture as one graph."""
    from torch._dynamo import exc

    return exc.Unsupported


def uncaptured_operator() -> type[Exception]:
    """What Dynamo raises for a higher-order operator (`torch.cond`) whose functions it cannot capture."""
    from torch._dynamo import exc

    return exc.UncapturedHigherOrderOpError


@functools.lru_cache(maxsize=1)
def trace_nothing_of(package: str) -> None:
    """Keeps Dynamo from tracing a package's own functions, such as hooks that are called while a frame runs which it
    could not capture.
    """
    from torch._dynamo import trace_rules

    trace_rules.add(package)


#: What a size is taken for that is known only when the step runs (how many tokens an expert gets).
GUESSED_SIZE = 128


def size_hint(size: Any) -> int:
    """A size as a number: of a symbolic one, the value that it was traced with, or a guess."""
    if isinstance(size, int):
        return size
    if not is_guessed(size):
        return int(size.node.hint)
    environment, expression = size.node.shape_env, size.node.expr
    name = "backed_var_to_val" if hasattr(environment, "backed_var_to_val") else "var_to_val"
    known = getattr(environment, name)
    return int(expression.xreplace({symbol: known.get(symbol, GUESSED_SIZE) for symbol in expression.free_symbols}))


def is_guessed(size: Any) -> bool:
    """Whether a size is known only when the step runs."""
    return not isinstance(size, int) and size.node.hint is None


def written_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint graph whose contents the step replaces behind it.

    AOTAutograd returns their new contents among the forward's outputs, and describes them so (since torch 2.9).
    """
    [output] = graph.find_nodes(op="output")
    described = [getattr(desc, "mutated_input", None) for desc in output.meta.get("desc", ())]
    written = {desc for desc in described if desc is not None}
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def graph_module(like: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, with the constants of another one; its code is generated when it is called, if possible."""
    from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module

    return make_graph_module(like, graph)


def cut(
    joint: fx.GraphModule, saved: Sequence[fx.Node], sizes: Sequence[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a joint graph into its forward and its backward, which reads the saved values and sizes."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules as extract

    return _drawing_once(*extract(joint, list(saved), list(sizes), num_fwd_outputs=num_fwd_outputs))


def _drawing_once(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A forward and a backward, which loses copies of the forward's operators that nothing reads.

    Torch removes them, but for random operators if inductor's fallback_random is set or Dynamo is not compiling. They
    would draw again.
    """
    if backward.graph.eliminate_dead_code(lambda node: node.op != "call_function" or is_backward_node(node)):
        backward.recompile()
    return forward, backward


class _Boxed(fx.graph.CodeGen):
    """Code of a graph that takes its inputs in a list and empties it, so that each is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        lines = [f"def {self._func_name}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines += ["    args_iter = iter(args_list)", *(f"    {name} = next(args_iter)" for name in names)]
            lines += ["    args_list.clear()"]
        return "\n".join(lines)


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph's code, operator by operator, as AOTAutograd calls compiled code."""
    module.graph.set_codegen(_Boxed())
    module.recompile()
    function = module.forward

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined] # AOTAutograd's mark for functions that empty their list
    return run


def missing() -> str:
    """What of this the installed torch lacks; empty if nothing."""
    try:
        from torch._dynamo.backends.common import aot_autograd  # noqa: F401
        from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput  # noqa: F401
        from torch._functorch.partitioners import _extract_fwd_bwd_modules as extract
    except ImportError as error:
        return str(error)
    wanted = {"saved_values", "saved_sym_nodes", "num_fwd_outputs"}
    lacking = wanted - set(inspect.signature(extract).parameters)
    return f"_extract_fwd_bwd_modules has no {sorted(lacking)}" if lacking else ""


Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def compiled_by_operators(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """A graph of Dynamo as AOTAutograd runs it, operator by operator, cut by a partition function."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        return boxed(graph)

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compiler, partition_fn=partition)(module, inputs)
    return compiled


class _Trace(NamedTuple):
    """What AOTAutograd cuts and compiles: the arguments of its second stage, which writes into the state's metadata."""

    state: Any
    capture: Any
    compilers: tuple[Any, ...]

    def can_be_cut_again(self) -> bool:
        """Not if the second stage changes more than metadata, or if nothing is differentiated."""
        operators = (node.target for node in self.capture.graph_module.graph.nodes)
        is_plain = not any(isinstance(target, torch._ops.HigherOrderOperator) for target in operators)
        return bool(is_plain and self.state.needs_autograd and self.capture.maybe_subclass_meta is None)

    def compiled(self, partition: Partition) -> Callable[..., Any]:
        """The code of another cut."""
        from torch._functorch import aot_autograd
        from torch._guards import TracingContext, tracing
        from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module

        fake_mode = self.state.fake_mode
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(tracing(TracingContext(fake_mode)))
            stack.enter_context(use_lazy_graph_module(True))
            stack.enter_context(fake_mode)
            second_stage: Any = vars(aot_autograd)[_SECOND_STAGE]
            run, _ = second_stage(_with_own_metadata(self.state), self.capture, partition, *self.compilers)
        return lambda *args: run(list(args))


def _with_own_metadata(state: Any) -> Any:
    """A state for another second stage, which prints no graphs."""
    metadata = copy.copy(state.fw_metadata)
    for name, value in vars(metadata).items():
        if isinstance(value, (dict, list)):
            setattr(metadata, name, copy.copy(value))
    quiet = dataclasses.replace(state.aot_config, enable_log=False)
    return dataclasses.replace(state, fw_metadata=metadata, aot_config=quiet)


_SECOND_STAGE = "aot_stage2_compile"


class ByOperators:
    """A graph of Dynamo as AOTAutograd runs it, operator by operator: traced once, and cut any number of times.

    Where AOTAutograd has no second stage that takes a partition function (torch 2.9), it traces the graph for each cut.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._trace: _Trace | None = None

    def compiled(self, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
        """The code of a cut; `inputs` are only read to trace the graph."""
        with _compiled_backward():
            if self._trace is not None:
                return self._trace.compiled(partition)
            with self._traced(inputs):
                return compiled_by_operators(self._module, inputs, partition)

    @contextlib.contextmanager
    def _traced(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Keep what AOTAutograd traces in the body, if it can be cut again."""
        from torch._functorch import aot_autograd

        original: Any = vars(aot_autograd).get(_SECOND_STAGE)
        takes = () if original is None else inspect.signature(original).parameters
        has_own = any(True for _ in (*self._module.parameters(), *self._module.buffers()))
        if "partition_fn" not in takes or has_own or any(isinstance(value, (list, tuple, dict)) for value in inputs):
            yield
            return
        found: list[_Trace] = []

        def second_stage(state: Any, capture: Any, partition: Any, *compilers: Any) -> Any:
            found.append(_Trace(_with_own_metadata(state), capture, compilers))
            return original(state, capture, partition, *compilers)

        with mock.patch.object(aot_autograd, _SECOND_STAGE, second_stage):
            yield
        if len(found) == 1 and found[0].can_be_cut_again():
            [self._trace] = found


def _compiled_backward() -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd compiles the backward with the forward, where it can, and not in the first step."""
    config: Any = torch._functorch.config
    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else contextlib.nullcontext()


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@functools.lru_cache(maxsize=1)
def _wrapped_module_type() -> type:
    from torch._dynamo.eval_frame import OptimizedModule

    class WrappedModule(OptimizedModule):
        """A compiled module whose calls a function wraps; a copy has a copy of that function."""

        def __reduce__(self) -> Any:
            return _wrapped_again, (self._orig_mod, self.dynamo_ctx, self.__dict__["wrapper"])

    return WrappedModule


def _wrapped_again(model: Any, context: Any, wrapper: Wrapper) -> Any:
    from torch._dynamo.eval_frame import OptimizedModule

    return wrapped(OptimizedModule(model, context), wrapper)


def wrapped(compiled: Any, wrapper: Wrapper) -> Any:
    """A module that torch.compile returned, with a wrapper around its calls and those of its copies."""
    compiled.__class__ = _wrapped_module_type()
    compiled.__dict__["wrapper"] = wrapper
    compiled.forward = wrapper(compiled.forward)
    return compiled


def compiled_without_plan(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph of Dynamo as AOTAutograd runs it, cut by torch's function that lets the backward recompute nothing."""
    from torch._functorch.partitioners import default_partition

    return compiled_by_operators(module, inputs, default_partition)


def cut_without_recomputation(
    joint: fx.GraphModule, inputs: Sequence[Any], num_fwd_outputs: int, **others: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a joint graph by torch's function that lets the backward recompute nothing."""
    from torch._functorch.partitioners import default_partition

    return _drawing_once(*default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others))


def _fusing_neighbours() -> Any:
    """Inductor fuses kernels that are neighbours in the plan's order, and no others.

    Fusing others would compute a result long before its place in the plan, or hold it long after.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Neighbours(InductorChoices):
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            may = InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)
            return may and _are_neighbours(node1, node2)

        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            may = InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)
            return may and _are_neighbours(node1, node2)

    return V.set_choices_handler(Neighbours())


def _are_neighbours(node1: Any, node2: Any) -> bool:
    """Whether no other kernel lies between two of inductor's kernels."""
    return bool(max(node1.min_order, node2.min_order) - min(node1.max_order, node2.max_order) == 1)


def compiled_by_inductor(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """A graph of Dynamo as inductor compiles it, cut by a partition function, never taken from inductor's caches.

    Inductor keeps the order of the two graphs, which is that of their plan.
    """
    from torch._inductor.compile_fx import compile_fx

    try:
        from torch._inductor.custom_graph_pass import CustomPartitionerFn
    except ImportError:
        raise Unsupported(
            f'torch {torch.__version__} has no custom_partitioner_fn, which kernels="inductor" needs; kernels="eager" '
            "works here"
        ) from None

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

    patches: dict[str, Any] = {"custom_partitioner_fn": Partitioner(), "reorder_for_peak_memory": False}
    patches |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    functorch: Any = torch._functorch.config
    with functorch.patch(enable_autograd_cache=False), _compiled_backward(), _fusing_neighbours():
        compiled: Any = compile_fx(module, inputs, config_patches=patches)
    return compiled
