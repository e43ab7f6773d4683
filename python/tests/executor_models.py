"""What tests of executors share."""

from __future__ import annotations

from collections.abc import Callable

import selective_support
import torch
from executor_support import (
    blocks,
    outside,
)
from torch import Tensor, nn

WIDTH = 8


class Layer(nn.Module):
    """A block with everything that bites: dropout, batch statistics, a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.25)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Net(selective_support.Net):
    """Some layers between an embedding and a head."""

    def __init__(self, count: int = 5, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__(layer, count, WIDTH)


def net(count: int = 5, layer: Callable[[], nn.Module] = Layer) -> Net:
    torch.manual_seed(0)
    return Net(count, layer).train()


STAGES = [outside("before"), *blocks(*(f"layers.{i}" for i in range(5))), outside("after")]


INPUT = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(7))


def loss_of(model: nn.Module) -> Tensor:
    return model(INPUT).square().mean()
