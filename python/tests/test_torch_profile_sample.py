"""Random states, threads, parts that stand in several places, and what a sample passes."""

# ruff: noqa: E402

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import executor_support
import torch_models
from cairn.torch import profiler
from cairn.torch.base import memory
from cairn.torch.profiling.side_outputs import SideOutputs
from profile_support import block_names
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


COPIES = "random states and buffers to replay"


@pytest.mark.parametrize(("drawing", "states"), [((), 1), ((0, 1, 2, 3), 4), ((1,), 2), ((0, 3), 2)])
def test_blocks_between_two_draws_share_a_random_state(drawing: tuple[int, ...], states: int) -> None:
    def block(index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5) if index in drawing else nn.Tanh(), nn.Linear(8, 8))

    model = nn.Sequential(*map(block, range(4)))
    profile = ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, blocks=list(model), passes=1)
    assert len(block_names(profile)) == 4
    one_more = profiler.RANDOM_STATE_BYTES  # while a block is recomputed
    assert profile.resident[COPIES] == states * profiler.RANDOM_STATE_BYTES + one_more


def test_the_state_before_a_block_that_is_kept_counts_for_the_next_one() -> None:
    model = nn.Sequential(nn.Dropout(0.5), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x, blocks = torch.randn(4, 8), list(model)[1:]
    profile = ct.profile(model, x, loss_fn=torch.sum, blocks=blocks, keep=[model[1]], passes=1)
    assert profile.resident[COPIES] == 2 * profiler.RANDOM_STATE_BYTES


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
    side_outputs = SideOutputs([module])
    module.kept[name]["loss"] = torch.ones(3)  # type: ignore[index, assignment]
    assert side_outputs.added() == []
    module.other = {name: torch.ones(3)}
    assert len(side_outputs.added()) == 1


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
