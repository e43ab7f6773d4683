"""The report of a compiled model: its plan, its measured step, and a comparison with the plain step."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cairn
import torch
from cairn import format_bytes, format_ns
from torch import nn

from ..base import clock, memory
from ..base.budgets import free_bytes, resolve
from ..base.errors import Unsupported, VerificationFailed, out_of_time, warn
from ..profiling.sample import Sample, backward_of
from ..rerun_state.module_state import same_results
from ..rerun_state.preserve import Buffers, Randomness
from .backend import Backend, GraphPrepared
from .compiled_plan import CompiledPlan
from .region_plan import RegionPlan

ROUNDS = 3  # how often a step is planned and measured, each time corrected by the measurement before
CURVE_TIME_LIMIT = "2s"  # of the solver, for each point of a curve
MAX_COMPILATIONS = 4  # steps of one model that may compile, before it is refused


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The results of one step, its peak in bytes and its time in ns. The peak counts all memory on the device."""

    loss: torch.Tensor | None
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random: Randomness
    peak_bytes: int
    step_ns: int


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """The plans of a compiled step, and its measurements.

    Attributes
    ----------
    plans : tuple of CompiledPlan
        One for each graph that Dynamo captured with gradients.
    measured_peak_bytes, step_ns : int
        Of the whole step, loss included.
    plain_peak_bytes, plain_ns : int or None
        Of the model without compilation; None where it was not run.
    differences : tuple of str, or None
        Results that differ in any bit from the model without compilation; None if they were not compared.
    regions : RegionPlan or None
        The plan of blocks that are compiled one by one; `plans` is empty then.
    """

    plans: tuple[CompiledPlan, ...]
    measured_peak_bytes: int
    step_ns: int
    plain_peak_bytes: int | None
    plain_ns: int | None
    differences: tuple[str, ...] | None
    regions: RegionPlan | None = None

    def __str__(self) -> str:
        lines = [str(plan) for plan in (*self.plans, *filter(None, [self.regions]))]
        whole = f"whole step  {format_bytes(self.measured_peak_bytes)}, {format_ns(self.step_ns)} measured"
        if self.plain_peak_bytes is not None and self.plain_ns is not None:
            whole += f"; without compilation {format_bytes(self.plain_peak_bytes)}, {format_ns(self.plain_ns)}"
        lines.append(f"\n  {whole}")
        lines += [f"  {sentence}" for sentence in self._times_off()]
        if self.differences is not None:
            same = "loss, gradients, buffers and random state equal those without compilation, bit for bit"
            lines.append("  " + (same if not self.differences else "differs: " + "; ".join(self.differences)))
        return "\n".join(lines)

    def _times_off(self) -> list[str]:
        """A sentence if the predicted time is far from the measured one; of several graphs there is no such time."""
        if self.regions is None and len(self.plans) != 1:
            return []
        plan = self.plans[0] if self.regions is None else self.regions.plan
        if_less = "compile again in a new process, the machine was busy"
        if_more = "the machine was busy, or the step is short"
        if self.regions is None and self.plans[0].kernels != "eager":
            if_less = if_more = "times of generated kernels are estimates"
        return clock.far_apart(plan.step_ns, self.step_ns, if_less, if_more)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["plans"] = [plan.to_json() for plan in self.plans]
        data["regions"] = None if self.regions is None else self.regions.to_json()
        return data


