"""`verify`: the sample's step run plain and planned from one state, and compared bit for bit; its peak measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from cairn import format_bytes
from torch import nn

from ..base import clock, memory
from ..base.choices import ACCUMULATED
from ..base.errors import VerificationFailed
from ..compiled.compiled_model import CompiledReport, known, verified
from ..handle import apply, refuse_planned_modules, set_aside
from ..planning.arguments import check_call, check_plan, positional, refuse_torch_compiled
from ..planning.measured_step import Measured
from ..planning.plan import Plan
from ..planning.step_memory import StepMemory
from ..profiling.sample import Sample, backward_of
from ..profiling.step_setup import StepSetup
from ..rerun_state.module_state import same_results
from ..rerun_state.preserve import Parameters, Randomness
from ..rerun_state.side_effects import attribute_descriptions

#: How many times as far apart as two plain steps a planned one and a plain one may be, where plain ones differ.
MAX_DISTANCE_RATIO = 8


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. Peaks are those of whole steps, in bytes.

    Attributes
    ----------
    differences : tuple of str
        Results that differ in any bit from plain training: the first of each kind.
    compared : bool
        Whether a plain step ran as well.
    created, accumulated : Measured
        The planned step that creates its gradients, and one that adds to existing gradients.
    plain : Measured or None
        The plain step, if it ran.
    plan : Plan
        The verified plan.
    unsteady : tuple of str
        Results that differ, but about as much as between two plain steps: some kernels on CUDA add in no fixed order.
    """

    differences: tuple[str, ...]
    compared: bool
    created: Measured
    accumulated: Measured
    plain: Measured | None
    plan: Plan
    unsteady: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Bit for bit the plain result, within the budget."""
        return not self.problems()

    def __str__(self) -> str:
        how = "the plain step's bits" if self.compared else "not compared with the plain step"
        if self.unsteady:
            how += f" but for what plain steps do not repeat themselves ({len(self.unsteady)}: {self.unsteady[0]}, ...)"
        peaks = f"{format_bytes(self.created.peak_bytes)} ({format_bytes(self.accumulated.peak_bytes)} onto gradients)"
        texts = "; ".join(self.problems()) or f"{how}; peak {peaks} of {format_bytes(self.plan.budget_bytes)}"
        return f"{'sound' if self.ok else 'NOT SOUND'}: {texts}"

    def problems(self) -> list[str]:
        """The failures, in words."""
        texts = list(self.differences)
        runs = [("", self.created)]
        if self.plan.gradients == ACCUMULATED:
            runs.append((" onto existing gradients", self.accumulated))
        for name, measured in runs:
            if measured.peak_bytes > self.plan.budget_bytes:
                texts.append(
                    f"the step{name} took {format_bytes(measured.peak_bytes)}, which is "
                    f"{format_bytes(measured.peak_bytes - self.plan.budget_bytes)} over the budget"
                )
        return texts


@overload
def verify(model: nn.Module, *, strict: bool = True) -> CompiledReport: ...
@overload
def verify(
    model: nn.Module,
    plan: Plan,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    compare: bool = True,
    strict: bool = True,
) -> Verification: ...
def verify(
    model: nn.Module,
    plan: Plan | None = None,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    compare: bool = True,
    strict: bool = True,
) -> Verification | CompiledReport:
    """Run the sample step plain and planned, from the same state, and compare.

    Loss, gradients, buffers, attributes of modules and random state must be equal bit for bit, and the peak within the
    budget. The model is restored afterwards.

    Parameters
    ----------
    model : nn.Module
        The model; or one that `compile` returned, which has its plan with it: `verify(compiled)`. Its inputs are those
        of the sample, with other values for floating-point tensors, which `compile` does not hold.
    plan : Plan
        The plan to verify.
    args, kwargs, loss_fn
        The sample, as for `profile`.
    compare : bool
        False runs the planned step alone, for models that do not fit plainly.
    strict : bool
        Raise for a difference; False returns it.

    Returns
    -------
    Verification or CompiledReport
        The result; its `ok` is true if nothing differs and the peak is within the budget.

    Raises
    ------
    VerificationFailed
        A bit differs, or the peak is over the budget; unless strict is false.

    Examples
    --------
    >>> result = ct.verify(model, plan, x, loss_fn=loss_fn)
    >>> result.ok
    True
    """
    compiled = known(model)
    if compiled is not None and plan is None:
        return verified(compiled, strict)
    if plan is None:
        refuse_torch_compiled(model)
    check_call(model, kwargs, loss_fn, args)
    check_plan(plan)
    assert plan is not None
    arguments = positional(args)
    sample = Sample(model, arguments, dict(kwargs or {}), loss_fn, plan.holds_output)
    device = memory.device_of(model)
    plan.check_fits(model, arguments, sample.kwargs)
    with set_aside(model, *sample.others), sample.preserved(device) as parameters:
        refuse_planned_modules(model)
        runs = _Runs(sample, plan, device, parameters)
        sample.watch(parameters)
        with runs.meter:  # one meter for all: what is allocated under it must be released under it
            plain = runs.step(existing=False, keeps=True) if compare else None
            with apply(model, plan):
                runs.step(existing=False)  # what is allocated once, at the first step
                created = runs.step(existing=False, keeps=compare)
                again = runs.step(existing=True)
            differences = _differences(plain, created, plan) if plain is not None else {}
            runs.release()
            usual = runs.differences_between_plain_steps() if differences else {}
        unsteady = tuple(name for name, difference in differences.items() if difference.is_as(usual.get(name)))
        result = Verification(
            tuple(
                _first_of_each_kind(difference.text for name, difference in differences.items() if name not in unsteady)
            ),
            compare,
            runs.measured(created),
            runs.measured(again),
            None if plain is None else runs.measured(plain),
            plan,
            unsteady,
        )
    if strict and not result.ok:
        raise VerificationFailed("; ".join(result.problems()))
    return result


@dataclasses.dataclass
class _Outcome:
    """A step's results, copied if they are kept, and the marks around it."""

    loss: torch.Tensor | None
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]  # their descriptions, by name
    random: Randomness | None
    resident_bytes: int
    first: int
    last: int
    step_ns: int
    existing: bool


