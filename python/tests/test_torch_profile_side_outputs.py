"""Side outputs of blocks count in a profile if the loss reads them."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import types

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from profile_support import Leaves, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("layers", [1, 4, 8])
def test_what_a_block_leaves_beside_its_result_reaches_the_loss(layers: int) -> None:
    model = nn.Sequential(*(Leaves(64, 64) for _ in range(layers)))
    x = torch.randn(32, 64)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.sum() + sum(layer.penalty for layer in model)

    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok


def test_what_a_block_leaves_counts_only_if_the_loss_reads_it() -> None:
    model, x = nn.Sequential(*(Leaves(64, 64) for _ in range(3))), torch.randn(32, 64)
    unread = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    first = ct.profile(model, x, loss_fn=lambda output: output.sum() + model[0].penalty, passes=1)

    def rises(profile: ct.Profile) -> list[int]:
        return [stage.backward_rise_bytes for stage in profile.stages[:3]]

    weight = model[0].weight.nbytes
    assert rises(first)[0] >= rises(unread)[0] + 2 * weight
    assert rises(first)[1:] == rises(unread)[1:]


def test_the_gradient_of_what_a_block_leaves_waits_for_the_block() -> None:
    class Aside(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.left = super().forward(x)
            return x + self.left

    model, x = nn.Sequential(*(Aside(64, 64) for _ in range(4))), torch.randn(256, 64)
    profile = ct.profile(model, x, loss_fn=lambda y: y.sum() + model[1].left.square().sum(), passes=1)
    waits = [stage.pending_grad_bytes // x.nbytes for stage in profile.stages[:4]]
    assert waits == [0, 1, 1, 1]


class Appending(nn.Module):
    """A block that appends a loss of its own to a list, and counts its runs."""

    def __init__(self, losses: list[torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)
        self.losses, self.seen = losses, types.SimpleNamespace(runs=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        self.losses.append(y.square().mean())
        self.seen.runs += 1
        return x + y


class Collecting(nn.Module):
    """Reads what its blocks appended, and empties the lists afterwards; they share one, or each has its own."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        losses: list[torch.Tensor] = []
        self.layers = nn.ModuleList(Appending(losses if shares else []) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        found = {id(layer.losses): layer.losses for layer in self.layers}.values()
        loss = x.square().mean() + sum(sum(losses) for losses in found)
        for losses in found:
            losses.clear()
        return loss


@pytest.mark.parametrize("shares", [False, True])
def test_runs_that_the_model_did_not_ask_for_leave_nothing_in_attributes(shares: bool) -> None:
    model, x = Collecting(shares), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    profile = ct.profile(model, x, passes=1)
    assert not any(stage.keep_reason for stage in profile.stages if stage.kind == "block")
    least = ct.plan(profile, ct.plan(profile, "1GiB").least_budget_bytes)
    assert ct.verify(model, least, x).ok
    runs = [layer.seen.runs for layer in model.layers]
    with ct.apply(model, least):
        for _ in range(3):
            for other in (model, plain):
                other.zero_grad()
                other(x).backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert [layer.seen.runs for layer in model.layers] == [run + 3 for run in runs]


def test_arguments_that_a_block_hands_on_are_not_its_output() -> None:
    class HandingOn(nn.Linear):
        def forward(self, packed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(super().forward(packed[0])), packed[1]

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(64, 64), nn.Linear(64, 64)
            self.blocks = nn.ModuleList(HandingOn(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, lengths = self.blocks[0]((self.enter(x), torch.ones(256, 64)))
            x, lengths = self.blocks[1]((x.exp(), lengths))
            return (self.leave(x) * lengths).sum()

    model, x = Packed(), torch.randn(256, 64)
    profile = ct.profile(model, x, loss_fn=lambda loss: loss, passes=1, blocks=model.blocks)
    size = 256 * 64 * 4
    blocks = [stage for stage in profile.stages if stage.kind == "block"]
    assert [(stage.output_bytes, stage.left_bytes) for stage in blocks] == [
        (0, size),
        (size, 0),
    ]  # nobody keeps a tanh's
    for point in ct.sweep(profile, 4):
        assert ct.verify(model, ct.plan(profile, point.budget_bytes), x, loss_fn=lambda loss: loss).ok


def test_losses_in_a_list_that_the_loop_empties() -> None:
    class Lists(nn.Linear):
        def __init__(self, losses: list[torch.Tensor]) -> None:
            super().__init__(64, 64)
            self.losses = losses

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).tanh()
            self.losses.append(y.square().mean())
            return y

    losses = [torch.zeros(())]
    model, x = nn.Sequential(*(Lists(losses) for _ in range(4))), torch.randn(32, 64)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        assert len(losses) <= 1 + 2 * len(model)  # of this step, and of blocks that are measured in it
        return output.square().mean() + sum(losses)

    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    assert len(losses) == 1
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok
    assert len(losses) == 1


def test_router_losses_collected_from_inside_blocks_are_part_of_the_step() -> None:
    step = torch_models.made("mixtral")
    step.model.config.output_router_logits = True
    profile = profiled(step)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(step.model, plan, (), step.kwargs).ok
