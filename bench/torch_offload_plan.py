"""Plans with offloading against plans that only recompute, at equal budgets: predicted and measured.

Budgets lie evenly between the least that works with offloading and storing everything. At each of them: the plan that
only computes again, whole blocks and parts of them, and the plans in which values may be offloaded to the host's memory
or to a file as well. Peaks are of the device's allocator; times are of the clock, for copies are made by other threads,
and of all threads; steps take turns, and medians count. Predictions are the simulator's, with the link as measured.

python bench/torch_offload_plan.py [mlp] [resnet50] [vgg16] [--device cuda] [--folder /tmp] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from support import arguments
from support.models import MODELS
from support.training import machine, quiet, release, seconds_now, step_peak, write


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="mlp, resnet50, vgg16, ...; default: mlp, resnet50")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where the file is")
    parser.add_argument("--budgets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = arguments.parse(parser, models=["tiny-mlp"], budgets=1, rounds=1)
    with quiet():
        results = {name: compare(name, chosen) for name in chosen.models or ("mlp", "resnet50")}
        conditions = machine() | {"times": "seconds by the clock, and of all threads", "device": chosen.device}
    write(chosen.json, {"machine": conditions, "models": results})


def compare(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """One network at all budgets."""
    torch.manual_seed(0)
    step, device = MODELS[name](), torch.device(chosen.device)
    step.model.to(device)
    step.args = tuple(argument.to(device) for argument in step.args)
    profile = ct.profile(step.model, **step.sample)
    tiers = {"host": "host", "file": f"file:{chosen.folder}"}
    links = {each: ct.measure_link(device, tier) for each, tier in tiers.items()}
    points = ct.sweep(profile, chosen.budgets + 1, host_budget="8GiB", link=links["host"])
    plans: dict[str, ct.Plan | None] = {"plain": None}
    for point in points[:-1]:
        mib = f"{point.budget_bytes / 2**20:.0f} MiB"
        with contextlib.suppress(ct.InfeasibleBudget):
            plans[f"{mib}, computed again"] = ct.plan(profile, point.budget_bytes)
        for each, tier in tiers.items():
            with contextlib.suppress(ct.InfeasibleBudget):
                plan = ct.plan(profile, point.budget_bytes, host_budget="8GiB", tier=tier, link=links[each])
                plans[f"{mib}, or sent to {each}"] = plan
    rows = measured(step, plans, device, chosen.rounds)
    show(name, links, rows)
    return {"links": {each: dataclasses.asdict(link) for each, link in links.items()}, "rows": rows}


def measured(step: Any, plans: dict[str, ct.Plan | None], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A row for each plan; None is the plain step."""
    peaks = {name: peak_of(step, plan, device) for name, plan in plans.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            taken[name].append(time_of(step, plan, device))
    clock, busy = ({n: statistics.median(pair[i] for pair in pairs) for n, pairs in taken.items()} for i in range(2))
    return [
        {
            "plan": name,
            "predicted_peak_bytes": None if plan is None else plan.created_peak_bytes,
            "peak_bytes": peaks[name],
            "predicted_overhead": None if plan is None else plan.overhead,
            "overhead": clock[name] / clock["plain"] - 1,
            "seconds": clock[name],
            "processor_seconds": busy[name],
            "slower_bytes": 0 if plan is None else plan.host_bytes,
        }
        for name, plan in plans.items()
    ]


def on(step: Any, plan: ct.Plan | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if plan is None else ct.apply(step.model, plan)


def peak_of(step: Any, plan: ct.Plan | None, device: torch.device) -> int:
    """Peak bytes of a step that creates its gradients, after one that opens the slab."""

    def run() -> None:
        step.loss().backward()

    with on(step, plan):
        run()
        return step_peak(step.model, run, step.args)


def time_of(step: Any, plan: ct.Plan | None, device: torch.device) -> tuple[float, float]:
    """Seconds of a step by the clock and of all threads, the slab opened by a step before it."""
    with on(step, plan):
        step.loss().backward()
        release(step.model)
        began, busy = seconds_now(device), time.process_time()
        step.loss().backward()
        taken = seconds_now(device) - began, time.process_time() - busy
    release(step.model)
    return taken


def show(name: str, links: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    print(f"\n{name}")
    for each, link in links.items():
        out, back = link.to_host_bytes_per_s / 1e9, link.to_device_bytes_per_s / 1e9
        print(f"  link to {each}: {out:.1f} GB/s out, {back:.1f} GB/s back, computing {link.slowdown:+.0%} meanwhile")
    print(f"  {'':34}{'peak, MiB':>20}{'extra time':>20}{'processor s':>13}{'slower MiB':>12}")
    print(f"  {'':34}{'predicted':>10}{'measured':>10}{'predicted':>10}{'measured':>10}")
    for row in rows:
        peak, overhead = row["predicted_peak_bytes"], row["predicted_overhead"]
        predicted = (f"{peak / 2**20:10.1f}", f"{100 * overhead:+9.0f}%") if peak is not None else (10 * " ",) * 2
        print(
            f"  {row['plan']:34}{predicted[0]}{row['peak_bytes'] / 2**20:10.1f}{predicted[1]}"
            f"{100 * row['overhead']:+9.0f}%{row['processor_seconds']:13.2f}{row['slower_bytes'] / 2**20:12.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
