"""Three ways to keep one budget: `checkpoint`, a model compiled as one graph, and blocks compiled one by one.

Small models of each family train with eager kernels under common budgets. They lie between the largest least budget of
the ways that cover the model and the least of what they take without recomputation. A row gives a way's least budget
beside the plain step's peak, the seconds that planning took, and for each budget the extra time over the plain step and
the measured peak as a share of the budget. Times are processor times; extra time is the median of ratios to plain steps
run in turns. A way that does not cover a model says why. Exits with 1 where a step takes more than its budget, or a way
fails otherwise than by a refusal of Cairn. `--tested` takes the models of the tests instead.

python bench/torch_three_ways.py [MODEL ...] [--tested] [--budgets 4] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from cairn.torch.base.tree import tensors_in
from support import arguments
from support.tested_models import tested_models
from support.training import MIB, machine, quiet, step_peak
from torch import nn
from torch_compile_families import MODELS, Made

Planned = Callable[[int], nn.Module]
NO_LIMIT = 1 << 50
FAILS = "FAILS"  # begins the reason of a way that is not refused by name


@dataclasses.dataclass
class Row:
    """What was seen of one way; bytes, seconds, and for each budget extra time and peak as shares in percent."""

    model: str
    way: str
    least_bytes: int = 0
    plain_bytes: int = 0
    planning_s: float = 0.0
    extra: list[float] = dataclasses.field(default_factory=list)
    peak: list[float] = dataclasses.field(default_factory=list)
    exact: bool = True
    not_covered: str = ""


class Way:
    """One way, on its own copy of a model; inputs are the same, for the loss may read them too."""

    def __init__(self, name: str, made: Made) -> None:
        self.name, self.model, self.inputs = name, copy.deepcopy(made[0]), made[1]
        self._profile: ct.Profile | None = None

    def plan(self, budget: int) -> nn.Module:
        """The model that keeps to a budget."""
        if self.name == "checkpoint":
            if self._profile is None:
                self._profile = ct.profile(self.model, kwargs=self.inputs, progress=False)
            applied = ct.handle(self.model)
            if applied is not None:
                applied.remove()
            ct.apply(self.model, ct.plan(self._profile, budget, gradients="created"))
            return self.model
        torch._dynamo.reset()
        regions = self.name == "blocks"
        options: dict[str, Any] = {"kernels": "eager", "regions": regions, "progress": False, "prove": False}
        return ct.compile(self.model, kwargs=self.inputs, budget=budget, **options)

    def limits(self, planned: nn.Module) -> tuple[int, int]:
        """The least budget, and the peak without recomputation, both with the reserve."""
        if self.name == "checkpoint":
            applied = ct.handle(planned)
            assert applied is not None
            plan: Any = applied.plan
        else:
            report: Any = ct.report(planned)
            plan = report.regions or report.plans[-1]
        return plan.least_budget_bytes, plan.plain_peak_bytes


def step(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Loss and gradients of one step from a seed."""
    torch.manual_seed(1)
    loss = model(**inputs)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are equal to the bit; sparse gradients are compared by their dense values."""
    return torch.equal(one.to_dense(), other.to_dense())


def extra_time(planned: nn.Module, plain: nn.Module, inputs: dict[str, Any], rounds: int) -> float:
    """In percent, over the plain step."""

    def seconds(model: nn.Module) -> float:
        began = time.process_time()
        step(model, inputs)
        return time.process_time() - began

    ratios = [seconds(planned) / seconds(plain) for _ in range(rounds + 1)]
    return 100 * (statistics.median(ratios[1:]) - 1)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:100]


def measured(name: str, maker: Callable[[], Made], budgets: int, rounds: int) -> Iterator[Row]:
    """The rows of one model."""
    torch.manual_seed(0)
    made = maker()
    rows: dict[str, Row] = {}
    ways: dict[str, Way] = {}
    for way in ("checkpoint", "graph", "blocks"):
        rows[way], ways[way] = Row(name, way), Way(way, made)
        began = time.process_time()
        try:
            rows[way].least_bytes, rows[way].plain_bytes = ways[way].limits(ways[way].plan(NO_LIMIT))
        except ct.TorchError as error:
            rows[way].not_covered = first_line(error)
        except Exception as error:
            rows[way].not_covered = f"{FAILS} with {type(error).__name__}: {first_line(error)}"
        rows[way].planning_s = time.process_time() - began
    covered = [row for row in rows.values() if not row.not_covered]
    low = max((row.least_bytes for row in covered), default=0)
    high = max(low, min((row.plain_bytes for row in covered), default=0))
    model, inputs = made
    expected = step(model, inputs)
    for row in covered:
        for number in range(budgets):
            budget = int(low * 1.01) + (high - low) * number // budgets + 4096
            try:
                planned = ways[row.way].plan(budget)
            except ct.InfeasibleBudget:  # by the measured step
                row.extra.append(float("nan"))
                continue
            row.exact &= all(map(same, expected, step(planned, inputs)))
            row.peak.append(
                100 * step_peak(planned, functools.partial(step, planned, inputs), tensors_in(inputs)) / budget
            )
            row.extra.append(extra_time(planned, model, inputs, rounds))
    yield from rows.values()


def main() -> int:
    """Print a row for each model and way."""
    command = arguments.parser(__doc__)
    command.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is named")
    command.add_argument("--tested", action="store_true", help="the models of the tests")
    command.add_argument("--budgets", type=int, default=4)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--json", type=Path)
    options = arguments.parse(command, models=["lora"], budgets=1, rounds=1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    with quiet():
        makers = tested_models() if options.tested else MODELS
        for name in options.models or makers:
            try:
                for row in measured(name, makers[name], options.budgets, options.rounds):
                    rows.append(row)
                    print(line(row), flush=True)
            except ModuleNotFoundError as error:
                print(f"{name:14} left out: {error}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({**machine(), "rows": list(map(dataclasses.asdict, rows))}, indent=1) + "\n")
    return int(any(row.not_covered.startswith(FAILS) or max(row.peak, default=0) > 100 for row in rows))


def line(row: Row) -> str:
    """A row of the table."""
    if row.not_covered:
        return f"{row.model:18} {row.way:10} not covered: {row.not_covered}"
    sizes = f"{row.least_bytes / MIB:7.2f} of {row.plain_bytes / MIB:7.2f} MiB, planned in {row.planning_s:5.1f} s"
    extra = " ".join(f"{value:+6.1f}" for value in row.extra)
    most = max(row.peak, default=0.0)
    return f"{row.model:18} {row.way:10} {sizes}; extra % {extra}; peak <= {most:5.1f} %; exact {row.exact}"


if __name__ == "__main__":
    sys.exit(main())
