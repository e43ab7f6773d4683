"""Measures real steps: once for `verify`, which compares plain and planned; and during training for the first steps."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from cairn import format_bytes
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .arguments import ACCUMULATED, CREATED, check_call, check_plan
from .base import _compat, clock, memory
from .base.errors import BudgetExceeded, VerificationFailed, warn
from .base.stage_measure import LEFT_BESIDE
from .base.tree import tensors_in
from .context.attributes import Attributes, plain_tensors
from .context.lasting import said_by
from .context.untouched import Buffers, Parameters, RandomState
from .handle import apply, set_aside
from .measuring.optimizer import KeptStates
from .measuring.sample import Sample, backward_of
from .plan import Plan
from .profiler import OPTIMIZER_STATE, STATE, autocast_of
from .report import Measured

#: How many times as far apart as two plain steps a planned one and a plain one may be, where plain ones differ.
UNSTEADY = 8

MOST_FORWARDS = 16  # that may belong to a step; more are no step of training
MOST_NOTES = 3  # of what was not as planned, in a warning
MOST_IN_VAIN = 8  # steps of a plan that could not be judged, as where another model's optimizer steps in their midst


def resident_of(plan: Plan, gradient_bytes: int) -> int:
    """What of a plan's memory is there before the step begins, with gradients of so many bytes."""
    if plan.scope == "activations":
        return int(plan.problem["input_bytes"])
    state = sum(size for name, size in plan.resident.items() if name in STATE)
    return state + gradient_bytes + int(plan.problem["input_bytes"])


def gradient_bytes_of(model: nn.Module) -> int:
    """Bytes of the gradients that exist now."""
    return memory.unique_bytes(p.grad for p in model.parameters() if p.is_leaf and p.grad is not None)


def uncounted_bytes(plan: Plan, model: nn.Module, gradient_bytes: int) -> int:
    """What a step has added to the gradients of so many bytes, where the plan does not count gradients.

    A meter sees them as they come, so taking all of them off its peak can take too much, never too little.
    """
    return gradient_bytes_of(model) - gradient_bytes if plan.scope == "activations" else 0


def _left_bytes(plan: Plan, model: nn.Module) -> int:
    """What of a plan's memory an earlier step has left beside the blocks' results, for this one to replace."""
    if LEFT_BESIDE not in plan.resident:
        return 0
    left = memory.unique_bytes(tensor for tensor, _ in plain_tensors(model))
    return min(left, plan.resident[LEFT_BESIDE])


# -- verify --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. Peaks are of whole steps, in bytes; `accumulated` of a step onto existing gradients.

    `unsteady`: what differed, but differs between two plain steps about as much: some kernels on CUDA add up in no
    fixed order.
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
        found = "; ".join(self.problems()) or f"{how}; peak {peaks} of {format_bytes(self.plan.budget_bytes)}"
        return f"{'sound' if self.ok else 'NOT SOUND'}: {found}"

    def problems(self) -> list[str]:
        """What is wrong, in words."""
        found = list(self.differences)
        runs = [("", self.created)]
        if self.plan.gradients == ACCUMULATED:
            runs.append((" onto existing gradients", self.accumulated))
        for name, measured in runs:
            if measured.peak_bytes > self.plan.budget_bytes:
                found.append(
                    f"the step{name} took {format_bytes(measured.peak_bytes)}, which is "
                    f"{format_bytes(measured.peak_bytes - self.plan.budget_bytes)} over the budget"
                )
        return found


