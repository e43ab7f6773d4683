"""What tests of `cairn.torch.offload` share: networks, steps of them, and what was moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base._compat import StorageRef
from cairn.torch.offloading.offload import Offload
from torch import Tensor, nn

TIERS = ("host", "file")
KIB = 1 << 10


def place(kind: str, folder: Path) -> str:
    return f"file:{folder}" if kind == "file" else "host"


class Attention(nn.Module):
    """Views of one storage, a mask, softmax, dropout, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("mask", torch.ones(24, 24).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, -1e9).softmax(-1)
        return x + self.out(nn.functional.dropout(weights, 0.2) @ v)


class Tower(nn.Module):
    """Shared weights and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = nn.functional.relu(self.again(x.tanh()), inplace=True)
        return self.first(x)


def convolutions() -> nn.Module:
    layers = []
    for _ in range(2):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention": (lambda: nn.Sequential(Attention(), Attention()), lambda: torch.randn(4, 24, 16)),
    "convolutions": (
        convolutions,
        lambda: torch.randn(4, 4, 16, 16).to(memory_format=torch.channels_last).requires_grad_(),
    ),
    "tower": (Tower, lambda: torch.randn(40, 16)),
    "recurrent": (lambda: nn.LSTM(16, 16, 2, dropout=0.1), lambda: torch.randn(9, 5, 16)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, sample = NETWORKS[name]
    return model(), sample()


Result = list[Tensor | None]


def step(model: nn.Module, x: Tensor, context: Any, autocast: bool = False) -> Result:
    """Loss, gradients, buffers and random state after a step."""
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    with context, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(x)
        loss = (output[0] if isinstance(output, tuple) else output).float().square().mean()
        del output
    loss.backward()
    grads = [None if p.grad is None else p.grad.clone() for p in (*model.parameters(), x)]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def same(one: Result, other: Result) -> bool:
    return len(one) == len(other) and all(
        a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def trace(saved: Offload) -> list[tuple[str, Any]]:
    """The copies that were begun, as soon as none waits."""
    for store in saved._stores.values():
        line = getattr(store.transfers._copy_streams, "_queue", None)
        if line is not None:
            with line.changed:
                assert line.changed.wait_for(lambda line=line: not line.waiting, timeout=30)
    return [each for store in saved._stores.values() for each in store.transfers.trace]


def moved(saved: Offload, kind: str) -> list[int]:
    return [int(key.split()[-1]) for name, key in trace(saved) if name == kind]


@pytest.fixture(name="context", params=[0, 6 * KIB, None])
def context_fixture(request: pytest.FixtureRequest) -> Offload:
    return ct.offload(min_bytes=0, resident_bytes=request.param)


def grads(model: nn.Module) -> Result:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class Chain(nn.Module):
    """Eight storages of 4 KiB are saved, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        self.storages = []
        for _ in range(8):
            x = x.tanh()
            self.storages.append(StorageRef(x))
        return x

    def alive(self) -> int:
        return sum(4096 for storage in self.storages if storage.alive())
