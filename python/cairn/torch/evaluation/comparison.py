"""Steps of one model run in several ways, measured in turns: peak, time, and whether the loss is the plain step's.

Each way first runs a warm-up step, in which plans record and compilers compile, and a step under a meter, which gives
the peak. Then come rounds in which each way runs one timed step. Other load of the machine slows all ways of a round
alike, so the extra time of a way is the median, over the rounds, of its ratio to the plain step of that round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import clock, memory
from ..base.choices import ACCUMULATED
from ..planning.plan import Plan
from ..planning.step_memory import StepMemory
from ..profiling.sample import Sample, backward_of
from ..profiling.step_setup import StepSetup
from ..rerun_state.preserve import Parameters

#: A context in which a step runs in some way. It yields the function to call instead of the model.
Turn = Callable[[], contextlib.AbstractContextManager[Callable[..., Any]]]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The measurement of a way to run the step. overhead: extra time as a share of the plain step's time."""

    peak_bytes: int
    step_ns: int
    overhead: float
    same_loss: bool | None  # None where there is no plain step to compare with


@dataclasses.dataclass(frozen=True)
class _First:
    peak_bytes: int
    loss: float | None


class Comparison:
    """Measures the ways of running a sample's step. `plan` is any of the profile's: it knows what memory counts."""

    def __init__(self, sample: Sample, plan: Plan, parameters: Parameters | None = None) -> None:
        """parameters: has watched a forward of the sample; None where the model writes none."""
        self._sample, self._plan = sample, plan
        self._device = memory.device_of(sample.model)
        self._setup = StepSetup(sample, self._device, parameters)

    def measured(self, turns: Sequence[Turn], rounds: int) -> list[Steps | str]:
        """Measure methods that run in turns, the plain step first. For a method that fails, the reason in a line."""
        first = [self._tried(turn) for turn in turns]
        times: list[list[int]] = [[] for _ in turns]
        for _ in range(rounds):
            for turn, first_step, taken in zip(turns, first, times, strict=True):
                if not isinstance(first_step, str):
                    taken.append(self._timed(turn))
        plain_times = times[0] or [self._plan.plain_ns] * rounds
        return [
            first_step if isinstance(first_step, str) else _summed_up(first_step, taken, first[0], plain_times)
            for first_step, taken in zip(first, times, strict=True)
        ]

    def _tried(self, turn: Turn) -> _First | str:
        try:
            return self._first(turn)
        except Exception as error:  # other methods may fail in any way, for example out of memory
            self._setup.end()
            return _in_a_line(error)

    def _first(self, turn: Turn) -> _First:
        """The steps before the rounds."""
        model, plan = self._sample.model, self._plan
        self._timed(turn)
        meter = memory.meter_for(self._device, taken=True)
        with meter:  # what is allocated under it is released under it
            self._prepare()
            step_memory = StepMemory(plan, model)
            with turn() as run:
                first = meter.mark()
                loss = self._step(run)
                last = meter.mark()
                value = None if loss is None else loss.item()
                del loss
            resident_bytes = step_memory.resident_bytes + step_memory.uncounted_bytes(model)
            self._setup.end()
        return _First(max(resident_bytes + meter.rise(first, last), plan.optimizer_peak_bytes), value)

    def _timed(self, turn: Turn) -> int:
        """The time of a step, in nanoseconds."""
        self._prepare()
        with turn() as run:
            began = clock.read()
            self._step(run)
            taken = clock.now(self._device) - began
        self._setup.end()
        return taken

    def _prepare(self) -> None:
        """The state that every step begins from."""
        self._setup.begin(self._plan.gradients == ACCUMULATED)
        clock.wait_for(self._device)

    def _step(self, run: Callable[..., Any]) -> torch.Tensor | None:
        """Forward and backward."""
        output, loss = self._sample.results(run(*self._sample.args, **self._sample.kwargs))
        backward_of(output, loss)
        return loss


def _summed_up(first: _First, taken: Sequence[int], plain: _First | str, plain_times: Sequence[int]) -> Steps:
    overhead = statistics.median(its / plain_ns for its, plain_ns in zip(taken, plain_times, strict=True)) - 1
    same = None if isinstance(plain, str) else _equal(first.loss, plain.loss)
    return Steps(first.peak_bytes, int(statistics.median(taken)), overhead, same)


def _equal(one: float | None, other: float | None) -> bool | None:
    if one is None or other is None:
        return None
    return one == other or (math.isnan(one) and math.isnan(other))


def _in_a_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
