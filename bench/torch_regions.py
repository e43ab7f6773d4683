"""Blocks that are compiled one by one: a plan for each budget against checkpointing whole compiled blocks.

A GPT (blocks of attention, GELU and dropout) trains in one thread, with eager kernels. First k of its compiled blocks
are checkpointed as wholes by torch.utils.checkpoint; then `ct.compile(regions=True)` gets the peak that this takes as
its budget. All ways take turns, each between two steps whose blocks are compiled and keep everything. Times are CPU
times; extra time is the median of the ratios to the mean of the two. Peaks are those of the allocator, with parameters
and inputs. "exact" compares loss and gradients with those of the model without compilation, bit for bit. At the end:
what compiling costs for each block, of a step whose compiled blocks keep everything beside the step without
compilation.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cairn.torch as ct
import torch
from cairn.torch.compiled.compiled_model import known
from cairn.torch.compiled.region_plan import RegionPlan
from cairn.torch.compiling_regions import RegionModel
from support import arguments
from support.training import MIB, allocated_peak, machine, quiet, write
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NO_LIMIT = "1TiB"


class Block(nn.Module):
    """Attention over all positions, a GELU between two products, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        batch, length, width = x.shape
        mixed = self.mix(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)), approximate="tanh")), 0.1)


class Gpt(nn.Module):
    """Blocks between an embedding and a head; `checkpointed` of them keep their inputs alone."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.checkpointed = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index < self.checkpointed else block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Way(NamedTuple):
    """One way to run the step: `enter` prepares the model for it."""

    name: str
    model: Gpt
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
    """CPU time of one step."""
    way.enter()
    began = time.process_time()
    run(way, ids)
    return time.process_time() - began


def results(way: Way, ids: torch.Tensor) -> list[torch.Tensor]:
    """The loss and all gradients."""
    way.enter()
    torch.manual_seed(1)
    loss: torch.Tensor = way.model(ids)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in way.model.parameters() if p.grad is not None)]
    way.model.zero_grad()
    return found


def peak_bytes(way: Way, ids: torch.Tensor) -> int:
    """Peak of one step, parameters and inputs included."""
    way.enter()
    resident = sum(t.numel() * t.element_size() for t in (*way.model.parameters(), ids))
    return resident + allocated_peak(lambda: run(way, ids))


def planned(model: Gpt, ids: torch.Tensor, budget: int | str, name: str) -> Way:
    """`ct.compile` block by block within a budget."""
    ct.compile(
        model, ids, budget=budget, kernels="eager", regions=True, holds_output=False, prove=False, progress=False
    )
    made = known(model)
    assert isinstance(made, RegionModel) and made.report is not None
    plan = made.report.regions
    assert isinstance(plan, RegionPlan)
    off = 100 * (plan.peak_bytes / (plan.measured_peak_bytes or 1) - 1)
    enter = functools.partial(made.regions.set_levels, plan.levels)
    return Way(name, model, enter, f"predicted {off:+.2f} %, time {100 * plan.overhead:+.1f} %")


def checkpointed(model: Gpt, count: int) -> Way:
    """The first blocks checkpointed as wholes."""
    return Way(f"checkpoint {count} blocks", model, functools.partial(setattr, model, "checkpointed", count))


def ways(model: Gpt, ids: torch.Tensor, options: Any) -> Iterator[tuple[Way, int]]:
    """Each way and the peak of its step; the first keeps everything, and then each budget has two."""
    other = copy.deepcopy(model)
    for block in other.blocks:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    everything = planned(model, ids, NO_LIMIT, "everything kept")
    yield everything, peak_bytes(everything, ids)
    for count in options.checkpointed:
        whole = checkpointed(other, count)
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
    with quiet():
        model = Gpt(options.layers, options.width, options.vocabulary)
        ids = torch.randint(options.vocabulary, (options.batch, options.length))
        untouched = copy.deepcopy(model)
        plain = Way("plain", untouched, lambda: None)
        print(f"plain: {peak_bytes(plain, ids) / MIB:.1f} MiB; torch {torch.__version__}")
        rows = compare(plain, list(ways(model, ids, options)), ids, options.rounds)
        write(options.json, {"conditions": machine(), "rows": rows})


if __name__ == "__main__":
    main()
