"""Predicted peaks of blocks that read values with a history which they are not passed."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from peaks_support import assert_exact
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")
WIDTH = 128


class Computed(nn.Module):
    """A layer whose weight somebody else computes into an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight))


class Hypernetwork(nn.Module):
    def __init__(self, calls: int, is_cleared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Computed() for _ in range(4))
        self.weights, self.codes = nn.Linear(16, WIDTH * WIDTH), nn.Parameter(torch.randn(4, 16))
        self.calls, self.is_cleared = calls, is_cleared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            for layer, code in zip(self.layers, self.codes, strict=True):
                layer.weight = self.weights(code).view(WIDTH, WIDTH)
                x = layer(x)
        for layer in self.layers if self.is_cleared else ():
            layer.weight = None
        return x.square().mean()


@pytest.mark.parametrize(("calls", "is_cleared"), [(1, False), (2, False), (1, True)])
def test_weights_that_a_network_computes_into_attributes_are_counted_once(calls: int, is_cleared: bool) -> None:
    assert_exact(Hypernetwork(calls, is_cleared), torch.randn(64, WIDTH))


class Reading(nn.Module):
    """Reads an attribute of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.linear, self.model = nn.Linear(WIDTH, WIDTH), [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.model[0].keys)


class SharedKeys(nn.Module):
    """Keys that the layers behind read too, made anew on the way at some of them."""

    def __init__(self, made_at: tuple[int, ...]) -> None:
        super().__init__()
        self.project, self.made_at = nn.Linear(WIDTH, WIDTH), made_at
        self.layers = nn.ModuleList(Reading(self) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.made_at:
                self.keys = self.project(x)
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("made_at", [(0,), (0, 2), (0, 1, 3)])
def test_what_runs_between_blocks_counts_what_it_makes_and_the_output_that_it_hands_on(
    made_at: tuple[int, ...],
) -> None:
    assert_exact(SharedKeys(made_at), torch.randn(256, WIDTH))
