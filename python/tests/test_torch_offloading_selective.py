"""Blocks of which a part is kept, and that part offloads: bit for bit, in the plan's order, within both budgets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import memory
from cairn.torch.planning.offload_plans import without_transfers_of
from cairn.torch.profiler import RANDOM_STATE_BYTES
from executor_support import Op, backward, differing, drop, expected_runs, train
from offloading_support import CPU, FAST, MIB, by_chance, carried_out, copies, offload, prefetch, trace_of
from selective_support import options_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch_models import ALL

WIDTH, ROWS = 16, 64
WAYS = 4  # in which blocks are saved: as many as there are however long operations take


class Mlp(nn.Module):
    """Random masks, an activation of several cheap operations, and products that are dear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def act(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(x + 0.04 * x.pow(3)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.dropout(self.act(self.up(self.norm(x))))))


class Batch(Mlp):
    """Buffers that every run writes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(4 * WIDTH)

    def act(self, x: Tensor) -> Tensor:
        return F.relu(self.batch(x), inplace=True)


class Chunks(nn.Module):
    """Tensors that are parts of one: what is kept of it is where others are found."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.enter(x).chunk(3, -1)
        return x + self.leave(torch.tanh(q * k) * v.sigmoid())


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def loss_of(model: nn.Module) -> Tensor:
    return mean_square(model(X))


def net(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return Net(layer)


@functools.cache
def profile_of(layer: Callable[[], nn.Module]) -> ct.Profile:
    return ct.profile(net(layer), X, loss_fn=mean_square, passes=1)


def offloading(option: int) -> list[Op]:
    """Blocks 1 to 3 run by an option. What they save is offloaded after the next block, prefetched one block early."""
    ops: list[Op] = [("forward_save", 1, option), offload("saved", 1)]
    for stage in (2, 3):
        ops += [("forward_save", stage, option), drop("saved", stage - 1), offload("saved", stage)]
    ops += [("forward_save", 4, 0), drop("saved", 3), ("forward_save", 5, 0), backward(5)]
    for stage in (4, 3, 2, 1):
        ops += [prefetch("saved", stage - 1)] if stage > 1 else []
        ops += [backward(stage)]
    return ops


# -- lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [Mlp, Batch])
@pytest.mark.parametrize("option", [1, WAYS - 1])
def test_what_a_part_keeps_are_offloaded(layer: Callable[[], nn.Module], option: int) -> None:
    stages = profile_of(layer).refs
    plain, other = net(layer), net(layer)
    ops = offloading(option)
    with carried_out(other, stages, ops, ways=WAYS, selective=options_of(profile_of(layer))) as (
        executor,
        _,
        plan_tier,
    ):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert executor.trace == expected_runs(stages, ops)
            assert trace_of(plan_tier) == copies(ops)
            assert not executor.notes


def test_parts_of_one_tensor_are_offloaded_with_all_of_it() -> None:
    """As a view of what is kept reads what lies beside that, too."""
    stages, selective = profile_of(Chunks).refs, options_of(profile_of(Chunks))
    ways = min(len(each.decisions) for each in selective.values())
    plain, other = net(Chunks), net(Chunks)
    for option in range(1, ways):
        ops = offloading(option)
        with carried_out(other, stages, ops, ways=ways, selective=selective) as (executor, _, plan_tier):
            for step in range(2):
                assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
                assert executor.trace == expected_runs(stages, ops)
                assert trace_of(plan_tier) == copies(ops)
                assert not executor.notes


@pytest.mark.parametrize("layer", [Mlp, Batch])
@pytest.mark.parametrize("seed", range(16))
def test_any_list_that_the_simulator_accepts(layer: Callable[[], nn.Module], seed: int) -> None:
    stages = profile_of(layer).refs
    ops = by_chance(seed, stages, WAYS)
    plain, other = net(layer), net(layer)
    with carried_out(other, stages, ops, ways=WAYS, selective=options_of(profile_of(layer))) as (
        executor,
        _,
        _,
    ):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert executor.trace == expected_runs(stages, ops)
            assert not executor.notes


def test_the_lists_by_chance_send_parts_away() -> None:
    lists = [by_chance(seed, profile_of(Mlp).refs, WAYS) for seed in range(16)]
    assert sum(_sends_parts(ops) for ops in lists) > 8


def _sends_parts(ops: list[Op]) -> int:
    """Copies out of what was saved by an option other than keeping everything, and that come back."""
    options: dict[int, int] = {}
    sent = 0
    for position, op in enumerate(ops):
        if op[0] == "forward_save":
            options[op[1]] = op[2]
        elif op[:2] == ("offload", "saved") and options[op[2]]:
            sent += prefetch("saved", op[2]) in ops[position:]
    return sent


def test_what_a_part_keeps_is_freed_while_it_is_away() -> None:
    """At the turn only the last block's saved tensors are there, whatever the others kept."""
    stages = profile_of(Mlp).refs
    other = net(Mlp)
    kept: dict[str, int] = {}
    stays = [op for op in offloading(1) if op[0] not in ("offload", "drop", "prefetch")]
    for name, ops in (("away", offloading(1)), ("there", stays)):
        with carried_out(other, stages, ops, ways=WAYS, budget=8 * MIB, selective=options_of(profile_of(Mlp))):
            loss_of(other).backward()
            other.zero_grad()
            meter = memory.meter_for(CPU)
            with meter:
                first = meter.mark()
                loss = loss_of(other)
                last = meter.mark()
            kept[name] = meter.level(last) - meter.level(first)
            loss.backward()
            other.zero_grad()
    # blocks share random states, and those of steps that need none are not there
    step_transfers = [
        s.options[1].offloadable_bytes - RANDOM_STATE_BYTES * len(s.draws) for s in profile_of(Mlp).stages[:3]
    ]
    assert kept["there"] - kept["away"] >= sum(step_transfers)


def test_a_graph_that_is_kept_and_parts_that_are_offloaded() -> None:
    stages = profile_of(Mlp).refs
    plain, other = net(Mlp), net(Mlp)

    def twice(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        loss = loss_of(model)
        found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=again) for again in (True, False)]
        return [grad for grads in found for grad in grads]

    with carried_out(other, stages, offloading(WAYS - 1), ways=WAYS, selective=options_of(profile_of(Mlp))):
        for _ in range(2):
            assert all(map(torch.equal, twice(plain), twice(other)))


