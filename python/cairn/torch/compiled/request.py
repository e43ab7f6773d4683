"""The request for a compiled step: its budget, its kernels, and the memory of the step outside of its graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..._budget import Budget
from ..base import budgets
from ..base.choices import ACCUMULATED, CREATED
from ..planning.task import UNCERTAINTY
from .compiled_plan import CompiledPlan
from .host_memory import HostMemory
from .problem import Surroundings

KERNELS = ("inductor", "eager")
DEFAULT_KERNELS = "inductor"
GRADIENTS = (CREATED, ACCUMULATED)
#: Keys of options= of torch.compile(backend="cairn").
OPTIONS = ("budget", "kernels", "optimizer", "gradients", "holds_output", "time_limit", "solver")
#: Those of offloading.
OFFLOADING_OPTIONS = ("host_budget", "tier", "link")


@dataclasses.dataclass
class Request:
    """Settings of one compilation.

    Attributes
    ----------
    budget
        Bytes, a size, or a cairn.Budget.
    solver, time_limit
        The solver, which is called up to three times, and the seconds that it may take in all.
    optimizer_peak_bytes
        The peak of the optimizer's step, everything resident included, if it is known.
    optimizer_step_bytes
        Memory that the optimizer's step allocates, without parameters, gradients and state; None without an optimizer.
    resident
        Memory that is on the device all along, without the graph's inputs; bytes by name.
    host
        Where values may be offloaded; None if nothing may.
    plan
        A plan to apply instead of a budget; nothing is solved then.
    correction_bytes
        The excess of a graph's measured step over its prediction; negative if it was below.
    step_correction_bytes
        The excess of the whole step over its prediction in that measurement.
    least
        Whether to make the plan of least memory, whatever the budget.
    has_regions
        Whether the caller could have its blocks compiled one by one instead.
    """

    budget: Any = "auto"
    kernels: str = DEFAULT_KERNELS
    gradients: str = CREATED
    holds_output: bool = True
    solver: str = "auto"
    time_limit: str = "3s"
    model_name: str = "graph"
    optimizer_peak_bytes: int = 0
    optimizer_step_bytes: int | None = None
    resident: dict[str, int] = dataclasses.field(default_factory=dict)
    loss_ns: int = 0
    loss_workspace_bytes: int = 0
    correction_bytes: int = 0
    step_correction_bytes: int = 0
    least: bool = False
    has_regions: bool = False
    host: HostMemory | None = None
    plan: CompiledPlan | None = None

    @property
    def remedy(self) -> str:
        """Arguments that may lower the least budget, for an error."""
        others = ["regions=True"] if self.has_regions else []
        return remedies(self.kernels, self.host is not None, *others)

    def surroundings(self, fixed_bytes: int) -> Surroundings:
        """Memory and time of the step outside of the graph, for the problem."""
        loss = self.loss_ns, self.loss_workspace_bytes
        return Surroundings(fixed_bytes, self.holds_output, *loss, self.correction_bytes + self.step_correction_bytes)

    def total_bytes(self, device: torch.device, present_bytes: int) -> int:
        """The budget in bytes."""
        return budgets.resolve(self.budget, device, present_bytes)

    def reserve_bytes(self, device: torch.device, activations: int) -> int:
        """The part of the budget that a plan leaves free."""
        if isinstance(self.budget, Budget) and self.budget.reserve is not None:
            return budgets.size_bytes(self.budget.reserve, "reserve") if self.budget.reserve else 0
        share, least = UNCERTAINTY["cuda" if device.type == "cuda" else "cpu"]
        return least + int(share * activations)


def remedies(kernels: str, may_offload: bool, *others: str) -> str:
    """Arguments of `compile` that may lower the least budget of a step with these, for an error."""
    fused = [] if kernels == "inductor" else ['kernels="inductor"']
    return " or ".join([*fused, *([] if may_offload else ["host_budget="]), *others])
