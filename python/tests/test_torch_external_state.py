"""Losses, teachers and other objects that are no part of the model are left as they were."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from attributes_support import UNLIMITED, Keeping
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


class Proxies(nn.Module):
    """A loss with parameters, statistics and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies, self.norm, self.calls = nn.Linear(32, 10), nn.BatchNorm1d(32), 0
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.centre.mul_(0.9).add_(output.detach().mean(0))
        return self.proxies(self.norm(output) - self.centre).logsumexp(-1).mean() / self.calls


LONE_TEACHER: nn.Module | None = None


class Taught(nn.Module):
    """Compares itself with a network that is no part of it, and that follows it."""

    def __init__(self, where: str, teacher: nn.Module) -> None:
        super().__init__()
        self.student = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)))
        self.where, self.list = where, [{"teacher": teacher}] if where == "list" else []
        if where == "hidden":
            object.__setattr__(self, "hidden", teacher)

    def teacher(self) -> nn.Module:
        if self.where == "global":
            assert LONE_TEACHER is not None
            return LONE_TEACHER
        return self.list[0]["teacher"] if self.where == "list" else self.hidden

    def forward(self, x: torch.Tensor, teacher: nn.Module | None = None) -> torch.Tensor:
        teacher = self.teacher() if teacher is None else teacher
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(0.99)
        return (self.student(x) - teacher(x)).square().mean()


def _state_of(module: nn.Module) -> list[Any]:
    tensors = [*module.parameters(), *module.buffers()]
    grads = [p.grad for p in module.parameters()]
    return [t.clone() for t in tensors] + [g if g is None else g.clone() for g in grads] + [getattr(module, "calls", 0)]


def _is_as(module: nn.Module, before: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b
        for a, b in zip(_state_of(module), before, strict=True)
    )


@pytest.mark.parametrize("how", ["module", "closure", "method", "partial", "object"])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_losses_with_a_state_of_their_own_are_left_as_they_were(how: str, has_gradients: bool) -> None:
    model, loss, x = nn.Sequential(*(torch_models.Residual(32) for _ in range(3))), Proxies(), torch.randn(64, 32)
    weight, keeping = nn.Parameter(torch.ones(())), Keeping()
    keeping.loss = loss
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "module": loss,
        "closure": lambda output: loss(output) * weight,
        "method": loss.forward,
        "partial": functools.partial(lambda other, output: other(output), loss),
        "object": lambda output: keeping.loss(output),
    }
    loss_fn = ways[how]
    if has_gradients:
        loss_fn(model(x)).backward()
        model.zero_grad()
    before, grad = _state_of(loss), weight.grad if weight.grad is None else weight.grad.clone()
    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    plan = ct.plan(profile, UNLIMITED)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok
    ct.sweep(profile, [UNLIMITED], model=model, args=x, loss_fn=loss_fn, beside=[], rounds=1)
    ct.checkpoint(model, x, loss_fn=loss_fn, budget=UNLIMITED, passes=1, progress=False)
    ct.handle(model).remove()
    with contextlib.suppress(ct.Unsupported):  # what is written to modules of others cannot be repeated
        ct.trace(model, x, loss_fn=loss_fn, passes=1)
    assert _is_as(loss, before)
    assert (weight.grad is grad) or torch.equal(weight.grad, grad)


@pytest.mark.parametrize("where", ["list", "hidden", "global", "argument"])
def test_teachers_that_are_no_part_of_the_model_are_left_as_they_were(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, x = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)), torch.randn(64, 32)
    monkeypatch.setitem(globals(), "LONE_TEACHER", teacher if where == "global" else None)
    model = Taught(where, teacher)
    sample = (x, teacher) if where == "argument" else (x,)
    before = _state_of(teacher)
    plan = ct.plan(ct.profile(model, sample, passes=1), UNLIMITED)
    assert ct.verify(model, plan, sample).ok
    assert _is_as(teacher, before)


def test_plans_made_in_training_leave_the_loss_as_it_was() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)))

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.layers(x) if mask is None else self.layers(x) * mask

    plain, loss, x, mask = Masked(), Proxies(), torch.randn(64, 32), torch.ones(64, 1)
    planned, planned_loss = copy.deepcopy(plain), copy.deepcopy(loss)
    ct.checkpoint(planned, x, loss_fn=planned_loss, budget=UNLIMITED, passes=1, progress=False)
    for args in ((x,), (x, mask), (x,)):
        for model, its in ((plain, loss), (planned, planned_loss)):
            torch.manual_seed(1)
            its(model(*args)).backward()
    assert [entry.made for entry in ct.handle(planned).plans] == ["measurement", "given"]
    assert _is_as(planned_loss, _state_of(loss)) and _is_as(planned, _state_of(plain))


def test_an_interrupt_as_hooks_are_taken_back_leaves_none() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(16) for _ in range(3))), torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    most = ct.plan(profile, UNLIMITED, allow=["recompute"])
    ct.apply(model, ct.plan(profile, most.least_budget_bytes, allow=["recompute"]))

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is torch.autograd.graph.saved_tensors_hooks.__exit__.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            model(x).sum().backward()
    finally:
        sys.setprofile(before)
    assert torch.is_grad_enabled()
    model(x).sum().backward()  # would be refused, if hooks were in force
    ct.handle(model).remove()
    model(x).sum().backward()
