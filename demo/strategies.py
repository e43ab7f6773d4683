"""Strategies side by side on the residual network: peak and time of a step, predicted and measured.

Predictions are the simulator's, of the schedule that each strategy stands for. Measurements are of the real thing:
PyTorch's own checkpointing where it is PyTorch's, a step replayed by Cairn where it is Cairn's. Times are of the
processor, one thread, the least of a few steps that the strategies take in turn: what else runs on the machine disturbs
them least, and all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cairn
import cairn.torch as ct
import torch
from cairn.torch.memory import meter_for, unique_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential
from workloads import Workload, cnn

MIB = 2**20
ROUNDS = 5
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Strategy:
    """A network set up to run its steps in one way, and what the simulator says of it."""

    name: str
    work: Workload
    predicted_bytes: int
    predicted_ns: int
    is_cairn: bool = False


@dataclass(frozen=True)
class Row:
    """One strategy as measured: peak of the whole step, least time of a step."""

    strategy: Strategy
    measured_bytes: int
    measured_ns: int


# -- predicting ----------------------------------------------------------------------------------------------


def segmented(stages: int, segments: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
    """The operations of a chain of which segments, first to last stage, are recomputed, each as a whole."""
    starts = dict(segments)
    forward: list[tuple[str, int]] = []
    backward: list[tuple[str, int]] = []
    stage = 1
    while stage <= stages:
        last = starts.get(stage, stage)
        inside = range(stage, last + 1)
        saves = [("forward_save", i) for i in inside]
        if stage in starts:
            forward += [("forward_keep", stage), *(("forward_drop", i) for i in inside[1:])]
            backward = [*saves, *(("backward", i) for i in reversed(inside)), *backward]
        else:
            forward += saves
            backward = [("backward", stage), *backward]
        stage = last + 1
    return forward + backward


def cut(blocks: Sequence[int], count: int, last_too: bool) -> list[tuple[int, int]]:
    """Blocks in so many segments of equal count; the last one is left out as torch does, unless last_too."""
    length = len(blocks) // count
    segments = [(blocks[i * length], blocks[(i + 1) * length - 1]) for i in range(count - 1)]
    return [*segments, (blocks[(count - 1) * length], blocks[-1])] if last_too else segments


def predict(problem: cairn.Chain, segments: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Peak and time of a checkpointed chain, from the simulator."""
    schedule = cairn.Schedule.from_ops(problem, segmented(len(problem.stages), segments))
    replay = cairn.simulate(problem, schedule, None)
    if replay.peak_bytes is None or replay.makespan_ns is None:
        raise RuntimeError(f"the segments make no valid schedule: {replay.violation}")
    return replay.peak_bytes, replay.makespan_ns


# -- measuring -----------------------------------------------------------------------------------------------


