"""Blocks of which a part is kept: whatever a block does selective, a step is bit for bit the plain one."""

from __future__ import annotations

import gc
import itertools
import json
import random
import weakref
from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch import profiler
from cairn.torch.base._compat import StorageRef
from cairn.torch.planning.step_profile import Profile
from cairn.torch.profiling import option_measure, option_proofs
from cairn.torch.selective.recompute import TensorRecompute
from executor_support import (
    Op,
    backward,
    differing,
    drop,
    keep,
    no_collector,
    planned,
    train,
    wild,
)
from selective_blocks import Attention, Batch, Custom, InPlace, Views, assert_same, count_recordings
from selective_support import (
    WIDTH,
    Mlp,
    Net,
    loss_of,
    mean_square,
    net,
    options_of,
    profile_of,
    sample,
    save,
    selectively_planned,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(Mlp):
    """Recomputes a part of its own."""

    def act(self, x: Tensor) -> Tensor:
        return checkpoint(super().act, torch.sin(x), use_reentrant=False)


class Cells(nn.Module):
    """Steps of a cell that writes beside what it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(3):
            state = torch.tanh(self.cell(torch.sin(x), state))
        return x + state


class Tied(Net):
    """Two layers share their weights with a third, and one layer runs twice."""

    def __init__(self) -> None:
        super().__init__(Mlp)
        self.layers[1].up.weight = self.layers[0].up.weight
        self.layers.append(self.layers[2])


LAYERS = [Mlp, InPlace, Batch, Custom, Checkpointed, Views, Attention, Cells]


# -- every option of every kind of block ------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [*LAYERS, Tied], ids=lambda layer: layer.__name__)
def test_every_option_is_the_plain_step(layer: Callable[[], nn.Module]) -> None:
    options = max(len(stage.options) for stage in profile_of(layer).stages)
    assert options > 2, [stage.closed for stage in profile_of(layer).stages]
    for option in range(1, options):
        assert_same(layer, option=option)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_options_trade_bytes_for_time(layer: Callable[[], nn.Module]) -> None:
    profile = profile_of(layer)
    [stage, *_] = [stage for stage in profile.stages if stage.options]
    sizes = [option.saved_bytes for option in stage.options]
    share = stage.saved_bytes / sum(stage.saved_bytes for stage in profile.stages)
    at_most = option_measure.MAX_OPTIONS + option_measure.PARTS * share
    assert sizes == sorted(sizes, reverse=True) and len(sizes) <= at_most + 1
    assert sizes[0] == stage.saved_bytes and sizes[-1] < sizes[0] // 2
    for larger, smaller in itertools.pairwise(stage.options[1:]):  # what is slower and saves more peaks lower
        is_lower = any(
            getattr(larger, f"{when}_rise_bytes") < getattr(smaller, f"{when}_rise_bytes")
            for when in ("forward", "backward", "accumulated_backward")
        )
        assert larger.time_ns <= smaller.time_ns or is_lower


@pytest.mark.parametrize("is_long", [False, True])
def test_what_takes_long_to_recompute_is_timed_once(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recomputed: list[str] = []

    def counted(self: Any, recompute: Any, *others: Any) -> None:
        recomputed.append(recompute.recipe.decisions)
        recompute_all(self, recompute, *others)

    recompute_all = option_proofs.Proofs._recompute_all
    monkeypatch.setattr(option_proofs.Proofs, "_recompute_all", counted)
    monkeypatch.setattr(option_proofs, "LONG_NS", -1 if is_long else 10**18)
    profiler.profile(net(Mlp), sample(), loss_fn=mean_square, passes=1)
    times = {len(list(group)) for _, group in itertools.groupby(recomputed)}
    assert times == {1 if is_long else option_proofs.PROOFS}


def test_what_is_written_behind_autograds_back_is_kept() -> None:
    class Behind(Mlp):
        def act(self, x: Tensor) -> Tensor:
            y = x.sin()
            z = y * x  # saves y
            y.data.add_(1)  # which the backward finds like this
            return torch.tanh(z * z.exp())

    assert max(len(stage.options) for stage in profile_of(Behind).stages) > 1
    assert_same(Behind)


def test_in_place_chains_and_batch_statistics_are_recomputed() -> None:
    for layer, name in ((InPlace, "relu_"), (Batch, "batch_norm"), (Mlp, "tanh"), (Attention, "softmax")):
        [stage, *_] = [stage for stage in profile_of(layer).stages if stage.options]
        assert any(name in option.recomputes for option in stage.options), layer


def test_what_recomputes_noise_is_told_by_a_plain_name() -> None:
    [stage, *_] = [stage for stage in profile_of(Mlp).stages if stage.options]
    recomputed = {name for option in stage.options for name in option.recomputes.split(", ")}
    assert any(name.startswith("noise") for name in recomputed), recomputed


def test_masks_are_kept_as_such() -> None:
    options = next(stage.options for stage in profile_of(Mlp).stages if stage.options)
    assert any("m" in option.decisions for option in options)


def test_random_schedules_with_random_options() -> None:
    found = profile_of(Mlp)
    selective = options_of(found)
    for seed in range(12):
        choose = random.Random(seed)
        ops: list[Op] = []
        for op in wild(found.refs, seed):
            is_open = op[0] == "forward_save" and op[1] in selective
            ops.append(save(op[1], choose.randrange(len(selective[op[1]].decisions))) if is_open else op)
        plain, other = net(), net()
        with planned(other, found.refs, ops, selective=selective) as executor:
            for step in range(2):
                assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
                assert not executor.notes


def test_what_is_dropped_after_it_was_saved_in_part_is_gone() -> None:
    """Nothing that the graph keeps, as the hooks, holds on to what a recompute would have read."""
    found = profile_of(Mlp)
    selective = options_of(found)
    assert sorted(selective) == [2, 3, 4] and len(found.refs) == 5
    least = {stage: len(found.decisions) - 1 for stage, found in selective.items()}
    ops: list[Op] = [
        save(1),
        save(2, least[2]),
        save(3, least[3]),
        keep(4),
        drop("saved", 3),
        drop("saved", 2),
        save(5),
    ]
    ops += [backward(5), keep(2), keep(3), save(4), backward(4), save(3), backward(3), save(2), backward(2)]
    ops.append(backward(1))
    plain, other = net(), net()
    with planned(other, found.refs, ops, selective=selective) as executor:
        for step in range(2):
            loss = loss_of(other)
            assert not any(type(each) is TensorRecompute for each in gc.get_objects()), step
            loss.backward()
            del loss
            for model in (plain, other):
                model.zero_grad()
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes


def test_an_option_of_a_later_run() -> None:
    found = profile_of(Mlp)
    selective, n = options_of(found), len(found.refs)
    opened_stages = sorted(selective)
    first, last = opened_stages[0], opened_stages[-1]
    ops: list[Op] = [keep(s) if s in selective else save(s) for s in range(1, n + 1)]
    for stage in range(n, 0, -1):
        if stage in selective:
            ops += [drop("output", stage)] if stage == last and last == n else []
            ops.append(save(stage, len(selective[stage].decisions) - 1 if stage != first else 1))
        ops.append(backward(stage))
    plain, other = net(), net()
    with planned(other, found.refs, ops, selective=selective) as executor:
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes


# -- blocks that are not opened ---------------------------------------------------------------------------------


class Branch(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.sum() > 0 else torch.sigmoid(x)


class Routed(Mlp):
    def act(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
        return x.index_add(0, chosen, torch.tanh(x[chosen]))


class Reader(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * x.detach().numpy().max().item()


class Counter(Mlp):
    calls = 0

    def act(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(x * 2)


class OwnGenerator(Mlp):
    """What it draws is not recomputed, the rest may be."""

    def act(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
        return torch.tanh(x + noise) * noise


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Branch, "depends on the values of its tensors"),
        (Routed, "depends on the values of its tensors"),
        (Reader, "reads tensors from Python (numpy)"),
        (Counter, "changes the attribute 'calls' of Counter in every run"),
    ],
)
def test_a_block_that_cannot_be_relied_on_is_not_opened(layer: type[nn.Module], reason: str) -> None:
    found = profile_of(layer)
    blocks = [stage for stage in found.stages if stage.kind == "block"]
    assert all(reason in stage.closed and not stage.options for stage in blocks)
    assert any("kept or recomputed as a whole: " in note and reason in note for note in found.notes)


def test_what_a_generator_of_its_own_draws_is_kept() -> None:
    assert_same(OwnGenerator)
    [stage, *_] = [stage for stage in profile_of(OwnGenerator).stages if stage.options]
    assert "rand" not in stage.options[-1].recomputes and "tanh" in stage.options[-1].recomputes


# -- plans --------------------------------------------------------------------------------------------------------


def test_a_plan_opens_blocks_and_is_verified() -> None:
    model = net()
    found = Profile.from_json(json.loads(json.dumps(profile_of(Mlp).to_json())))
    assert found == profile_of(Mlp)
    whole = ct.plan(found, "1GiB", gradients="created", allow=("recompute",))
    middle = (whole.least_budget_bytes + whole.plain_peak_bytes) // 2
    made = ct.Plan.from_json(json.loads(json.dumps(ct.plan(found, middle, gradients="created").to_json())))
    assert made.selective and not made.is_plain
    assert made.overhead <= ct.plan(found, middle, gradients="created", allow=("recompute",)).overhead
    result = ct.verify(model, made, sample(), loss_fn=mean_square)
    error = abs(result.created.peak_bytes - made.created_peak_bytes)
    assert result.ok and error < 0.01 * made.created_peak_bytes + 2 * profiler.RANDOM_STATE_BYTES
    text = str(ct.explain(made))
    assert "option " in text and "recomputes" in text
    with pytest.raises(ValueError, match="allow"):
        ct.plan(found, middle, allow=("inside",))
    assert not ct.plan(found, middle, gradients="created", allow=("recompute",)).selective


def test_never_slower_than_whole_blocks() -> None:
    found = profile_of(Attention)
    whole = ct.sweep(found, 6, allow=("recompute",))
    for point in whole:
        assert ct.plan(found, point.budget_bytes).step_ns <= (point.step_ns or 0)


def test_without_looking_inside() -> None:
    found = profile_of(Mlp, inside=False)
    assert not any(stage.options or stage.closed for stage in found.stages)
    assert all(len(stage["options"]) == 1 for stage in found.chain()["stages"])


def test_a_planned_model_is_freed_with_its_last_reference() -> None:
    model = net()
    with no_collector():
        with selectively_planned(model):
            train(model, loss_of)
            train(model, loss_of, 1)
            layer = weakref.ref(model.layers[1])
            storage = StorageRef(model.layers[1].up.weight)  # type: ignore[union-attr, arg-type]
        del model
        assert layer() is None and not storage.alive()


def test_a_plan_that_is_applied_again_need_not_be_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = net(), net()
    recorded = count_recordings(monkeypatch)
    for step in range(3):
        with selectively_planned(other) as executor:
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes
    assert len(recorded) == 3  # blocks
