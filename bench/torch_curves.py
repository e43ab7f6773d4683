"""Cairn against checkpoint_sequential and checkpointing every block, in one run: peak and time of a step.

For every peak that another method reaches, with any number of segments, Cairn plans for exactly that many bytes. Steps
create their gradients and take turns; times are of the one thread's processor. Extra time is the median, over the
rounds, of the ratio to the plain step of the round. Exits with 1 if Cairn is slower than another method at its peak, or
has no plan for it, and says where.

python bench/torch_curves.py [resnet50] [vgg16] [--rounds 5] [--batch 4] [--size N] [--segments N]
                             [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn
import cairn.torch as ct
import torch
from cairn.torch.evaluation.comparison import Comparison, Steps, Turn
from cairn.torch.handle import SuspendablePlan
from cairn.torch.profiling.sample import Sample
from support import arguments
from support.models import Step, resnet50, vgg16
from support.training import MIB, UNLIMITED, as_it_is, following, machine, quiet, succeeded, write
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

MODELS: dict[str, tuple[Callable[..., Step], int]] = {"resnet50": (resnet50, 160), "vgg16": (vgg16, 128)}
PLAIN = "plain"


@dataclasses.dataclass
class Row:
    """A method as measured; with a budget, a plan of Cairn's."""

    method: str
    peak_bytes: int
    step_ns: int
    overhead: float
    same_loss: bool | None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; default: both")
    parser.add_argument("--rounds", type=int, default=5, help="steps timed per method")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, help="of the images; default: 160 for resnet50, 128 for vgg16")
    parser.add_argument("--segments", type=int, help="the most of checkpoint_sequential; default: as many as blocks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = arguments.parse(parser, models=["vgg16"], rounds=1, batch=1, size=32, segments=2)
    results, lost = {}, []
    with quiet():
        for name in chosen.models or MODELS:
            make, size = MODELS[name]
            torch.manual_seed(0)
            rows = _measured(make(chosen.batch, chosen.size or size), chosen.rounds, chosen.segments)
            results[name] = rows
            _print(name, rows)
            lost += [f"{name}: {where}" for where in _lost(rows)]
    data = {name: [dataclasses.asdict(row) for row in rows] for name, rows in results.items()}
    conditions = {"machine": machine(), "batch": chosen.batch, "size": chosen.size, "rounds": chosen.rounds}
    write(chosen.json, {**conditions, "models": data, "cairn_slower": lost})
    if chosen.plot is not None:
        _draw(results, chosen.plot)
    print("\n".join(lost) if lost else "Cairn is faster at every peak that another method reaches.")
    changed = any(not row.same_loss for rows in results.values() for row in rows)
    return 1 if changed or (lost and not chosen.quick) else 0  # one round of small steps says little about times


# -- measuring -----------------------------------------------------------------------------------------------


def _measured(step: Step, rounds: int, segments: int | None) -> list[Row]:
    sample = Sample(step.model, step.args, step.kwargs, step.loss_fn)
    profile = ct.profile(step.model, **step.sample)
    roomy = ct.plan(profile, UNLIMITED, gradients="created")
    comparison = Comparison(sample, roomy)
    assert isinstance(step.model, nn.Sequential)
    others = _others(step.model, segments)
    peaks = {succeeded(steps).peak_bytes for steps in comparison.measured(list(others.values()), 1)[1:]}
    plans = [plan for peak in sorted(peaks) if (plan := _plan_within(profile, peak)) is not None]
    plans.insert(0, ct.plan(profile, roomy.least_budget_bytes, gradients="created"))
    recalled = [SuspendablePlan(step.model, plan) for plan in plans]
    turns: list[Turn] = [*others.values(), *(functools.partial(following, step.model, each) for each in recalled)]
    found = [succeeded(each) for each in comparison.measured(turns, rounds)]
    rows = [_row(name, steps) for name, steps in zip(others, found, strict=False)]
    for plan, steps in zip(plans, found[len(others) :], strict=True):
        rows.append(_row(f"cairn within {plan.budget_bytes / MIB:.1f} MiB", steps, plan))
    return rows


def _row(method: str, steps: Steps, plan: ct.Plan | None = None) -> Row:
    measured = (method, steps.peak_bytes, steps.step_ns, steps.overhead, steps.same_loss)
    return Row(*measured) if plan is None else Row(*measured, plan.budget_bytes, plan.peak_bytes, plan.overhead)


def _plan_within(profile: ct.Profile, peak_bytes: int) -> ct.Plan | None:
    """Plan without a reserve: measured peaks are compared, and a peak over its budget is reported."""
    with contextlib.suppress(ct.InfeasibleBudget):
        return ct.plan(profile, cairn.Budget(total=peak_bytes, reserve=0), gradients="created")
    return None


def _others(model: nn.Sequential, segments: int | None) -> dict[str, Turn]:
    """Plain, and torch's own checkpointing of the children of a Sequential."""

    def every_block(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def in_segments(count: int) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint_sequential(model, count, x, use_reentrant=False)

    runs: dict[str, Callable[..., Any]] = {PLAIN: model, "every block": every_block}
    runs |= {f"checkpoint_sequential {count}": in_segments(count) for count in range(2, (segments or len(model)) + 1)}
    return {name: functools.partial(as_it_is, run) for name, run in runs.items()}


# -- telling -------------------------------------------------------------------------------------------------


def _lost(rows: list[Row]) -> list[str]:
    """Where Cairn is slower than another method within that one's peak, takes more, or changes the loss."""
    mine = {row.budget_bytes: row for row in rows if row.budget_bytes is not None}
    least = min(mine.values(), key=lambda row: row.peak_bytes)
    found = [f"{row.method} changed the loss" for row in rows if not row.same_loss]
    for other in rows:
        if other.budget_bytes is not None or other.method == PLAIN:
            continue
        row, peak = mine.get(other.peak_bytes), f"{other.peak_bytes / MIB:.1f} MiB ({other.method})"
        if row is None and least.peak_bytes <= other.peak_bytes:  # predicted to take more than it did
            row = least
        if row is None:
            more, slower = least.peak_bytes - other.peak_bytes, f"{100 * least.overhead:.1f} %"
            against = f"{100 * other.overhead:.1f} %"
            found.append(f"no plan within {peak}: the least takes {more} bytes more; slower {slower} against {against}")
        elif row.peak_bytes > other.peak_bytes:
            found.append(f"{row.peak_bytes - other.peak_bytes} bytes over {peak}")
        elif row.overhead > other.overhead:
            found.append(f"slower within {peak}: {100 * row.overhead:.1f} % against {100 * other.overhead:.1f} %")
    return found


def _print(name: str, rows: list[Row]) -> None:
    print(f"{name:<42} {'peak':>12} {'slower than plain':>18} {'predicted':>10}")
    for row in rows:
        predicted = "" if row.predicted_overhead is None else f"{100 * row.predicted_overhead:.1f} %"
        measured = f"{row.peak_bytes / MIB:>8.1f} MiB {100 * row.overhead:>16.1f} %"
        print(f"  {row.method:<40} {measured} {predicted:>10}", flush=True)


def _draw(results: dict[str, list[Row]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(results), 4.5), layout="constrained")
    for index, (name, rows) in enumerate(results.items(), 1):
        axes = figure.add_subplot(1, len(results), index)
        for label, prefix in (
            ("Cairn", "cairn"),
            ("checkpoint_sequential, all k", "checkpoint_sequential"),
            ("every block", "every"),
        ):
            points = sorted((row.peak_bytes / MIB, 100 * row.overhead) for row in rows if row.method.startswith(prefix))
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(title=name, xlabel="measured peak of the step, MiB", ylabel="measured extra time, %")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