def resident_bytes(work: Workload, x: Tensor) -> int:
    """What is there between steps: parameters, their gradients, buffers, optimizer state, the input."""
    state = [v for s in work.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    parameters = list(work.model.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    return unique_bytes([*parameters, *grads, *work.model.buffers(), *state, x])


def run_step(work: Workload, x: Tensor, y: Tensor) -> int:
    """One step, gradients kept; its processor time."""
    began = time.process_time_ns()
    work.loss(work.model(x), y).backward()
    return time.process_time_ns() - began


def measure_peak(work: Workload, x: Tensor, y: Tensor) -> int:
    """Peak bytes of a step that adds to gradients."""
    run_step(work, x, y)
    with meter_for(CPU) as meter:
        first = meter.mark()
        run_step(work, x, y)
        last = meter.mark()
    return resident_bytes(work, x) + meter.peak(first, last) - meter.level(first)


def measure(strategies: Sequence[Strategy], x: Tensor, y: Tensor) -> list[Row]:
    """All strategies, their steps in turn."""
    peaks = [measure_peak(each.work, x, y) for each in strategies]
    rounds = [[run_step(each.work, x, y) for each in strategies] for _ in range(ROUNDS)]
    return [Row(*measured) for measured in zip(strategies, peaks, map(min, zip(*rounds, strict=True)), strict=True)]


def with_forward(work: Workload, run_blocks: Callable[[nn.ModuleList, Tensor], Tensor]) -> Workload:
    """The network with its loop over the blocks replaced."""
    model = work.model

    def forward(images: Tensor) -> Tensor:
        x = run_blocks(work.blocks, model.stem(images))
        return model.head(x.mean(dim=(2, 3)))

    model.forward = forward
    return work


def every_block(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """PyTorch's checkpoint around each block."""
    for block in blocks:
        x = torch_checkpoint(block, x, use_reentrant=False)
    return x


def in_segments(count: int) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    """PyTorch's checkpoint_sequential."""
    return lambda blocks, x: checkpoint_sequential(nn.Sequential(*blocks), count, x, use_reentrant=False)


# -- the table -----------------------------------------------------------------------------------------------


def torch_strategies(make: Callable[[], Workload], plan: ct.Plan, counts: Sequence[int]) -> list[Strategy]:
    """Plain PyTorch and its own checkpointing."""
    problem = plan.verified.problem
    blocks = [i for i, ref in enumerate(plan.stages, 1) if ref.kind == "block"]
    segmented_ones = [
        Strategy(
            f"checkpoint_sequential, {count} segments",
            with_forward(make(), in_segments(count)),
            *predict(problem, cut(blocks, count, last_too=False)),
        )
        for count in counts
    ]
    each = cut(blocks, len(blocks), last_too=True)
    return [
        Strategy("plain PyTorch", make(), *predict(problem, [])),
        *segmented_ones,
        Strategy("checkpoint on every block", with_forward(make(), every_block), *predict(problem, each)),
    ]


def cairn_strategy(make: Callable[[], Workload], plan: ct.Plan) -> Strategy:
    """Cairn with a plan."""
    work = make()
    ct.apply(work.model, plan)
    return Strategy(f"Cairn, {plan.budget_bytes / MIB:.0f} MiB", work, plan.peak_bytes, plan.step_ns, is_cairn=True)


def show(rows: Sequence[Row]) -> None:
    """The table for people."""
    base = rows[0]
    print(f"  {'':34}{'peak, MiB':>20}{'time of a step, ms':>24}{'extra time':>12}")
    print(f"  {'':34}{'predicted':>10}{'measured':>10}{'predicted':>14}{'measured':>10}{'measured':>12}")
    for row in rows:
        told = row.strategy
        extra = 100 * (row.measured_ns / base.measured_ns - 1)
        print(
            f"  {told.name:34}{told.predicted_bytes / MIB:10.1f}{row.measured_bytes / MIB:10.1f}"
            f"{told.predicted_ns / 1e6:14.0f}{row.measured_ns / 1e6:10.0f}{extra:+11.0f}%"
        )


def draw(rows: Sequence[Row], curve: Sequence[ct.Point], title: str, path: Path) -> None:
    """Extra time against peak: the planned curve, and every strategy as measured."""
    from matplotlib.figure import Figure

    base = rows[0]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    points = [
        (p.peak_bytes / MIB, 100 * p.overhead) for p in curve if p.peak_bytes is not None and p.overhead is not None
    ]
    axes.plot(*zip(*points[1:], strict=True), color="tab:green", label="Cairn, predicted")
    for row in rows:
        at = row.measured_bytes / MIB, 100 * (row.measured_ns / base.measured_ns - 1)
        marker, color = ("o", "tab:green") if row.strategy.is_cairn else ("s", "tab:red")
        axes.plot(*at, marker=marker, color=color, linestyle="")
        if not row.strategy.is_cairn:
            axes.annotate(row.strategy.name, at, textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.plot([], [], marker="o", color="tab:green", linestyle="", label="Cairn, measured")
    axes.plot([], [], marker="s", color="tab:red", linestyle="", label="PyTorch, measured")
    axes.set(xlabel="peak memory of a step, MiB", ylabel="extra time, %", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def compare(out: Path, quick: bool) -> None:
    """Prints the table; writes the plot and a timeline, and says where."""
    torch.set_num_threads(1)

    def make() -> Workload:
        each = 2 if quick else 4
        return cnn(widths=[32] * each + [64] * each + [128] * each)

    work = make()
    x, y = next(work.batches)
    print(f"\nstrategies on a pyramid of {len(work.blocks)} such blocks, measured in one process", flush=True)
    profile = ct.profile(work.model, (x,), loss_fn=lambda output: work.loss(output, y))
    curve = ct.sweep(profile, 12)
    near_least = ct.plan(profile, curve[1].budget_bytes)
    strategies = torch_strategies(make, near_least, counts=[2, 3, 4])
    same = sorted({round(each.predicted_bytes / MIB): each.predicted_bytes for each in strategies[1:]}.values())
    plans = [near_least, *(ct.plan(profile, peak + 2 * near_least.reserve_bytes) for peak in same)]
    strategies += [cairn_strategy(make, plan) for plan in plans]
    rows = measure(strategies, x, y)
    show(rows)
    draw(rows, curve, f"Residual pyramid, {len(work.blocks)} blocks, batch {len(x)}", out / "tradeoff.png")
    tightest = near_least.verified
    (out / "timeline.json").write_text(cairn.trace(tightest.problem, tightest.schedule))
    print(f"\n  trade-off plot  {out / 'tradeoff.png'}")
    print(f"  timeline        {out / 'timeline.json'}  (open it at ui.perfetto.dev)")
