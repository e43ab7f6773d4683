"""Measures the first training steps that follow each plan of a model, and reports those over their budgets."""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from cairn import format_bytes
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base import _compat, memory
from ..base.errors import BudgetExceeded, warn
from ..base.stage_measure import OPTIMIZER_STATE
from ..planning.measured_step import Measured
from ..planning.plan import Plan
from ..profiling.optimizer import KeptStates
from .watched_step import WatchedStep

MAX_INCONCLUSIVE = 8  # steps of a plan that cannot be judged, because another model's optimizer steps in them, say


@dataclasses.dataclass
class _PlanRecord:
    """The measured steps of a plan: their number, and the worst of them."""

    plan: Plan  # held, so that no other one gets its id
    steps: int = 0
    inconclusive: int = 0  # steps that were begun and not judged
    worst: Measured | None = None
    watched: WatchedStep | None = None  # the worst, which knows why
    unforeseen_bytes: int = 0  # state of optimizers that the worst step had, and the plan does not count

    def add(self, step: Measured, unforeseen_bytes: int, watched: WatchedStep) -> None:
        self.steps += 1
        self.inconclusive -= 1
        if self.worst is None or step.peak_bytes >= self.worst.peak_bytes:
            self.worst, self.unforeseen_bytes, self.watched = step, unforeseen_bytes, watched


