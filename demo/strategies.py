"""Strategies side by side on a residual network: peak and time of a step, predicted and measured.

    python demo/strategies.py FOLDER

Predictions are the simulator's, of the schedule that each strategy stands for. Measurements are of the real thing:
PyTorch's own checkpointing and compiler where it is PyTorch's, a step replayed by Cairn where it is Cairn's, each in
turns with the others. Times are of the processor, one thread, which what else runs on the machine disturbs least.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import cairn
import cairn.torch as ct
import torch
from cairn.torch.base import clock
from workloads import cnn

MIB = 2**20
WIDTHS, BATCH, ROUNDS = (32, 32, 64, 64, 128, 128), 16, 2


def show(measured: ct.Sweep) -> None:
    """The table for people."""
    print(f"  {'':46}{'peak, MiB':>20}{'step, ms':>10}{'extra time':>22}")
    print(f"  {'':46}{'predicted':>10}{'measured':>10}{'measured':>10}{'predicted':>12}{'measured':>10}")
    for row in measured.measured:
        peak = "" if row.predicted_peak_bytes is None else f"{row.predicted_peak_bytes / MIB:.1f}"
        extra = "" if row.predicted_overhead is None else f"{100 * row.predicted_overhead:+.0f}%"
        print(
            f"  {row.name:46}{peak:>10}{row.peak_bytes / MIB:10.1f}"
            f"{row.step_ns / 1e6:10.0f}{extra:>12}{100 * row.overhead:+9.0f}%"
        )
    print(f"  times: of the processor, over {ROUNDS} rounds; so few leave errors of several points in the extra time")
    for name, reason in measured.left_out.items():
        print(f"  {name:46}left out: {reason}")


def compare(out: Path) -> None:
    """Prints the table; writes it, the plot and a timeline, and says where."""
    torch.set_num_threads(1)
    clock.read = time.thread_time_ns
    work = cnn(WIDTHS, BATCH)
    x, y = next(work.batches)
    print(
        f"\nstrategies on a pyramid of {len(work.blocks)} such blocks, batch {BATCH}, measured in one process",
        flush=True,
    )
    sample: dict[str, Any] = {"args": (x,), "loss_fn": lambda output: work.loss(output, y)}
    profile = ct.profile(work.model, **sample)
    plot, table, timeline = (out / name for name in ("tradeoff.png", "tradeoff.json", "timeline.json"))
    curve = ct.sweep(profile, 12, plot=plot, model=work.model, rounds=ROUNDS, **sample)
    show(curve)
    table.write_text(json.dumps(curve.to_json(), indent=1) + "\n")
    tightest = ct.plan(profile, curve[1].budget_bytes).verified
    timeline.write_text(cairn.trace(tightest.problem, tightest.schedule))
    print(f"\n  trade-off plot  {plot}")
    print(f"  the same, data  {table}")
    print(f"  timeline        {timeline}  (open it at ui.perfetto.dev)")


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
