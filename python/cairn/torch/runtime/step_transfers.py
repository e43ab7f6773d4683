"""The transfers of one training step: starts offloads and prefetches, and waits for them.

A `StepTransfers` holds the host copies of one step. They lie in one slab, at places that are the same in every step
(`transfer_plan.py`). So only one step at a time may use the slab. The `PlanTier` belongs to the plan of a model: it
opens the slab when a step first needs it, and lends it to one step at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from ..offloading.tiers import open_tier
from ..offloading.transfers import TensorGroup, Transfers, group_bytes
from ..schedule.program import Value
from ..schedule.transfer_plan import TransferPlan


class StepTransfers:
    """The transfers of one step; see the top of this file. Positions are those of the transfer plan's list."""

    def __init__(self, transfer_plan: TransferPlan, transfers: Transfers) -> None:
        self._transfer_plan, self._transfers = transfer_plan, transfers
        self._groups: dict[Value, TensorGroup] = {}  # values that have a copy on the host
        self._leaving: dict[int, TensorGroup] = {}  # by position of the offload: copies for which nobody has waited
        self._arriving: dict[Value, TensorGroup] = {}  # values that are being prefetched
        self._in_forward = True

    @property
    def device(self) -> torch.device:
        """The device whose tensors are offloaded."""
        return self._transfers.device

    @property
    def is_over(self) -> bool:
        """Whether the step's forward has ended, no value is on the host, and no transfer is under way."""
        return not self._in_forward and not self._groups and not self._arriving

    def forward_ended(self) -> None:
        """The step's forward has returned."""
        self._in_forward = False

    def holds(self, value: Value) -> bool:
        """Whether the value has a copy on the host."""
        return value in self._groups

    def is_arriving(self, value: Value) -> bool:
        """Whether the value was prefetched, and not yet taken."""
        return value in self._arriving

    def offload(self, position: int, value: Value, tensors: Sequence[torch.Tensor]) -> bool:
        """Starts to copy tensors to the host. False if they are larger than planned."""
        place = self._transfer_plan.places[position]
        if group_bytes(tensors) > len(place):
            return False
        self._groups[value] = self._leaving[position] = self._transfers.offload(value, tensors, place.start)
        return True

    def wait(self, position: int) -> None:
        """Waits for the offloads for which the operation at this position has to wait."""
        last = self._transfer_plan.waits.get(position, -1)
        for offload in sorted(offload for offload in self._leaving if offload <= last):
            self._leaving.pop(offload).wait_out()

    def wait_for(self, value: Value) -> None:
        """Waits until the offload of a value has ended."""
        group = self._groups.get(value)
        for offload in [offload for offload, other in self._leaving.items() if other is group]:
            self._leaving.pop(offload).wait_out()

    def prefetch(self, value: Value) -> None:
        """Allocates device memory and starts to copy back."""
        self.wait_for(value)
        self._groups[value].prefetch()
        self._arriving[value] = self._groups[value]

    def take(self, value: Value) -> list[torch.Tensor]:
        """The prefetched tensors; waits until they are complete."""
        return self._arriving.pop(value).tensors()

    def discard(self, value: Value) -> None:
        """Frees the place of the host copy."""
        group = self._groups.pop(value)
        self._leaving = {offload: other for offload, other in self._leaving.items() if other is not group}
        group.discard()

    def drop(self, value: Value) -> None:
        """Frees the place of the host copy, and a prefetch that is under way."""
        self._arriving.pop(value, None)
        if value in self._groups:
            self.discard(value)

    def close(self) -> None:
        """Drops all copies. Their device memory is freed at once."""
        self._groups, self._arriving, self._leaving = {}, {}, {}
        self._in_forward = False
        self._transfers.release()


class PlanTier:
    """The tier of a model's plan, lent to one step at a time.

    where, shared_link: as in `open_tier` and in a cairn.Machine. host_budget: the largest size in bytes.
    """

    def __init__(self, where: str, host_budget: int | None, device: torch.device, shared_link: bool = False) -> None:
        self._where, self._host_budget, self._device, self._shared = where, host_budget, device, shared_link
        self._lent: weakref.ref[StepTransfers] | None = None
        self.transfers: Transfers | None = None  # what copies; None before the first step
        self._lock = threading.Lock()

    def lend(self, transfer_plan: TransferPlan) -> StepTransfers | None:
        """The transfers for one step. None while another step, in this thread or another, may have copies there."""
        with self._lock:
            last = None if self._lent is None else self._lent()
            return None if last is not None and not last.is_over else self._begin(transfer_plan)

    def open(self, transfer_plan: TransferPlan) -> None:
        """Opens the tier now, so that the first step does not wait for it."""
        with self._lock:
            self._opened_tier(transfer_plan)

    def _begin(self, transfer_plan: TransferPlan) -> StepTransfers:
        transfers = self._opened_tier(transfer_plan)
        transfers.begin_step()
        step_transfers = StepTransfers(transfer_plan, transfers)
        self._lent = weakref.ref(step_transfers)
        return step_transfers

    def _opened_tier(self, transfer_plan: TransferPlan) -> Transfers:
        if self.transfers is None:
            tier = open_tier(self._where, transfer_plan.slab_bytes, self._device, host_budget=self._host_budget)
            self.transfers = Transfers(tier, self._device, self._shared)
        self.transfers.tier.grow(transfer_plan.slab_bytes)
        return self.transfers

    def retire(self) -> None:
        """Leaves the tier to the steps that still have copies there. A later step opens another one."""
        self.transfers, self._lent = None, None
