"""Runs a traced step by a schedule, operation by operation, and measures its memory.

A value exists from its `compute` to its `drop`, as in the simulator's rules. Only the outputs of computed nodes are
held. So a storage is freed when its node and all views of it are dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..base import _compat, memory
from .graph_program import External, ExternalTensor, LiveValues, Program, Value


@dataclass(frozen=True)
class Step:
    """The result of one run of a traced step.

    Attributes
    ----------
    loss
        The loss.
    grads
        Gradients by the name of their parameter, or of the input that they belong to ("args[0]").
    outputs
        The tensors of the model's output, in the order in which they appear in it; empty unless the step was
        traced with `keep_output=True`.
    peak_bytes
        The largest memory that was allocated at any time, parameters, buffers and inputs included; None if
        it was not measured.
    predicted_peak_bytes
        The schedule's peak by the simulator.
    computed
        The number of performed operations, recomputations included.
    host_peak_bytes
        The largest memory of copies on the host at any time.
    """

    loss: torch.Tensor
    grads: Mapping[str, torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    computed: int
    host_peak_bytes: int = 0


@contextlib.contextmanager
def below_everything(device: torch.device) -> Iterator[None]:
    """Operators are called as they were recorded: below autograd, after autocast."""
    with torch.autocast(device.type, enabled=False), _compat.below_autograd():
        yield


def replay(values: LiveValues, ops: Sequence[tuple[Any, ...]]) -> int:
    """Performs a list of operations; returns how many of them computed something."""
    computed = 0
    for name, v in ops:
        getattr(values, name)(v)
        computed += name == "compute"
    return computed


@dataclass(frozen=True)
class Outcome:
    """The results of a program, as they lie when it has run."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    written: list[tuple[int, torch.Tensor]]

    @classmethod
    def of(cls, program: Program, values: LiveValues) -> Outcome:
        """Takes them out of the values that are left."""
        values.fetch_results()

        def value_of(where: Value | External) -> torch.Tensor:
            return values.tensor(where).detach()

        return cls(
            value_of(program.loss),
            {name: value_of(where) for name, where in program.grads.items()},
            tuple(value_of(where) for where in program.outputs),
            [(index, value_of(where)) for index, where in program.written],
        )

    def named(self, externals: Sequence[ExternalTensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every result with its description."""
        yield "the loss", self.loss
        for name, grad in self.grads.items():
            yield f"the gradient of {name}", grad
        for index, output in enumerate(self.outputs):
            yield f"output {index}", output
        for index, contents in self.written:
            yield externals[index].name, contents


class Run(NamedTuple):
    """The results of a run, by how many bytes memory rose in it, how often it computed, what it took on the host."""

    outcome: Outcome
    rise_bytes: int
    computed: int
    host_peak_bytes: int


def run(
    program: Program,
    ops: Sequence[tuple[Any, ...]],
    externals: Sequence[torch.Tensor],
    device: torch.device,
    meter: memory.Meter | None,
) -> Run:
    """Runs a program by a schedule."""
    with contextlib.closing(LiveValues(program, externals)) as values:
        return _run(program, values, ops, device, meter)


def _run(
    program: Program,
    values: LiveValues,
    ops: Sequence[tuple[Any, ...]],
    device: torch.device,
    meter: memory.Meter | None,
) -> Run:
    if meter is None:
        with below_everything(device):
            computed = replay(values, ops)
        return Run(Outcome.of(program, values), 0, computed, values.host_peak_bytes)
    with memory.not_collecting(), meter, below_everything(device):
        first = meter.mark()
        computed = replay(values, ops)
        last = meter.mark()
    rise = meter.rise(first, last)
    return Run(Outcome.of(program, values), rise, computed, values.host_peak_bytes)


def write_back(outcome: Outcome, externals: Sequence[torch.Tensor]) -> None:
    """Gives tensors from outside (buffers) the contents that the step leaves in them."""
    with torch.no_grad():
        for index, contents in outcome.written:
            externals[index].copy_(contents)
