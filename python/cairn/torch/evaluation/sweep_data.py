"""The trade-off curve of a model as data: points as predicted, and ways to run the step as measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload

import cairn
import torch

SWEEP_VERSION = 1
PLAIN, SELECTIVE, WHOLE = "plain", "selective recomputation", "whole blocks"


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the trade-off curve; None where no plan exists.

    Attributes
    ----------
    budget_bytes : int
        The budget.
    peak_bytes, step_ns : int or None
        Predicted peak and time of the step.
    overhead : float or None
        Predicted extra time, as a share of the plain step's.
    """

    budget_bytes: int
    peak_bytes: int | None
    step_ns: int | None
    overhead: float | None

    def __str__(self) -> str:
        budget = f"budget {cairn.format_bytes(self.budget_bytes)}"
        if self.peak_bytes is None or self.step_ns is None or self.overhead is None:
            return f"{budget}: no plan"
        peak, time = cairn.format_bytes(self.peak_bytes), cairn.format_ns(self.step_ns)
        return f"{budget}: peak {peak}, {time}, {100 * self.overhead:+.1f} %"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run the step, and its prediction (None: there is none).

    method: "plain", "every block" (each checkpointed), "checkpoint_sequential", "torch.compile", or one of the curves,
        "selective recomputation" or "whole blocks".
    budget_bytes, segments, activation_memory_budget: the setting of a plan, of checkpoint_sequential, of torch.compile.
    """

    method: str
    budget_bytes: int | None = None
    segments: int | None = None
    activation_memory_budget: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None

    @property
    def name(self) -> str:
        """The method and its setting."""
        if self.budget_bytes is not None:
            return f"{self.method}, {cairn.format_bytes(self.budget_bytes)}"
        if self.segments is not None:
            return f"{self.method}, {self.segments} segments"
        if self.activation_memory_budget is not None:
            return f"{self.method}, activation_memory_budget {self.activation_memory_budget:g}"
        return self.method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(Way):
    """A way to run the step, as measured.

    Attributes
    ----------
    peak_bytes : int
        Measured peak of the step.
    step_ns : int
        Time of a step, the median of the rounds.
    overhead : float
        Extra time as a share of the plain step's: the median over the rounds of the ratio to the plain step of the same
        round; to the predicted plain step where that could not be measured.
    same_loss : bool or None
        Whether the loss is the plain step's to the bit; None where it could not be compared.
    """

    peak_bytes: int
    step_ns: int
    overhead: float
    same_loss: bool | None

    def __str__(self) -> str:
        peak, time = cairn.format_bytes(self.peak_bytes), cairn.format_ns(self.step_ns)
        return f"{self.name}, measured: peak {peak}, {time}, {100 * self.overhead:+.1f} %"


@dataclasses.dataclass(frozen=True)
class Sweep(Sequence[Point]):
    """The trade-off curve; as a sequence, its points. Sizes in bytes, times in nanoseconds.

    Attributes
    ----------
    points : tuple of Point
        The curve.
    whole_blocks : tuple of Point
        The curve of whole blocks at the same budgets, where blocks have options inside and a picture or measurements
        were asked for.
    measured : tuple of Measurement
        The measurement.
    left_out : dict
        Ways that were not measured, with the reason.
    rounds : int
        How many steps of each way were timed.
    """

    model_name: str
    device: str
    scope: str
    gradients: str
    points: tuple[Point, ...]
    whole_blocks: tuple[Point, ...] = ()
    measured: tuple[Measurement, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rounds: int = 0

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Point, ...]: ...
    def __getitem__(self, index: int | slice) -> Point | tuple[Point, ...]:
        return self.points[index]

    def __len__(self) -> int:
        return len(self.points)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.points, *self.measured)))

    @property
    def curves(self) -> dict[str, tuple[Point, ...]]:
        """The predicted curves by name; without `whole_blocks` there is one, of whole blocks."""
        return {SELECTIVE: self.points, WHOLE: self.whole_blocks} if self.whole_blocks else {WHOLE: self.points}

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data; units are in the names."""
        conditions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        return {"format": "cairn-torch-sweep", "version": SWEEP_VERSION, **conditions, **dataclasses.asdict(self)}
