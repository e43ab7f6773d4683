"""What tests of insides share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.torch.selective.graph_recorder import BlockRecorder
from executor_support import (
    differing,
    train,
)
from selective_support import (
    WIDTH,
    Mlp,
    loss_of,
    net,
    profile_of,
    selectively_planned,
)
from torch import Tensor, nn
from torch.nn import functional as F


class InPlace(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return F.relu_(torch.sin(x).mul_(2).add_(0.1))


class Batch(Mlp):
    """Batch statistics, of what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(4 * WIDTH)

    def act(self, x: Tensor) -> Tensor:
        return F.relu(self.batch(x), inplace=True)


class Square(torch.autograd.Function):
    """Saves an input and an output, and reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x, _), (_, y) = ctx.saved_tensors, ctx.saved_tensors
        return grad * 2 * x + 0 * y


class Custom(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return Square.apply(torch.tanh(x)) + torch.sin(x)


class Views(Mlp):
    """Pieces of one tensor, transposed and joined, and a mask that comes from nothing."""

    def act(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        scores = torch.tanh(a.t() @ b)
        mask = torch.ones(scores.shape[0], scores.shape[0]).tril()
        return torch.cat([(b @ scores.masked_fill(mask == 0, 0.0)).sigmoid(), a.exp()], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(4, -1, 2, WIDTH // 2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def assert_same(
    layer: Callable[[], nn.Module], compute_loss: Callable[[nn.Module], Tensor] = loss_of, option: int = 99
) -> None:
    plain, other = net(layer), net(layer)
    with selectively_planned(other, option, layer) as executor:
        for step in range(3):
            assert not differing(train(plain, compute_loss, step), train(other, compute_loss, step))
            assert not executor.notes


hidden: dict[str, Any] = {"calls": 0, "of no known value": object()}


class Hidden(Mlp):
    """Does something else in every other run, without a trace of it in its attributes, shapes or constants."""

    def act(self, x: Tensor) -> Tensor:
        factor = 1.0 if hidden["calls"] % 2 == 0 else 1.5
        return torch.tanh(x * factor) * factor


def count_recordings(monkeypatch: pytest.MonkeyPatch, layer: Callable[[], nn.Module] = Mlp) -> list[int]:
    """Grows by one with each recording; the layer was profiled before."""
    profile_of(layer)
    count: list[int] = []
    original = BlockRecorder.graph
    monkeypatch.setattr(BlockRecorder, "graph", lambda self, output: count.append(1) or original(self, output))
    return count
