"""Blocks that are compiled one by one: a plan for each budget against checkpointing whole compiled blocks.

A model trains in one thread, with eager kernels: a GPT (blocks of attention, GELU and dropout), a mixture of experts
whose blocks have graph breaks, an encoder-decoder with breaks between blocks, the GPT with blocks that FSDP2 shards
over two ranks (what the first rank sees; a peak is the larger of the two), a decoder with gated products, or blocks
with convolutions. First k of its compiled blocks are checkpointed as wholes by torch.utils.checkpoint; then
`ct.compile(regions=True)` gets the peak that this takes as its budget. All ways take turns, each between two steps
whose blocks are compiled and keep everything. Times are CPU times; extra time is the median of the ratios to the mean
of the two. Peaks are those of the allocator, with parameters and inputs. "proved at least" is the lower bound of the
time of any plan of these blocks and options within the budget. "exact" compares loss and gradients with those of the
model without compilation, bit for bit. At the end: what compiling costs for each block, of a step whose compiled
blocks keep everything beside the step without compilation.
"""

from __future__ import annotations

import contextlib
import functools
import io
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cairn.torch as ct
import torch
from cairn.torch.base import ranks
from cairn.torch.compiled.compiled_model import known
from cairn.torch.compiled.region_plan import RegionPlan
from cairn.torch.compiling_regions import RegionModel
from cairn.torch.rerun_state.sharded import ranks_of
from support import arguments, region_models
from support.region_models import Blocks
from support.training import MIB, allocated_peak, machine, quiet, write
from support.two_ranks import local, on_two_ranks

NO_LIMIT = "1TiB"
STEPS = 9  # whose least peak is taken


class Way(NamedTuple):
    """One way to run the step: `enter` prepares the model for it."""

    name: str
    model: Blocks
    enter: Callable[[], object]
    said: str = ""


def run(way: Way, ids: torch.Tensor) -> torch.Tensor:
    """Forward and backward from the same random state each time."""
    torch.manual_seed(1)
    loss: torch.Tensor = way.model(ids)
    loss.backward()
    way.model.zero_grad()
    return loss.detach()


def seconds(way: Way, ids: torch.Tensor) -> float:
    """CPU time of one step, after one that is not measured."""
    way.enter()
    run(way, ids)
    began = time.process_time()
    run(way, ids)
    return time.process_time() - began


def results(way: Way, ids: torch.Tensor) -> list[torch.Tensor]:
    """The loss and all gradients."""
    way.enter()
    torch.manual_seed(1)
    loss: torch.Tensor = way.model(ids)
    loss.backward()
    found = [loss.detach(), *(local(p.grad).clone() for p in way.model.parameters() if p.grad is not None)]
    way.model.zero_grad()
    return found


def peak_bytes(way: Way, ids: torch.Tensor) -> int:
    """Peak of one step, parameters and inputs included: the least of several, of the rank that takes most.

    A buffer that gloo frees in a thread of its own is counted as if it stayed, in some steps.
    """
    way.enter()
    resident = sum(local(t).nbytes for t in (*way.model.parameters(), ids))
    peak = resident + min(allocated_peak(lambda: run(way, ids)) for _ in range(STEPS))
    return ranks_of(way.model).largest(peak)


def planned(model: Blocks, ids: torch.Tensor, budget: int | str, name: str) -> Way:
    """`ct.compile` block by block within a budget."""
    ct.compile(
        model, ids, budget=budget, kernels="eager", regions=True, holds_output=False, prove=False, progress=False
    )
    made = known(model)
    assert isinstance(made, RegionModel) and made.report is not None
    plan = made.report.regions
    assert isinstance(plan, RegionPlan)
    off = 100 * (plan.peak_bytes / (plan.measured_peak_bytes or 1) - 1)
    enter = functools.partial(made.follow, plan.plan, plan.levels)  # what a later plan recomputes as a whole ends
    least = 100 * ((plan.plan.lower_bound_ns or 0) / plan.plan.plain_ns - 1)
    proved = f", proved at least {least:+.1f} %" if plan.plan.lower_bound_ns else ""
    return Way(name, model, enter, f"predicted {off:+.2f} %, time {100 * plan.overhead:+.1f} %{proved}")


def checkpointed(model: Blocks, count: int) -> Way:
    """The first blocks checkpointed as wholes."""
    return Way(f"checkpoint {count} blocks", model, functools.partial(setattr, model, "checkpointed", count))


