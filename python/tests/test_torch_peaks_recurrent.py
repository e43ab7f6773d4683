"""Predicted peaks of blocks whose outputs no backward reads, and of what blocks hold that save nothing."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from peaks_support import assert_exact
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("seeded")
WIDTH, STEPS = 64, 12


class Cell(nn.Module):
    """Saves neither its state nor the next one, unless it is gated."""

    def __init__(self, is_gated: bool) -> None:
        super().__init__()
        self.read, self.write, self.is_gated = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), is_gated

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        new = self.write(torch.tanh(self.read(x)))
        return state * new.sigmoid() + new if self.is_gated else state * 0.9 + new


class Recurrent(nn.Module):
    def __init__(self, is_gated: bool = False, collects: bool = False) -> None:
        super().__init__()
        self.layers, self.collects = nn.ModuleList([Cell(is_gated)]), collects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = x.new_zeros(x.shape[1:]), []
        for step in x:
            state = self.layers[0](step, state)
            if self.collects:
                states.append(state)
        return (torch.stack(states) if self.collects else state).square().mean()


@pytest.mark.parametrize(("is_gated", "collects"), [(False, False), (True, False), (False, True)])
def test_outputs_that_nobody_saves_are_counted_as_long_as_they_are_there(is_gated: bool, collects: bool) -> None:
    assert_exact(Recurrent(is_gated, collects), torch.randn(STEPS, 128, WIDTH), share=0.955)


def test_outputs_that_nobody_saves_pass() -> None:
    x = torch.randn(STEPS, 128, WIDTH)
    for is_gated in (False, True):
        profile = ct.profile(Recurrent(is_gated), x, passes=1, blocks="layers.*", inside=False)
        passing = [stage.passing_bytes for stage in profile.stages if stage.kind == "block"]
        assert passing == [0 if is_gated else 4 * 128 * WIDTH] * (STEPS - 1) + [0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.branch, x, use_reentrant=False)
        return result


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Checkpointed() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_random_states_that_checkpoints_inside_blocks_hold_are_counted() -> None:
    assert_exact(Deep(), torch.randn(256, WIDTH))