def verify(
    model: nn.Module,
    plan: Plan,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    compare: bool = True,
    strict: bool = True,
) -> Verification:
    """Runs the sample step plain and planned, from the same state, and compares.

    Loss, gradients, buffers, what modules have in attributes, and random state must be equal bit for bit, and the peak
    within the budget. What differs between two plain steps about as much is not counted, but named
    (`Verification.unsteady`). The model is left as it was. With compare=False only the planned step runs, for models
    that do not fit plainly.
    Raises VerificationFailed unless strict is false.
    """
    check_call(model, kwargs, loss_fn, args)
    check_plan(plan)
    arguments = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    sample = Sample(model, arguments, dict(kwargs or {}), loss_fn, plan.holds_output)
    device = memory.device_of(model)
    plan.check_fits(model, arguments, sample.kwargs)
    with set_aside(model), sample.untouched(device) as parameters:
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
            usual = runs.usual() if differences else {}
        unsteady = tuple(name for name, found in differences.items() if found.is_as(usual.get(name)))
        result = Verification(
            tuple(_told(found.text for name, found in differences.items() if name not in unsteady)),
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
    attributes: dict[str, Any]  # what they say
    random: RandomState | None
    resident_bytes: int
    first: int
    last: int
    step_ns: int
    existing: bool


class _Runs:
    """Steps from one state, under one meter."""

    def __init__(self, sample: Sample, plan: Plan, device: torch.device, parameters: Parameters) -> None:
        self._sample, self._plan, self._device, self._parameters = sample, plan, device, parameters
        self._start, self._buffers = RandomState(device), Buffers(sample.model)
        self._outcomes: list[_Outcome] = []
        self.meter = memory.meter_for(device, taken=True)

    def step(self, existing: bool, keeps: bool = False) -> _Outcome:
        """One step, onto gradients that exist already or creating them; `keeps` its results."""
        memory.give_back()
        model, meter = self._sample.model, self.meter
        self._start.restore()
        self._buffers.restore()
        self._parameters.restore()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if existing and p.requires_grad else None
        gradient_bytes, attributes = gradient_bytes_of(model), Attributes(model.modules(), with_large=True)
        clock.wait_for(self._device)
        first = meter.mark()
        began = time.perf_counter_ns()
        output, loss = self._sample.forward()
        backward_of(output, loss)
        clock.wait_for(self._device)
        took = time.perf_counter_ns() - began
        last = meter.mark()
        outcome = _Outcome(
            None if loss is None else loss.detach().clone(),
            {name: p.grad.clone() for name, p in model.named_parameters() if keeps and p.grad is not None},
            {name: b.clone() for name, b in model.named_buffers() if keeps},
            said_by(model) if keeps else {},
            RandomState(self._device),
            resident_of(self._plan, gradient_bytes) - uncounted_bytes(self._plan, model, gradient_bytes),
            first,
            last,
            took,
            existing,
        )
        del output, loss
        attributes.restore()
        for p in model.parameters():
            p.grad = None
        self._outcomes.append(outcome)
        return outcome

    def usual(self) -> dict[str, _Difference]:
        """What differs between two steps of the same kind."""
        one, other = (self.step(existing=False, keeps=True) for _ in range(2))
        found = _differences(one, other, self._plan)
        self.release()
        return found

    def release(self) -> None:
        """Lets go of the copies."""
        for outcome in self._outcomes:
            outcome.loss, outcome.random = None, None
            outcome.grads.clear()
            outcome.buffers.clear()
            outcome.attributes.clear()

    def measured(self, outcome: _Outcome) -> Measured:
        """Once the meter was left."""
        rise = self.meter.peak(outcome.first, outcome.last) - self.meter.level(outcome.first)
        return Measured(outcome.resident_bytes + rise, outcome.step_ns, outcome.existing)


@dataclasses.dataclass(frozen=True)
class _Difference:
    """A result that two steps do not share: what to say of it, and how far apart its numbers are at most."""

    text: str
    distance: float

    def is_as(self, usual: _Difference | None) -> bool:
        """Whether two plain steps differ about as much."""
        return usual is not None and self.distance <= UNSTEADY * usual.distance


def _differences(plain: _Outcome, planned: _Outcome, plan: Plan) -> dict[str, _Difference]:
    """What differs, by name."""
    pairs = {"the loss": (plain.loss, planned.loss, "")}
    for kind, one, other in (
        ("the gradient of", plain.grads, planned.grads),
        ("the buffer", plain.buffers, planned.buffers),
    ):
        names = list({**one, **other})
        pairs.update((f"{kind} {name}", (one.get(name), other.get(name), _block_of(name, plan))) for name in names)
    found = {
        what: _Difference(f"{what}{block} differs from the plain step's", _distance(a, b))
        for what, (a, b, block) in pairs.items()
        if not _same(a, b)
    }
    for name in filter(planned.attributes.__contains__, plain.attributes):
        if plain.attributes[name] != planned.attributes[name]:
            what = f"the attribute {name}"
            text = f"{what}{_block_of(name, plan)} differs from the plain step's"
            found[what] = _Difference(text, math.inf)
    if plain.random is None or planned.random is None or plain.random.torch_differs(planned.random):
        found["the random state"] = _Difference(
            "the random state after the step differs from the plain step's", math.inf
        )
    return found


def _told(texts: Iterable[str]) -> Iterator[str]:
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


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout is not torch.strided:  # gradients of sparse embeddings
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _block_of(parameter: str, plan: Plan) -> str:
    """The block that a parameter belongs to, for messages."""
    inside = [ref.name for ref in plan.stages if ref.is_block and parameter.startswith(ref.name + ".")]
    return f" (block {max(inside, key=len)})" if inside else ""


# -- the first steps of training -----------------------------------------------------------------------------


@dataclasses.dataclass
class _Found:
    """How many steps with a plan were measured, and the worst of them."""

    plan: Plan  # held, so that no other one gets its id
    steps: int = 0
    in_vain: int = 0  # steps that were begun and not judged
    worst: Measured | None = None
    unforeseen_bytes: int = 0  # state of optimizers that the worst step had, and the plan does not count

    def add(self, step: Measured, unforeseen_bytes: int) -> None:
        self.steps += 1
        self.in_vain -= 1
        if self.worst is None or step.peak_bytes >= self.worst.peak_bytes:
            self.worst, self.unforeseen_bytes = step, unforeseen_bytes


#: What backwards may do that no plan counts, and what to do about it.
_DIFFERENTIABLE = (
    "a backward with create_graph=True keeps what its own derivative needs, which no plan counts. Leave room for it by "
    "Budget(reserve=)"
)
_REPEATED = (
    "a forward had more than one backward (retain_graph=True), and a plan is for one. Add the losses up before the "
    "backward, or leave room for it by Budget(reserve=)"
)
_CASTING = (
    "the backward ran within the autocast region, which keeps its copies of parameters to its end. Let it end before "
    "the backward, or leave room for them by Budget(reserve=)"
)


class Watch:
    """Measures the first training steps that follow each plan of a model, where nothing else is measuring.

    A step begins with the model's forward and ends with the backward; it is judged when the optimizer steps or the next
    forward begins. Forwards whose backwards are still to come belong to one step, for all that they keep is there at
    once. A peak over the budget warns, or raises BudgetExceeded if strict. So does state that an optimizer creates, and
    the plan does not count, if with it the next step would take more than the budget.

    Only one thread is measured at a time, for a meter belongs to the thread that entered it. A step during which
    another thread begins one does not count. Measuring takes time, so it ends after a few steps that did not count.
    """

    def __init__(self, steps: int, strict: bool = False, on_miss: Callable[[Plan, int], None] | None = None) -> None:
        self._steps, self._strict = steps, strict
        self._on_miss = on_miss  # called with the plan and what was missed, in bytes, once no forward is running
        self._miss: tuple[Plan, int] | None = None
        self._due: BudgetExceeded | None = None  # to be raised when a step begins, or the optimizer's
        self._found: dict[int, _Found] = {}  # by id of a plan
        self._lock = threading.RLock()
        self._meter: memory.Meter | None = None
        self._thread: threading.Thread | None = None  # that the meter belongs to
        self._has_measured = False  # the step before
        self._outputs: list[_compat.StorageRef] = []  # of the latest forward that was measured
        self._dropped = self._held = 0  # bytes of them that were gone, or there, when its backward ended
        self._disturbed = False  # by a step of another thread
        self._last: int | None = None  # mark of the backward's end
        self._missing: Sequence[str] = ()  # blocks that its latest forward has not run
        self._notes: Sequence[str] = ()  # what else was not as planned
        self._forwards: list[weakref.ref[Any]] = []  # of the step: what lives as long as their graphs
        self._together = 1  # so many of those graphs lived at once
        self._seen: set[str] = set()  # what its backwards did that no plan counts
        self._current: tuple[weakref.ref[nn.Module], Plan] | None = None  # of the latest step
        self._states = KeptStates()
        self._within: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have stepped in the backward
        watch = weakref.ref(self)

        def judge(*_: Any) -> None:
            watching = watch()
            if watching is not None and watching._is_mine() and _compat.backward_id() < 0:  # not one within it
                watching._finish()
                watching._correct()

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            watching = watch()
            if watching is None or not watching._is_mine():
                return
            if _compat.backward_id() < 0:
                watching._look_at(optimizer)
            else:
                watching._within.add(optimizer)

        hooks = [register_optimizer_step_pre_hook(judge), register_optimizer_step_post_hook(look)]
        self._unhook = weakref.finalize(self, _remove, hooks)
        self._unhook.atexit = False

    def __del__(self) -> None:  # with the model whose plan it watches
        if not sys.is_finalizing() and _compat.backward_id() < 0 and self._is_mine():
            self._stop()

    def measured(self, plan: Plan) -> Measured | None:
        """The worst step so far of those that followed this plan. What is to be raised waits for the next step."""
        if self._is_mine():
            self._finish(raises=False)
        return self._of(plan).worst

    def _of(self, plan: Plan) -> _Found:
        return self._found.setdefault(id(plan), _Found(plan))

    def remove(self) -> None:
        """Stops watching."""
        self._unhook()
        if self._is_mine():
            self._stop()

    def begin(self, module: nn.Module, plan: Plan) -> None:
        """A step begins that follows this plan."""
        with self._lock:
            if not self._is_mine():
                self._disturbed = True
                return
            if self._joins() or _compat.backward_id() >= 0:  # a backward runs in a state of its own
                return
            self._finish()
            self._current = weakref.ref(module), plan
            self._note_those_within(module, plan)
            found = self._of(plan)
            if found.steps < self._steps and found.in_vain < MOST_IN_VAIN and not _compat.profiler_is_active():
                self._start(module, plan)
            else:
                self._has_measured = False

    def _is_mine(self) -> bool:
        """Whether no other thread that lives is measured."""
        thread = self._thread
        return self._meter is None or thread is threading.current_thread() or thread is None or not thread.is_alive()

    def _joins(self) -> bool:
        """Takes a forward into the step that is measured, if backwards of that are to come; whether it did."""
        if self._meter is None or self._last is not None or self._disturbed or not self._meter.is_here():
            return False
        waiting = sum(graph() is not None for graph in self._forwards)
        self._together = max(self._together, waiting + 1)
        return waiting > 0 and len(self._forwards) < MOST_FORWARDS

    def _start(self, module: nn.Module, plan: Plan) -> None:
        self._plan, self._thread, self._disturbed = plan, threading.current_thread(), False
        self._module, self._gradient_bytes = weakref.ref(module), gradient_bytes_of(module)
        self._existed = self._gradient_bytes > 0
        self._unforeseen = self._unforeseen_bytes(plan)
        self._resident = resident_of(plan, self._gradient_bytes) + self._unforeseen
        self._of(plan).in_vain += 1  # until it is judged
        self._forwards, self._together, self._seen, self._uncounted = [], 1, set(), 0
        self._device, self._last = memory.device_of(module), None
        if self._has_measured or self._device.type != "cpu":  # where no meter was, it is not seen going either
            self._resident += _left_bytes(plan, module) + self._held_bytes(module)
        self._has_measured = True
        self._autocast = autocast_of(self._device)
        self._meter = memory.meter_for(self._device, interruptible=True, taken=True)
        self._meter.__enter__()
        self._first = self._meter.mark()
        self._began = self._now()

    def _held_bytes(self, module: nn.Module) -> int:
        """What the caller still has of the output of the step before."""
        own = memory.storages((*module.parameters(), *module.buffers()))
        held = {ref.key: ref.nbytes for ref in self._outputs if ref.alive() and ref.key not in own}
        return sum(held.values())

    def _now(self) -> int:
        clock.wait_for(self._device)
        return time.perf_counter_ns()

    def forward_ended(self, output: Any, missing: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        """The step's forward has returned this; `missing` are planned blocks that it has not run, `notes` get what else
        is not as planned.
        """
        if self._meter is None or self._thread is not threading.current_thread():
            return
        self._missing, self._notes = missing, notes
        outputs = list(tensors_in(output))
        self._outputs = list(map(_compat.StorageRef, filter(memory.has_storage, outputs)))
        roots = [t for t in outputs if t.requires_grad]
        backwards: set[int] = set()

        def backward_begins(grad: torch.Tensor) -> None:
            if _compat.backward_id() in backwards:  # another one of the roots was the first
                return
            if torch.is_grad_enabled():
                self._seen.add(_DIFFERENTIABLE)
            if torch.is_autocast_enabled(grad.device.type) and torch.is_autocast_cache_enabled():
                self._seen.add(_CASTING)
            if backwards:
                self._seen.add(_REPEATED)
            backwards.add(_compat.backward_id())
            _compat.at_end_of_backward(self._backward_done)

        for root in roots:
            root.register_hook(backward_begins)
        self._forwards.append(weakref.ref(backward_begins))

    def _backward_done(self) -> None:
        if self._meter is not None and not self._meter.is_here():
            self._disturbed = True
        elif self._meter is not None:
            self._last = self._meter.mark()
            self._took = self._now() - self._began
            bytes_of = {ref.key: ref.nbytes for ref in self._outputs}
            there = {ref.key for ref in self._outputs if ref.alive()}
            self._held = sum(bytes_of[key] for key in there)
            self._dropped = sum(bytes_of.values()) - self._held
            module = self._module()
            if module is not None:
                self._uncounted = uncounted_bytes(self._plan, module, self._gradient_bytes)

    def _stop(self) -> memory.Meter | None:
        """Ends the measurement; never within a backward, which runs in a state of its own."""
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.__exit__(None, None, None)
            memory.give_back()
        return meter

    def _finish(self, raises: bool = True) -> None:
        """Judges the step that was measured, if its backward has ended."""
        if raises and self._due is not None:
            due, self._due = self._due, None
            raise due
        meter, last = self._stop(), self._last
        if meter is None or last is None or meter.was_interrupted or self._disturbed:
            return
        plan = self._plan
        peak = self._resident - self._uncounted + meter.peak(self._first, last) - meter.level(self._first)
        self._of(plan).add(Measured(peak, self._took, self._existed, self._dropped), self._unforeseen)
        self._judge(plan, peak, self._unforeseen, raises=raises)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Judges by what an optimizer has created in the step that it has just taken."""
        module, plan = (None, None) if self._current is None else (self._current[0](), self._current[1])
        if module is None or plan is None or not self._states.note(optimizer, module):
            return
        found, unforeseen = self._of(plan), self._unforeseen_bytes(plan)
        if unforeseen > max(plan.reserve_bytes, found.unforeseen_bytes):
            self._measure_again()
        if found.worst is not None and unforeseen > found.unforeseen_bytes:
            self._existed = found.worst.gradients_existed
            peak = found.worst.peak_bytes + unforeseen - found.unforeseen_bytes
            self._judge(plan, peak, unforeseen, "the next step will take")
            self._correct()

    def _note_those_within(self, module: nn.Module, plan: Plan) -> None:
        """Takes down what optimizers keep that stepped in a backward, whose peak has it already."""
        before = self._unforeseen_bytes(plan)
        for optimizer in self._within:
            self._states.note(optimizer, module)
        self._within.clear()
        if self._unforeseen_bytes(plan) > before:
            self._measure_again()

    def _measure_again(self) -> None:
        for each in self._found.values():
            each.steps = 0

    def _unforeseen_bytes(self, plan: Plan) -> int:
        """State of optimizers that exists, and that the plan does not count."""
        return max(0, self._states.bytes - plan.resident.get(OPTIMIZER_STATE, 0)) if plan.scope == "step" else 0

    def _correct(self) -> None:
        miss, self._miss = self._miss, None
        if miss is not None and self._on_miss is not None:
            self._on_miss(*miss)

    def _judge(self, plan: Plan, peak: int, unforeseen: int, taken: str = "the step took", raises: bool = True) -> None:
        """Tells of a step over its budget. A plan that counts no state of optimizers promises nothing about it."""
        if peak <= plan.budget_bytes:
            return
        is_promised = peak - unforeseen > plan.budget_bytes or OPTIMIZER_STATE in plan.resident
        predicted = plan.accumulated_peak_bytes if self._existed else plan.created_peak_bytes
        model = None if self._current is None else self._current[0]()
        text = (
            f"{type(model).__name__}: {taken} {format_bytes(peak)}, {format_bytes(peak - plan.budget_bytes)} over its "
            f"budget of {format_bytes(plan.budget_bytes)} ({format_bytes(predicted)} were predicted): "
            f"{self._supposed_cause(plan)}"
        )
        if self._strict and is_promised:
            if raises:
                raise BudgetExceeded(text)
            self._due = BudgetExceeded(text)
            return
        warn(text)
        if self._on_miss is not None and peak > predicted:
            self._miss = (plan, peak - predicted)

    def _supposed_cause(self, plan: Plan) -> str:
        """Why a step may have taken too much, and what to do."""
        unforeseen, module = self._unforeseen_bytes(plan), self._module()
        if unforeseen > plan.reserve_bytes:
            remedy = "optimizer= the one that is used, as it is set in training"
            if not self._states.can_be_measured:
                remedy = "Budget(reserve=) of that much: steps that run the model themselves are not measured before"
            kept = f"the optimizer keeps {format_bytes(unforeseen)} between steps that the plan does not count"
            return f"{kept}. Plan again, with {remedy}"
        if module is not None and (change := plan.change_of(module)):
            return f"{change}. Profile and plan again"
        if self._missing:
            return (
                f"planned blocks did not run ({', '.join(self._missing)}), and others may have, in their places. "
                "Profile and plan again"
            )
        if self._autocast != (planned := plan.fingerprint["autocast"]):
            made, ran = (f"with autocast to {to}" if to else "without autocast" for to in (planned, self._autocast))
            return f"the plan was made {made}, and the step ran {ran}. Profile in the region in which you train"
        if self._together > 1:
            return (
                f"the model ran {self._together} times before the backward, and a plan is for once. Pass all in one "
                "call, or plan a module that calls the model as often"
            )
        for seen in (_DIFFERENTIABLE, _REPEATED, _CASTING):
            if seen in self._seen:
                return seen
        if self._existed and plan.gradients == CREATED:
            return (
                "gradients existed when it began, and the plan is for steps that create them. Plan with "
                f"gradients='{ACCUMULATED}'"
            )
        if self._held > plan.reserve_bytes and not plan.holds_output:
            return (
                "the loop still had the model's output during the backward, and the plan is for one that keeps the "
                "loss alone. Plan without holds_output=False"
            )
        if self._notes:
            return f"{'; '.join(list(dict.fromkeys(self._notes))[:MOST_NOTES])}. Profile and plan again"
        return (
            "is something held that the profile did not see, such as what another model has saved? Plan again, with "
            "Budget(reserve=) or a new profile"
        )


def _remove(hooks: Iterable[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
