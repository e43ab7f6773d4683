"""What of a plan's memory is there around a step, and what a step adds that its plan does not count. All in bytes."""

from __future__ import annotations

from torch import nn

from .base import _compat, memory
from .base.stage_measure import IN_ATTRIBUTES, LEFT_BESIDE, STATE
from .context.attributes import plain_tensors
from .plan import Plan


def resident_of(plan: Plan, gradient_bytes: int, found_bytes: int) -> int:
    """What of a plan's memory is there before the step begins, with gradients of so many bytes, and with what was found
    in attributes then.
    """
    if plan.scope == "activations":
        return int(plan.problem["input_bytes"]) + found_bytes
    state = sum(size for name, size in plan.resident.items() if name in STATE and name != IN_ATTRIBUTES)
    return state + found_bytes + gradient_bytes + int(plan.problem["input_bytes"])


class Found:
    """What a step finds in attributes of modules, of what its plan counts: it stays, or is replaced.

    A plan for activations alone does not count what was there before, and what replaces that no more.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        counted = sum(plan.resident.get(name, 0) for name in (IN_ATTRIBUTES, LEFT_BESIDE))
        tensors = [tensor for tensor, _ in plain_tensors(model)] if counted or plan.scope == "activations" else []
        self._storages = list(map(_compat.StorageRef, filter(memory.has_storage, tensors)))
        size = sum(self._sizes().values())
        self.nbytes = min(size, counted)
        self._most = size if plan.scope == "activations" else self.nbytes

    def _sizes(self) -> dict[int, int]:
        return {ref.key: ref.nbytes for ref in self._storages}

    def replaced_bytes(self, model: nn.Module) -> int:
        """Of this, what no attribute has any more. A meter that has not seen it come, or is used where someone else
        still holds it, does not see it go.
        """
        there = memory.storages(tensor for tensor, _ in plain_tensors(model)) if self._storages else {}
        return min(self._most, sum(size for key, size in self._sizes().items() if key not in there))


def gradient_bytes_of(model: nn.Module) -> int:
    """Bytes of the gradients that exist now."""
    return memory.unique_bytes(p.grad for p in model.parameters() if p.is_leaf and p.grad is not None)


def uncounted_bytes(plan: Plan, model: nn.Module, gradient_bytes: int) -> int:
    """What a step has added to the gradients of so many bytes, where the plan does not count gradients.

    A meter sees them as they come, so taking all of them off its peak can take too much, never too little.
    """
    return gradient_bytes_of(model) - gradient_bytes if plan.scope == "activations" else 0
