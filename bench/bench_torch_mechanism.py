"""What carrying out a schedule costs beside the work itself: time per block, for blocks that do next to nothing.

Run as python bench/bench_torch_mechanism.py; prints microseconds of a forward and backward, the least of many runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from cairn.torch.executor import Executor
from cairn.torch.stages import StageRef
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BLOCKS = 16
RUNS = 300


class Block(nn.Module):
    """Saves a number of tiny tensors."""

    def __init__(self, saves: int) -> None:
        super().__init__()
        self.saves, self.weight = saves, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.saves - 2):
            x = x.sin()
        return x * self.weight


def least_us(run: Callable[[], object]) -> float:
    """Microseconds per block."""
    taken = []
    gc.disable()
    for _ in range(RUNS):
        began = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - began)
    gc.enable()
    return min(taken[RUNS // 10 :]) / BLOCKS / 1000


def checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def measure(saves: int) -> dict[str, float]:
    model, x = nn.Sequential(*(Block(saves) for _ in range(BLOCKS))), torch.randn(4)
    stages = [StageRef("block", str(i)) for i in range(BLOCKS)]
    numbers = range(1, BLOCKS + 1)
    keep_all = [("forward_save", s) for s in numbers] + [("backward", s) for s in reversed(numbers)]
    again = [("forward_keep", s) for s in numbers] + [("drop", "output", BLOCKS)]
    again += [op for s in reversed(numbers) for op in (("forward_save", s), ("backward", s))]
    found = {
        "forward": least_us(lambda: model(x)),
        "plain": least_us(lambda: model(x).sum().backward()),
        "torch.utils.checkpoint": least_us(lambda: checkpointed(model, x).sum().backward()),
    }
    for name, ops in (("kept, planned", keep_all), ("run again, planned", again)):
        executor = Executor(model, stages, ops)
        executor.attach()
        found[name] = least_us(lambda: model(x).sum().backward())
        executor.detach()
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, one thread; microseconds a block, beyond plain and beyond running again")
    print(f"{'saved tensors':>14} {'plain':>8} {'kept, planned':>14} {'run again, planned':>19} {'checkpoint':>11}")
    for saves in (3, 10, 30):
        found = measure(saves)
        plain, forward = found["plain"], found["forward"]
        again, torchs = found["run again, planned"], found["torch.utils.checkpoint"]
        print(f"{saves:14} {plain:8.1f} {found['kept, planned'] - plain:14.1f} {again - plain - forward:19.1f} "
              f"{torchs - plain - forward:11.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
