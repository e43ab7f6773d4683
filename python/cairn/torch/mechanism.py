"""What it costs to run a block again, beside the run itself: hooks, holders, random states, copies, comparisons.

Measured once per process on blocks that compute next to nothing, as time per block, per tensor that it saves, per
module or parameter that it has, and per buffer: differences between kinds of blocks that differ in that alone. On CUDA
all this happens on the host while the device works, and is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from . import isolate
from .blocks import Block
from .executor import Executor
from .stages import BLOCK, StageRef

BLOCKS = 8
ROUNDS = 11  # the median counts, as for blocks; in processor time, so that other programs do not
MANY = 16  # of what is counted, in the kind of block that has it


class _Trifle(nn.Module):
    """Saves a number of tiny tensors; has parts and buffers that it does not use."""

    def __init__(self, saves: int = 2, parts: int = 0, buffers: int = 0) -> None:
        super().__init__()
        self.saves, self.weight = saves, nn.Parameter(torch.ones(4))
        self.parts = nn.ModuleList(nn.LayerNorm(4, bias=False) for _ in range(parts))
        for index in range(buffers):
            self.register_buffer(f"buffer{index}", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.saves - 2):
            x = x.sin()
        return x * self.weight


@dataclasses.dataclass(frozen=True)
class Cost:
    """Nanoseconds for running a block again once."""

    block_ns: float
    saved_ns: float
    part_ns: float
    buffer_ns: float

    def of(self, block: Block, saved_count: int) -> int:
        """Of a block that saves so many tensors."""
        parts = [part for module in block.modules for part in module.modules()]
        count = len(parts) + sum(len(part._parameters) for part in parts)
        buffers = sum(len(part._buffers) for part in parts)
        return round(self.block_ns + self.saved_ns * saved_count + self.part_ns * count + self.buffer_ns * buffers)


@functools.cache
def cost() -> Cost:
    """Measures; takes some tenths of a second, the first time."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        bare = _again_ns(_Trifle)
        saving = _again_ns(lambda: _Trifle(saves=2 + MANY))
        parts = _again_ns(lambda: _Trifle(parts=MANY))
        buffers = _again_ns(lambda: _Trifle(buffers=MANY))
    saved_ns = max(0.0, saving - bare) / MANY
    part_ns = max(0.0, parts - bare) / (2 * MANY)  # each has a parameter
    buffer_ns = max(0.0, buffers - bare) / MANY
    return Cost(max(0.0, bare - 2 * saved_ns - 3 * part_ns), saved_ns, part_ns, buffer_ns)


def _again_ns(make: Callable[[], nn.Module]) -> float:
    """Per block, beyond a plain step and a forward that saves nothing."""
    model, x = nn.Sequential(*(make() for _ in range(BLOCKS))), torch.ones(4)
    numbers = range(1, BLOCKS + 1)
    ops = [("forward_keep", s) for s in numbers] + [("drop", "output", BLOCKS)]
    ops += [op for s in reversed(numbers) for op in (("forward_save", s), ("backward", s))]
    executor = Executor(model, [StageRef(BLOCK, str(i)) for i in range(BLOCKS)], ops)

    def step() -> None:
        model(x).sum().backward()

    def forward() -> None:
        with isolate.saving_nothing():
            model(x)

    plain, alone = _median_ns(step), _median_ns(forward)
    executor.attach()
    planned = _median_ns(step)
    executor.detach()
    return max(0.0, planned - plain - alone) / BLOCKS


def _median_ns(run: Callable[[], None]) -> int:
    collecting = gc.isenabled()
    gc.disable()
    try:
        taken = []
        for _ in range(ROUNDS):
            began = time.thread_time_ns()
            run()
            taken.append(time.thread_time_ns() - began)
    finally:
        if collecting:
            gc.enable()
    return int(statistics.median(taken))
