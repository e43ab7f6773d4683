"""How well peaks and times of planned steps are predicted, per model, from the least budget to storing everything.

python bench/torch_prediction.py [MODEL ...] [--budgets 4] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from support import arguments
from support.models import MODELS
from support.training import Method, machine, medians, plans_between, quiet, write


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--budgets", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="steps timed per plan; the median counts")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = arguments.parse(parser, models=["tiny-cnn"], budgets=2, rounds=1)
    results = {}
    print(
        f"{'model':<14} {'budget':>10} {'peak predicted':>15} {'measured':>10} {'error':>8} "
        f"{'slower predicted':>17} {'measured':>9} {'time error':>11}"
    )
    with quiet():
        for name in chosen.models or MODELS:
            results[name] = _model(name, chosen.budgets, chosen.rounds)
    write(chosen.json, {"machine": machine(), "models": results})


def _model(name: str, budgets: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    step = MODELS[name]()
    profile = ct.profile(step.model, **step.sample)
    plans = plans_between(profile, budgets)
    checked = [ct.verify(step.model, p, step.args, step.kwargs, loss_fn=step.loss_fn) for p in plans]

    def run() -> None:
        step.loss().backward()

    methods = {"plain": Method(run)} | {str(i): Method(run, plan) for i, plan in enumerate(plans)}
    seconds = medians(step.model, methods, rounds)
    rows = []
    for index, (plan, found) in enumerate(zip(plans, checked, strict=True)):
        row = {
            "budget_bytes": plan.budget_bytes,
            "reserve_bytes": plan.reserve_bytes,
            "predicted_peak_bytes": plan.accumulated_peak_bytes,
            "measured_peak_bytes": found.accumulated.peak_bytes,
            "predicted_created_peak_bytes": plan.created_peak_bytes,
            "measured_created_peak_bytes": found.created.peak_bytes,
            "predicted_overhead": plan.overhead,
            "measured_overhead": seconds[str(index)] / seconds["plain"] - 1,
            "predicted_s": plan.step_ns / 1e9,
            "measured_s": seconds[str(index)],
        }
        rows.append(row)
        _print(name, row)
    return {"plain_s": seconds["plain"], "predicted_plain_s": plans[0].plain_ns / 1e9, "plans": rows}


def _print(name: str, row: dict[str, Any]) -> None:
    peak = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
    time = row["predicted_s"] / row["measured_s"] - 1
    budget, predicted, measured = (row[f"{key}_bytes"] / 2**20 for key in ("budget", "predicted_peak", "measured_peak"))
    slower = (100 * row[f"{key}_overhead"] for key in ("predicted", "measured"))
    print(f"{name:<14} {budget:>6.1f} MiB {predicted:>11.2f} MiB {measured:>6.1f} MiB {100 * peak:>+6.2f} %", end=" ")
    print("{:>15.1f} % {:>7.1f} %".format(*slower), f"{100 * time:>+9.1f} %", flush=True)


if __name__ == "__main__":
    main()
