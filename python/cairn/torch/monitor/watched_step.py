"""One step of training under a meter: from the model's forward to the end of its last backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, clock, memory
from ..base.choices import ACCUMULATED, CREATED
from ..base.tree import tensors_in
from ..planning.fingerprint import autocast_of
from ..planning.measured_step import Measured
from ..planning.plan import Plan
from ..planning.step_memory import StepMemory
from ..rerun_state.backend_flags import changes_since
from ..runtime.executor import COPIES_OF_ANOTHER

MOST_FORWARDS = 16  # that may belong to a step; more are no step of training
MOST_NOTES = 3  # deviations from the plan in one warning

#: What backwards may do that no plan counts, and what to do about it.
_DIFFERENTIABLE = (
    "a backward with create_graph=True keeps what its own derivative needs, which this plan does not count. Plan a "
    "module whose forward takes the derivatives and returns the loss, or leave room for it by Budget(reserve=)"
)
_REPEATED = (
    "a forward had more than one backward (retain_graph=True), and a plan is for one. Add the losses up before the "
    "backward, or leave room for it by Budget(reserve=)"
)
_CASTING = (
    "the backward ran within the autocast region, which keeps its copies of parameters to its end. Let it end before "
    "the backward, or leave room for them by Budget(reserve=)"
)
_ALL_IN_ONE = "Pass all in one call, or plan a module that calls the model as often"


class WatchedStep:
    """The measurement of one step. It begins when the object is made.

    Forwards whose backwards are still to come belong to one step, because their saved tensors exist at the same time.
    The meter belongs to the thread in which the step was made, and so do all calls except `disturb` and
    `belongs_to_other_thread`.
    """

    def __init__(self, module: nn.Module, plan: Plan, uncounted_before_bytes: int, sees_going: bool) -> None:
        """uncounted_before_bytes: memory at the beginning of the step that the plan does not count from then on.

        sees_going: the meter sees frees of memory that was allocated before it.
        """
        self.plan = plan
        self._module = weakref.ref(module)
        self._memory = StepMemory(plan, module)
        self._sees_going = sees_going
        self._uncounted_bytes = uncounted_before_bytes
        self._end_bytes = 0  # memory that was not counted when the latest backward ended
        self._outputs: list[_compat.StorageRef] = []  # of the latest forward
        self._dropped = self._held = 0  # bytes of them that were gone, or there, when its backward ended
        self._missing: Sequence[str] = ()  # blocks that its latest forward has not run
        self._notes: Sequence[str] = ()  # what else was not as planned
        self._forwards: list[weakref.ref[Any]] = []  # what lives as long as their graphs
        self._together = 1  # the most of those graphs that lived at once
        self._seen: set[str] = set()  # what its backwards did that no plan counts
        self._disturbed = False  # by a step of another thread
        self._device = memory.device_of(module)
        self._autocast = autocast_of(self._device)
        self._changed_flags = changes_since(plan.fingerprint.get("backend_flags", {}))
        self._thread = threading.current_thread()
        self._meter: memory.Meter | None = memory.meter_for(self._device, interruptible=True, taken=True)
        self._meter.__enter__()
        self._first = self._meter.mark()
        self._last: int | None = None  # mark of the latest backward's end
        self._began = clock.now(self._device)
        self._took = 0

    # ---- what happens to it ----

    def belongs_to_other_thread(self) -> bool:
        """Whether another thread, which is still alive, measures this step."""
        return self._meter is not None and self._thread is not threading.current_thread() and self._thread.is_alive()

    def disturb(self) -> None:
        """Discards the measurement, because another thread runs a step at the same time."""
        self._disturbed = True

    def joins(self) -> bool:
        """Whether a forward that begins belongs to this step: other backwards of the step are still to come."""
        if self._meter is None or self._last is not None or self._disturbed or not self._meter.is_here():
            return False
        waiting = sum(graph() is not None for graph in self._forwards)
        self._together = max(self._together, waiting + 1)
        return waiting > 0 and len(self._forwards) < MOST_FORWARDS

    def forward_ended(self, output: Any, missing: Sequence[str], notes: Sequence[str]) -> None:
        """A forward has returned `output`.

        missing: planned blocks that it has not run. notes: a list to which other deviations are added later.
        """
        if self._meter is None or self._thread is not threading.current_thread():
            return
        self._missing, self._notes = missing, notes
        outputs = list(tensors_in(output))
        self._outputs = list(map(_compat.StorageRef, filter(memory.has_storage, outputs)))
        backwards: set[int] = set()

        def backward_begins(grad: torch.Tensor) -> None:
            if _compat.backward_id() in backwards:  # another one of the outputs was the first
                return
            if torch.is_grad_enabled():
                self._seen.add(_DIFFERENTIABLE)
            if torch.is_autocast_enabled(grad.device.type) and torch.is_autocast_cache_enabled():
                self._seen.add(_CASTING)
            if backwards:
                self._seen.add(_REPEATED)
            backwards.add(_compat.backward_id())
            _compat.at_end_of_backward(self._backward_ended)

        for root in outputs:
            if root.requires_grad:
                root.register_hook(backward_begins)
        self._forwards.append(weakref.ref(backward_begins))

    def _backward_ended(self) -> None:
        if self._meter is None:
            return
        if not self._meter.is_here():
            self._disturbed = True
            return
        self._last = self._meter.mark()
        self._took = clock.now(self._device) - self._began
        bytes_of = {ref.key: ref.nbytes for ref in self._outputs}
        there = {ref.key for ref in self._outputs if ref.alive()}
        self._held = sum(bytes_of[key] for key in there)
        self._dropped = sum(bytes_of.values()) - self._held
        module = self._module()
        if module is not None:
            self._end_bytes = self._memory.uncounted_bytes(module, self._sees_going)

    def end(self) -> Measured | None:
        """End the measurement and return it; never call this within a backward, which runs in a state of its own.

        None if the step has not ended or cannot be judged, and for a second call.
        """
        meter, self._meter = self._meter, None
        if meter is None:
            return None
        meter.__exit__(None, None, None)
        memory.give_back()
        if self._last is None or meter.was_interrupted or self._disturbed:
            return None
        resident = self._memory.resident_bytes + self._uncounted_bytes + self._end_bytes
        peak = resident + meter.rise(self._first, self._last)
        return Measured(peak, self._took, self._memory.gradient_bytes > 0, self._dropped)

    # ---- results ----

    def held_bytes(self, module: nn.Module) -> int:
        """The tensors of the output that the caller still holds."""
        own = memory.storages((*module.parameters(), *module.buffers()))
        held = {ref.key: ref.nbytes for ref in self._outputs if ref.alive() and ref.key not in own}
        return sum(held.values())

    def supposed_cause(self, gradients_existed: bool) -> str:
        """The likely reason why a step used more memory than planned, and the remedy."""
        plan, module = self.plan, self._module()
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
        if self._changed_flags:
            return f"backend flags differ: {self._changed_flags}. Profile in the region in which you train"
        if self._together > 1:
            return f"the model ran {self._together} times before the backward, and a plan is for once. {_ALL_IN_ONE}"
        for seen in (_DIFFERENTIABLE, _REPEATED, _CASTING):
            if seen in self._seen:
                return seen
        if gradients_existed and plan.gradients == CREATED:
            return (
                "gradients existed when it began, and the plan is for steps that create them. Plan with "
                f"gradients='{ACCUMULATED}'"
            )
        if self._held > plan.reserve_bytes and not plan.holds_output:
            return (
                "the loop still had the model's output during the backward, and the plan is for one that keeps the "
                "loss alone. Plan without holds_output=False"
            )
        if COPIES_OF_ANOTHER in self._notes:
            return f"{COPIES_OF_ANOTHER}. {_ALL_IN_ONE}"
        if self._notes:
            return f"{'; '.join(list(dict.fromkeys(self._notes))[:MOST_NOTES])}. Profile and plan again"
        return (
            "is something held that the profile did not see, such as what another model has saved? Plan again, with "
            "Budget(reserve=) or a new profile"
        )
