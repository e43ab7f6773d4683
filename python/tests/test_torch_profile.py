"""cairn.torch.profile: what is found in models, what is measured, and that nothing is changed."""

# ruff: noqa: E402

from __future__ import annotations

import concurrent.futures
import copy
import cProfile
import dataclasses
import functools
import importlib
import itertools
import pstats
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import executor_support
import torch_models
from cairn.torch import profiler
from cairn.torch.base import memory
from cairn.torch.base._compat import profiler_events
from cairn.torch.base.blocks import Block
from cairn.torch.base.stage_measure import StageMeasure
from cairn.torch.profiling import gradient_lifetimes, option_proofs, overhead
from cairn.torch.profiling.optimizer import KeptStates, measure_optimizer
from cairn.torch.profiling.side_outputs import Beside
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("seeded")


def profiled(step: torch_models.Step, **options: Any) -> ct.Profile:
    return ct.profile(step.model, **{**step.profiling, **options}, passes=1)


def block_names(profile: ct.Profile) -> list[str]:
    return [stage.name for stage in profile.stages if stage.kind == "block"]


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
    root = _Loop(model)
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


class _Loop(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


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


# -- which blocks --------------------------------------------------------------------------------------------


def test_children_of_a_sequential_become_blocks_and_what_cannot_stand_alone_joins_its_predecessor() -> None:
    names = block_names(profiled(torch_models.cnn()))
    assert names == ["0", "1-2", "3-4", "5", "6", "7", "8-10", "11"]


class Projecting(nn.Module):
    """A residual layer with a container for no more than its projection, if it has any."""

    def __init__(self, width: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.projection = nn.Sequential(nn.Conv2d(width, after, 1), nn.BatchNorm2d(after)) if width != after else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.projection is None else self.projection(x)
        return torch.tanh(around + self.second(torch.tanh(self.first(x))))


def test_layers_become_blocks_rather_than_a_container_that_has_little_of_them() -> None:
    class Named(nn.Module):
        """Has its layers in attributes of their own."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = Projecting(4, 8), Projecting(8, 8), Projecting(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.three(self.two(self.one(x)))

    profile = ct.profile(Named().train(), torch.randn(2, 4, 16, 16), loss_fn=torch.sum, passes=1)
    assert block_names(profile) == ["one", "two", "three"]


def test_a_model_that_does_more_itself_than_its_layers_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running layers again brings nothing back that functions between them save as well."""
    step, apart = torch_models.made("layers"), torch_models.made("layers-apart")
    assert block_names(profiled(torch_models.made("convolutions"))) == [""]
    whole, fine = profiled(step), ct.profile(apart.model, **apart.profiling, passes=1)
    assert block_names(whole) == [""] and "inward.0" in block_names(fine)
    assert len(whole.stages[0].options) > 12
    least = ct.plan(whole, "1TiB").least_budget_bytes
    assert least < 0.7 * ct.plan(fine, "1TiB").least_budget_bytes
    assert ct.verify(step.model, ct.plan(whole, least), **step.sample).ok
    for options in ({"inside": False}, {"keep": "up.0"}):
        assert block_names(profiled(step, **options)) == block_names(fine)
    monkeypatch.setattr(profiler, "free_bytes", lambda device: whole.stages[0].saved_bytes)
    assert block_names(profiled(step)) == block_names(fine)  # to be run alone, it would need more


class Deciding(torch_models.Layers):
    """What it does depends on what it computes, so that no part of it can be rebuilt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.mean().item() > 1000 else y


def test_a_model_that_cannot_be_opened_is_not_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = block_names(profiled(torch_models.made("layers-apart")))
    model, x = Deciding().train(), torch.randn(8, 64, 64)
    assert block_names(ct.profile(model, x, loss_fn=torch.sum, passes=1)) == fine

    def refuse(self: Any) -> None:
        """What is no part of the blocks that were found may be refused in them."""
        if self._blocks[0].name == "":
            self._sample.model.up[0].bias.grad = torch.ones(256)
            raise ct.Unsupported("the model")

    monkeypatch.setattr(profiler.option_measure.OptionPass, "run", refuse)
    step = torch_models.made("layers")
    assert block_names(profiled(step)) == fine
    assert all(p.grad is None for p in step.model.parameters())


def test_what_is_named_in_keep_keeps_the_block_that_it_lies_in() -> None:
    profile = profiled(torch_models.resnet(), keep=["layers.1.expand", "layers.3"])
    kept = [stage.name for stage in profile.stages if stage.kind == "block" and stage.keep_reason]
    assert kept == ["layers.1", "layers.3"]


def test_hugging_face_layers_become_blocks() -> None:
    assert block_names(profiled(torch_models.made("gpt2"))) == [f"transformer.h.{i}" for i in range(3)]
    assert block_names(profiled(torch_models.made("t5"))) == [
        "encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"
    ]  # fmt: skip


def test_blocks_named_by_the_user() -> None:
    step = torch_models.resnet()
    assert block_names(profiled(step, blocks="layers.*[02]")) == ["layers.0", "layers.2"]
    assert block_names(profiled(step, blocks=torch_models.Bottleneck)) == [f"layers.{i}" for i in range(6)]
    assert block_names(profiled(step, blocks=step.model.layers)) == [f"layers.{i}" for i in range(6)]
    assert block_names(profiled(step, blocks=[step.model.layers[3], "layers.1"])) == ["layers.1", "layers.3"]
    parts = ["enter", "left", "right", "twice", "twice", "leave"]
    assert block_names(profiled(torch_models.branches(), blocks="*")) == parts  # the model itself has no name
    with pytest.raises(ValueError, match="names no module"):
        profiled(step, blocks="encoder.*")
    with pytest.raises(TypeError, match="blocks must be a name pattern, .* not int"):
        profiled(step, blocks=3)


def test_a_layer_that_runs_twice_is_two_stages_and_one_that_is_skipped_is_none() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in (2, 0, 2):
                x = torch.tanh(self.layers[index](x))
            return x

    profile = ct.profile(Skips(), torch.randn(4, 8), loss_fn=torch.sum, passes=1)
    refs = [(ref.name, ref.call) for ref in profile.refs if ref.is_block]
    assert refs == [("layers.2", 0), ("layers.0", 0), ("layers.2", 1)]


def test_a_layer_that_is_all_there_is_in_its_list_is_found() -> None:
    profile = profiled(torch_models.shared())
    assert [(ref.name, ref.call) for ref in profile.refs if ref.is_block] == [("layers.0", i) for i in range(5)]


class _SkipsAtRandom(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.layers, self.share = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x if torch.rand(()) < self.share else layer(x)
        return x


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_are_skipped_at_random(seed: int) -> None:
    """The sample step is one in which few are, and is the same one in every pass."""
    torch.manual_seed(seed)
    profile = ct.profile(_SkipsAtRandom(0.15), torch.randn(4, 8, requires_grad=True), loss_fn=torch.sum, passes=2)
    assert block_names(profile) == [f"layers.{i}" for i in range(4)]
    profile = ct.profile(_SkipsAtRandom(0.6), torch.randn(4, 8, requires_grad=True), loss_fn=torch.sum, passes=2)
    skipped = {f"layers.{i}" for i in range(4)} - set(block_names(profile))
    assert skipped and all(any(note.startswith(f"{name} did not run") for note in profile.notes) for name in skipped)


def test_a_model_without_parts_is_one_block() -> None:
    profile = ct.profile(nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True), loss_fn=torch.sum, passes=1)
    assert block_names(profile) == [""]


def test_frozen_blocks_are_no_stages() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    model[:2].requires_grad_(False)
    profile = ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, passes=1)
    assert block_names(profile) == ["2", "3", "4"]


# -- what must be kept ---------------------------------------------------------------------------------------


class _Draws(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class _Counts(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class _HidesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.hidden = x.exp()  # autograd does not know of it
        return ctx.hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.hidden


class _Hides(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _HidesFunction.apply(super().forward(x))


class _WritesInput(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


@pytest.mark.parametrize(
    ("kind", "reason"), [(_Draws, "random"), (_Counts, "same result"), (_Hides, "outside what autograd saves")]
)
def test_blocks_that_cannot_be_repeated_are_kept(kind: type[nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), kind(64, 64), nn.Linear(64, 64))
    profile = ct.profile(model, torch.randn(64, 64), loss_fn=torch.sum, passes=1)
    kept = {stage.name: stage.keep_reason for stage in profile.stages if stage.kind == "block" and stage.keep_reason}
    assert list(kept) == ["1"] and reason in kept["1"]
    assert any("1 is always kept" in note for note in profile.notes)
    assert [stage["no_recompute"] for stage in profile.chain()["stages"]][1] is True


class _Borrows(nn.Linear):
    """Runs a module that is part of the model, and not of this."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.borrowed[0](x))


def test_blocks_that_write_buffers_of_others_are_kept() -> None:
    """Only a block's own buffers are put back when it runs again."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = nn.BatchNorm1d(64), nn.LayerNorm(64)
            self.layers = nn.ModuleList([_Borrows(64, 64), _Borrows(64, 64), nn.Linear(64, 64)])
            self.layers[0].borrowed, self.layers[1].borrowed = [self.norm], [self.scale]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Shares(), torch.randn(64, 64)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    kept = {stage.name: stage.keep_reason for stage in profile.stages if stage.kind == "block" and stage.keep_reason}
    assert list(kept) == ["layers.0"] and "buffers of modules that are no part of it (running_mean" in kept["layers.0"]
    assert int(model.norm.num_batches_tracked) == 0
    plan = ct.plan(profile, ct.plan(profile, 2**30).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok


class _Teaching(nn.Module):
    """Its forward moves a teacher after the student, in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.student = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for p in self.teacher.parameters():
            p.data.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                if self.how == "in place":
                    q.mul_(0.9).add_(p, alpha=0.1)
                elif self.how == "past autograd":
                    q.data.lerp_(p, 0.1)
                else:
                    q.data = 0.9 * q + 0.1 * p
            wanted = self.teacher(x)
        return (self.student(x) - wanted).square().mean()


@pytest.mark.parametrize("how", ["in place", "past autograd", "replaced"])
def test_parameters_that_a_forward_writes_are_left_as_they_were(how: str) -> None:
    model, x = _Teaching(how), torch.randn(64, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profile = ct.profile(model, x, passes=1, blocks="student.*")
    plan = ct.plan(profile, ct.plan(profile, 2**30).least_budget_bytes)
    assert not plan.is_plain and ct.verify(model, plan, x).ok
    ct.sweep(profile, 2, model=model, args=x, rounds=1, beside=[])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class _Normalises(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data, dim=1)
        return super().forward(x)


class _Clamps(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("kind", [_Normalises, _Clamps])
def test_blocks_that_write_parameters_are_kept(kind: type[nn.Module]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), layer(64, 64)) for layer in (nn.Linear, kind, nn.Linear)))
    profile = ct.profile(model, torch.randn(64, 64), loss_fn=torch.sum, passes=1, blocks=list(model))
    kept = {stage.name: stage.keep_reason for stage in profile.stages if stage.kind == "block" and stage.keep_reason}
    assert kept == {"1": "writes parameters"}


class _Graph(nn.Module):
    """Layers that gather along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Gathers(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


class _Gathers(nn.Linear):
    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(torch.sparse.mm(edges, super().forward(x)))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_arguments(layout: torch.layout) -> None:
    model, x = _Graph(), torch.randn(256, 32)
    edges = (torch.rand(256, 256) * (torch.rand(256, 256) < 0.02)).to_sparse(layout=layout)
    profile = ct.profile(model, (x, edges), loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, 2**30).least_budget_bytes)
    assert not plan.is_plain and ct.verify(model, plan, (x, edges), loss_fn=torch.sum).ok


def test_nested_arguments_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ragged = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with pytest.raises(ct.Unsupported, match="nested tensor"):
        ct.profile(model, ragged, loss_fn=lambda output: output.values().sum())


class Pushes(nn.Module):
    """A block of an encoder that leaves its result in a list; the list is all that says so, or it is returned."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(32, 32), returns

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x = torch.tanh(self.linear(x))
        skips.append(x)
        return (x[::2], x) if self.returns else (x[::2],)


class Pops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        return torch.tanh(self.linear(torch.cat([x.repeat(2, 1), skips.pop()], -1)))


class Handing(nn.Module):
    """An encoder and a decoder whose blocks hand things on in a list."""

    def __init__(self, returns: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Pushes(returns) for _ in range(3)), *(Pops() for _ in range(3))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, skips) if isinstance(block, Pops) else block(x, skips)[0]
        assert not skips
        return x


