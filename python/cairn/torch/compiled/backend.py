"""The backend of torch.compile: plans the graph that Dynamo captures, compiles it and measures the compiled step.

The measurement makes sure of the budget. The compiled graph runs once, forward and backward, on the inputs that it was
captured with. If its peak exceeds the budget, or is far below the prediction although the plan recomputes, the
difference corrects the prediction and the graph is planned again. A step that still exceeds the budget is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from cairn import format_bytes
from torch import fx

from ..base import _compat_compile, budgets, memory
from ..base.choices import ACCUMULATED
from ..base.errors import BudgetExceeded, InfeasibleBudget, PlanMismatch, Unsupported, warn
from .captured import Captured
from .compiled_plan import CompiledPlan
from .planner import Planner
from .request import Request

ROUNDS = 3
#: How many plans are kept for sizes larger than those that a graph was captured with.
MOST_SIZES = 8
#: A prediction is corrected if it is too high by this share of the memory that is not resident all along.
UNUSED = 0.03


class Prepared(Exception):
    """Raised in place of a graph's first run, when it is planned and compiled and nothing shall run."""


class Backend:
    """A backend for one request.

    Attributes
    ----------
    plans
        The plan of each graph.
    measures
        Whether the first call of a graph measures it; else the caller measures the whole step.
    is_preparing
        Whether graphs are planned and compiled, and not run.
    """

    def __init__(self, request: Request) -> None:
        lacking = _compat_compile.missing()
        if lacking:
            raise Unsupported(f"torch {torch.__version__} cannot compile within a budget: {lacking}")
        self.request = request
        self.plans: list[CompiledPlan] = []
        self.compilations = 0
        self.measures, self.is_preparing = True, False
        self._codes: dict[Captured, Callable[..., Any]] = {}

    def __deepcopy__(self, _: Any) -> Backend:
        return Backend(self.request)  # a copy of a compiled model makes plans of its own

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph of Dynamo."""
        return self.code(Captured(module), inputs)

    def code(self, captured: Captured, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The code for a graph, planned and compiled when it is first wanted.

        A refusal is raised by the first call instead of here, where torch would wrap the error.
        """
        if captured not in self._codes:
            self._codes[captured] = self._compiled(captured, inputs)
        return self._codes[captured]

    def _compiled(self, captured: Captured, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compilations += 1
        try:
            planner, compiled = self.planned(captured, inputs, device_of_inputs(inputs), 0)
        except (InfeasibleBudget, PlanMismatch, Unsupported) as error:
            return _refusing(error)
        if planner.plan is None:  # no gradients are wanted: nothing is saved
            return compiled
        return _First(self, captured, planner, compiled, _symbolic_sizes(inputs))

    def planned(
        self, captured: Captured, inputs: Sequence[Any], device: torch.device, correction_bytes: int
    ) -> tuple[Planner, Callable[..., Any]]:
        """A plan, and its compiled code.

        Where no plan is predicted to fit, fused kernels get the plan of least memory: what they take is only known when
        they have run.
        """
        resident = self._resident(inputs, device)
        request = dataclasses.replace(
            self.request,
            correction_bytes=correction_bytes + self.request.correction_bytes,
            optimizer_peak_bytes=max(self.request.optimizer_peak_bytes, self._optimizer_peak(inputs, resident)),
        )
        planner = Planner(request, device, resident, captured.read)
        try:
            return planner, captured.compiled(inputs, request.kernels, planner)
        except InfeasibleBudget as error:
            if request.kernels == "eager" or not _may_run(error, resident, device):
                raise
        planner = Planner(dataclasses.replace(request, least=True), device, resident, captured.read)
        return planner, captured.compiled(inputs, request.kernels, planner)

    def _resident(self, inputs: Sequence[Any], device: torch.device) -> dict[str, int]:
        """What is on the device during the whole step."""
        tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.device == device]
        trained = [t for t in tensors if t.requires_grad]
        resident = {
            "parameters": memory.unique_bytes(trained),
            "buffers and inputs": memory.unique_bytes(tensors, without=memory.storages(trained)),
            **self.request.resident,
        }
        if self.request.gradients == ACCUMULATED:
            resident["gradients that exist"] = memory.dense_bytes(t for t in trained if t.is_leaf)
        return {name: size for name, size in resident.items() if size}

    def _optimizer_peak(self, inputs: Sequence[Any], resident: Mapping[str, int]) -> int:
        """The peak of the optimizer's step, when all gradients exist and the graph's results are freed."""
        if self.request.optimizer_step_bytes is None:
            return 0
        own = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        gradients = 0 if self.request.gradients == ACCUMULATED else memory.dense_bytes(own)
        return sum(resident.values()) + gradients + self.request.optimizer_step_bytes