class Watch:
    """Measures the first training steps that follow each plan of a model, where nothing else is measuring.

    A step is judged when the optimizer steps or the next forward begins. A peak over the budget warns, or raises
    BudgetExceeded if strict. So does state that an optimizer creates, and the plan does not count, if with it the next
    step would take more than the budget.

    Only one thread is measured at a time, for a meter belongs to the thread that entered it. A step during which
    another thread begins one does not count. Measuring takes time, so it ends after a few steps that did not count.
    """

    def __init__(self, steps: int, strict: bool = False, on_miss: Callable[[Plan, int], None] | None = None) -> None:
        self._steps, self._strict = steps, strict
        self._on_miss = on_miss  # called with the plan and what was missed, in bytes, once no forward is running
        self._miss: tuple[Plan, int] | None = None
        self._due: BudgetExceeded | None = None  # to be raised when a step begins, or the optimizer's
        self._records: dict[int, _PlanRecord] = {}  # by id of a plan
        self._lock = threading.RLock()
        self._step: WatchedStep | None = None  # the latest that was measured
        self._unforeseen = 0  # state of optimizers that it began with, and its plan does not count
        self._has_measured = False  # the step before
        self._current: tuple[weakref.ref[nn.Module], Plan] | None = None  # of the latest step
        self._states = KeptStates()
        self._within: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have stepped in the backward
        watch = weakref.ref(self)

        def judge(*_: Any) -> None:
            watching = watch()
            if (
                watching is not None and watching._is_of_this_thread() and _compat.backward_id() < 0
            ):  # not one within it
                watching._finish()
                watching._correct()

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            watching = watch()
            if watching is None or not watching._is_of_this_thread():
                return
            if _compat.backward_id() < 0:
                watching._record_state(optimizer)
            else:
                watching._within.add(optimizer)

        hooks = [register_optimizer_step_pre_hook(judge), register_optimizer_step_post_hook(look)]
        self._unhook = weakref.finalize(self, _remove, hooks)
        self._unhook.atexit = False

    def __del__(self) -> None:  # with the model whose plan it watches
        if not sys.is_finalizing() and _compat.backward_id() < 0:
            self._stop()

    def remove(self) -> None:
        """Stops watching."""
        self._unhook()
        self._stop()

    def measured(self, plan: Plan) -> Measured | None:
        """The worst step so far of those that followed this plan. What is to be raised waits for the next step."""
        if self._is_of_this_thread():
            self._finish(raises=False)
        return self._of(plan).worst

    def begin(self, module: nn.Module, plan: Plan) -> None:
        """A step begins that follows this plan."""
        with self._lock:
            if self._step is not None and self._step.belongs_to_other_thread():
                self._step.disturb()
                return
            # a backward runs in a state of its own
            if (self._step is not None and self._step.joins()) or _compat.backward_id() >= 0:
                return
            self._finish()
            self._current = weakref.ref(module), plan
            self._record_those_within(module, plan)
            record = self._of(plan)
            if (
                record.steps < self._steps
                and record.inconclusive < MAX_INCONCLUSIVE
                and not _compat.profiler_is_active()
            ):
                record.inconclusive += 1  # until it is judged
                self._start(module, plan)
            else:
                self._has_measured = False

    def forward_ended(self, output: Any, missing: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        """The step's forward has returned this; `missing` are planned blocks that it has not run, `notes` get what else
        is not as planned.
        """
        if self._step is not None:
            self._step.forward_ended(output, missing, notes)

    # ---- steps ----

    def _of(self, plan: Plan) -> _PlanRecord:
        return self._records.setdefault(id(plan), _PlanRecord(plan))

    def _is_of_this_thread(self) -> bool:
        """Whether no other thread that lives is measured."""
        return self._step is None or not self._step.belongs_to_other_thread()

    def _start(self, module: nn.Module, plan: Plan) -> None:
        self._unforeseen = uncounted = self._unforeseen_bytes(plan)
        sees_going = self._has_measured or memory.device_of(module).type != "cpu"  # what came where no meter was is not
        if sees_going:
            uncounted += 0 if self._step is None else self._step.held_bytes(module)
        self._step, self._has_measured = WatchedStep(module, plan, uncounted, sees_going), True

    def _stop(self) -> None:
        if self._step is not None and not self._step.belongs_to_other_thread():
            self._step.end()

    def _finish(self, raises: bool = True) -> None:
        """Judges the step that was measured, if its backward has ended."""
        if raises and self._due is not None:
            due, self._due = self._due, None
            raise due
        step = self._step
        measured = None if step is None else step.end()
        if step is None or measured is None:
            return
        self._of(step.plan).add(measured, self._unforeseen, step)
        self._judge(step, measured, self._unforeseen, raises=raises)

    # ---- state of optimizers ----

    def _record_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Judges by what an optimizer has created in the step that it has just taken."""
        module, plan = (None, None) if self._current is None else (self._current[0](), self._current[1])
        if module is None or plan is None or not self._states.note(optimizer, module):
            return
        record, unforeseen = self._of(plan), self._unforeseen_bytes(plan)
        if unforeseen > max(plan.reserve_bytes, record.unforeseen_bytes):
            self._measure_again()
        if record.worst is not None and record.watched is not None and unforeseen > record.unforeseen_bytes:
            peak = record.worst.peak_bytes + unforeseen - record.unforeseen_bytes
            expected = dataclasses.replace(record.worst, peak_bytes=peak)
            self._judge(record.watched, expected, unforeseen, "the next step will take")
            self._correct()

    def _record_those_within(self, module: nn.Module, plan: Plan) -> None:
        """Record the state of optimizers that step in the backward, whose peak contains it already."""
        before = self._unforeseen_bytes(plan)
        for optimizer in self._within:
            self._states.note(optimizer, module)
        self._within.clear()
        if self._unforeseen_bytes(plan) > before:
            self._measure_again()

    def _measure_again(self) -> None:
        for each in self._records.values():
            each.steps = 0

    def _unforeseen_bytes(self, plan: Plan) -> int:
        """State of optimizers that exists, and that the plan does not count."""
        return max(0, self._states.bytes - plan.resident.get(OPTIMIZER_STATE, 0)) if plan.scope == "step" else 0

    # ---- steps over their budget ----

    def _judge(
        self, watched: WatchedStep, step: Measured, unforeseen: int, taken: str = "the step took", raises: bool = True
    ) -> None:
        """Tells of a step over its budget. A plan that counts no state of optimizers promises nothing about it."""
        plan, peak = watched.plan, step.peak_bytes
        if peak <= plan.budget_bytes:
            return
        is_promised = peak - unforeseen > plan.budget_bytes or OPTIMIZER_STATE in plan.resident
        predicted = plan.accumulated_peak_bytes if step.gradients_existed else plan.created_peak_bytes
        model = None if self._current is None else self._current[0]()
        text = (
            f"{type(model).__name__}: {taken} {format_bytes(peak)}, {format_bytes(peak - plan.budget_bytes)} over its "
            f"budget of {format_bytes(plan.budget_bytes)} ({format_bytes(predicted)} were predicted): "
            f"{self._supposed_cause(watched, step)}"
        )
        if self._strict and is_promised:
            if raises:
                raise BudgetExceeded(text)
            self._due = BudgetExceeded(text)
            return
        warn(text)
        if self._on_miss is not None and peak > predicted:
            self._miss = (plan, peak - predicted)

    def _supposed_cause(self, watched: WatchedStep, step: Measured) -> str:
        """The likely reason of a step over its budget, and the remedy."""
        unforeseen = self._unforeseen_bytes(watched.plan)
        if unforeseen > watched.plan.reserve_bytes:
            remedy = "optimizer= the one that is used, as it is set in training"
            if not self._states.can_be_measured:
                remedy = "Budget(reserve=) of that much: steps that run the model themselves are not measured before"
            kept = f"the optimizer keeps {format_bytes(unforeseen)} between steps that the plan does not count"
            return f"{kept}. Plan again, with {remedy}"
        return watched.supposed_cause(step.gradients_existed)

    def _correct(self) -> None:
        miss, self._miss = self._miss, None
        if miss is not None and self._on_miss is not None:
            self._on_miss(*miss)


def _remove(hooks: Iterable[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
