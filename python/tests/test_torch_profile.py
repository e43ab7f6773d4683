"""cairn.torch.profile: what is found in models, what is measured, and that nothing is changed."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import random
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.base import memory
from profile_support import Loop, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


# -- the model is left as it was -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "branches", "gpt2"])
def test_profiling_leaves_everything_as_it_was(name: str) -> None:
    step = torch_models.made(name)
    model = step.model
    step.loss().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grads = {key: p.grad for key, p in model.named_parameters()}
    values = {key: grad.clone() for key, grad in grads.items()}
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    state, foreign = torch.get_rng_state(), random.getstate()
    profiled(step)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is grads[key] and torch.equal(p.grad, values[key]) for key, p in model.named_parameters())
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == foreign
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_steps_that_the_model_counts_itself_are_those_of_training() -> None:
    class Warming(nn.Linear):
        """Its own count of steps, in an attribute and an object, decides what it computes."""

        def __init__(self) -> None:
            super().__init__(16, 16)
            self.steps, self.schedule, self.cache = 0, types.SimpleNamespace(factor=1.0), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            self.schedule.factor *= 0.5
            self.cache = self.cache if self.cache is not None else torch.ones(8, 16)
            return super().forward(x) * self.cache / self.steps + self.schedule.factor

    x = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 16), Warming(), nn.Tanh(), nn.Linear(16, 16))
    plain = copy.deepcopy(model)
    ct.checkpoint(model, x, loss_fn=torch.sum, budget="1MiB", passes=1)
    assert (model[1].steps, model[1].schedule.factor) == (0, 1.0)
    for _ in range(3):
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("kept", ["tensor", "list", "in place"])
def test_what_each_forward_leaves_for_the_next_one_is_that_of_training(kept: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList(nn.GRUCell(64, 64) for _ in range(3))
            self.state: Any = None if kept == "tensor" else [None] * 3
            self.table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table = torch.ones(64, 64) if self.table is None else self.table  # made once
            states = [self.state] * 3 if kept == "tensor" else self.state if kept == "in place" else list(self.state)
            for i, cell in enumerate(self.cells):
                x = cell(x, states[i])
                states[i] = x.detach()
            self.state = states[2] if kept == "tensor" else states
            return x @ self.table

    model, x = Recurrent(), torch.randn(64, 64)
    plain, start = copy.deepcopy(model), model.state
    ct.checkpoint(model, x, loss_fn=torch.sum, budget="1GiB", passes=1)
    assert model.state is start and model.table is not None
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
    before = model.state
    ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert model.state is before and torch.equal(model(x), plain(x))
    ct.handle(model).remove()


@pytest.mark.parametrize("is_there", [True, False])
def test_blocks_run_again_find_no_state_where_their_first_run_found_none(is_there: bool) -> None:
    """It does something else than those that find some; and profiles leave none, which the loss may read."""

    class Resetting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            if is_there:
                self.state = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made, state = torch.tanh(self.linear(x)), getattr(self, "state", None) if is_there else self.found()
            self.state = made[:1].detach() if state is None else made[:1].detach() + state
            return made if state is None else made * torch.ones_like(state)

        def found(self) -> torch.Tensor | None:
            return self.state if hasattr(self, "state") else None

    model, x = nn.Sequential(*(Resetting() for _ in range(4))), torch.randn(64, 64)
    plain = copy.deepcopy(model)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, inside=False, blocks=Resetting)
    assert all(getattr(layer, "state", None) is None for layer in model)
    with ct.apply(model, ct.plan(profile, ct.plan(profile, "1GiB").least_budget_bytes)):
        for _ in range(3):
            for each in (model, plain):
                each(x).sum().backward()
            assert all(torch.equal(one.state, other.state) for one, other in zip(model, plain, strict=True))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_block_that_reads_what_its_last_run_has_left_with_a_history_is_kept() -> None:
    """As RecurrentGemma's do, whose first row is to forget the state, which the model sets to zeros before it runs."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.state = nn.Linear(64, 64), torch.zeros(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forgets = torch.zeros(64, 1)
            made = torch.sigmoid(self.gate(x)) * forgets * self.state + x
            self.state = made[-1]
            return torch.tanh(made)

    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                if isinstance(layer, Recurrent):
                    layer.state = torch.zeros(64)
            return super().forward(x)

    model, x = Model(*(each for _ in range(3) for each in (nn.Linear(64, 64), Recurrent()))), torch.randn(64, 64)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    kept = {stage.name: stage.keep_reason for stage in profile.stages if stage.kind == "block" and stage.keep_reason}
    assert list(kept) == ["1", "3", "5"] and all(
        "what its last run left in an attribute" in kept[name] for name in kept
    )
    plan = ct.plan(profile, ct.plan(profile, 2**30).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_an_optimizer_that_steps_in_the_backward_does_not_step() -> None:
    step = torch_models.cnn()
    parameter = step.model[0].weight
    before = parameter.detach().clone()
    calls: list[int] = []

    def descend(p: torch.Tensor) -> None:
        calls.append(1)
        p.data.sub_(p.grad)

    parameter.register_post_accumulate_grad_hook(descend)
    profiled(step)
    assert not calls and torch.equal(parameter, before)
    step.loss().backward()
    assert calls == [1]  # the hook is back


def test_a_failing_forward_leaves_the_model_usable() -> None:
    step = torch_models.cnn()
    with pytest.raises(RuntimeError, match="5 channels"):
        ct.profile(step.model, torch.randn(2, 5, 64, 64), loss_fn=torch.sum)
    assert all("forward" not in vars(module) for module in step.model.modules())
    profiled(step)


def test_more_memory_than_the_blocks_need_is_never_taken() -> None:
    """A model whose plain step takes hundreds of megabytes is profiled within a fraction of that."""
    blocks = [nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Tanh(), nn.Linear(4096, 64)) for _ in range(12)]
    model = nn.ModuleList(blocks)
    root = Loop(model)
    x = torch.randn(256, 64)
    peaks: list[int] = []
    allocated = memory.CpuMeter.peak

    def noted(self: Any, first: int, last: int) -> int:
        found = allocated(self, first, last)
        peaks.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.CpuMeter, "peak", noted)
        profile = ct.profile(root, x, loss_fn=torch.sum, blocks=model, passes=1)
    plain = ct.plan(profile, 2**40).plain_peak_bytes
    assert max(peaks) < plain / 3


class Volume:
    """What a step looks things up in; made anew by each, and there until the next one."""

    levels: list[torch.Tensor]


class LooksUp(nn.Module):
    """Uses a parameter of its first layer itself, so that its memory is measured twice."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = Volume()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.layers[0].bias
        self.volume.levels = [x.repeat(4, 1) * scale for scale in (1, 2)]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.volume.levels[1][: len(x)]


def test_what_a_step_leaves_for_the_next_one_to_replace_is_counted() -> None:
    x, model = torch.randn(256, 64), LooksUp().train()
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert profile.stages[0].saved_bytes >= 2 * 4 * x.nbytes
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok
