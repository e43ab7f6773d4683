"""What plans are worth for models that are written by hand: layers in lists, and functions called between them.

python bench/torch_by_hand.py [MODEL ...] [--rounds 5] [--json FILE]

Such a model is one block, of which parts are kept and the rest is recomputed. Beside that stand the same layers as
blocks of their own, of which little can be recomputed. For each way: the least peak, and what steps cost at three peaks
evenly from the least of all to plain, as predicted and as measured, gradients created. Steps take turns; times are of
the one thread's processor, and extra time is the median, over the rounds, of the ratio to the plain step of the round.
Every step's loss must be plain's to the bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import cairn
import cairn.torch as ct
import torch
from cairn.torch.evaluation.comparison import Comparison, Steps
from cairn.torch.handle import SuspendablePlan
from cairn.torch.profiling.sample import Sample
from support import arguments
from support.models import Layers
from support.training import MIB, UNLIMITED, as_it_is, following, machine, quiet, succeeded, write
from torch import Tensor, nn
from torch.nn import functional as F

SHARES = (0, 1, 2)  # thirds of the way from the least to plain


def convolution(before: int, after: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, padding=1)


def transformer() -> Layers:
    return Layers(width=256, depth=6, heads=8)


class Convolutions(nn.Module):
    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convolution(width if i else 3, width) for i in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.silu(norm(conv(x)))
        return x


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = convolution(3, width), convolution(width, width)
        self.c, self.d = convolution(width, 2 * width), convolution(2 * width, 2 * width)
        self.e, self.f = convolution(2 * width, 4 * width), convolution(4 * width, 4 * width)
        self.up, self.g = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), convolution(4 * width, 2 * width)
        self.out, self.h = nn.ConvTranspose2d(2 * width, width, 2, 2), convolution(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.b(F.relu(self.a(x))))
        second = F.relu(self.d(F.relu(self.c(F.max_pool2d(first, 2)))))
        x = F.relu(self.f(F.relu(self.e(F.max_pool2d(second, 2)))))
        x = F.relu(self.g(torch.cat([self.up(x), second], 1)))
        return F.relu(self.h(torch.cat([self.out(x), first], 1)))


class Perceptron(nn.Module):
    def __init__(self, width: int = 512, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Autoencoder(nn.Module):
    """Variational."""

    def __init__(self, width: int = 784) -> None:
        super().__init__()
        self.read, self.mean, self.deviation = nn.Linear(width, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.inner, self.write = nn.Linear(20, 400), nn.Linear(400, width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.read(x))
        mean, deviation = self.mean(h), self.deviation(h)
        z = mean + torch.exp(0.5 * deviation) * torch.randn_like(mean)
        return torch.sigmoid(self.write(F.relu(self.inner(z))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "transformer": (transformer, (4, 256, 256), "*.*"),
    "convolutions": (Convolutions, (8, 3, 64, 64), "*.*"),
    "u-net": (UNet, (8, 3, 64, 64), "*"),
    "perceptron": (Perceptron, (1024, 512), "*.*"),
    "autoencoder": (Autoencoder, (2048, 784), "*"),
}


@dataclasses.dataclass
class Row:
    """A budget; `blocks` says of what, and nothing was measured where it has no plan."""

    blocks: str
    budget_bytes: int
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None
    measured: Steps | None = None

    def __str__(self) -> str:
        within = f"  {self.blocks:<12} {self.budget_bytes / MIB:8.1f} MiB"
        if self.measured is None or self.predicted_peak_bytes is None or self.predicted_overhead is None:
            return f"{within}   no plan"
        error = 100 * (self.predicted_peak_bytes / self.measured.peak_bytes - 1)
        times = f"{100 * self.measured.overhead:+9.1f} % {100 * self.predicted_overhead:+9.1f} %"
        return f"{within}   {self.measured.peak_bytes / MIB:8.1f} MiB {error:+6.1f} % {times}"


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="steps timed per plan")
    parser.add_argument("--json", type=Path)
    chosen = arguments.parse(parser, models=["autoencoder"], rounds=1)
    results = {}
    print("  blocks             budget       measured  error   slower   predicted")
    with quiet():
        for name in chosen.models or MODELS:
            torch.manual_seed(0)
            results[name] = measured(name, chosen.rounds)
    data = {name: [dataclasses.asdict(row) for row in rows] for name, rows in results.items()}
    write(chosen.json, {"machine": machine(), "rounds": chosen.rounds, "models": data})
    wrong = [row for rows in results.values() for row in rows if row.measured and not row.measured.same_loss]
    return 1 if wrong else 0


def measured(name: str, rounds: int) -> list[Row]:
    make, shape, pattern = MODELS[name]
    model, x = make().train(), torch.randn(shape)
    sample = Sample(model, (x,), {}, lambda output: output.square().mean())
    profiles = {
        "whole": ct.profile(model, x, loss_fn=sample.loss_fn),
        "layers": ct.profile(model, x, loss_fn=sample.loss_fn, blocks=pattern),
    }
    tops = {blocks: ct.plan(profile, UNLIMITED, gradients="created") for blocks, profile in profiles.items()}
    least = min(top.least_budget_bytes for top in tops.values())
    plain = max(top.plain_peak_bytes for top in tops.values())
    budgets = [least + (plain - least) * share // len(SHARES) for share in SHARES]
    rows, turns = [], []
    for blocks, profile in profiles.items():
        for budget in sorted({*budgets, tops[blocks].least_budget_bytes}):
            rows.append(Row(blocks, budget))
            with contextlib.suppress(ct.InfeasibleBudget):
                plan = ct.plan(profile, cairn.Budget(total=budget, reserve=0), gradients="created")
                rows[-1].predicted_peak_bytes, rows[-1].predicted_overhead = plan.peak_bytes, plan.overhead
                turns.append(functools.partial(following, model, SuspendablePlan(model, plan)))
    found = Comparison(sample, tops["whole"]).measured([functools.partial(as_it_is, model), *turns], rounds)
    steps = iter(found[1:])
    for row in rows:
        row.measured = succeeded(next(steps)) if row.predicted_peak_bytes is not None else None
    print(f"{name}: plain takes {succeeded(found[0]).peak_bytes / MIB:.1f} MiB")
    print(*rows, sep="\n", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