class CompiledModel:
    """A compiled model with its sample: runs the compiled step, and the step of the original model.

    It owns the model, and has a weak reference to the compiled one.

    Attributes
    ----------
    resident_bytes
        Memory that is on the device before a step.
    optimizer_peak_bytes
        The peak of the optimizer's step; 0 without an optimizer.
    report
        None before the step was planned.
    backend
        The backend that plans its graphs; None where blocks are compiled one by one.
    """

    def __init__(self, model: nn.Module, compiled: nn.Module, sample: Sample, device: torch.device) -> None:
        self.model, self._compiled = model, weakref.ref(compiled)
        self.sample, self.device = sample, device
        self.resident_bytes = 0
        self.optimizer_peak_bytes = 0
        self.report: CompiledReport | None = None
        self.backend: Backend | None = None

    def prepared_step(self) -> StepResult:
        """Capture, plan and compile the step unless that is done, and run it until a run compiles nothing.

        More than one run may be needed: attributes that a model sets in its first step can fail Dynamo's guards in the
        second.
        """
        backend = self.backend
        if backend is None:
            return self.compiled_step()
        backend.is_preparing = True
        try:
            with contextlib.suppress(GraphPrepared):
                self.compiled_step(may_compile=True)
        finally:
            backend.is_preparing = False
        for _ in range(MAX_COMPILATIONS):
            before = backend.compilations
            result = self.compiled_step(may_compile=True)
            if backend.compilations == before:
                return result
        raise Unsupported(f"torch.compile compiles this model anew in each of {MAX_COMPILATIONS} steps")

    def step(self, function: Callable[..., Any], may_compile: bool = False) -> StepResult:
        """Run and measure one step that creates its gradients. The model's own gradients are restored afterwards.

        may_compile: whether the step may compile. If a compilation measures its graph meanwhile, the peak of this step
        is not measured: `peak_bytes` is then the resident memory alone.
        """
        model, meter, buffers = self.model, memory.meter_for(self.device, may_compile), Buffers(self.model)
        with _gradients_set_aside(model), memory.not_collecting():
            with meter:  # what is allocated under it is released under it
                first, start_ns = meter.mark(), clock.read()
                loss = self._run(function)
                elapsed_ns = clock.now(self.device) - start_ns
                is_measured = meter.is_here()
                last = meter.mark() if is_measured else first
                random = Randomness(self.device)
                grads = {name: _copy(p.grad) for name, p in model.named_parameters()}
                loss_copy = _copy(loss)
                del loss
                for parameter in model.parameters():
                    parameter.grad = None
            buffers_after = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
            buffers.restore()
        peak_above_start = meter.rise(first, last) if is_measured else 0
        return StepResult(loss_copy, grads, buffers_after, random, self.resident_bytes + peak_above_start, elapsed_ns)

    def _run(self, function: Callable[..., Any]) -> torch.Tensor | None:
        sample = self.sample
        output, loss = sample.results(sample.output(function))
        backward_of(output, loss)
        return None if loss is None else loss.detach()

    def plain_step(self) -> StepResult:
        """One step of the model without compilation."""
        return self.step(self.model)

    def plain_step_to_compare(self, is_wanted: bool, predicted_bytes: int, reporter: Any) -> StepResult | None:
        """One step of the model without compilation, if it is wanted and fits on the device of every rank."""
        if not is_wanted:
            return None
        lacking = max(0, predicted_bytes - free_bytes(self.device) - self.resident_bytes)
        if self.sample.ranks.largest(lacking):
            size = format_bytes(predicted_bytes)
            warn(f"not proved: a step without a plan takes {size}, more than the device has free")
            return None
        reporter.begin("comparing with the step without compilation")
        return self.plain_step()

    def make_report(
        self,
        plans: tuple[CompiledPlan, ...],
        regions: RegionPlan | None,
        compiled_step: StepResult,
        peak_bytes: int,
        plain_step: StepResult | None,
        differing: tuple[str, ...] | None,
    ) -> None:
        """Make the report of a compiled step. peak_bytes: its peak, the optimizer's step included."""
        plain_bytes = None if plain_step is None else max(plain_step.peak_bytes, self.optimizer_peak_bytes)
        plain_ns = None if plain_step is None else plain_step.step_ns
        times = compiled_step.step_ns, plain_bytes, plain_ns
        self.report = CompiledReport(plans, peak_bytes, *times, differing, regions)
        compiled = self._compiled()
        assert compiled is not None
        remember(compiled, self)

    def compiled_step(self, may_compile: bool = False) -> StepResult:
        """One step of the compiled model."""
        compiled = self._compiled()
        assert compiled is not None
        return self.step(compiled, may_compile)


@contextlib.contextmanager
def _gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Remove a model's gradients for the body, and restore them after it."""
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def differences(plain: StepResult, other: StepResult) -> tuple[str, ...]:
    """The results that differ in any bit, each described by its name; gradients with their largest difference."""
    differing = []
    if plain.loss is not None and other.loss is not None and not same_results(plain.loss, other.loss):
        differing.append(f"the loss ({plain.loss.item()!r} and {other.loss.item()!r})")
    differing += [f"the gradient of {name}{_by(g, other.grads[name])}" for name, g in plain.grads.items()
                  if not same_results(g, other.grads[name])]  # fmt: skip
    differing += [f"the buffer {name}" for name, b in plain.buffers.items() if not same_results(b, other.buffers[name])]
    if plain.random.torch_differs(other.random):
        differing.append("the random state after the step")
    return tuple(differing)


def _by(one: torch.Tensor | None, other: torch.Tensor | None) -> str:
    """The largest difference of two tensors, in words; empty if one is None."""
    if one is None or other is None:
        return ""
    distance = (one.to_dense() - other.to_dense()).abs().max().item()
    return f" by up to {distance:.2g}" if distance else " in the signs of zeros"


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Callable[[], CompiledModel | None]] = weakref.WeakKeyDictionary()