def _may_run(error: InfeasibleBudget, resident: Mapping[str, int], device: torch.device) -> bool:
    """Whether the device has the memory that the plan of least memory is predicted to need."""
    return (error.least_bytes or 0) <= budgets.free_bytes(device) + sum(resident.values())


def _refusing(error: Exception) -> Callable[..., Any]:
    """Raises an error whenever it is called."""

    def run(*_: Any) -> Any:
        raise error

    return run


def _symbolic_sizes(inputs: Sequence[Any]) -> dict[int, int]:
    """The symbolic sizes among a graph's inputs: by index, the value at capture."""
    return {place: _compat_compile.size_hint(value) for place, value in enumerate(inputs)
            if isinstance(value, torch.SymInt)}  # fmt: skip


class _First:
    """A compiled graph whose first call measures it, and plans again if it needs more memory than predicted.

    Code cannot run while Dynamo compiles, so the first call, which follows at once, measures. The plan of a graph with
    symbolic sizes serves the sizes at capture and smaller ones. Larger sizes get plans of their own.
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
        self._larger: dict[tuple[Any, ...], _First] = {}

    def __call__(self, *args: Any) -> Any:
        if self._sizes and any(args[place] > size for place, size in self._sizes.items()):
            return self._for_larger(args)(*args)
        if not self._is_measured and torch.is_grad_enabled():
            if self._backend.measures:
                with _random_as_it_was(self._planner.device):
                    self._settle(args)
            elif self._planner.plan is not None:
                self._keep(self._planner.plan, self._compiled, args)
        if self._backend.is_preparing:
            raise Prepared
        return self._compiled(*args)

    def _for_larger(self, args: Sequence[Any]) -> _First:
        """The same graph planned for larger inputs; only the latest few plans are kept."""
        wanted = tuple(args[place] for place in self._sizes)
        if wanted not in self._larger:
            captured = Captured(self._captured.module)  # traced for these sizes
            planner, compiled = self._backend.planned(captured, args, self._planner.device, 0)
            if len(self._larger) == MOST_SIZES:
                self._larger.pop(next(iter(self._larger)))
            self._larger[wanted] = _First(self._backend, captured, planner, compiled, {})
        return self._larger[wanted]

    def _settle(self, inputs: Sequence[Any]) -> None:
        """Measure the step, and plan again until it keeps to its budget and leaves little of it unused."""
        planner, compiled, correction = self._planner, self._compiled, 0
        kept: tuple[CompiledPlan, Callable[..., Any]] | None = None
        for number in range(ROUNDS):
            if number:
                planner, compiled = self._backend.planned(self._captured, inputs, planner.device, correction)
            assert planner.plan is not None
            measured = _measured(compiled, inputs, planner, planner.plan.budget_bytes)
            plan = dataclasses.replace(planner.plan, measured_peak_bytes=measured)
            refusal = planner.refused(measured)
            if refusal is not None and kept is None:
                raise refusal
            if measured <= plan.budget_bytes:
                kept = plan, compiled
                if not _leaves_much(planner, plan, measured):
                    break
            elif kept is not None:
                break
            correction += measured - planner.predicted_bytes
        if kept is not None:
            self._keep(*kept, inputs)
            return
        raise BudgetExceeded(
            f"the compiled step took {format_bytes(measured)}, over its budget of {format_bytes(plan.budget_bytes)}, "
            f"also after {ROUNDS} plans: leave room for what its prediction misses, by cairn.Budget(reserve=)"
        )

    def _keep(self, plan: CompiledPlan, compiled: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Use a plan and its code from now on."""
        self._is_measured = True
        self._backend.plans.append(plan)
        self._compiled = _watching_gradients(compiled, plan, inputs)


