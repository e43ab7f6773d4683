"""The backend of torch.compile: plans the graph that Dynamo captures, compiles it and measures the compiled step.

The measurement makes sure of the budget. The compiled graph runs once, forward and backward, on the inputs that it was
captured with. If its peak exceeds the budget, or is far below the prediction although the plan recomputes, the
difference corrects the prediction and the graph is planned again. If no such plan fits, the plan of least memory is
tried. If that exceeds the budget as well, `InfeasibleBudget` is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cairn
import torch
from torch import fx

from ..base import _compat, budgets, memory
from ..base.choices import ACCUMULATED
from ..base.errors import BudgetExceeded, InfeasibleBudget, Unsupported
from .accumulation import AccumulationWarning
from .captured import Captured
from .compiled_plan import CompiledPlan
from .planner import Planner
from .request import Request
from .waiting_forwards import waiting_forwards

#: How often one graph is planned, each time with a corrected prediction, before the plan of least memory is tried.
MAX_PLANS = 3
#: How many plans one graph keeps for symbolic sizes larger than those at capture.
MAX_LARGER_SIZES = 8
#: Excess of a predicted peak over the measured one, as a share of the predicted peak without resident memory. A larger
#: excess is corrected.
MAX_OVERPREDICTION = 0.03


class GraphPrepared(Exception):
    """Raised instead of running a graph while `Backend.is_preparing`: the graph is planned and compiled then."""


class Backend:
    """The backend of torch.compile for one request.

    It owns the compiled code of each captured graph, until the backend itself is freed.

    Attributes
    ----------
    plans
        The plan of each graph that was called with gradients.
    compilations
        The number of graphs compiled so far.
    measures_graphs
        If true, the first call of a graph measures its forward and backward. If false, the caller measures the whole
        step.
    is_preparing
        If true, calls plan and compile their graph and then raise `GraphPrepared`.
    is_of_one_graph
        Whether the backend knows one graph alone of what may be a larger step. Calls warn then if several forwards wait
        for their backwards.
    """

    def __init__(self, request: Request) -> None:
        missing = _compat.missing_for_compiling()
        if missing:
            raise Unsupported(f"torch {torch.__version__} cannot compile within a budget: {missing}")
        self.request = request
        self.plans: list[CompiledPlan] = []
        self.compilations = 0
        self.measures_graphs, self.is_preparing, self.is_of_one_graph = True, False, False
        self._codes: dict[Captured, Callable[..., Any]] = {}

    def __deepcopy__(self, _: Any) -> Backend:
        return Backend(self.request)  # a copy of a compiled model makes plans of its own

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph of Dynamo."""
        return self.code(Captured(module), inputs)

    def code(self, captured: Captured, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled code of a graph. The first request plans and compiles the graph.

        If planning fails, the returned code raises the error when it is called: Dynamo would wrap an error that its
        backend raises.
        """
        if captured not in self._codes:
            self._codes[captured] = self._compiled(captured, inputs)
        return self._codes[captured]

    def _compiled(self, captured: Captured, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compilations += 1
        try:
            planner, compiled = self.plan_and_compile(captured, inputs, device_of_inputs(inputs), 0)
        except cairn.Error as error:
            return raising(error)
        if planner.plan is None:  # no gradients are wanted: nothing is saved
            return compiled
        return _MeasuredGraph(self, captured, planner, compiled, _symbolic_sizes(inputs))

    def plan_and_compile(
        self,
        captured: Captured,
        inputs: Sequence[Any],
        device: torch.device,
        correction_bytes: int,
        *,
        least: bool = False,
    ) -> tuple[Planner, Callable[..., Any]]:
        """Plan a graph and compile it.

        The memory of fused kernels is only known once they have run. So with inductor's kernels, a budget that no plan
        is predicted to fit gets the plan of least memory. Its measurement then decides. The same holds for any kernels
        once a step was measured and corrects the prediction.

        Parameters
        ----------
        correction_bytes
            The excess of this graph's measured peak over its predicted one, from earlier plans; negative if it was
            below.
        least
            Whether to make the plan of least memory, whatever the budget.

        Returns
        -------
        The planner, which has the plan (None without gradients), and the compiled code.
        """
        resident = self._resident(inputs, device)
        request = dataclasses.replace(
            self.request,
            correction_bytes=correction_bytes + self.request.correction_bytes,
            optimizer_peak_bytes=max(self.request.optimizer_peak_bytes, self._optimizer_peak(inputs, resident)),
            least=least,
        )
        planner = Planner(request, device, resident, captured.read)
        try:
            return planner, captured.planned(inputs, request.kernels, planner)
        except InfeasibleBudget as error:
            was_measured = correction_bytes != 0
            if not was_measured and (request.kernels == "eager" or not _fits_on_device(error, resident, device)):
                raise
        planner = Planner(dataclasses.replace(request, least=True), device, resident, captured.read)
        return planner, captured.planned(inputs, request.kernels, planner)

    def _resident(self, inputs: Sequence[Any], device: torch.device) -> dict[str, int]:
        """Memory that is resident on the device during the whole step: bytes by name."""
        tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.device == device]
        parameters = [t for t in tensors if t.requires_grad]
        resident = {
            "parameters": memory.unique_bytes(parameters),
            "buffers and inputs": memory.unique_bytes(tensors, without=memory.storages(parameters)),
            **self.request.resident,
        }
        if self.request.gradients == ACCUMULATED:
            resident["gradients that exist"] = memory.dense_bytes(t for t in parameters if t.is_leaf)
        return {name: size for name, size in resident.items() if size}

    def _optimizer_peak(self, inputs: Sequence[Any], resident: Mapping[str, int]) -> int:
        """The peak of the optimizer's step in bytes. All gradients exist then, and the graph's results are freed."""
        if self.request.optimizer_step_bytes is None:
            return 0
        parameters = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        gradients = 0 if self.request.gradients == ACCUMULATED else memory.dense_bytes(parameters)
        return sum(resident.values()) + gradients + self.request.optimizer_step_bytes


def _fits_on_device(error: InfeasibleBudget, resident: Mapping[str, int], device: torch.device) -> bool:
    """Whether the device has enough memory for the predicted peak of the plan of least memory."""
    return (error.least_bytes or 0) <= budgets.free_bytes(device) + sum(resident.values())


def raising(error: Exception) -> Callable[..., Any]:
    """A function that raises the error whenever it is called."""

    def run(*_: Any) -> Any:
        raise error

    return run


def _symbolic_sizes(inputs: Sequence[Any]) -> dict[int, int]:
    """The symbolic sizes among a graph's inputs: the value at capture by the input's index."""
    return {index: _compat.size_hint(value) for index, value in enumerate(inputs)
            if isinstance(value, torch.SymInt)}  # fmt: skip


class _MeasuredGraph:
    """A compiled graph. Its first call measures its peak, and plans again if the prediction was wrong.

    The backend itself cannot measure, because no code may run while Dynamo compiles. The first call follows at once.

    The plan of a graph with symbolic sizes serves the sizes at capture and smaller ones. Larger sizes get plans of
    their own.

    Parameters
    ----------
    planner, compiled
        The first plan, and its code.
    sizes
        The symbolic sizes among the graph's inputs: the value at capture by the input's index.
    """

    def __init__(
        self,
        backend: Backend,
        captured: Captured,
        planner: Planner,
        compiled: Callable[..., Any],
        sizes: Mapping[int, int],
    ) -> None:
        self._backend, self._captured, self._planner, self._sizes = backend, captured, planner, sizes
        self._compiled, self._is_measured = compiled, False
        self._by_larger_sizes: dict[tuple[Any, ...], _MeasuredGraph] = {}

    def __call__(self, *args: Any) -> Any:
        if self._sizes and any(args[index] > size for index, size in self._sizes.items()):
            return self._for_larger_sizes(args)(*args)
        if not self._is_measured and torch.is_grad_enabled():
            if self._backend.measures_graphs:
                with _restored_random_state(self._planner.device):
                    self._plan_by_measurement(args)
            elif self._planner.plan is not None:
                self._use(self._planner.plan, self._compiled, args)
        if self._backend.is_preparing:
            raise GraphPrepared
        outputs = self._compiled(*args)
        if self._backend.is_of_one_graph and torch.is_grad_enabled():
            self._wait_for_backward(outputs)
        return outputs

    def _wait_for_backward(self, outputs: Any) -> None:
        waiting_forwards(self._planner.device).add(
            self._backend, _tensors(outputs), self._backend.plans[-1].budget_bytes
        )

    def _for_larger_sizes(self, args: Sequence[Any]) -> _MeasuredGraph:
        """The same graph planned for larger sizes. The oldest of `MAX_LARGER_SIZES` plans is dropped for a new one."""
        sizes = tuple(args[index] for index in self._sizes)
        if sizes not in self._by_larger_sizes:
            captured = Captured(self._captured.module)  # traced for these sizes
            planner, compiled = self._backend.plan_and_compile(captured, args, self._planner.device, 0)
            if len(self._by_larger_sizes) == MAX_LARGER_SIZES:
                self._by_larger_sizes.pop(next(iter(self._by_larger_sizes)))
            self._by_larger_sizes[sizes] = _MeasuredGraph(self._backend, captured, planner, compiled, {})
        return self._by_larger_sizes[sizes]

    def _plan_by_measurement(self, inputs: Sequence[Any]) -> None:
        """Measure the step, and plan again with a corrected prediction while that is needed.

        A plan is final if its measured peak fits the budget, unless the plan recomputes and its peak is far below the
        prediction. A later plan that exceeds the budget is discarded in favour of an earlier one that fits. If none
        fits, the last one is that of least memory.
        """
        planner, compiled, correction = self._planner, self._compiled, 0
        fitting: tuple[CompiledPlan, Callable[..., Any]] | None = None
        measured: list[int] = []
        for attempt in range(MAX_PLANS + 1):
            if attempt:
                planner, compiled = self._backend.plan_and_compile(
                    self._captured, inputs, planner.device, correction, least=attempt == MAX_PLANS
                )
            assert planner.plan is not None
            peak_bytes = _measured(compiled, inputs, planner, planner.plan.budget_bytes)
            plan = dataclasses.replace(planner.plan, measured_peak_bytes=peak_bytes)
            measured.append(peak_bytes)
            refusal = planner.infeasible_if_over(measured)
            if refusal is not None and fitting is None:
                raise refusal
            if peak_bytes <= plan.budget_bytes:
                fitting = plan, compiled
                is_last_resort = attempt > 0 and planner.request.least
                if is_last_resort or not _overpredicts(planner, plan, peak_bytes):
                    break
            elif planner.request.plan is not None:
                raise BudgetExceeded.of_given_plan(peak_bytes, plan.budget_bytes)
            if fitting is not None and (attempt + 1 >= MAX_PLANS or peak_bytes > plan.budget_bytes):
                break
            correction += peak_bytes - planner.predicted_bytes  # negative: the prediction was too high
        assert fitting is not None  # the plan of least memory fits, or is refused
        self._use(*fitting, inputs)

    def _use(self, plan: CompiledPlan, compiled: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Make a plan and its code final."""
        self._is_measured = True
        self._backend.plans.append(plan)
        self._compiled = _warning_of_accumulation(compiled, plan, inputs)


def _overpredicts(planner: Planner, plan: CompiledPlan, measured_bytes: int) -> bool:
    """Whether a plan recomputes although its measured peak is far below its predicted one."""
    if not plan.recomputed or planner.request.plan is not None:
        return False
    activation_bytes = planner.predicted_bytes - sum(planner.resident.values())
    return planner.predicted_bytes - measured_bytes > MAX_OVERPREDICTION * activation_bytes


def _measured(compiled: Callable[..., Any], inputs: Sequence[Any], planner: Planner, budget_bytes: int) -> int:
    """The measured peak of forward and backward in bytes, resident memory included.

    If the first step exceeds the budget, a second one is measured instead: a first call may allocate memory that stays.
    """
    fixed_bytes, inputs = sum(planner.resident.values()), _detached(inputs, planner.written)
    with _restored_contents(inputs, planner.written):
        peak_bytes = fixed_bytes + _peak_above_start(compiled, inputs, planner)
        if peak_bytes > budget_bytes:
            peak_bytes = fixed_bytes + _peak_above_start(compiled, inputs, planner)
    return peak_bytes


def _detached(inputs: Sequence[Any], written: Sequence[int]) -> list[Any]:
    """The inputs with aliases of those that require gradients, and copies of those of them that the step writes.

    The caller's tensors have hooks, which would be called with the gradients of a measurement, and an autograd graph,
    into which a step in place would write.
    """
    detached = list(inputs)
    for index, tensor in enumerate(inputs):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            leaf = tensor.detach().requires_grad_()
            detached[index] = leaf.clone() if index in written else leaf
    return detached


def _peak_above_start(compiled: Callable[..., Any], inputs: Sequence[Any], planner: Planner) -> int:
    """The peak of one step above the memory in use when it begins, in bytes."""
    meter = memory.meter_for(planner.device)
    with memory.not_collecting(), meter:
        first = meter.mark()
        _step(compiled, inputs, planner.request.holds_output)
        last = meter.mark()
    return meter.rise(first, last)


class _Loss(torch.autograd.Function):
    """A scalar whose backward returns gradients of ones for the roots. It neither owns the roots nor saves them."""

    @staticmethod
    def forward(ctx: Any, *roots: torch.Tensor) -> torch.Tensor:
        ctx.specs = [(root.shape, root.dtype, root.device) for root in roots]
        return roots[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.specs)


def _step(compiled: Callable[..., Any], inputs: Sequence[Any], holds_output: bool) -> None:
    """Run forward and backward. The backward begins at the scalars among the outputs, or at all if none is a scalar.

    Their gradients are ones. holds_output: whether the outputs exist during the backward.
    """
    with torch.enable_grad():
        outputs = compiled(*inputs)
        loss = _loss_of(outputs)
        if not holds_output:
            del outputs
        differentiated = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        if loss is not None:
            torch.autograd.grad(loss, differentiated, allow_unused=True)


def _loss_of(outputs: Any) -> torch.Tensor | None:
    roots = [t for t in _tensors(outputs) if t.requires_grad]
    losses = [root for root in roots if root.numel() == 1]
    return _Loss.apply(*(losses or roots)) if roots else None


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [t for t in _compat.tree_leaves(outputs) if isinstance(t, torch.Tensor)]


@contextlib.contextmanager
def _restored_contents(inputs: Sequence[Any], written: Sequence[int]) -> Iterator[None]:
    """Restore, after the body, the contents of the inputs that the step writes. written: their indices."""
    contents = {index: inputs[index].detach().clone() for index in written if index < len(inputs)}
    try:
        yield
    finally:
        with torch.no_grad():
            for index, before in contents.items():
                inputs[index].copy_(before)


def _restored_random_state(device: torch.device) -> Any:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _warning_of_accumulation(
    compiled: Callable[..., Any], plan: CompiledPlan, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """The code, which warns once if a step adds to existing gradients although its plan does not count them."""
    indices = [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if plan.gradients == ACCUMULATED or not indices:
        return compiled
    warning = AccumulationWarning(plan.gradients)

    def run(*args: Any) -> Any:
        warning.check(args[index] for index in indices)
        return compiled(*args)

    return run


def device_of_inputs(inputs: Sequence[Any]) -> torch.device:
    """The device of the budget: the accelerator of a graph's inputs, or the CPU if none is on an accelerator."""
    devices: Mapping[torch.device, None] = dict.fromkeys(
        t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type != "cpu"
    )
    if len(devices) > 1:
        raise Unsupported(f"the graph uses {', '.join(map(str, devices))}: a budget is for one device")
    return next(iter(devices), torch.device("cpu"))
