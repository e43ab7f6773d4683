"""A plan's memory that exists before a step, and memory of a step that its plan does not count; in bytes."""

from __future__ import annotations

from torch import nn

from ..base import _compat, memory
from ..base.stage_measure import IN_ATTRIBUTES, SIDE_OUTPUTS, STATE
from ..rerun_state.attributes import plain_tensors
from .plan import Plan


class StepMemory:
    """Memory of a step under a plan that a meter of the step does not see. It is made when the step begins.

    Attributes
    ----------
    gradient_bytes
        Bytes of the gradients that existed then.
    resident_bytes
        The part of the plan's memory that existed then; tensors in attributes are not counted.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.gradient_bytes = _gradient_bytes_of(model)
        self.resident_bytes = int(plan.problem["input_bytes"])
        self._is_step, self._left_bytes = plan.scope == "step", plan.resident.get(SIDE_OUTPUTS, 0)
        self._counted_bytes = plan.resident.get(IN_ATTRIBUTES, 0)
        if self._is_step:
            state = sum(size for name, size in plan.resident.items() if name in STATE and name != IN_ATTRIBUTES)
            self.resident_bytes += state + self.gradient_bytes
        counts = self._left_bytes + self._counted_bytes > 0 or not self._is_step
        self._storages = _storages_in_attributes(model) if counts else {}

    def uncounted_bytes(self, model: nn.Module, sees_going: bool = False) -> int:
        """At the end of the step: bytes to add to the resident memory and to a meter's rise.

        The meter has counted new tensors. sees_going: it has also counted the tensors that were freed.
        """
        there = memory.storages(tensor for tensor, _ in plain_tensors(model)) if self._storages else {}
        sizes = {ref.key: ref.nbytes for ref in self._storages.values()}
        gone = sum(size for key, size in sizes.items() if key not in there)
        if not self._is_step:  # such a plan counts no gradients, and no other tensors that are replaced
            replaced = min(gone, self._left_bytes) if sees_going else -max(0, gone - self._left_bytes)
            return replaced - self._added_gradient_bytes(model)
        stays = min(sum(sizes.values()) - gone, self._counted_bytes)
        return stays + (min(gone, self._counted_bytes + self._left_bytes) if sees_going else 0)

    def _added_gradient_bytes(self, model: nn.Module) -> int:
        """Bytes of gradients that the step has added.

        A meter counts each gradient when it is created. So subtracting all of them from its peak may subtract too
        much, never too little.
        """
        return _gradient_bytes_of(model) - self.gradient_bytes


def _storages_in_attributes(model: nn.Module) -> dict[int, _compat.StorageRef]:
    """The storages of tensors in attributes of modules and in objects of hooks."""
    tensors = (tensor for tensor, _ in plain_tensors(model))
    return {ref.key: ref for ref in map(_compat.StorageRef, filter(memory.has_storage, tensors))}


def _gradient_bytes_of(model: nn.Module) -> int:
    """Bytes of the gradients that exist now."""
    return memory.unique_bytes(p.grad for p in model.parameters() if p.is_leaf and p.grad is not None)