def test_what_blocks_leave_in_lists_is_there_for_others() -> None:
    step = torch_models.Step(Handing(), (torch.randn(256, 32),), loss_fn=lambda y: y.square().mean())
    profile = profiled(step)
    blocks = [(stage.name, stage.keep_reason) for stage in profile.stages if stage.kind == "block"]
    assert blocks == [(f"blocks.{i}", "") for i in range(6)]
    top = ct.plan(profile, 2**40)
    for budget in (top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes):
        assert ct.verify(step.model, ct.plan(profile, budget), *step.args, loss_fn=step.loss_fn).ok


def test_blocks_that_leave_in_a_list_what_they_do_not_return_are_refused_by_name() -> None:
    step = torch_models.Step(Handing(returns=False), (torch.randn(8, 32),), loss_fn=torch.sum)
    with pytest.raises(ct.Unsupported, match=r"'blocks.0' puts a tensor that it does not return into a list"):
        profiled(step)


def test_blocks_that_are_passed_an_iterator_are_refused_by_name() -> None:
    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, factors: Iterator[float]) -> torch.Tensor:
            return super().forward(x) * next(factors)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Takes(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factors = iter([0.5, 1.0, 2.0])
            for block in self.blocks:
                x = block(x, factors)
            return x

    with pytest.raises(ct.Unsupported, match=r"'blocks.0' is passed an iterator \(list_iterator\)"):
        profiled(torch_models.Step(Model(), (torch.randn(8, 8),), loss_fn=torch.sum))


def test_blocks_that_are_kept_for_one_reason_share_a_note() -> None:
    model = nn.Sequential(nn.Linear(64, 64), _Counts(64, 64), _Counts(64, 64), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    told = "1 and 2 are always kept: each does not give the same result when it is run again"
    plan = ct.plan(profile, 2**30)
    assert told in profile.notes and told in str(ct.explain(plan))


def test_a_model_that_is_one_block_is_called_so() -> None:
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert [str(ref) for ref in profile.refs] == ["the model", "after the model"] and block_names(profile) == [""]
    report = ct.explain(ct.plan(profile, 2**30))
    assert [row.name for row in report.rows] == ["the model", "after the model"]
    assert ct.verify(model, report.plan, x, loss_fn=torch.sum).ok


def test_a_block_that_writes_its_input_is_no_stage() -> None:
    layers = nn.ModuleList([nn.Linear(64, 64), _WritesInput(64, 64), *(nn.Linear(64, 64) for _ in range(4))])
    profile = ct.profile(_Loop(layers), torch.randn(64, 64), loss_fn=torch.sum, passes=1)
    assert block_names(profile) == ["blocks.0", "blocks.2", "blocks.3", "blocks.4", "blocks.5"]


def test_blocks_kept_on_request() -> None:
    profile = profiled(torch_models.resnet(), keep=["layers.1"])
    assert [s.name for s in profile.stages if s.kind == "block" and s.keep_reason] == ["layers.1"]


# -- what is measured ----------------------------------------------------------------------------------------


def test_a_linear_chain_is_measured_to_the_byte() -> None:
    batch, width = 32, 48
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
    profile = ct.profile(
        model, torch.randn(batch, width), loss_fn=torch.sum, passes=1, blocks=[model[0], model[1], model[2]]
    )
    size, weight = 4 * batch * width, 4 * (width * width + width)
    stage = profile.stages[1]
    assert stage.output_bytes == stage.grad_bytes == size
    assert stage.saved_bytes == size  # Tanh saves its output, Linear only the block's input
    assert stage.weight_grad_bytes == weight
    assert stage.forward_rise_bytes == 2 * size
    assert profile.resident["output of 2"] == size  # the caller holds it
    assert profile.gradient_bytes == profile.resident["parameters"] == 3 * weight
    assert profile.input_bytes == size


def test_identical_blocks_measure_alike() -> None:
    stages = [stage for stage in profiled(torch_models.made("gpt2")).stages if stage.kind == "block"]
    assert len({stage.signature() for stage in stages}) == 1
    assert [stage.left_bytes for stage in stages] == [0, 0, stages[0].output_bytes]  # it stays behind the last block
    assert len({(stage.forward_ns, stage.backward_ns) for stage in stages}) == 1
    assert all(stage.random and stage.forward_ns > 0 and stage.backward_ns > 0 for stage in stages)


def test_batch_norm_is_noticed() -> None:
    stages = {stage.name: stage for stage in profiled(torch_models.cnn()).stages}
    assert set(stages["1-2"].writes_buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert not stages["0"].writes_buffers


def test_what_the_caller_holds_is_counted() -> None:
    step = torch_models.made("gpt2")
    logits = step.model(**step.kwargs).logits
    assert profiled(step).held_bytes == logits.numel() * 4 + 4


def test_running_again_costs_more_than_the_run() -> None:
    """By the mechanism's own time, which grows with what a block saves; kept blocks are free of it."""
    profile = profiled(torch_models.resnet())
    blocks = [stage for stage in profile.stages if stage.kind == "block"]
    assert all(0 < stage.again_ns < 10**8 for stage in blocks)
    chain = profile.chain()
    for stage, described in zip(profile.stages, chain["stages"], strict=True):
        options = described["options"]
        assert options[0]["forward_ns"] + options[0]["backward_ns"] == stage.forward_ns + stage.backward_ns
        assert described["forward_only_ns"] >= stage.again_ns
        if all(measured.backward_ns >= stage.again_ns for measured in (stage, *stage.options)):
            # so that nothing is saved that no backward uses
            assert described["forward_only_ns"] <= min(option["forward_ns"] for option in options)
    known = overhead.cost()
    few, many = (known.of(Block("", (nn.Linear(4, 4),)), count) for count in (2, 40))
    assert 0 < few <= many


def test_bookkeeping_is_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, of which one may wait for a core that something else has, would be in all of its times."""
    threads: set[int] = set()
    timed = overhead._time

    def time_of(run: Callable[[], None]) -> int:
        threads.add(torch.get_num_threads())
        return timed(run)

    monkeypatch.setattr(overhead, "_time", time_of)
    torch.set_num_threads(2)
    overhead.cost.__wrapped__()
    assert threads == {1}
    assert torch.get_num_threads() == 2


def test_nothing_is_saved_to_be_dropped_unused() -> None:
    """Where running again costs something, to save and drop is no way around it."""
    profile = profiled(torch_models.made("llama"))
    times = {"forward_ns": 10**7, "backward_ns": 2 * 10**7}
    for stage in profile.stages:
        for measured in (stage, *stage.options):
            vars(measured).update(times)
        vars(stage).update(forward_only_ns=10**7, again_ns=10**6)
    top = ct.plan(profile, 2**40)
    low, high = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes
    plans = [ct.plan(profile, low + (high - low) * i // 10) for i in range(10)]
    assert any(len(plan.ops) > len(top.ops) for plan in plans)
    assert not any(op[:2] == ["drop", "saved"] for plan in plans for op in plan.ops)


@pytest.mark.parametrize(
    ("changes", "raised", "there"),
    [
        ([], [], []),
        ([3, 0, 2], [3, 0, 2], [0, 0, 0]),  # gradients of parameters
        ([5, 0, -5], [0, 0, 0], [5, 5, 0]),  # one that waits
        ([5, 4, -5, -2], [2, 0, 0, 0], [3, 7, 2, 0]),
        ([-3, 2, 1, -1], [0, 2, 0, 0], [0, 0, 1, 0]),  # what goes first was counted elsewhere
    ],
)
def test_what_waits_in_a_backward_is_told_from_what_stays(
    changes: list[int], raised: list[int], there: list[int]
) -> None:
    assert gradient_lifetimes.parted(changes) == (raised, there)


def test_what_waits_is_counted_by_kind_of_step() -> None:
    """Changes are in the order of the forward; what is there beside a stage's gradient came with the stage behind."""
    stages = [StageMeasure(name, "block") for name in "abc"]
    gradient_lifetimes.count(stages, [-4, 1, 4], [-2, 0, 5])
    assert [(stage.weight_grad_bytes, stage.waiting_bytes) for stage in stages] == [(0, 4), (0, 3), (1, 0)]
    counted = [(stage.accumulated_weight_grad_bytes, stage.accumulated_waiting_bytes) for stage in stages]
    assert counted == [(0, 2), (0, 2), (3, 0)]


def test_a_gradient_that_waits_is_on_its_way_back_with_those_of_the_chain() -> None:
    """That of a sum around the second block waits while it and the first run again and backward."""
    step = torch_models.around("around-one")
    profile = profiled(step)
    size = step.args[0].shape[0] * 256 * 4
    of_loss = 4  # waits, too, as long as the caller's backward runs
    waits = {stage.name: stage.accumulated_waiting_bytes - of_loss for stage in profile.stages}
    assert [waits[f"blocks.{i}"] for i in range(6)] == [0, size, size, size, 0, 0]
    second = profile.stages[1]
    assert profile.chain()["stages"][1]["grad_bytes"] == second.grad_bytes + size + of_loss


def test_outputs_that_a_list_has_until_the_forward_ends_are_held_by_nobody() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = []
            for block in self.blocks:
                made.append(block(x))
                x = x + made[-1]
            return x

    model, x = Listing(), torch.randn(256, 64)
    profile = ct.profile(model, x, loss_fn=lambda y: y.square().mean(), passes=1)
    assert all(stage.also_held_bytes <= stage.output_bytes for stage in profile.stages)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=lambda y: y.square().mean()).ok


def test_a_profile_is_data() -> None:
    profile = profiled(torch_models.branches())
    again = ct.Profile.from_json(profile.to_json())
    assert again == profile and again.chain() == profile.chain()
    with pytest.raises(ValueError, match="version"):
        ct.Profile.from_json({**profile.to_json(), "version": 99})


def test_evaluation_mode_is_pointed_out() -> None:
    step = torch_models.cnn()
    step.model.eval()
    with pytest.warns(UserWarning, match="evaluation mode"):
        profiled(step)


def test_a_loss_outside_is_pointed_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert any("loss_fn" in note for note in ct.profile(model, torch.randn(4, 8), passes=1).notes)


def test_wrappers_that_hook_gradients_are_refused() -> None:
    class DistributedDataParallel(nn.Module):
        pass

    with pytest.raises(ct.Unsupported, match="before it is wrapped"):
        ct.profile(DistributedDataParallel(), torch.randn(1))


def test_a_model_that_recomputes_by_itself_is_refused() -> None:
    step = torch_models.made("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers is renaming it
        step.model.gradient_checkpointing_enable()
    with pytest.raises(ct.Unsupported, match="gradient_checkpointing_disable"):
        profiled(step)


# -- optimizers ----------------------------------------------------------------------------------------------


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


def test_no_warning_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profiled(torch_models.branches())


def test_meter_reads_levels_and_peaks() -> None:
    meter = memory.CpuMeter()
    with meter:
        a = meter.mark()
        kept = torch.empty(1000)
        torch.empty(5000)
        b = meter.mark()
        del kept
        last = torch.empty(250)
        c = meter.mark()
        del last
    assert (meter.level(a), meter.level(b), meter.level(c)) == (0, 4000, 1000)
    assert (meter.peak(a, b), meter.peak(b, c), meter.peak(a, c)) == (24000, 4000, 24000)


def test_a_meter_hides_operators_from_its_events_and_shows_them_to_the_next_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are many more than what a meter looks at, in blocks of many small operations."""
    if not hasattr(torch._C._autograd, "_enable_profiler_legacy"):
        pytest.skip("torch has no profiler of events in order")
    read, kinds = profiler_events._legacy_events, []

    def noted(threads: Any, prefix: str) -> Any:
        kinds.extend(event.kind() for thread in threads for event in thread)
        return read(threads, prefix)

    monkeypatch.setattr(profiler_events, "_legacy_events", noted)
    value = torch.ones(10)
    with memory.CpuMeter() as meter:
        meter.mark()
        for _ in range(20):
            value = value + 1
        meter.mark()
    assert kinds.count("push") == 2 and kinds.count("memory_alloc") >= 40
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as later:
        value + 1
    assert "aten::add" in {event.key for event in later.key_averages()}


def test_a_profile_can_be_profiled() -> None:
    importlib.import_module("torch._dynamo")  # its calls are watched for
    python = cProfile.Profile()
    python.enable()
    profiled(torch_models.branches())
    python.disable()
    assert any(function == "measure_optimizer" for _, _, function in pstats.Stats(python).stats)  # type: ignore[attr-defined]


def test_a_profiler_of_python_that_could_not_go_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._dynamo")
    monkeypatch.setattr(sys, "getprofile", lambda: range(0))  # as that of pyinstrument, which is no function
    with pytest.raises(ct.Unsupported, match=r"a profiler of Python runs in this thread \(builtins\)"):
        profiled(torch_models.branches())
    monkeypatch.undo()
    assert sys.getprofile() is None


def test_stages_of_stages_are_opened_but_blocks_with_small_lists_in_them_are_not() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(torch_models.Bottleneck(32, 8, 1) for _ in range(2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.path(x)

    model = nn.Sequential(nn.Conv2d(3, 32, 3), Stage(), Residual(), Residual())
    profile = ct.profile(model, torch.randn(2, 3, 16, 16), loss_fn=torch.sum, passes=1)
    assert block_names(profile) == ["0", "1.layers.0", "1.layers.1", "2", "3"]


class Leaves(nn.Linear):
    """A block with a loss of its own, left in an attribute."""

    penalty: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.weight.square().mean() + x.mean()
        return super().forward(x).tanh()


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
    waits = [stage.waiting_bytes // x.nbytes for stage in profile.stages[:4]]
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


def test_all_sample_steps_are_the_same_step_of_a_model_that_counts_its_own() -> None:
    class Alternating(nn.Module):
        """Every other step takes more memory, the first one, too."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.steps = nn.Sequential(*(Leaves(32, 32) for _ in range(4))), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.layers(x.sin().exp().tanh() if self.steps % 2 else x)

    model, x = Alternating(), torch.randn(256, 32, requires_grad=True)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    least = ct.plan(profile, 2**40).least_budget_bytes
    report = ct.verify(model, ct.plan(profile, least), x, loss_fn=torch.sum)
    assert report.ok and model.steps == 0


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="torch does not say whose hooks there are",
)
def test_blocks_in_checkpoints_of_the_models_own_are_refused() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = nn.Sequential(Checkpointed(*(Leaves(16, 16) for _ in range(3))), nn.Linear(16, 16), nn.Tanh())
    with pytest.raises(ct.Unsupported, match=r"calls '0\.0' within saved-tensor hooks .* take them out"):
        ct.profile(model, torch.randn(8, 16), loss_fn=torch.sum, blocks="0.*")
    plan = ct.plan(ct.profile(model, torch.randn(8, 16), loss_fn=torch.sum, blocks=model), "1GiB")
    assert ct.verify(model, plan, torch.randn(8, 16), loss_fn=torch.sum).ok


def test_blocks_in_reentrant_checkpoints_of_the_models_own_are_refused() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model = nn.Sequential(nn.Linear(16, 16), Checkpointed(*(Leaves(16, 16) for _ in range(3))), nn.Tanh())
    x = torch.randn(8, 16)
    for blocks in ("1.*", Leaves):
        with pytest.raises(ct.Unsupported, match=r"calls '1\.0' within .* use_reentrant=True: take it out"):
            ct.profile(model, x, loss_fn=torch.sum, blocks=blocks)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, blocks=model), "1GiB")
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok


