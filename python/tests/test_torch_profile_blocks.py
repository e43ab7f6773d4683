"""Which blocks a profile finds, and which are always kept."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch import profiler
from profile_support import Loop, block_names, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


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
    """What it does depends on what it computes, so that no part of it can be recomputed."""

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
    """Only a block's own buffers are restored when it is recomputed."""

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
    told = "1 and 2 are always kept: each does not give the same result when it is recomputed"
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
    profile = ct.profile(Loop(layers), torch.randn(64, 64), loss_fn=torch.sum, passes=1)
    assert block_names(profile) == ["blocks.0", "blocks.2", "blocks.3", "blocks.4", "blocks.5"]


def test_blocks_kept_on_request() -> None:
    profile = profiled(torch_models.resnet(), keep=["layers.1"])
    assert [s.name for s in profile.stages if s.kind == "block" and s.keep_reason] == ["layers.1"]
