"""checkpoint_sequential: with segments, and with a budget."""

# ruff: noqa: E402

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
from cairn.torch import sequential
from cairn.torch.base import memory
from plan_support import linear_chain
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def run(function: Any, functions: nn.Sequential, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    functions.zero_grad()
    x = x.clone().requires_grad_()
    output = function(x)
    output.square().sum().backward()
    return output, [x.grad, *(p.grad for p in functions.parameters())]


def test_checkpoint_sequential_is_exact_with_segments_and_with_a_budget() -> None:
    functions, x = linear_chain(), torch.randn(64, 32)
    plain = run(functions, functions, x)
    for options in ({"segments": 3}, {"segments": 1}, {"budget": "1MiB"}, {"budget": "600KiB"}):
        out = run(lambda x, options=options: ct.checkpoint_sequential(functions, input=x, **options), functions, x)
        assert torch.equal(out[0], plain[0])
        assert all(torch.equal(a, b) for a, b in zip(out[1], plain[1], strict=True))
    with torch.no_grad():
        assert torch.equal(ct.checkpoint_sequential(functions, input=x, budget="1MiB"), plain[0])


def test_checkpoint_sequential_saves_what_the_budget_says() -> None:
    functions, x = linear_chain(), torch.randn(512, 32)
    peaks = {}
    for budget in (2**21, 2**30):
        run(lambda x, b=budget: ct.checkpoint_sequential(functions, input=x, budget=b), functions, x)
        meter = memory.CpuMeter()
        functions.zero_grad()
        leaf = x.clone().requires_grad_()
        with meter:
            first = meter.mark()
            ct.checkpoint_sequential(functions, input=leaf, budget=budget).square().sum().backward()
            last = meter.mark()
            functions.zero_grad()
            leaf.grad = None
        peaks[budget] = meter.peak(first, last)
    assert peaks[2**21] <= 2**21 < peaks[2**30] / 2


def _plans_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    def counted(*args: Any, **options: Any) -> ct.Profile:
        made.append(1)
        return ct.profile(*args, **options)

    monkeypatch.setattr(sequential, "profile", counted)
    return made


def test_checkpoint_sequential_plans_each_chain_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    chains, x = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)], torch.randn(4, 8, requires_grad=True)
    made = _plans_made(monkeypatch)
    for _ in range(2):
        y = x
        for chain in chains:
            y = ct.checkpoint_sequential(chain, input=y, budget="1MiB", passes=1)
        y.sum().backward()
    assert len(made) == 12


def test_checkpoint_sequential_plans_once_for_masks_that_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return torch.tanh(super().forward(x)) * mask * scale

    chain, x = nn.Sequential(Masked(8, 8), Masked(8, 8)), torch.randn(4, 8, requires_grad=True)
    made, masks = _plans_made(monkeypatch), [torch.ones(4, 8) for _ in range(3)]
    for mask in masks:
        ct.checkpoint_sequential(chain, input=x, budget="1MiB", kwargs={"mask": mask}, passes=1).sum().backward()
    assert len(made) == 1
    ct.checkpoint_sequential(chain, input=x, budget="1MiB", kwargs={"mask": masks[0], "scale": 2.0}, passes=1)
    ct.checkpoint_sequential(chain, input=x, budget="1MiB", kwargs={"mask": masks[0][:1]}, passes=1)
    assert len(made) == 3


def test_a_part_that_has_a_plan_is_named() -> None:
    model, x = linear_chain(), torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, profile.resident_bytes() + 2**30)
    with ct.budget(model[0], "1GiB", x, loss_fn=torch.sum):
        for call in (
            lambda: ct.apply(model, plan),
            lambda: ct.verify(model, plan, x, loss_fn=torch.sum),
            lambda: ct.trace(model, x, loss_fn=torch.sum),
        ):
            with pytest.raises(
                ct.Unsupported, match="a plan is at work on 0, a part of this Sequential: remove it first"
            ):
                call()
    with pytest.raises(TypeError, match="a plan is what .* not a Solution"):
        ct.apply(
            model,
            cairn.solve(cairn.Chain([cairn.Stage(1, saved_bytes=1, forward_ns=1, backward_ns=1)], input_bytes=1), 100),
        )


def test_checkpoint_sequential_knows_methods_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = [nn.Linear(8, 8), nn.Tanh()], torch.randn(4, 8, requires_grad=True)
    made = _plans_made(monkeypatch)
    for _ in range(3):
        ct.checkpoint_sequential([each.forward for each in layers], input=x, budget="1MiB", passes=1).sum().backward()
    assert len(made) == 1


def test_checkpoint_sequential_plans_anew_for_what_is_trained_or_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    made = _plans_made(monkeypatch)
    chain[0].requires_grad_(False)
    ct.checkpoint_sequential(chain, input=x, budget="1MiB", passes=1).sum().backward()
    assert chain[0].weight.grad is None
    chain[0].requires_grad_(True)
    ct.checkpoint_sequential(chain, input=x, budget="1MiB", passes=1).sum().backward()
    assert chain[0].weight.grad is not None and len(made) == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ct.checkpoint_sequential(chain, input=x, budget="1MiB", passes=1).sum().backward()
    assert len(made) == 3


def test_checkpoint_sequential_keeps_no_model_alive() -> None:
    chain = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    known = len(sequential._chains)
    ct.checkpoint_sequential(chain, input=torch.randn(4, 8), budget="1MiB", passes=1).sum().backward()
    gone, weight = weakref.ref(chain[0]), weakref.ref(chain[0].weight)
    assert len(sequential._chains) == known + 1
    del chain
    gc.collect()
    assert gone() is None and weight() is None and len(sequential._chains) <= known


def test_checkpoint_sequential_takes_tuples_kwargs_and_functions() -> None:
    def split(x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, x + scale

    def join(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return a * b * scale

    x = torch.randn(8, requires_grad=True)
    expected = join(*split(x, 3.0), 3.0)
    for options in ({"segments": 2}, {"budget": "1MiB"}):
        found = ct.checkpoint_sequential([split, join], input=x, kwargs={"scale": 3.0}, **options)
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="either"):
        ct.checkpoint_sequential([split, join], input=x)
    with pytest.raises(ValueError, match="between 1 and"):
        ct.checkpoint_sequential([split, join], 3, x)
    with pytest.raises(TypeError, match="segments .* not '3MiB'; a budget is given by name"):
        ct.checkpoint_sequential([split, join], "3MiB", x)
    with pytest.raises(ValueError, match="no functions to run"):
        ct.checkpoint_sequential([], input=x, budget="1MiB")
    assert torch.equal(ct.checkpoint_sequential([split, join], SomeInteger(2), x, kwargs={"scale": 3.0}), expected)
    with pytest.raises(TypeError, match="checkpoint_sequential has no option 'pases'; did you mean passes"):
        ct.checkpoint_sequential([split, join], input=x, budget="1MiB", pases=1)
    with pytest.raises(TypeError, match="checkpoint_sequential with segments has no option 'passes'"):
        ct.checkpoint_sequential([split, join], 2, x, passes=1)
    with pytest.raises(ValueError, match="use_reentrant=False is the only way"):
        ct.checkpoint_sequential([split, join], 2, x, use_reentrant=True)
    assert torch.equal(ct.checkpoint_sequential([split, join], 2, x, use_reentrant=False), join(*split(x)))


class SomeInteger:
    """As NumPy's: an integer that is no `int`."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value