class Transforming(torch_models.Residual):
    """A block that transforms its activation, or its layers, by torch.func."""

    def __init__(self, transform: str) -> None:
        super().__init__(32)
        self.transform = transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        func = torch.func
        y = super().forward(x)
        if self.transform == "grad":
            return x + func.grad(lambda t: torch.tanh(t).sum())(y)
        if self.transform == "vjp":
            return x + func.vjp(torch.tanh, y)[1](y)[0]
        if self.transform == "jvp":
            return x + func.jvp(torch.tanh, (y,), (y,))[1]
        return x + self.down(func.vmap(self.up)(y))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp"])
def test_derivatives_by_torch_func_inside_a_model_are_refused_by_name(transform: str) -> None:
    model = nn.Sequential(*(Transforming(transform) for _ in range(3)))
    with pytest.raises(ct.Unsupported, match=r"'0' differentiates by torch\.func .* plan the parts of the model"):
        ct.profile(model, torch.randn(8, 32), loss_fn=torch.sum)


def test_layers_that_run_in_vmap_are_part_of_the_block_around_it() -> None:
    model, x = nn.Sequential(*(Transforming("vmap") for _ in range(3))), torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_blocks_that_run_in_vmap_are_refused_by_name() -> None:
    class Mapping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = torch.func.vmap(layer)(x)
            return x

    model = nn.Sequential(nn.Linear(32, 32), Mapping(*(nn.Linear(32, 32) for _ in range(3))), nn.Tanh())
    with pytest.raises(ct.Unsupported, match=r"calls '1\.0' within a transform of torch\.func .*blocks="):
        ct.profile(model, torch.randn(8, 32), loss_fn=torch.sum, blocks="1.*")


