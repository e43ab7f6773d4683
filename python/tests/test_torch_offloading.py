"""Steps with values that are offloaded and fetched back: bit for bit, in the plan's order, within both budgets."""

from __future__ import annotations

from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.offloading.transfers import group_bytes
from cairn.torch.runtime.executor import Executor
from cairn.torch.runtime.step_transfers import StepTransfers
from executor_support import blocks, differing, expected_runs, train
from offloading_plans_support import (
    STAGES,
    X,
    loss_of,
    network,
    tier_fixture,  # noqa: F401
)
from offloading_support import FAST, by_chance, carried_out, copies, inputs_offloaded, offloading, trace_of
from torch import Tensor, nn


class SeedElsewhere(torch.autograd.Function):
    """Saves a tensor of another device as well, as attention on CUDA saves the seed of its dropout on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.empty((), dtype=torch.long, device="meta"))
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, seed = ctx.saved_tensors
        assert seed.is_meta
        return 2 * x * grad


class Seeded(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(SeedElsewhere.apply(self.up(x)))


def seeded_network(width: int = 32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Seeded(width) for _ in range(5)))


def test_what_is_saved_on_another_device_stays_there() -> None:
    plain, other = seeded_network(), seeded_network()
    with carried_out(other, STAGES, offloading(STAGES)) as (executor, transfer_plan, plan_tier):
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert trace_of(plan_tier) == copies(transfer_plan.ops)
            assert not executor.notes


def test_blocks_that_save_something_on_another_device_can_be_offloaded() -> None:
    model = seeded_network(128)
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    profile = ct.profile(model, x, loss_fn=lambda y: y.square().mean(), passes=1)
    assert all(
        stage.saved_is_offloadable() for stage in profile.stages[:4]
    )  # the loss reads what the last one returned


@pytest.mark.parametrize("make", [offloading, inputs_offloaded])
def test_a_step_is_the_plain_one_and_copies_start_in_the_order_of_the_list(make: Any, tier: str) -> None:
    plain, other = network(), network()
    ops = make(STAGES)
    with carried_out(other, STAGES, ops, tier) as (executor, transfer_plan, plan_tier):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert executor.trace == expected_runs(STAGES, ops)
            assert trace_of(plan_tier) == copies(ops) == copies(transfer_plan.ops)
            assert not executor.notes


@pytest.mark.parametrize("seed", range(24))
def test_any_list_that_the_simulator_accepts(seed: int) -> None:
    ops = by_chance(seed, STAGES)
    plain, other = network(), network()
    with carried_out(other, STAGES, ops) as (executor, transfer_plan, _):
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes
    assert sorted(map(str, transfer_plan.ops)) == sorted(map(str, ops))
    assert copies(transfer_plan.ops) == copies(ops)


def test_the_lists_by_chance_are_offloaded() -> None:
    lists = [by_chance(seed, STAGES) for seed in range(24)]
    assert sum(len(copies(ops)) > 3 for ops in lists) > 12
    assert any(op[0] == "prefetch" and op[1] == "output" for ops in lists for op in ops)


class Handing(nn.Module):
    """Returns what is added to every layer beside its result, as layers of T5 do."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(rows, 2 * width))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.scale * 2 if bias is None else bias
        return x + self.down(nn.functional.gelu(self.up(x) + bias)), bias


class Handed(nn.Module):
    """The bias is made by the first layer, or between layers."""

    def __init__(self, width: int = 32, rows: int = 16, by_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.by_first = nn.ModuleList(Handing(width, rows) for _ in range(5)), by_first
        self.bias = nn.Parameter(torch.ones(rows, 2 * width))

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.by_first else self.bias * 2
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


HANDED = tuple(blocks(*(f"layers.{i}" for i in range(5))))


@pytest.mark.parametrize("by_first", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_lists_by_chance_where_blocks_hand_a_value_through(seed: int, by_first: bool) -> None:
    ops = by_chance(seed, HANDED)
    plain, other = Handed(by_first=by_first), Handed(by_first=by_first)
    with carried_out(other, HANDED, ops) as (executor, _, _):
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes


def test_what_a_block_was_passed_stays_where_its_output_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = StepTransfers.offload

    def noting(step_transfers: StepTransfers, position: int, value: Any, tensors: list[Tensor]) -> bool:
        sent.append(group_bytes(tensors))
        return send(step_transfers, position, value, tensors)

    monkeypatch.setattr(StepTransfers, "offload", noting)
    model = Handed()
    with carried_out(model, HANDED, inputs_offloaded(HANDED)):
        train(model, loss_of)
    assert sent == [X.nbytes] * 3


@pytest.mark.parametrize("by_first", [False, True])
def test_plans_of_models_whose_blocks_hand_a_value_through(by_first: bool) -> None:
    model, x = Handed(64, 48, by_first), torch.randn(16, 48, 64, generator=torch.Generator().manual_seed(0))
    step = {"args": x, "loss_fn": lambda y: y.square().mean()}
    measured = ct.profile(model, **step, passes=1)
    points = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)
    offloads = 0
    for point in points[:-1]:
        made = ct.plan(measured, point.budget_bytes, host_budget="1GiB", link=FAST)
        assert ct.verify(model, made, **step).ok
        offloads += made.offloads
        with ct.apply(model, made) as handle:
            step["loss_fn"](model(x)).backward()
            assert not handle.executor.notes
    assert offloads


def test_no_stage_is_left_to_autograd_whose_saved_tensors_are_offloaded() -> None:
    with carried_out(network(), STAGES, offloading(STAGES)) as (executor, _, _):
        program = executor.first.settings.program
        assert program.native[5] is False  # its input is another copy
        assert not any(program.native[1:])


def test_transfers_without_an_itinerary_are_refused() -> None:
    with pytest.raises(ct.Unsupported, match="transfer plan"):
        Executor(network(), STAGES, offloading(STAGES))
