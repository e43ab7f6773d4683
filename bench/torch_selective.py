"""What selective recomputation is worth: time of a step at given peaks, against whole blocks and against torch.

python bench/torch_selective.py [gpt2 | bert | llama | vit | ... | resnet50 | vgg16] [--layers N]
                                [--mib 840 553 442 321] [--share 0.25 0.5] [--segments 2 4] [--rounds 5]
                                [--allocator default] [--json FILE] [--plot FILE]

Peaks are bytes of activations: what a step that adds to existing gradients takes beyond parameters and gradients. They
are given in MiB, or as shares of the way from the least of whole blocks to plain. Whole blocks are planned twice: with
PyTorch's head and loss ("blocks alone"; shares refer to these), and with Cairn's, which take less ("blocks", and
"parts", where blocks may be recomputed selectively, too). The models return their loss alone.
Methods take turns, one thread, CPU time of the process (which a busy machine disturbs less than the clock's); the
overhead is the median over the rounds of the ratio to the same round's plain step. All must give plain's exact loss.
The model's inputs count, as they do in plans. Beside each plan stands the least that any choice of kept tensors could
cost at the plan's peak, if the operations that it replays were all that it costs (`support/selective_bound.py`).

The allocator keeps what it has (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ at 4 GiB), so that tensors are not
faulted in again and again; `--allocator default` leaves glibc as it is, `--allocator mmap` faults every tensor in, and
`--allocator jemalloc` preloads that library (libjemalloc2 on Debian) as it is. Page faults of a step are counted.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cairn
import cairn.torch as ct
import torch
from support import arguments
from support.allocators import ALLOCATORS, restart_under
from support.cut_steps import MODELS, CutStep
from support.selective_bound import bound_of
from support.training import MIB, UNLIMITED, Method, allocated_peak, machine, quiet, write

UNEQUAL = "resnet50", "vgg16"  # of unequal blocks, which the bound is not made for


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("model", nargs="?", choices=MODELS, default="gpt2")
    parser.add_argument("--layers", type=int, help="of a transformer, fewer than usual")
    parser.add_argument("--mib", type=int, nargs="*", default=[], help="peaks to plan for")
    parser.add_argument("--share", type=float, nargs="*", default=[], help="the same, from the least (0) to plain (1)")
    parser.add_argument("--segments", type=int, nargs="*", default=[], help="of checkpoint_sequential")
    parser.add_argument("--rounds", type=int, default=5, help="steps timed per method; the median counts")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="keeping")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw what a block's options save and cost")
    chosen = arguments.parse(parser, model="tiny", share=[0.5], segments=[2], rounds=1)
    wanted = restart_under(chosen.allocator, parser)
    with quiet():
        torch.manual_seed(0)
        step = MODELS[chosen.model](chosen.layers)
        data = _measured(step, chosen)
    described = {"machine": machine(), "allocator": chosen.allocator, "allocator_environment": wanted}
    described |= {"model": chosen.model, "layers": chosen.layers}
    write(chosen.json, {**described, **data})
    if chosen.plot is not None:
        draw(data["options"], chosen.plot)
    return 0 if all(row["same_loss"] for row in data["rows"]) else 1


# -- measuring -----------------------------------------------------------------------------------------------


def _measured(step: CutStep, chosen: argparse.Namespace) -> dict[str, Any]:
    profile = ct.profile(step.model, loss_fn=step.sample.get("loss_fn"), **_sample(step))
    alone = ct.profile(step.model, loss_fn=step.sample.get("loss_fn"), **_sample(step), inside=False, outside=False)
    block = next(stage for stage in profile.stages if stage.options)
    _print_options(block)
    methods = {"plain": Method(step.run), "every block": Method(step.run_every_block)}
    for k in chosen.segments:
        methods[f"checkpoint_sequential {k}"] = Method(functools.partial(step.run_in_segments, k))
    least = ct.plan(alone, UNLIMITED, scope="activations")
    sizes = [mib * MIB for mib in chosen.mib]
    sizes += [
        int(least.least_budget_bytes + share * (least.plain_peak_bytes - least.least_budget_bytes))
        for share in chosen.share
    ]
    ways: dict[str, tuple[ct.Profile, tuple[str, ...]]] = (
        {"blocks alone": (alone, ("recompute",))} if profile.replacements.notes() else {}
    )
    ways |= {"blocks": (profile, ("recompute",)), "parts": (profile, ("recompute", "inside"))}
    for size in sizes:
        for name, (measured, allow) in ways.items():
            try:
                plan = ct.plan(measured, cairn.Budget(total=size, reserve=0), scope="activations", allow=allow)
            except ct.InfeasibleBudget as error:
                print(f"{size / MIB:.0f} MiB, {name}: {error}", flush=True)
                continue
            methods[f"{name} within {size / MIB:.0f} MiB"] = Method(step.run, plan)
    rows = _timed(step, methods, chosen.rounds, profile.input_bytes)
    if chosen.model not in UNEQUAL:
        bound = bound_of(profile, step.model, step.loss)
        for row in rows:
            planned = row["predicted_peak_bytes"]
            row["least_overhead"] = None if planned is None else bound.overhead(planned)
    _print(rows)
    return {"options": [vars(option) for option in block.options], "rows": rows}


def _sample(step: CutStep) -> dict[str, Any]:
    return {name: value for name, value in step.sample.items() if name in ("args", "kwargs")}


def _timed(step: CutStep, methods: dict[str, Method], rounds: int, input_bytes: int) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {name: [] for name in methods}
    faults: dict[str, list[int]] = {name: [] for name in methods}
    peaks: dict[str, int] = {}
    losses: dict[str, set[float]] = {name: set() for name in methods}
    for p in step.model.parameters():
        p.grad = torch.zeros_like(p)
    for number in range(rounds + 1):
        for name, method in methods.items():
            for p in step.model.parameters():
                assert p.grad is not None
                p.grad.zero_()
            with method.on(step.model):
                if number == 0:  # the first step of a plan records; its peak is that of the others
                    peaks[name] = input_bytes + allocated_peak(method.run)
                    continue
                faulted, began = _page_faults(), time.process_time()
                losses[name].add(method.run())
                taken[name].append(time.process_time() - began)
                faults[name].append(_page_faults() - faulted)
    rows = []
    for name, method in methods.items():
        ratios = [mine / plain for mine, plain in zip(taken[name], taken["plain"], strict=True)]
        rows.append(
            {
                "method": name,
                "peak_bytes": peaks[name],
                "predicted_peak_bytes": None if method.plan is None else method.plan.peak_bytes,
                "cpu_seconds": statistics.median(taken[name]),
                "page_faults": statistics.median(faults[name]),
                "overhead": statistics.median(ratios) - 1,
                "predicted_overhead": None if method.plan is None else method.plan.overhead,
                "same_loss": losses[name] == losses["plain"],
            }
        )
    return rows


def _page_faults() -> int:
    """Of the process so far, without reading from a disk: memory that the kernel has put in place."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _print_options(stage: Any) -> None:
    base = stage.options[0]
    print(f"{'option':>6} {'saves MiB':>10} {'of the block, slower':>21}  recomputes")
    for number, option in enumerate(stage.options):
        slower = option.time_ns / base.time_ns - 1
        print(f"{number:>6} {option.saved_bytes / MIB:>10.2f} {100 * slower:>20.2f}%  {option.recomputes}")


