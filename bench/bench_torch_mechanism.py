"""The overhead of executing a schedule: time per block, for blocks that compute almost nothing (least of many runs),
and for transformer layers under selective recomputation (medians, in processor time), with its share of their time.

python bench/bench_torch_mechanism.py [--runs 300] [--layers 64x32 192x72 256x72]; prints microseconds of a forward and
backward.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import torch
from cairn.torch.base import memory
from cairn.torch.base.stage_measure import KEEP
from cairn.torch.base.stages import StageRef
from cairn.torch.runtime.executor import Executor
from cairn.torch.selective.block_options import MASK
from cairn.torch.selective.recompute import Recipe
from support import arguments
from support.selective_runs import alike, by_kept, by_option
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BLOCKS = 16
LAYERS = "64x32", "192x72", "256x72"  # width and tokens: one whose operations hardly count, and two of about 5 ms
WARM = 4  # steps until all that a plan keeps from step to step is there


class Block(nn.Module):
    """Saves a number of tiny tensors."""

    def __init__(self, saves: int) -> None:
        super().__init__()
        self.saves, self.weight = saves, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.saves - 2):
            x = x.sin()
        return x * self.weight


def least_us(run: Callable[[], object], runs: int) -> float:
    """Microseconds per block."""
    taken = []
    with memory.not_collecting():
        for _ in range(runs):
            began = time.perf_counter_ns()
            run()
            taken.append(time.perf_counter_ns() - began)
    return min(taken[runs // 10 :]) / BLOCKS / 1000


def checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def measure(saves: int, runs: int) -> dict[str, float]:
    model, x = nn.Sequential(*(Block(saves) for _ in range(BLOCKS))), torch.randn(4)
    stages = [StageRef("block", str(i)) for i in range(BLOCKS)]
    numbers = range(1, BLOCKS + 1)
    keep_all = [("forward_save", s) for s in numbers] + [("backward", s) for s in reversed(numbers)]
    again = [("forward_keep", s) for s in numbers] + [("drop", "output", BLOCKS)]
    again += [op for s in reversed(numbers) for op in (("forward_save", s), ("backward", s))]
    found = {
        "forward": least_us(lambda: model(x), runs),
        "plain": least_us(lambda: model(x).sum().backward(), runs),
        "torch.utils.checkpoint": least_us(lambda: checkpointed(model, x).sum().backward(), runs),
    }
    for name, ops in (("kept, planned", keep_all), ("recomputed, planned", again)):
        executor = Executor(model, stages, ops)
        executor.attach()
        found[name] = least_us(lambda: model(x).sum().backward(), runs)
        executor.detach()
    return found


# -- layers that compute ---------------------------------------------------------------------------------------


class Layers(nn.Module):
    """GPT-2's layers."""

    def __init__(self, width: int, count: int = 8) -> None:
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        super().__init__()
        config = GPT2Config(n_embd=width, n_head=4, attn_implementation="eager")
        self.layers = nn.ModuleList(GPT2Block(config, layer_idx=i) for i in range(count))

    def forward(self, x: Tensor, around: Callable[..., Any] = lambda layer, x: layer(x)) -> Tensor:
        for layer in self.layers:
            x = around(layer, x)
        return x


class Timed:
    """The code that recomputes tensors, timed."""

    taken_ns = 0

    def __init__(self, running: Any) -> None:
        self._running = running

    def __next__(self) -> None:
        next(self._running)

    def send(self, where: Any) -> None:
        began = time.perf_counter_ns()
        try:
            self._running.send(where)
        finally:
            Timed.taken_ns += time.perf_counter_ns() - began


def recipes_of(executor: Executor, step: Callable[[], None]) -> list[Recipe]:
    """What the layers follow after some steps; the executor stays attached."""
    if not executor.is_attached:
        executor.attach()
    for _ in range(WARM):
        step()
    selective = [
        planned.selective for planned in executor.first.planned_blocks.values() if planned.selective is not None
    ]
    return [recipe for each in selective for entry in each._entries.values() for recipe in entry.recipes.values()]