def warn_of_capture(differing: Sequence[str]) -> None:
    """Warn of results that differ because of torch.compile itself, whatever the plan."""
    rest = len(differing) - 1
    first = differing[0] + (f", and {rest} more" if rest else "")
    warn(
        f"torch.compile computes something else than the model does without it: {first}. The step within the budget "
        "equals that of torch.compile without a plan bit for bit"
    )


def given_bytes(sample: Sample, device: torch.device) -> int:
    """Bytes of the inputs of a step on a device, without parameters and buffers."""
    own = memory.storages([*sample.model.parameters(), *sample.model.buffers()])
    return memory.unique_bytes((t for t in sample.static_tensors() if t.device == device), without=own)


def remember(compiled: nn.Module, compiled_model: CompiledModel) -> None:
    """Store the report of a compiled model. If its blocks are compiled in place, the model itself holds it."""
    _KNOWN[compiled] = weakref.ref(compiled_model) if compiled is compiled_model.model else lambda: compiled_model


def known(model: Any) -> CompiledModel | None:
    """The report of a model that `compile` returned."""
    return _KNOWN.get(model, _nothing)() if isinstance(model, nn.Module) else None


def _nothing() -> None:
    """No report."""


def verified(compiled_model: CompiledModel, strict: bool = True) -> CompiledReport:
    """Run the compiled step and the step without compilation from one state, and compare their results.

    With inductor's kernels, differences are reported and are no error.
    """
    assert compiled_model.report is not None
    planned_before = 0 if compiled_model.backend is None else len(compiled_model.backend.plans)
    with compiled_model.sample.redrawn(), compiled_model.sample.preserved(compiled_model.device):
        compiled_step = compiled_model.prepared_step()
        plain_step = compiled_model.plain_step()
        differing = differences(plain_step, compiled_step)
    replanned = (
        () if compiled_model.backend is None else tuple(compiled_model.backend.plans[planned_before:])
    )  # Dynamo forgot what it had compiled
    report = dataclasses.replace(
        compiled_model.report,
        plans=replanned or compiled_model.report.plans,
        measured_peak_bytes=max(compiled_step.peak_bytes, compiled_model.optimizer_peak_bytes),
        step_ns=compiled_step.step_ns,
        plain_peak_bytes=max(plain_step.peak_bytes, compiled_model.optimizer_peak_bytes),
        plain_ns=plain_step.step_ns,
        differences=differing,
    )
    plans: list[CompiledPlan | RegionPlan] = [*report.plans, *filter(None, [report.regions])]
    problems = list(differing) if all(plan.kernels == "eager" for plan in plans) else []
    budget = min((plan.budget_bytes for plan in plans), default=None)
    if budget is not None and report.measured_peak_bytes > budget:
        over = format_bytes(report.measured_peak_bytes - budget)
        problems.append(f"the step took {format_bytes(report.measured_peak_bytes)}, which is {over} over the budget")
    if strict and problems:
        raise VerificationFailed("; ".join(problems))
    return report


#: A point of a curve: peak in bytes, time in nanoseconds, extra time as a share; None where nothing fits.
CurvePoint = tuple[int | None, int | None, float | None]


def curve(plan: CompiledPlan, budgets: int | Sequence[Any]) -> Iterator[tuple[int, CurvePoint]]:
    """The curve of memory against time of a compiled step, by the simulator: budgets in bytes, each with its point.

    budgets: sizes, or a number of budgets between the least that works and that of a step without recomputation.
    """
    graph = plan.graph
    device = torch.device(plan.device)
    if isinstance(budgets, int):
        limits = cairn.limits(graph, time_limit=CURVE_TIME_LIMIT)
        low, high = limits.least_bytes, limits.store_all_bytes
        if low is None or high is None:
            raise out_of_time(CURVE_TIME_LIMIT)
        budgets_bytes = [low + (high - low) * i // max(budgets - 1, 1) + plan.reserve_bytes for i in range(budgets)]
    else:
        budgets_bytes = [resolve(budget, device, sum(plan.resident.values())) for budget in budgets]
    for budget in budgets_bytes:
        solution = cairn.solve(graph, max(1, budget - plan.reserve_bytes), time_limit=CURVE_TIME_LIMIT)
        if solution.makespan_ns is None or solution.store_all_ns is None:
            yield budget, (None, None, None)
            continue
        double_counted_ns = solution.store_all_ns - plan.plain_ns  # counted by the problem alone
        step_ns = solution.makespan_ns - double_counted_ns
        yield budget, (solution.peak_bytes, step_ns, step_ns / plan.plain_ns - 1 if plan.plain_ns else 0.0)
