"""Cairn beside torch's checkpoint_sequential and beside checkpointing every block, in one run: peak and time of a step.

For every peak that another method reaches, Cairn plans for exactly that many bytes. Steps take turns; medians count.

python bench/torch_curves.py [resnet50] [vgg16] [--rounds 5] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch_models_large import LARGE, Step
from torch_support import Method, machine, medians, peak_of, quiet, write

SEGMENTS = {"resnet50": (2, 3, 4, 6, 7, 9), "vgg16": (2, 3, 4, 6, 8, 11)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="resnet50, vgg16; default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    with quiet():
        results = {name: _model(name, chosen.rounds) for name in chosen.models or SEGMENTS}
    write(chosen.json, {"machine": machine(), "models": results})
    if chosen.plot is not None:
        _draw(results, chosen.plot)


def _model(name: str, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    step = LARGE[name]()
    others = _others(step, SEGMENTS[name])
    tensors = [*step.args, *_targets(step)]
    for method in others.values():
        method.run()
    peaks = {name: peak_of(step.model, method, tensors) for name, method in others.items()}
    profile = ct.profile(step.model, **step.sample)
    plans: dict[str, ct.Plan] = {}
    for other, peak in peaks.items():
        with contextlib.suppress(ct.InfeasibleBudget):  # the reserve may not fit
            plans[f"cairn within {other}"] = ct.plan(profile, peak, gradients="created")
    least = ct.plan(profile, 2**62, gradients="created").least_budget_bytes
    plans["cairn at its least"] = ct.plan(profile, least, gradients="created")
    methods = others | {name: Method(others["plain"].run, plan) for name, plan in plans.items()}
    peaks |= {name: peak_of(step.model, methods[name], tensors) for name in plans}
    seconds = medians(step.model, methods, rounds)
    plain = seconds["plain"]
    rows = [
        {
            "method": method,
            "peak_bytes": peaks[method],
            "seconds": seconds[method],
            "overhead": seconds[method] / plain - 1,
        }
        for method in methods
    ]
    for row in rows:
        plan = plans.get(row["method"])
        row["predicted_overhead"] = plan.overhead if plan else None
        row["predicted_peak_bytes"] = plan.peak_bytes if plan else None
    _print(name, rows)
    return rows


def _others(step: Step, segments: tuple[int, ...]) -> dict[str, Method]:
    model, x = step.model, step.args[0]

    def every_block() -> None:
        value = x
        for layer in model:
            value = checkpoint(layer, value, use_reentrant=False)
        step.loss_fn(value).backward()

    def in_segments(count: int) -> Callable[[], None]:
        def run() -> None:
            step.loss_fn(checkpoint_sequential(model, count, x, use_reentrant=False)).backward()

        return run

    methods = {"plain": Method(lambda: step.loss().backward()), "every block": Method(every_block)}
    return methods | {f"checkpoint_sequential {count}": Method(in_segments(count)) for count in segments}


def _targets(step: Step) -> list[torch.Tensor]:
    cells = getattr(step.loss_fn, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, torch.Tensor)]


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"{name:<40} {'peak':>12} {'slower than plain':>18} {'predicted':>10}")
    for row in rows:
        predicted = "" if row["predicted_overhead"] is None else f"{100 * row['predicted_overhead']:.1f} %"
        measured = f"{row['peak_bytes'] / 2**20:>8.1f} MiB {100 * row['overhead']:>16.1f} %"
        print(f"  {row['method']:<38} {measured} {predicted:>10}", flush=True)


def _draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(results), 4.5), layout="constrained")
    for index, (name, rows) in enumerate(results.items(), 1):
        axes = figure.add_subplot(1, len(results), index)
        for label, prefix in (
            ("Cairn", "cairn"),
            ("checkpoint_sequential", "checkpoint_sequential"),
            ("every block", "every"),
        ):
            points = sorted(
                (r["peak_bytes"] / 2**20, 100 * r["overhead"]) for r in rows if r["method"].startswith(prefix)
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(title=name, xlabel="measured peak of the step, MiB", ylabel="measured extra time, %")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
