"""State that forwards replace, and what hooks collect, is after profiling and verifying as it was before."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from attributes_support import UNLIMITED
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


class Remembering(nn.Module):
    """Blocks beside a state that each forward replaces or fills."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(torch_models.Residual(16) for _ in range(3)))
        if isinstance(state, str):
            self.register_buffer("state", None)
        else:
            self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        row, state = x.detach().mean(0), self.state
        if isinstance(state, np.ndarray):
            state += row.numpy()
        elif isinstance(state, torch.Tensor) and state.numel() == 0:
            state.resize_(row.shape).copy_(row)
        elif isinstance(state, Pair):
            self.state = Pair(row, [row])
        elif isinstance(state, tuple):
            self.state = (float(row.sum()), state[1] + 1)
        elif isinstance(state, dict):
            self.state = {"a": {"b": (row, row)}}
        else:
            self.state = [(row, row)] if isinstance(state, list) else row
        return x


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    rest: list[torch.Tensor]


STATES: dict[str, Callable[[], Any]] = {
    "a list of tuples": lambda: [(torch.zeros(16), torch.zeros(16))],
    "a dict of dicts": lambda: {"a": {"b": (torch.zeros(16),)}},
    "a dataclass": lambda: Pair(torch.zeros(16), []),
    "numbers": lambda: (0.0, 0),
    "an array": lambda: np.zeros(16, np.float32),
    "no buffer yet": lambda: "buffer",
}


@pytest.mark.parametrize("how", STATES)
def test_a_state_that_forwards_replace_is_as_it_was_after_profiles_and_verifications(how: str) -> None:
    model, x = Remembering(STATES[how]()), torch.randn(32, 16)
    before = repr(model.state)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert repr(model.state) == before
    ct.verify(model, ct.plan(profile, UNLIMITED), x, loss_fn=torch.sum)
    assert repr(model.state) == before


def test_buffers_get_their_shapes_in_the_first_step_as_without_profiles() -> None:
    """As those of torch.ao's observers do."""
    model, x = Remembering(None), torch.randn(32, 16)
    del model.state
    model.register_buffer("state", torch.empty(0))
    ct.checkpoint(model, x, loss_fn=torch.sum, passes=1, budget="64MiB")
    assert model.state.shape == (0,)
    model(x).sum().backward()
    assert model.state.shape == (16,)


class Slotted(dict):
    """A container without attributes of its own."""

    __slots__ = ()


@pytest.mark.parametrize("kind", [list, deque])
def test_what_hooks_on_all_modules_collect_is_put_back(kind: type) -> None:
    model, x, seen = nn.Sequential(*(torch_models.Residual(16) for _ in range(4))), torch.randn(32, 16), kind()
    numbers = Slotted()

    def collect(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Linear):
            seen.append(output)
            numbers[0] = 0

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.sum() + sum(each.square().mean() for each in seen)

    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    handle = torch.nn.modules.module.register_module_forward_hook(collect)
    try:
        profile = ct.profile(model, x, loss_fn=loss_of, passes=1)
        assert not seen
        ct.apply(model, ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes))
        loss_of(model(x)).backward()
        assert len(seen) == linears
    finally:
        handle.remove()