class _Runs:
    """Steps from one state, under one meter."""

    def __init__(self, sample: Sample, plan: Plan, device: torch.device, parameters: Parameters) -> None:
        self._sample, self._plan, self._device = sample, plan, device
        self._setup = StepSetup(sample, device, parameters)
        self._outcomes: list[_Outcome] = []
        self.meter = memory.meter_for(device, taken=True)

    def step(self, existing: bool, keeps: bool = False) -> _Outcome:
        """One step, onto gradients that exist already or creating them; `keeps` its results."""
        memory.give_back()
        model, meter = self._sample.model, self.meter
        self._setup.begin(existing)
        step_memory = StepMemory(self._plan, model)
        clock.wait_for(self._device)
        first = meter.mark()
        began = clock.read()
        output, loss = self._sample.forward()
        backward_of(output, loss)
        took = clock.now(self._device) - began
        last = meter.mark()
        outcome = _Outcome(
            None if loss is None else loss.detach().clone(),
            {name: p.grad.clone() for name, p in model.named_parameters() if keeps and p.grad is not None},
            {name: b.clone() for name, b in model.named_buffers() if keeps},
            attribute_descriptions(model) if keeps else {},
            Randomness(self._device),
            step_memory.resident_bytes + step_memory.uncounted_bytes(model),
            first,
            last,
            took,
            existing,
        )
        del output, loss
        self._setup.end()
        self._outcomes.append(outcome)
        return outcome

    def differences_between_plain_steps(self) -> dict[str, _Difference]:
        """The differences between two steps of the same kind."""
        one, other = (self.step(existing=False, keeps=True) for _ in range(2))
        differing = _differences(one, other, self._plan)
        self.release()
        return differing

    def release(self) -> None:
        """Lets go of the copies."""
        for outcome in self._outcomes:
            outcome.loss, outcome.random = None, None
            outcome.grads.clear()
            outcome.buffers.clear()
            outcome.attributes.clear()

    def measured(self, outcome: _Outcome) -> Measured:
        """Once the meter was left."""
        rise = self.meter.rise(outcome.first, outcome.last)
        return Measured(outcome.resident_bytes + rise, outcome.step_ns, outcome.existing)


@dataclasses.dataclass(frozen=True)
class _Difference:
    """A result that differs between two steps: its description, and the largest distance of its numbers."""

    text: str
    distance: float

    def is_as(self, usual: _Difference | None) -> bool:
        """Whether two plain steps differ about as much."""
        return usual is not None and self.distance <= MAX_DISTANCE_RATIO * usual.distance


def _differences(plain: _Outcome, planned: _Outcome, plan: Plan) -> dict[str, _Difference]:
    """The differences, by name of the result."""
    pairs = {"the loss": (plain.loss, planned.loss, "")}
    for kind, one, other in (
        ("the gradient of", plain.grads, planned.grads),
        ("the buffer", plain.buffers, planned.buffers),
    ):
        names = list({**one, **other})
        pairs.update((f"{kind} {name}", (one.get(name), other.get(name), _block_of(name, plan))) for name in names)
    differing = {
        what: _Difference(f"{what}{block} differs from the plain step's", _distance(a, b))
        for what, (a, b, block) in pairs.items()
        if not same_results(a, b)
    }
    for name in {**plain.attributes, **planned.attributes}:
        if plain.attributes.get(name) != planned.attributes.get(name):
            what = f"the attribute {name}"
            text = f"{what}{_block_of(name, plan)} differs from the plain step's"
            differing[what] = _Difference(text, math.inf)
    if plain.random is None or planned.random is None or plain.random.torch_differs(planned.random):
        differing["the random state"] = _Difference(
            "the random state after the step differs from the plain step's", math.inf
        )
    return differing


def _first_of_each_kind(texts: Iterable[str]) -> Iterator[str]:
    """The first text of each kind: where one gradient differs, many do."""
    kinds: set[str] = set()
    for text in texts:
        kind = text.split()[1]
        if kind not in kinds:
            kinds.add(kind)
            yield text


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape or a.numel() == 0:
        return math.inf
    distance = float((a.to_dense().double() - b.to_dense().double()).abs().max())
    return math.inf if math.isnan(distance) else distance


def _block_of(parameter: str, plan: Plan) -> str:
    """The block that a parameter belongs to, for messages."""
    inside = [ref.name for ref in plan.stages if ref.is_block and parameter.startswith(ref.name + ".")]
    return f" (block {max(inside, key=len)})" if inside else ""
