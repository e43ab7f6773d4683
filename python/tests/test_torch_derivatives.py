"""Losses with derivatives of the model in them: steps that take them under a plan give the gradients of plain steps."""

# ruff: noqa: E402

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.base import memory
from cairn.torch.base.stage_measure import SLACK_BYTES
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH, ROWS, DEPTH = 32, 512, 4
UNLIMITED = 2**40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.last(x)


def gradient(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def residual(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the heat equation, as a physics-informed network is trained by."""
    u = model(x)
    first = gradient(u, x)
    return (first[:, 1:] - gradient(first[:, :1], x)[:, :1]).square().mean()


def critic(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """With a gradient penalty on another forward, as in WGAN-GP."""
    penalty = (gradient(model(x), x).norm(dim=1) - 1).square().mean()
    return model(x).mean() + 10 * penalty


def discriminator(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """With an R1 penalty."""
    y = model(x)
    return F.softplus(-y).mean() + gradient(y, x).square().sum(1).mean()


def score_matching(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """With Hutchinson's estimate of a trace."""
    score, probe = gradient(model(x), x), torch.randn_like(x)
    return (gradient((score * probe).sum(1), x) * probe).sum(1).mean() + score.square().mean()


def forces(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Energies, and forces, which are their negative gradients by positions."""
    energies = model(x)
    return energies.square().mean() + (gradient(energies, x) + 1).abs().mean()


def parameter_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The norm of the gradient by parameters, as in gradient matching."""
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    return sum(g.square().sum() for g in grads)


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def step(model: nn.Module, loss: Loss, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """What a step computes, and by how much memory rises in it."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    gc.collect()
    meter = memory.meter_for(torch.device("cpu"))
    with meter:
        begin = meter.mark()
        value = loss(model, x)
        value.backward()
        end = meter.mark()
    found = [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found, meter.peak(begin, end) - meter.level(begin)


def planned_least(model: nn.Module, x: torch.Tensor) -> ct.Plan:
    profile = ct.profile(model, x, loss_fn=lambda y: y.square().mean(), passes=1)
    return ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)


@pytest.mark.parametrize("loss", [residual, critic, discriminator, score_matching, forces, parameter_penalty])
def test_steps_with_derivatives_in_their_loss_are_exact_and_take_no_more_than_checkpoints(loss: Loss) -> None:
    model, x = Net(), torch.randn(ROWS, 2, requires_grad=True)
    want, _ = step(model, loss, x)
    model.checkpoints = True
    _, checkpointed = step(model, loss, x)
    model.checkpoints = False
    with ct.apply(model, planned_least(model, x)) as handle:
        for _ in range(2):
            got, peak = step(model, loss, x)
            assert len(got) == len(want)
            assert all(map(torch.equal, want, got))
        assert handle.executor.notes == []
    assert peak <= checkpointed


def test_a_gradient_penalty_on_a_forward_of_its_own_takes_less_under_a_plan() -> None:
    model, x = Net(), torch.randn(ROWS, 2, requires_grad=True)
    _, plain = step(model, critic, x)
    with ct.apply(model, planned_least(model, x)):
        step(model, critic, x)
        _, planned = step(model, critic, x)
    assert planned < 0.85 * plain


def test_a_loss_with_derivatives_is_refused_with_what_to_do() -> None:
    model, x = Net(), torch.randn(ROWS, 2, requires_grad=True)
    with pytest.raises(ct.Unsupported, match=r"a module whose forward takes them .* Budget\(reserve=\)"):
        ct.profile(model, x, loss_fn=lambda y: discriminator(model, x), passes=1)


# -- derivatives in the forward ------------------------------------------------------------------------------


class Step(nn.Module):
    """A network with its loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = Net(2), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net, x)


class Potential(nn.Module):
    """Energies and forces of atoms, whose batches come without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = Net(2), nn.BatchNorm1d(2)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        positions = batch["positions"].requires_grad_()
        energies = self.net(F.dropout(self.norm(positions), 0.1))
        return {"energies": energies, "forces": -gradient(energies, positions)}


class Within(nn.Module):
    """A module that takes gradients, with layers before and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.potential = Net(2), Potential()
        self.behind = Net(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forces = self.potential({"positions": self.before(x).expand(-1, 2) + x})["forces"]
        return self.behind(forces).square().mean()


def of_batch(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of a batch that is new each time."""
    output = model({"positions": x.detach().clone()})
    return force_loss(output)


def force_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["energies"].square().mean() + (output["forces"] + 1).abs().mean()


def output_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize(("loss", "share"), [(residual, 0.8), (critic, 0.85), (parameter_penalty, 0.9)])
def test_a_forward_with_derivatives_in_it_keeps_a_budget_below_plain(loss: Loss, share: float) -> None:
    model, x = Step(loss), torch.randn(ROWS, 2, requires_grad=True)
    want, plain = step(model, output_alone, x)
    profile = ct.profile(model, x, passes=1, holds_output=False)
    check_least(model, profile, output_alone, x, want, share * plain)


def test_a_forward_that_asks_for_gradients_of_its_batch_keeps_a_budget_below_plain() -> None:
    model, x = Potential(), torch.randn(ROWS, 2)
    want, plain = step(model, of_batch, x)
    profile = ct.profile(model, ({"positions": x},), loss_fn=force_loss, passes=1)
    assert not x.requires_grad
    assert x.grad is None
    check_least(model, profile, of_batch, x, want, 0.9 * plain)


def test_a_block_with_derivatives_inside_stands_beside_others() -> None:
    model, x = Within(), torch.randn(ROWS, 2)
    want, plain = step(model, output_alone, x)
    profile = ct.profile(model, x, passes=1, holds_output=False)
    assert [s.name for s in profile.stages if s.keep_reason == "takes gradients in its own forward"] == ["potential"]
    assert len([s for s in profile.stages if s.kind == "block" and not s.keep_reason]) == 4
    check_least(model, profile, output_alone, x, want, 0.85 * plain)


def check_least(
    model: nn.Module, profile: ct.Profile, loss: Loss, x: torch.Tensor, want: list[torch.Tensor], most: float
) -> None:
    """Steps by the least plan are exact, take what it says, and less than `most`."""
    everything = ct.plan(profile, UNLIMITED, gradients="created")
    plan = ct.plan(profile, everything.least_budget_bytes, gradients="created")
    beside = sum(plan.resident.values()) + profile.input_bytes
    with ct.apply(model, plan) as handle:
        for _ in range(2):
            got, peak = step(model, loss, x)
            assert len(got) == len(want)
            assert all(map(torch.equal, want, got))
            assert handle.executor.notes == []
            assert peak <= plan.created_peak_bytes - beside + SLACK_BYTES
    assert peak < most


def test_parts_of_a_block_with_derivatives_inside_are_no_blocks() -> None:
    model, x = Step(residual), torch.randn(ROWS, 2, requires_grad=True)
    with pytest.raises(ct.Unsupported, match=r"names a Block in a Step whose forward takes gradients"):
        ct.profile(model, x, blocks="net.blocks.*", passes=1)


def test_a_compiled_forward_with_derivatives_in_it_keeps_half_of_plain() -> None:
    model, x = Step(residual), torch.randn(ROWS, 2, requires_grad=True)
    want, plain = step(model, output_alone, x)
    resident = sum(t.nbytes for t in (*model.parameters(), x))
    compiled = ct.compile(model, x, budget=resident + plain // 2, kernels="eager", holds_output=False)
    got, peak = step(compiled, output_alone, x)
    assert all(map(torch.equal, want, got))
    assert peak <= plain // 2
