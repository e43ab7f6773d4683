"""Random networks that write in place, view, draw, and keep buffers in every way: what tracing must see through."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6


class Network(nn.Module):
    """A random program over 6 x 6 matrices; each instruction reads one or two earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        count = draw.randrange(4, 24)
        self.program = [
            (draw.randrange(len(INSTRUCTIONS)), draw.random(), draw.random(), draw.randrange(WIDTH))
            for _ in range(count)
        ]
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values = [x * 1.0]
        for code, first, second, index in self.program:
            a, b = (values[int(share * len(values))] for share in (first, second))
            try:
                values.append(INSTRUCTIONS[code](self, a, b, index))
            except RuntimeError as error:
                if "in-place" not in str(error):  # autograd refuses some writes into views
                    raise
        return sum((value.square().mean() for value in values[-4:]), x.new_zeros(()))


def row(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    y = a * 2
    y[i] = b[0]
    return y


def column(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    y = a + 1
    y[:, i].mul_(0.5)
    return y


def shifted(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    y = torch.zeros(WIDTH, WIDTH)
    y[1:] = a[:-1]
    return y + net.weight


def diagonal(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    y = torch.empty(WIDTH, WIDTH)
    y.copy_(a)
    y.diagonal().fill_(0.3)
    return y


def read_then_written(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    y = a.sin()
    total = y.sum()
    y += total
    return y


def halves(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    left, right = a.chunk(2, 1)
    return torch.cat([right.clone().sin_(), left], 1)


def accumulated(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    total = torch.tensor(0.0)
    for k in range(3):
        total += a[k].sum()
    return b * total * 0.1


def buffer_added(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    net.total.add_(a.detach().mean(0))
    return a * net.total


def buffer_replaced(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    net.total = net.total * 0.9
    return a + net.total


def buffer_row(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    net.table[i].copy_(a.detach()[0])
    return net.table * a


def reshaped(net: Network, a: Tensor, b: Tensor, i: int) -> Tensor:
    return a.reshape(2, 3 * WIDTH).exp().clamp_(max=3).view(WIDTH, WIDTH)


INSTRUCTIONS: list[Callable[[Network, Tensor, Tensor, int], Tensor]] = [
    lambda net, a, b, i: a @ net.weight,
    lambda net, a, b, i: torch.tanh(a) + net.bias,
    lambda net, a, b, i: a + b,
    lambda net, a, b, i: a.t(),
    lambda net, a, b, i: a.clone().add_(b),
    lambda net, a, b, i: torch.sigmoid(a).relu_(),
    lambda net, a, b, i: a.add_(0.1) if i % 2 else a.mul_(b.detach()),
    lambda net, a, b, i: F.dropout(a, 0.3),
    lambda net, a, b, i: F.relu(a * b, inplace=True),
    lambda net, a, b, i: F.layer_norm(a, (WIDTH,), net.bias),
    lambda net, a, b, i: net.norm(a),
    row,
    column,
    shifted,
    diagonal,
    read_then_written,
    halves,
    accumulated,
    buffer_added,
    buffer_replaced,
    buffer_row,
    reshaped,
]