def test_blocks_with_weights_that_the_model_computes_are_refused_by_name() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = {name: p * self.scale for name, p in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, weights, (x,))

    model, plain, x = Scaling(), Scaling(), torch.randn(64, 32)
    plain.load_state_dict(model.state_dict())
    with pytest.raises(ct.Unsupported, match=r"calls 'inner\.0' with weights .* plan the module that functional_call"):
        ct.profile(model, x, loss_fn=torch.sum)
    profile = ct.profile(model.inner, x, loss_fn=torch.sum)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    with ct.apply(model.inner, plan):
        for one in (model, plain):
            torch.manual_seed(0)
            one(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class CheckpointInside(torch_models.Residual):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_blocks_are_part_of_them(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointInside, "reentrant", reentrant)
    model, x = nn.Sequential(*(CheckpointInside(32) for _ in range(4))), torch.randn(64, 32, requires_grad=True)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    least = ct.plan(profile, 2**40).least_budget_bytes
    plan = ct.plan(profile, least)
    assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_outputs_without_gradients_are_refused_with_what_may_take_them() -> None:
    model = nn.Sequential(*(CheckpointInside(32) for _ in range(2)))
    for loss_fn in (None, torch.sum):
        with pytest.raises(ValueError, match=r"output does not require gradients.* use_reentrant=False does"):
            ct.profile(model, torch.randn(8, 32), loss_fn=loss_fn)


def test_what_a_backward_cannot_rebuild_is_no_option_even_if_the_memory_looks_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The LSTM of oneDNN returns memory that only its backward reads, never quite written; none where there is none."""
    monkeypatch.setattr(option_proofs, "_same", lambda first, second: True)
    profile = profiled(torch_models.recurrent())
    assert not any("rnn" in option.rebuilds for stage in profile.stages for option in stage.options)


def test_modules_with_parts_are_not_merged_although_nothing_saves_what_lies_between_them() -> None:
    class Shifted(torch_models.Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - 1)

    model = nn.Sequential(*(Shifted() for _ in range(4)))
    for _ in range(3):
        assert block_names(ct.profile(model, torch.randn(32, 64), loss_fn=torch.sum, passes=1)) == ["0", "1", "2", "3"]


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


def test_a_profile_within_a_cache_of_weights_is_refused() -> None:
    """It would take every weight to be there already."""
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2)))
    with nn.utils.parametrize.cached(), pytest.raises(ct.Unsupported, match=r"cached\(\) span the model's forward"):
        ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum)
    ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, passes=1)


def test_a_block_that_descends_in_its_own_forward_is_kept() -> None:
    class Descending(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(super().forward(inner).square().sum(), inner)
            return super().forward(x - gradient)

    model, x = nn.Sequential(nn.Linear(8, 8), Descending(8, 8)), torch.randn(4, 8)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert [stage.keep_reason for stage in profile.stages[:2]] == ["", "takes gradients in its own forward"]
    assert ct.verify(model, ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes), x, loss_fn=torch.sum).ok


# -- random states -------------------------------------------------------------------------------------------

COPIES = "random states and buffers to replay"


@pytest.mark.parametrize(("drawing", "states"), [((), 1), ((0, 1, 2, 3), 4), ((1,), 2), ((0, 3), 2)])
def test_blocks_between_two_draws_share_a_random_state(drawing: tuple[int, ...], states: int) -> None:
    def block(index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5) if index in drawing else nn.Tanh(), nn.Linear(8, 8))

    model = nn.Sequential(*map(block, range(4)))
    profile = ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, blocks=list(model), passes=1)
    assert len(block_names(profile)) == 4
    one_more = profiler.RANDOM_STATE_BYTES  # while a block runs again
    assert profile.resident[COPIES] == states * profiler.RANDOM_STATE_BYTES + one_more


def test_the_state_before_a_block_that_is_kept_counts_for_the_next_one() -> None:
    model = nn.Sequential(nn.Dropout(0.5), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x, blocks = torch.randn(4, 8), list(model)[1:]
    profile = ct.profile(model, x, loss_fn=torch.sum, blocks=blocks, keep=[model[1]], passes=1)
    assert profile.resident[COPIES] == 2 * profiler.RANDOM_STATE_BYTES


# -- threads -------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """The second weight may be one that others have, too."""

    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 64, bias=False)
        self.down.weight = self.down.weight if shared is None else shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(self.up(x)))


def test_autocasts_copies_are_told_with_who_makes_and_who_saves_them() -> None:
    """By each stage as if it were the first; autocast keeps none of what is frozen."""
    first = Pair()
    blocks = [first, Pair(first.down.weight), nn.Linear(64, 64)]
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sequential(*blocks))
    first.up.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        loss_fn = lambda y: y.float().square().mean()  # noqa: E731
        profile = ct.profile(model, torch.randn(16, 64), loss_fn=loss_fn, blocks=blocks, passes=1)
    found = [(stage.made_copies, [name for name in stage.saved_copies if name]) for stage in profile.stages]
    matrix = 64 * 32 * 2
    assert found == [
        ({"0.weight": 2 * matrix}, []),
        ({"1.0.up.bias": 64, "1.0.down.weight": matrix}, ["1.0.down.weight"]),
        (
            {"1.1.up.bias": 64, "1.1.up.weight": matrix, "1.0.down.weight": matrix},
            ["1.1.up.weight", "1.0.down.weight"],
        ),
        ({"1.2.bias": 128, "1.2.weight": 2 * matrix}, ["1.2.weight"]),
        ({}, []),
    ]
    assert profile.stages[1].saved_count == len(profile.stages[1].saved_copies)
    activations = 16 * (32 + 64) * 2
    for stage in profile.stages[1:3]:  # also the one behind what makes copies outside of blocks
        assert 0 <= stage.saved_bytes - 2 * matrix - activations < 64


def test_threads_take_turns_to_profile() -> None:
    """They share random generators, and the collector."""
    runs: list[str] = []

    class Slow(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(self.name)
            time.sleep(0.002)  # so that others come in between if they can
            return self.layers(x)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        models = [Slow(name) for name in "abc"]
        made = [pool.submit(ct.profile, m, torch.randn(4, 8), loss_fn=torch.sum, passes=1) for m in models]
        profiles = [each.result() for each in made]
    assert all(block_names(profile) for profile in profiles)
    assert len([name for name, _ in itertools.groupby(runs)]) == 3


@pytest.mark.parametrize("name", ["validation", "training", "_modules"])
def test_what_a_run_replaces_under_a_name_that_was_there_is_not_added(name: str) -> None:
    """Also where dicts of the user's have names that modules have for attributes of their own."""
    module = torch.nn.Linear(2, 2)
    module.kept = {name: {"loss": torch.ones(3)}}
    beside = Beside([module])
    module.kept[name]["loss"] = torch.ones(3)  # type: ignore[index, assignment]
    assert beside.added() == []
    module.other = {name: torch.ones(3)}
    assert len(beside.added()) == 1


def test_models_in_ddp_with_a_static_graph_are_refused(tmp_path: Path) -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8)
    with executor_support.group_of_one(tmp_path):
        wrapped = nn.parallel.DistributedDataParallel(model, static_graph=True)
        with pytest.raises(ct.Unsupported, match="plan before it is wrapped"):
            ct.profile(model, x, loss_fn=torch.sum)
        del wrapped
        ct.profile(model, x, loss_fn=torch.sum)