def draw(options: list[dict[str, Any]], path: Path) -> None:
    """What each option of a block saves, and by how much the block is slower for it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "cairn"
    mpl.rcParams["svg.fonttype"] = "none"
    times = [option["forward_ns"] + option["backward_ns"] for option in options]
    saved = [option["saved_bytes"] / MIB for option in options]
    slower = [100 * (time / times[0] - 1) for time in times]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="saved, MiB", ylabel="slower, % of the block's forward and backward")
    axes.plot(saved, slower, "o-")
    for number, (x, y) in enumerate(zip(saved, slower, strict=True)):
        name = f"option {number}" if number else "keep"
        axes.annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8)
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _print(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'method':<28} {'peak MiB':>9} {'predicted':>9} {'CPU s':>7} {'slower':>8} {'predicted':>9} {'at least':>8} "
        f"{'faults':>9} {'same loss':>9}"
    )
    for row in rows:
        predicted = row["predicted_peak_bytes"]
        slower, least = row["predicted_overhead"], row.get("least_overhead")
        print(
            f"{row['method']:<28} {row['peak_bytes'] / MIB:>9.1f} "
            f"{'' if predicted is None else f'{predicted / MIB:.1f}':>9} "
            f"{row['cpu_seconds']:>7.2f} {100 * row['overhead']:>7.1f}% "
            f"{'' if slower is None else f'{100 * slower:.1f}%':>9} "
            f"{'' if least is None else f'{100 * least:.1f}%':>8} {row['page_faults']:>9,.0f} {row['same_loss']!s:>9}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