def test_a_kept_tensor_that_is_changed_in_place_while_it_is_away_is_an_error_as_ever() -> None:
    stages = profile_of(Mlp).refs
    other = net(Mlp)
    ops: list[Op] = [op for op in offloading(0) if op[1:] != ("saved", 3)]
    with carried_out(other, stages, ops, ways=WAYS, selective=options_of(profile_of(Mlp))):
        seen: list[Tensor] = []
        hook = other.layers[0].down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        loss = loss_of(other)
        hook.remove()
        with torch.no_grad():
            seen[0].add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


@pytest.mark.parametrize("option", [0, 1])
def test_parts_that_cannot_be_offloaded_are_taken_out_of_a_list(option: int) -> None:
    ops = offloading(1)
    stays = without_transfers_of(frozenset({("saved", 2, option)}), ops)
    assert any(op[1:] == ("saved", 2) for op in stays) == (option == 0)
    assert any(op[1:] == ("saved", 1) for op in stays)


# -- plans ---------------------------------------------------------------------------------------------------


def overhead_of(measured: ct.Profile, budget: int, **options: Any) -> float | None:
    try:
        return ct.plan(measured, budget, **options).overhead
    except ct.InfeasibleBudget:
        return None


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "resnet"])
def test_parts_and_transfers_are_planned_together(name: str) -> None:
    """Plans are exact, within both budgets, in order; no slower than either alone, and faster somewhere."""
    torch.manual_seed(0)
    step = ALL[name]()
    measured = ct.profile(step.model, **step.sample, passes=1)
    gains = []
    for point in ct.sweep(measured, 5, host_budget="1GiB", link=FAST)[:-1]:
        budget = point.budget_bytes
        made = ct.plan(measured, budget, host_budget="1GiB", link=FAST)
        alone = [
            overhead_of(measured, budget),
            overhead_of(measured.without_options(), budget, host_budget="1GiB", link=FAST),
        ]
        gains.append(min(found for found in (*alone, float("inf")) if found is not None) - made.overhead)
        found = ct.verify(step.model, made, **step.sample)
        assert found.ok
        assert found.accumulated.peak_bytes <= made.accumulated_peak_bytes + 64 * 1024
        if made.offloads:
            with ct.apply(step.model, made) as handle:
                step.loss().backward()
                assert trace_of(handle.executor.plan_tier) == copies(made.ops)
                assert not handle.executor.notes
            step.model.zero_grad()
    assert max(gains) > 0


def test_a_plan_of_parts_that_are_offloaded_is_data(tmp_path: Any) -> None:
    torch.manual_seed(0)
    step = ALL["gpt2"]()
    measured = ct.profile(step.model, **step.sample, passes=1)
    plans = [
        ct.plan(measured, point.budget_bytes, host_budget="1GiB", link=FAST)
        for point in ct.sweep(measured, 6, host_budget="1GiB", link=FAST)
    ]
    made = next(plan for plan in plans if plan.offloads and plan.selective)
    made.save(tmp_path / "plan.json")
    again = ct.Plan.load(tmp_path / "plan.json")
    assert again.hash == made.hash
    assert again.transfer_plan == made.transfer_plan
    assert ct.verify(step.model, again, **step.sample).ok
    assert "offloaded" in str(ct.explain(made))


def test_options_that_are_not_offloaded_whole_stay() -> None:
    """A profile in which it is unknown what options move, as older ones are: they may be kept, but are not sent."""
    torch.manual_seed(0)
    step = ALL["llama"]()
    measured = ct.profile(step.model, **step.sample, passes=1)
    stages = tuple(
        dataclasses.replace(s, options=[dataclasses.replace(o, offloadable_bytes=0) for o in s.options])
        for s in measured.stages
    )
    unknown = dataclasses.replace(measured, stages=stages)
    for point in ct.sweep(unknown, 4, host_budget="1GiB", link=FAST)[:-1]:
        made = ct.plan(unknown, point.budget_bytes, host_budget="1GiB", link=FAST)
        assert not _sends_parts([tuple(op) for op in made.ops])
        assert ct.verify(step.model, made, **step.sample).ok
