"""Side outputs of blocks, and what outlives a backward, count in predicted peaks."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch import api
from cairn.torch.base import memory
from random_times_support import SEEDS, UNLIMITED, with_random_times
from selective_support import mean_square
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


class _Collector:
    """Has the features that hooks see."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.seen.append(output)


_FEATURES: dict[Any, torch.Tensor] = {}


class _Watched(nn.Module):
    """Blocks that leave a feature of an inner layer, mostly for the loss: in an attribute, or where hooks put it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(_Leaving(how) for _ in range(6))
        self.features: dict[int, torch.Tensor] = {}
        self.collector = _Collector()
        for index, layer in enumerate(self.layers):
            if how in ("dict", "cleared"):
                layer.up.register_forward_hook(functools.partial(self._note, index))
            elif how == "gradients":
                layer.up.register_full_backward_hook(functools.partial(self._note_gradient, index))
            elif how == "global":
                layer.up.register_forward_hook(lambda module, args, out: _FEATURES.update({id(module): out}))
            elif how == "list":
                layer.up.register_forward_hook(self.collector.note)

    def _note_gradient(self, index: int, module: nn.Module, got: Any, given: tuple[torch.Tensor, ...]) -> None:
        self.features[index] = given[0]

    def _note(self, index: int, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.features[index] = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.collector.seen.clear()
        for layer in self.layers:
            x = layer(x)
        if self.how == "gradients":
            features = []
        elif self.how in ("attribute", "detached"):
            features = [layer.feature for layer in self.layers if self.how == "attribute"]
        elif self.how in ("object", "new object"):
            features = [layer.seen.feature for layer in self.layers]
        elif self.how == "unsaved":
            features = [layer.seen["feature"] for layer in self.layers]
        elif self.how == "global":
            features = [_FEATURES[id(layer.up)] for layer in self.layers]
        else:
            features = list(self.features.values()) or self.collector.seen
        loss = x.square().mean() + sum(feature.square().mean() for feature in features)
        if self.how == "cleared":
            self.features.clear()
        return loss


class _Leaving(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)
        self.seen: Any = types.SimpleNamespace() if how == "object" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        feature = self.up(self.norm(x))
        if self.how == "object":
            self.seen.feature = feature
        elif self.how == "new object":
            self.seen = types.SimpleNamespace(feature=feature)
        elif self.how == "unsaved":
            feature = nn.functional.gelu(feature)
            self.seen = {"feature": feature}
            return x + self.down(torch.tanh(feature))
        if self.how in ("attribute", "detached"):
            self.feature = feature if self.how == "attribute" else feature.detach().clone()
        return x + self.down(nn.functional.gelu(feature))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        *("attribute", "detached", "gradients", "dict", "cleared", "global", "list", "object", "new object", "unsaved"),
    ],
)
def test_what_blocks_leave_beside_their_results_is_counted_while_they_run_again(how: str, inside: bool) -> None:
    """It is there until the next step replaces it, whatever is kept of the block."""
    model, x = _Watched(how), torch.randn(512, 32)
    profile = ct.profile(model, x, passes=1, inside=inside, blocks=_Leaving)
    assert profile.resident["side outputs of blocks"] == 6 * 512 * 96 * 4
    assert not profile.notes  # that some are always kept
    assert how == "gradients" or not (model.features or model.collector.seen or _FEATURES)  # of the profile's runs
    assert how == "detached" or not any("feature" in vars(layer) for layer in model.layers)
    assert not any(layer.seen and vars(layer.seen) for layer in model.layers)
    least = ct.plan(profile, UNLIMITED).least_budget_bytes
    for percent in (100, 120):
        plan = ct.plan(profile, least * percent // 100)
        ct.verify(model, plan, x)
        for steps in (1, 3):
            _FEATURES.clear()
            trained = _Watched(how)
            trained.load_state_dict(model.state_dict())
            ct.apply(trained, plan)
            ct.handle(trained).shapes.watch(api.Watch(steps, False, lambda *told: None))
            for _ in range(steps):
                trained(x).backward()
            report = ct.report(trained)
            taken = report.measured
            assert taken is not None and taken.gradients_existed == (steps > 1)
            assert taken.peak_bytes <= plan.budget_bytes
            # what is cleared goes sooner where the block does not keep it, and gradients come in the backward
            if how != "cleared" and (how != "gradients" or steps > 1):
                assert taken.peak_bytes > 0.95 * report.predicted_peak_bytes
            assert len(trained.collector.seen) == (6 if how == "list" else 0)  # none of later runs
            assert len(trained.features) == (6 if how in ("dict", "gradients") else 0)
    with memory.meter_for(torch.device("cpu")) as meter:
        before = meter.mark()
        trained(x).backward()
        after = meter.mark()
    assert meter.level(after) - meter.level(before) < 4096  # a step leaves what the step before left
    _FEATURES.clear()


@pytest.mark.parametrize("was_run", [False, True])
def test_what_blocks_replace_goes_while_they_run(was_run: bool) -> None:
    """Of the features of the step before, one more is gone with every block that runs."""
    model, x = _Watched("detached"), torch.randn(512, 32)
    profile = ct.profile(model, x, passes=1, blocks=_Leaving)
    for seed in range(1, 7 + SEEDS):
        drawn = with_random_times(profile, seed)
        plan = ct.plan(drawn, ct.plan(drawn, UNLIMITED).least_budget_bytes)
        trained = _Watched("detached")
        if was_run:
            trained(x).backward()
        ct.apply(trained, plan)
        ct.handle(trained).shapes.watch(api.Watch(3, False, lambda *told: None))
        for _ in range(3):
            trained(x).backward()
            taken = ct.report(trained).measured
            assert taken is not None and taken.peak_bytes <= plan.budget_bytes, plan.ops


class _Lingering(nn.Module):
    """Leaves what outlives the backward: a history that no loss uses, a gradient of its own; or hides what it has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how.startswith("hidden"):
            return self.hiding(x)
        inner = torch.tanh(self.up(x))
        if self.how == "a number":
            self.extra = (inner.softmax(-1) * inner).mean()
        elif self.how == "numbers":
            self.extra = (inner.softmax(-1) * inner).sum(-1)
        elif self.how == "a gradient":
            inner.retain_grad()
            self.extra = inner
        return x + self.down(inner)

    def hiding(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "hidden input":
            return self.down(torch.tanh(self.up(_Square.apply(x, True))))
        if self.how == "hidden output":
            return _Square.apply(self.down(torch.tanh(self.up(x))), False)
        return self.down(torch.tanh(_Square.apply(self.up(x), True)))


class _Square(torch.autograd.Function):
    """Holds its input, or its output, past autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holds_input: bool) -> torch.Tensor:
        y = x.square()
        ctx.held = {"values": [x if holds_input else y.detach()]}
        ctx.holds_input = holds_input
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        [held] = ctx.held["values"]
        return grad * 2 * (held if ctx.holds_input else held.sqrt()), None


def _lingering(how: str) -> nn.Sequential:
    return nn.Sequential(*(_Lingering(how) for _ in range(6)))


@pytest.mark.parametrize("how", ["a number", "numbers", "a gradient"])
def test_what_outlives_a_backward_is_counted(how: str) -> None:
    """As there during all of a step, though the forward of each block replaces its own."""
    x, model = torch.randn(512, 32), _lingering(how)
    profile = ct.profile(model, x, loss_fn=mean_square, passes=1)
    assert any("larger than need be" in note for note in profile.notes) == (how != "a gradient")
    top = ct.plan(profile, UNLIMITED)
    for budget in (top.least_budget_bytes, (top.least_budget_bytes + top.plain_peak_bytes) // 2, UNLIMITED):
        plan, trained = ct.plan(profile, budget), copy.deepcopy(model)
        assert ct.verify(model, plan, x, loss_fn=mean_square).ok
        ct.apply(trained, plan)
        ct.handle(trained).shapes.watch(api.Watch(3, False, lambda *told: None))
        for _ in range(3):
            mean_square(trained(x)).backward()
        report = ct.report(trained)
        assert report.measured is not None
        assert 0.75 * report.predicted_peak_bytes < report.measured.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("how", ["hidden input", "hidden output", "hidden inside"])
def test_what_custom_functions_hold_past_autograd_stays(how: str) -> None:
    x, model = torch.randn(512, 32), _lingering(how)
    profile = ct.profile(model, x, loss_fn=mean_square, passes=1)
    assert all(stage.keep_reason for stage in profile.stages)
    assert "outside what autograd saves" in " ".join(profile.notes)
    for memory_beside in ({}, {"host_budget": "1GiB", "link": "20GB/s"}):
        least = ct.plan(profile, UNLIMITED, **memory_beside).least_budget_bytes
        plan = ct.plan(profile, least, **memory_beside)
        assert ct.verify(model, plan, x, loss_fn=mean_square).ok
        assert plan.plain_peak_bytes > 0.9 * least


def test_outputs_that_the_loop_still_has_are_measured() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(32) for _ in range(4)), nn.Linear(32, 400)), torch.randn(512, 32)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED)
    ct.apply(model, plan)
    ct.handle(model).shapes.watch(api.Watch(3, False, lambda *told: None))
    for _ in range(3):
        output = model(x)  # until then, the one before is there
        output.sum().backward()
    taken = ct.report(model).measured
    assert taken is not None and taken.gradients_existed
    assert 0.98 * plan.accumulated_peak_bytes < taken.peak_bytes <= plan.accumulated_peak_bytes


class _Recurring(nn.Module):
    """Leaves a memory in an attribute of its own, for its next step to read; as Transformer-XL does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.memory: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory or [x.new_zeros(len(x), 128, 64) for _ in self.layers]
        left = []
        for layer, known in zip(self.layers, memory, strict=True):
            left.append(torch.cat([known, x.detach()], 1)[:, -128:].clone())
            x = x + torch.tanh(layer(x)) + layer(known).mean(1, keepdim=True)
        self.memory = left
        return x


@pytest.mark.parametrize("is_warm", [False, True])
def test_what_a_model_leaves_for_its_next_step_is_counted(is_warm: bool) -> None:
    model, x = _Recurring(), torch.randn(8, 32, 64)
    if is_warm:
        mean_square(model(x)).backward()
    profile = ct.profile(model, x, loss_fn=mean_square, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=mean_square).ok
    there = memory.unique_bytes([*model.parameters(), x, *(torch.zeros_like(p) for p in model.parameters())])
    with ct.apply(model, plan):
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            known = memory.unique_bytes(model.memory or [])
            meter = memory.meter_for(torch.device("cpu"), taken=True)
            with meter:
                first = meter.mark()
                mean_square(model(x)).backward()
                last = meter.mark()
            assert there + known + meter.peak(first, last) - meter.level(first) <= plan.budget_bytes