def test_a_frozen_block_whose_hook_makes_its_output_require_gradients_is_profiled() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(16) for _ in range(3)), nn.Linear(16, 4)), torch.randn(32, 16)
    model[:3].requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, output: output.requires_grad_())
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok


# -- parts that stand in several places ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.GELU(), nn.Dropout(0.1), nn.LeakyReLU(inplace=True)]
)
@pytest.mark.parametrize("around", [lambda *layers: layers, lambda *layers: map(nn.Sequential, layers)])
def test_an_activation_that_all_layers_share_belongs_to_each(activation: nn.Module, around: Any) -> None:
    layers = [nn.Linear(64, 64) for _ in range(4)]
    if around() == ():
        model = nn.Sequential(*(part for layer in layers for part in (layer, activation)))
    else:
        model = nn.Sequential(*(nn.Sequential(layer, activation, nn.Linear(64, 64)) for layer in layers))
    x = torch.randn(128, 64)
    profile = ct.profile(model, x, loss_fn=lambda y: y.square().mean(), passes=1)
    top = ct.plan(profile, 2**40)
    for budget in (top.least_budget_bytes, 2**40):
        assert ct.verify(model, ct.plan(profile, budget), x, loss_fn=lambda y: y.square().mean()).ok


def test_a_shared_child_that_begins_two_groups_begins_none() -> None:
    shared, x = nn.Dropout(0.1), torch.randn(64, 16)
    model = nn.Sequential(
        shared, nn.ReLU(inplace=True), nn.Linear(16, 16), shared, nn.ReLU(inplace=True), nn.Linear(16, 16)
    )
    profile = ct.profile(model, x, loss_fn=lambda y: y.square().mean(), passes=1, blocks="*")
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=lambda y: y.square().mean()).ok