def made(options: Any) -> Blocks:
    """The model; where it is sharded, by FSDP2, each block and the whole."""
    model = region_models.made(options.model, options.layers, options.width, options.vocabulary)
    if options.model == "sharded":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def compiled_by_torch(options: Any) -> Blocks:
    """The model with blocks that torch alone compiles; the hooks that gather parameters stay outside."""
    model = made(options)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    return model


def ways(model: Blocks, ids: torch.Tensor, options: Any) -> Iterator[tuple[Way, int]]:
    """Each way and the peak of its step; the first keeps everything, and then each budget has two."""
    other = compiled_by_torch(options)
    everything = planned(model, ids, NO_LIMIT, "everything kept")
    yield everything, peak_bytes(everything, ids)
    for count in options.checkpointed:
        whole = checkpointed(other, count)
        for _ in range(2):  # the first one compiles
            run(whole, ids)
        peak = peak_bytes(whole, ids)
        yield whole, peak
        try:
            own = planned(model, ids, int(peak * (1 + options.reserve)), f"cairn in place of {count}")
        except ct.InfeasibleBudget as error:
            print(f"{peak / MIB:.1f} MiB: the least is {(error.least_bytes or 0) / MIB:.1f} MiB")
            continue
        yield own, peak_bytes(own, ids)


def compare(plain: Way, found: list[tuple[Way, int]], ids: torch.Tensor, count: int) -> list[dict[str, Any]]:
    """A row for each way."""
    base, names = found[0][0], [way.name for way, _ in found]
    ratios: dict[str, list[float]] = {name: [] for name in ("plain", *names)}
    for _ in range(count):
        before = seconds(base, ids)
        for name, way in zip(ratios, (plain, *(way for way, _ in found)), strict=True):
            taken, after = seconds(way, ids), seconds(base, ids)
            ratios[name].append(2 * taken / (before + after))
            before = after
    wanted = results(plain, ids)
    rows = []
    for way, peak in found:
        extra = 100 * (statistics.median(ratios[way.name]) - 1)
        same = all(map(torch.equal, wanted, results(way, ids)))
        rows.append({"way": way.name, "peak_mib": peak / MIB, "extra_percent": extra, "exact": same, "plan": way.said})
        print(f"{way.name:22} {peak / MIB:9.1f} MiB {extra:+7.1f} %  {'exact' if same else 'differs':8} {way.said}")
    plain_s, kept_s = seconds(plain, ids), statistics.median(seconds(base, ids) for _ in range(3))
    share = 1 / statistics.median(ratios["plain"]) - 1
    blocks = len(plain.model.blocks)
    cost_us, block_ms = 1e6 * share * plain_s / blocks, 1e3 * kept_s / blocks
    print(
        f"compiling costs {100 * share:+.1f} % of the step: {cost_us:.0f} us for each block of about {block_ms:.1f} ms"
    )
    return [*rows, {"way": "compiling, a block", "us": cost_us, "percent": 100 * share}]


def main() -> None:
    """Measure and print; write JSON where a file is named."""
    command = arguments.parser(__doc__)
    command.add_argument("--model", choices=region_models.NAMES, default="gpt")
    command.add_argument("--layers", type=int, default=12)
    command.add_argument("--width", type=int, default=256)
    command.add_argument("--length", type=int, default=128)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--vocabulary", type=int, default=512)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--checkpointed", type=int, nargs="*", default=[2, 4, 6, 8, 10])
    command.add_argument("--reserve", type=float, default=0.005, help="a budget's share beyond the peak it is to reach")
    command.add_argument("--json", type=Path)
    small = {"layers": 2, "width": 32, "length": 32, "batch": 2, "vocabulary": 64, "rounds": 1, "checkpointed": [1]}
    options = arguments.parse(command, **small)
    warnings.simplefilter("ignore")
    if options.model == "sharded":
        print("".join(on_two_ranks(rank, options)[0]))
    else:
        measure(options)


def rank(options: Any) -> list[str]:
    """What one rank prints."""
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        measure(options)
    return lines.getvalue().splitlines(keepends=True)


def measure(options: Any) -> None:
    """The rows of one model."""
    warnings.simplefilter("ignore")
    with quiet():
        model, untouched = made(options), made(options)
        torch.manual_seed(1)
        ids = torch.randint(options.vocabulary, (options.batch, options.length))
        plain = Way("plain", untouched, lambda: None)
        print(f"{options.model}: {peak_bytes(plain, ids) / MIB:.1f} MiB; torch {torch.__version__}")
        rows = compare(plain, list(ways(model, ids, options)), ids, options.rounds)
        if not ranks.several():
            write(options.json, {"conditions": machine(), "rows": rows})


if __name__ == "__main__":
    main()
