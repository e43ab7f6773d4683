"""What a profile measures of an optimizer: its state, its step, and what it leaves as it was."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.base import memory
from cairn.torch.profiling.optimizer import KeptStates, measure_optimizer
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    ],
)
def test_optimizer_state_and_step_are_predicted(make: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 200))
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step()
    values = [p.detach().clone() for p in model.parameters()]
    predicted = measure_optimizer(optimizer)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert not optimizer.state
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    peak = 0
    for _ in range(2):
        meter = memory.CpuMeter()
        with meter:
            first = meter.mark()
            optimizer.step()
            last = meter.mark()
        peak = max(peak, meter.peak(first, last) - meter.level(last))
    scheduler.step()
    state = memory.unique_bytes(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
    assert predicted.state_bytes == pytest.approx(state, rel=0.001, abs=64)
    assert predicted.step_bytes == pytest.approx(peak, rel=0.01, abs=256)
    assert measure_optimizer(optimizer).state_bytes == state


class Momentum(torch.optim.Optimizer):
    """One of its own, with attributes."""

    def __init__(self, params: Any, decay: float = 0.5, **others: Any) -> None:
        super().__init__(params, {"lr": 0.1, "factor": 3})
        self.decay, self.calls = decay, [0]
        vars(self).update(others)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.mul_(self.decay).add_(p.grad), alpha=group["lr"])
                torch.empty(group["factor"] * p.numel())


class Whole(Momentum):
    """Copies of it have all that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


class Later(Momentum):
    """Takes more from the second step on."""

    def step(self, closure: Any = None) -> None:
        super().step()
        torch.empty(10**5 if self.calls[0] > 1 else 0)


class Aside(Momentum):
    """Needs what no copy has."""

    def step(self, closure: Any = None) -> None:
        self.table.zero_()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Momentum, Whole])
def test_optimizers_with_attributes_and_hooks_are_measured_without_a_step(kind: type[Momentum]) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 50, bias=False))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer, calls = kind(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step()
    values = [p.detach().clone() for p in model.parameters()]
    found = measure_optimizer(optimizer)
    assert found.state_bytes == memory.unique_bytes(model.parameters())
    assert 0 <= found.step_bytes - 3 * 100 * 100 * 4 < 256
    assert (calls, optimizer.calls, len(optimizer.state)) == ([], [0], 0)
    assert all(map(torch.equal, model.parameters(), values))


def test_what_an_optimizer_takes_is_that_of_its_largest_group_and_of_what_it_trains() -> None:
    frozen, large, small = (nn.Parameter(torch.zeros(n)) for n in (3000, 1000, 100))
    frozen.requires_grad_(False)
    groups = [{"params": [frozen, large], "factor": 5}, {"params": [small], "factor": 9}, {"params": [frozen.clone()]}]
    found = measure_optimizer(Momentum(groups))
    assert found.state_bytes == 1100 * 4
    assert 0 <= found.step_bytes - 5 * 1000 * 4 < 256
    assert 0 <= measure_optimizer(Later([small])).step_bytes - 10**5 * 4 < 256
    both = {"params": [large, nn.Parameter(torch.zeros(500))]}
    alone = measure_optimizer(Momentum([{**both, "foreach": True, "fused": True}])).step_bytes
    assert alone == measure_optimizer(Momentum([both])).step_bytes
    assert measure_optimizer(Momentum([{**both, "foreach": True}])).step_bytes == alone * 3 // 2
    assert measure_optimizer(Momentum([{"params": [nn.Parameter(torch.zeros(0))]}])).state_bytes == 0


def test_an_optimizer_that_no_copy_can_stand_for_is_refused() -> None:
    model = nn.Linear(8, 8)
    optimizer = Aside(model.parameters(), table=torch.ones(8))
    with pytest.raises(ct.Unsupported, match="Aside .* 'table'.* leave optimizer= out"):
        ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, optimizer=optimizer, passes=1)
    assert torch.equal(vars(optimizer)["table"], torch.ones(8))


def test_what_an_optimizer_keeps_is_looked_at_when_it_has_more_or_fewer_entries() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer, second = Momentum([*model.parameters(), *other.parameters()]), Momentum(model.parameters())
    kept = KeptStates()
    assert not kept.note(optimizer, model) and kept.bytes == 0
    for p in (*model.parameters(), *other.parameters()):
        p.grad = torch.ones_like(p)
    optimizer.step()
    size = memory.unique_bytes(model.parameters())
    assert kept.note(optimizer, model) and kept.bytes == size  # but not the state of others
    assert not kept.note(optimizer, model)
    second.step()
    assert kept.note(second, model) and kept.bytes == 2 * size
    optimizer.state.clear()
    assert kept.note(optimizer, model) and kept.bytes == size
    away = nn.Linear(8, 8, device="meta")
    third = Momentum(away.parameters())
    third.state[away.weight]["mean"] = torch.zeros(8)  # on the CPU, for a model elsewhere
    assert not kept.note(third, away) and kept.bytes == size


class Wrapper(torch.optim.Optimizer):
    """All is another optimizer's, as accelerate does it."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str = "optimizer") -> None:
        vars(self).update({"inner": name, name: optimizer})

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return vars(self)[self.inner].param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)[self.inner].param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return vars(self)[self.inner].state

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)[self.inner].state = state

    def step(self, closure: Any = None) -> Any:
        return vars(self)[self.inner].step(closure)


def test_an_optimizer_within_others_is_measured_and_left_as_it_was() -> None:
    step = torch_models.vgg()
    optimizer = torch.optim.AdamW(step.model.parameters())
    step.loss_fn(step.model(*step.args)).backward()
    optimizer.step()
    groups, states = optimizer.param_groups[0]["params"], len(optimizer.state)
    expected = ct.profile(step.model, passes=1, optimizer=optimizer, **step.sample)
    values = [p.detach().clone() for p in step.model.parameters()]
    found = ct.profile(step.model, passes=1, optimizer=Wrapper(Wrapper(optimizer)), **step.sample)
    assert (found.resident, found.optimizer_step_bytes) == (expected.resident, expected.optimizer_step_bytes)
    assert found.present_bytes == expected.present_bytes
    with pytest.raises(ct.Unsupported, match="Wrapper has its parameters in another optimizer: pass that one"):
        ct.profile(step.model, passes=1, optimizer=Wrapper(optimizer, "hidden"), **step.sample)
    assert optimizer.param_groups[0]["params"] is groups and len(optimizer.state) == states
    assert all(map(torch.equal, step.model.parameters(), values))


def test_optimizers_that_accelerate_has_prepared_are_left_as_they_were() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(8, 8)
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    optimizer.step()
    profile = ct.profile(model, x, loss_fn=torch.sum, optimizer=optimizer, passes=1)
    assert profile.resident["optimizer state"] >= 2 * memory.unique_bytes(model.parameters())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert len(optimizer.state) == 2
