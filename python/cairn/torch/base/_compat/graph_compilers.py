"""Compilers of the graphs that Dynamo captures: operator by operator, or by inductor, cut by a partition function."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from ..errors import Unsupported
from .joint_graphs import Partition


def missing_for_compiling() -> str:
    """The private interfaces for compiling that the installed torch lacks, as text; empty if it has all."""
    try:
        from torch._dynamo.backends.common import aot_autograd  # noqa: F401
        from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput  # noqa: F401
        from torch._functorch.partitioners import _extract_fwd_bwd_modules as extract
    except ImportError as error:
        return str(error)
    wanted = {"saved_values", "saved_sym_nodes", "num_fwd_outputs"}
    lacking = wanted - set(inspect.signature(extract).parameters)
    return f"_extract_fwd_bwd_modules has no {sorted(lacking)}" if lacking else ""


def compiled_by_operators(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph of Dynamo to run operator by operator. partition: cuts the joint graph."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        _let_backwards_be_repeated()
        return boxed(graph)

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compiler, partition_fn=partition)(module, inputs)
    return compiled


def _let_backwards_be_repeated() -> None:
    """Tell AOTAutograd that the backward of the graph that is being compiled writes into no saved tensor.

    It would refuse `retain_graph` otherwise. Only inductor's backwards write into them ("donated buffers").
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in place: several objects have the list


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The code of a graph that runs operator by operator, with the calling convention of AOTAutograd."""
    module.graph.set_codegen(_Boxed())
    module.recompile()
    function = module.forward

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined] # AOTAutograd's mark for functions that empty their list
    return run


class _Boxed(fx.graph.CodeGen):
    """Code of a graph that takes its inputs in a list and empties the list, which frees each after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        lines = [f"def {self._func_name}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines += ["    args_iter = iter(args_list)", *(f"    {name} = next(args_iter)" for name in names)]
            lines += ["    args_list.clear()"]
        return "\n".join(lines)


def _compiled_backward() -> contextlib.AbstractContextManager[Any]:
    """Settings by which AOTAutograd compiles the backward together with the forward, instead of in the first step."""
    config: Any = torch._functorch.config
    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else contextlib.nullcontext()


class ByOperators:
    """A graph of Dynamo that runs operator by operator. It is traced once, and cut any number of times.

    Where AOTAutograd has no second stage that takes a partition function (torch 2.9), it traces the graph for each cut.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._trace: _TracedGraph | None = None

    def compiled(self, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
        """The code of the graph cut by `partition`. `inputs` are only read to trace the graph."""
        with _compiled_backward():
            if self._trace is not None:
                return self._trace.compiled(partition)
            with self._traced(inputs):
                return compiled_by_operators(self._module, inputs, partition)

    @contextlib.contextmanager
    def _traced(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Keep the graph that AOTAutograd traces in the body, if it can be cut again."""
        from torch._functorch import aot_autograd

        original: Any = vars(aot_autograd).get(_SECOND_STAGE)
        takes = () if original is None else inspect.signature(original).parameters
        has_own = any(True for _ in (*self._module.parameters(), *self._module.buffers()))
        if "partition_fn" not in takes or has_own or any(isinstance(value, (list, tuple, dict)) for value in inputs):
            yield
            return
        found: list[_TracedGraph] = []

        def second_stage(state: Any, capture: Any, partition: Any, *compilers: Any) -> Any:
            found.append(_TracedGraph(_with_own_metadata(state), capture, compilers))
            return original(state, capture, partition, *compilers)

        with mock.patch.object(aot_autograd, _SECOND_STAGE, second_stage):
            yield
        if len(found) == 1 and found[0].can_be_cut_again():
            [self._trace] = found


class CapturedInputs:
    """The inputs that Dynamo captures a graph with, as fake tensors: the graph can be traced again by them later.

    It is made while Dynamo compiles.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        from torch._guards import TracingContext
        from torch._subclasses import FakeTensor

        context = TracingContext.try_get()
        self._inputs = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
        modes = [value.fake_mode for value in self._inputs if isinstance(value, FakeTensor)]
        #: Of the inputs: in torch 2.9 the context has another one by now.
        self._fake_mode = next(iter(modes), None if context is None else context.fake_mode)

    @contextlib.contextmanager
    def active(self) -> Iterator[list[Any]]:
        """The inputs. In the body AOTAutograd traces them by the sizes that Dynamo captured, symbolic ones too."""
        from torch._guards import TracingContext, tracing

        with tracing(TracingContext(self._fake_mode)):
            yield self._inputs


_SECOND_STAGE = "aot_stage2_compile"


class _TracedGraph(NamedTuple):
    """A graph that AOTAutograd traced: the arguments of its second stage, which cuts and compiles the graph.

    That stage writes into the metadata of `state`, so each call gets a copy.
    """

    state: Any
    capture: Any
    compilers: tuple[Any, ...]

    def can_be_cut_again(self) -> bool:
        """Whether the second stage may run several times: it changes metadata alone, and there is a backward."""
        operators = (node.target for node in self.capture.graph_module.graph.nodes)
        is_plain = not any(isinstance(target, torch._ops.HigherOrderOperator) for target in operators)
        return bool(is_plain and self.state.needs_autograd and self.capture.maybe_subclass_meta is None)

    def compiled(self, partition: Partition) -> Callable[..., Any]:
        """Run the second stage: the code of the graph cut by `partition`."""
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
    """A copy of the state for one run of the second stage, which logs no graphs."""
    metadata = copy.copy(state.fw_metadata)
    for name, value in vars(metadata).items():
        if isinstance(value, (dict, list)):
            setattr(metadata, name, copy.copy(value))
    quiet = dataclasses.replace(state.aot_config, enable_log=False)
    return dataclasses.replace(state, fw_metadata=metadata, aot_config=quiet)


def compiled_without_plan(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo to run operator by operator, cut by torch's `default_partition`: no recomputation."""
    from torch._functorch.partitioners import default_partition

    return compiled_by_operators(module, inputs, default_partition)


def compiled_by_inductor(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph of Dynamo by inductor. partition: cuts the joint graph.

    Inductor keeps the order of the nodes in the two graphs, and its caches are not used.
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
    patches |= (
        {"graph_partition": False} if hasattr(torch._inductor.config, "graph_partition") else {}
    )  # for CUDA graphs
    functorch: Any = torch._functorch.config
    with (
        functorch.patch(enable_autograd_cache=False),
        _compiled_backward(),
        _fusing_neighbours(),
        _one_function_per_kernel(),
        _reusing_at_once(),
    ):
        compiled: Any = compile_fx(module, inputs, config_patches=patches)
    return compiled


def _one_function_per_kernel() -> contextlib.AbstractContextManager[Any]:
    """Settings by which inductor generates a C++ function for each kernel.

    By default one function has all kernels between two operators. Their results are allocated before the function runs,
    and their inputs are freed after it.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    name = "MAX_FUSED_KERNEL_ARGS_NUM"
    return mock.patch.object(CppScheduling, name, -1) if hasattr(CppScheduling, name) else contextlib.nullcontext()


def _reusing_at_once() -> contextlib.AbstractContextManager[Any]:
    """Settings of inductor: a kernel reuses the memory of a buffer only if it runs right after its last reader.

    By default a buffer without readers stays allocated until a later kernel reuses its memory, where inductor estimates
    that this does not raise the peak. Its estimate does not know what else is in memory during the step.
    """
    from torch._inductor.codegen import wrapper

    lines, name = getattr(wrapper, "AllocateLine", None), "should_reuse_buffer"
    by_estimate = getattr(lines, name, None)
    if by_estimate is None:
        return contextlib.nullcontext()

    def is_next(line: Any, free_line: Any, size: int) -> bool:
        try:
            return bool(free_line.scheduler_node_index + 1 == line.scheduler_node_index)
        except AttributeError:
            return bool(by_estimate(line, free_line, size))

    return mock.patch.object(lines, name, is_next)


def _fusing_neighbours() -> Any:
    """Settings by which inductor fuses only kernels that are neighbours in the plan's order.

    Fusing others would compute a result long before its place in the plan, or hold it long after. Two kernels that only
    read the same are fused if they read as many bytes together as each of them writes: fused, they write at once.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Neighbours(InductorChoices):
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            may = InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)
            written_bytes = max(_written_bytes(scheduler, node) for node in (node1, node2))
            return may and _are_neighbours(node1, node2) and shared_data_score >= written_bytes

        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            may = InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)
            return may and _are_neighbours(node1, node2)

    return V.set_choices_handler(Neighbours())


def _written_bytes(scheduler: Any, node: Any) -> int:
    """The bytes that one of inductor's kernels writes."""
    return sum(scheduler.dep_size_hint(dep) for dep in node.read_writes.writes)


def _are_neighbours(node1: Any, node2: Any) -> bool:
    """Whether no other kernel lies between two of inductor's kernels."""
    return bool(max(node1.min_order, node2.min_order) - min(node1.max_order, node2.max_order) == 1)