def _leaves_much(planner: Planner, plan: CompiledPlan, measured: int) -> bool:
    """Whether a step recomputes although its measured peak leaves memory that its prediction counted as used."""
    if not plan.recomputed or planner.request.plan is not None:
        return False
    counted = planner.predicted_bytes - sum(planner.resident.values())
    return planner.predicted_bytes - measured > UNUSED * counted


def _measured(compiled: Callable[..., Any], inputs: Sequence[Any], planner: Planner, budget_bytes: int) -> int:
    """The peak of the step, everything resident included.

    If the first step exceeds the budget, a second one counts: a first call may allocate memory that stays.
    """
    fixed_bytes = sum(planner.resident.values())
    with _contents_as_they_were(inputs, planner.written):
        measured = fixed_bytes + _rise(compiled, inputs, planner)
        if measured > budget_bytes:
            measured = fixed_bytes + _rise(compiled, inputs, planner)
    return measured


def _rise(compiled: Callable[..., Any], inputs: Sequence[Any], planner: Planner) -> int:
    """By how much the step raises the memory in use."""
    meter = memory.meter_for(planner.device)
    with memory.not_collecting(), meter:
        first = meter.mark()
        _step(compiled, inputs, planner.request.holds_output)
        last = meter.mark()
    return meter.peak(first, last) - meter.level(first)


class _Loss(torch.autograd.Function):
    """A scalar whose backward makes gradients for tensors; it neither owns the tensors nor saves any."""

    @staticmethod
    def forward(ctx: Any, *roots: torch.Tensor) -> torch.Tensor:
        ctx.made_like = [(root.shape, root.dtype, root.device) for root in roots]
        return roots[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.made_like)


def _step(compiled: Callable[..., Any], inputs: Sequence[Any], holds_output: bool) -> None:
    """Run forward and backward: from the losses among the outputs, else from gradients of ones of all outputs."""
    with torch.enable_grad():
        outputs = compiled(*inputs)
        loss = _loss_of(outputs)
        if not holds_output:
            del outputs
        wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        if loss is not None:
            torch.autograd.grad(loss, wanted, allow_unused=True)


def _loss_of(outputs: Any) -> torch.Tensor | None:
    roots = [t for t in _tensors(outputs) if t.requires_grad]
    losses = [root for root in roots if root.numel() == 1]
    return _Loss.apply(*(losses or roots)) if roots else None


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]


@contextlib.contextmanager
def _contents_as_they_were(inputs: Sequence[Any], written: Sequence[int]) -> Iterator[None]:
    """Restore the tensors that the step writes."""
    contents = {index: inputs[index].detach().clone() for index in written if index < len(inputs)}
    try:
        yield
    finally:
        with torch.no_grad():
            for index, before in contents.items():
                inputs[index].copy_(before)


def _random_as_it_was(device: torch.device) -> Any:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _watching_gradients(compiled: Callable[..., Any], plan: CompiledPlan, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Warn once if a step adds to existing gradients, which its plan does not count."""
    places = [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if plan.gradients == ACCUMULATED or not places:
        return compiled
    place, warned = places[0], False

    def run(*args: Any) -> Any:
        nonlocal warned
        if not warned and args[place].grad is not None and torch.is_grad_enabled():
            warned = True
            warn(
                "this compiled step adds to gradients that exist, which its plan does not count: pass "
                'gradients="accumulated", or set gradients to None before each step'
            )
        return compiled(*args)

    return run


def device_of_inputs(inputs: Sequence[Any]) -> torch.device:
    """The device that a budget is for: the accelerator among a graph's inputs, else the CPU."""
    devices: Mapping[torch.device, None] = dict.fromkeys(
        t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type != "cpu"
    )
    if len(devices) > 1:
        raise Unsupported(f"the graph uses {', '.join(map(str, devices))}: a budget is for one device")
    return next(iter(devices), torch.device("cpu"))