def test_children_may_be_named_as_slices_are() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({f"{i}-{i + 1}": nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for i in range(3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x.square().mean()

    model, x = Named(), torch.randn(64, 16)
    profile = ct.profile(model, x, passes=1, blocks="layers.*")
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x).ok


# -- what is passed, and what a loss has at hand -------------------------------------------------------------


TARGET = torch.randn(256, 64, 8)


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[..., None] - target).square().mean()


class Holding:
    def __init__(self) -> None:
        self.target = TARGET

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return distance(output, self.target)

    def method(self, output: torch.Tensor) -> torch.Tensor:
        return distance(output, self.target)


class HoldingModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("target", TARGET)

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return distance(output, self.target)


@pytest.mark.parametrize(
    "loss_fn",
    [
        functools.partial(distance, target=TARGET),
        lambda output: distance(output, TARGET),
        lambda output, target=TARGET: distance(output, target),
        (lambda target: lambda output: distance(output, target))(TARGET),
        Holding(),
        Holding().method,
        HoldingModule(),
    ],
    ids=["partial", "global", "default", "closure", "object", "method", "module"],
)
def test_targets_are_counted_wherever_a_loss_has_them(loss_fn: Callable[[Any], torch.Tensor]) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(256, 64)
    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    assert profile.input_bytes == memory.unique_bytes([x, TARGET])


@dataclasses.dataclass
class Context:
    scale: float
    later: Any = dataclasses.field(init=False)
    parent: Any = None


class Contextual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x))) * context.scale