class ByHand:
    """Hooks as one would write them for these layers alone: they drop and recompute the same, and look at nothing."""

    def __init__(self, recipe: Recipe, layer: nn.Module, x: Tensor) -> None:
        self._decisions, self._held, self._layer, self._x = recipe.decisions, recipe.held, layer, x
        self._kept: dict[int, tuple[Tensor, int]] = {}
        self._made: list[Tensor | None] = []
        self._count = 0
        self._running = recipe.code.begin(self._kept, {}, self._made)
        next(self._running)

    def argument(self, index: int) -> Tensor:
        return self._x

    def parameter(self, index: int) -> Tensor:
        return list(self._layer.parameters())[index]

    def pack(self, tensor: Tensor) -> Tensor | int:
        index = self._count
        self._count = index + 1
        if index in self._held:
            self._kept[index] = tensor.detach(), tensor._version
        return tensor if self._decisions[index] == KEEP else index

    def unpack(self, saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._running.send(self)
        made = self._made.pop()
        assert made is not None
        return made

    def run(self) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            output: Tensor = self._layer(self._x)
            return output


def timed(begin: Callable[..., Any], *args: Any) -> Timed:
    return Timed(begin(*args))


def recomputing_us(executor: Executor, step: Callable[[], None], count: int, runs: int) -> float:
    """Microseconds a layer of the code that recomputes tensors, within steps: the operations that are recomputed."""
    codes = [recipe.code for recipe in recipes_of(executor, step)]
    before = [code.begin for code in codes]
    for code in codes:
        code.begin = functools.partial(timed, code.begin)  # type: ignore[assignment] # of a generator, what is called
    taken = []
    for _ in range(runs):
        Timed.taken_ns = 0
        step()
        taken.append(Timed.taken_ns)
    for code, begin in zip(codes, before, strict=True):
        code.begin = begin
    executor.detach()
    return statistics.median(taken) / count / 1000


def layers_us(width: int, tokens: int, runs: int) -> dict[str, float]:
    """CPU microseconds a layer, beyond a plain step: what lies about the middle of steps in turns.

    Each plan is carried out in layers of its own, so that nothing has to be attached in between.
    """
    layers, x = Layers(width).train(), torch.randn(1, tokens, width)
    profile = ct.profile(layers, x, loss_fn=Tensor.sum, blocks="layers.*")
    options, count = alike(profile), len(layers.layers)

    def step(model: Layers = layers) -> None:
        model(x).sum().backward()

    def hooked() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            step()

    def checkpointed() -> None:
        layers(x, lambda layer, x: checkpoint(layer, x, use_reentrant=False)).sum().backward()

    by_dropped = by_kept(options)
    most, least = copy.deepcopy(layers), copy.deepcopy(layers)
    first, last_kept = (by_option(m, profile, by_dropped[i]) for m, i in ((most, 0), (least, -1)))
    recipes = recipes_of(first, functools.partial(step, most))
    last_kept.attach()

    def by_hand() -> None:
        following = iter(recipes)
        layers(x, lambda layer, x: ByHand(next(following), layer, x).run()).sum().backward()

    methods: dict[str, Callable[[], None]] = {
        "plain": step,
        "hooks that do nothing": hooked,
        "most is kept": functools.partial(step, most),
    }
    if not any(recipe.states or MASK in recipe.decisions for recipe in recipes):
        methods["the same by hand"] = by_hand
    methods |= {"least is kept": functools.partial(step, least), "torch.utils.checkpoint": checkpointed}
    for run in methods.values():
        for _ in range(WARM):
            run()
    taken: dict[str, list[int]] = {name: [] for name in methods}
    for _ in range(-(-runs // 2)):
        for name, run in methods.items():
            run()
            began = time.thread_time_ns()
            run()
            taken[name].append(time.thread_time_ns() - began)
    last_kept.detach()
    plain = taken["plain"]
    beyond = {name: map(int.__sub__, times, plain) for name, times in taken.items() if name != "plain"}
    medians = {name: statistics.median(times) / count / 1000 for name, times in {"plain": plain, **beyond}.items()}
    return {
        **medians,
        "dropped, where most is kept": len(options.asked) - options.decisions[by_dropped[0]].count("k"),
        "recomputing these": recomputing_us(first, functools.partial(step, most), count, -(-runs // 6)),
    }


def print_layers(width: int, tokens: int, runs: int) -> None:
    """What keeping a part of a layer costs, and the share of the mechanism in that."""
    found = layers_us(width, tokens, runs)
    print(f"GPT-2 layers {width} wide, {tokens} tokens; CPU microseconds a layer, beyond plain")
    for name, us in found.items():
        print(f"{name:<28} {us:8.0f}")
    plain, hooks, again = found["plain"], found["hooks that do nothing"], found["recomputing these"]
    mechanism = found["most is kept"] - hooks - again
    print(
        f"of a step whose blocks take {plain / 1000:.2f} ms: hooks {100 * hooks / plain:.1f} %, "
        f"mechanism {100 * mechanism / plain:.1f} %, operations recomputed {100 * again / plain:.1f} %"
    )


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--runs", type=int, default=300, help="of blocks that do next to nothing; half as many of layers"
    )
    parser.add_argument("--layers", nargs="*", default=LAYERS, metavar="WxT", help="widths and numbers of tokens")
    chosen = arguments.parse(parser, runs=10, layers=LAYERS[:1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, one thread; microseconds a block, beyond plain and beyond recomputing")
    print(f"{'saved tensors':>14} {'plain':>8} {'kept, planned':>14} {'recomputed, planned':>19} {'checkpoint':>11}")
    for saves in (3, 10, 30):
        found = measure(saves, chosen.runs)
        plain, forward = found["plain"], found["forward"]
        again, torchs = found["recomputed, planned"], found["torch.utils.checkpoint"]
        print(f"{saves:14} {plain:8.1f} {found['kept, planned'] - plain:14.1f} {again - plain - forward:19.1f} "
              f"{torchs - plain - forward:11.1f}")  # fmt: skip
    for layers in chosen.layers:
        width, tokens = map(int, layers.split("x"))
        print_layers(width, tokens, chosen.runs)


if __name__ == "__main__":
    main()