class WithContext(nn.Module):
    def __init__(self, holds_itself: bool) -> None:
        super().__init__()
        self.layers, self.holds_itself = nn.ModuleList(Contextual() for _ in range(3)), holds_itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = Context(2.0)
        context.parent = context if self.holds_itself else None
        for layer in self.layers:
            x = layer(x, context)
        return x.square().mean()


def test_what_is_passed_may_have_fields_that_are_set_later_but_not_itself() -> None:
    x = torch.randn(16, 8)
    model = WithContext(False)
    profile = ct.profile(model, x, passes=1)
    assert ct.verify(model, ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes), x).ok
    with pytest.raises(ct.Unsupported, match="holds itself, directly or through others"):
        ct.profile(WithContext(True), x, passes=1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_without_a_shape_are_refused_by_name() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.nested.as_nested_tensor([x[:10], x[10:]], layout=torch.strided)
            return x + torch.cat(list(self.outer(torch.relu(self.inner(rows))).unbind()))

    with pytest.raises(ct.Unsupported, match=r"nested tensor of torch\.strided layout"):
        ct.profile(nn.Sequential(Ragged(), Ragged()), torch.randn(32, 8), loss_fn=torch.sum, passes=1)


def test_buffers_that_are_no_numbers_are_not_taken_to_be_written() -> None:
    class Unset(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("since", torch.tensor(float("nan")))

    profile = ct.profile(nn.Sequential(Unset(), Unset()), torch.randn(4, 8), loss_fn=torch.sum, blocks=Unset, passes=1)
    assert not any(stage.writes_buffers for stage in profile.stages)


def test_half_of_a_pair_of_numbers_counts_as_drawn() -> None:
    """NumPy makes normal numbers in pairs, and its state is the same but for the second one."""
    numpy = pytest.importorskip("numpy")

    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(numpy.random.randn())

    numpy.random.seed(0)
    numpy.random.randn()
    profile = ct.profile(nn.Sequential(Drawing(8, 8)), torch.randn(4, 8), loss_fn=torch.sum, blocks=Drawing, passes=1)
    assert "numpy" in profile.stages[0].keep_reason


@pytest.mark.parametrize("seed", range(4))
def test_branches_that_are_dropped_at_random_are_measured_where_they_run(seed: int) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.rand(()) < 0.5 else x + self.down(torch.tanh(self.up(x)))

    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(32, 32), *(Dropped() for _ in range(8))), torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    ran = sum(stage.saved_bytes >= 64 * 128 * 4 for stage in profile.stages)
    told = [note for note in profile.notes if "ran without a part that others of its class ran" in note]
    assert ran >= 6 and len(told) == (ran < 8)
