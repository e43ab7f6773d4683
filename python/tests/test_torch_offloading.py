"""Steps with values that are offloaded and fetched back: bit for bit, in the plan's order, within both budgets."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import cairn
import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import budgets
from cairn.torch.base.errors import TierUnavailable, TransferFailed
from cairn.torch.base.stages import StageRef
from cairn.torch.monitor.watched_step import WatchedStep
from cairn.torch.offloading.tiers import FileTier, HostTier
from cairn.torch.offloading.transfers import group_bytes
from cairn.torch.planning.offload_plans import Destination, Offloading, without_transfers_of
from cairn.torch.runtime.executor import COPIES_OF_ANOTHER, Executor
from cairn.torch.runtime.step_transfers import StepTransfers
from cairn.torch.schedule.transfer_plan import peak_with_transfers, traffic_of, transfer_plan_of
from executor_support import backward, blocks, differing, drop, expected_runs, no_collector, save, train
from offloading_support import (
    CPU,
    FAST,
    MIB,
    by_chance,
    carried_out,
    copies,
    discard,
    inputs_offloaded,
    offload,
    offloading,
    prefetch,
    sized,
    trace_of,
)
from torch import Tensor, nn
from torch_models import ALL, ODD, Step


@pytest.fixture(params=["host", "file"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "host" if request.param == "host" else f"file:{tmp_path}"


# -- lists by hand and by chance -----------------------------------------------------------------------------


def network(depth: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)))


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> Tensor:
    return model(X).square().mean()


STAGES = tuple(blocks(*"01234"))


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


# -- the transfer plan -------------------------------------------------------------------------------------------


def test_a_dropped_copy_is_waited_for_where_its_room_is_needed() -> None:
    stages = blocks(*"012")
    ops = [save(1), offload("saved", 1), save(2), drop("saved", 1), save(3), backward(3), prefetch("saved", 1)]
    ops += [backward(2), backward(1), discard("saved", 1)]
    roomy = transfer_plan_of(sized(stages), ops, 100 * MIB)
    assert roomy.waits == {}
    tight = transfer_plan_of(sized(stages), ops, 7 * MIB)  # input, A[2], A[3], two gradients
    assert tight.waits == {4: 1}
    assert peak_with_transfers(sized(stages), tight)[1] == 7 * MIB
    assert peak_with_transfers(sized(stages), roomy)[1] > 7 * MIB


@pytest.mark.parametrize(("budget", "order"), [(7 * MIB, ["wait", "head"]), (8 * MIB, ["head", "wait"])])
def test_what_lies_outside_of_blocks_waits_only_for_what_its_own_room_needs(
    budget: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's forward runs beside a copy for which its backward has to wait."""
    stages, model, seen = [*blocks(*"01"), StageRef("outside", "head")], network(3), []
    ops = [save(1), offload("saved", 1), save(2), drop("saved", 1), save(3), backward(3), prefetch("saved", 1)]
    ops += [backward(2), backward(1), discard("saved", 1)]
    wait = StepTransfers.wait

    def waited(step_transfers: StepTransfers, position: int) -> None:
        seen.extend(["wait"] * (position in step_transfers._transfer_plan.waits))
        wait(step_transfers, position)

    monkeypatch.setattr(StepTransfers, "wait", waited)
    with carried_out(model, stages, ops, budget=budget) as (_, transfer_plan, _):
        assert list(transfer_plan.waits) == [4 if budget == 7 * MIB else 5]
        plain = network(3)
        model[2].register_forward_hook(lambda *_: seen.append("head"))
        assert not differing(train(plain, loss_of, 0), train(model, loss_of, 0))
    assert seen == order


def test_a_copy_that_fails_when_the_forward_has_ended_leaves_the_slower_memory_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages, model, failing = [*blocks(*"01"), StageRef("outside", "head")], network(3), [True]
    ops = [save(1), offload("saved", 1), save(2), drop("saved", 1), save(3), backward(3), prefetch("saved", 1)]
    ops += [backward(2), backward(1), discard("saved", 1)]
    wait = StepTransfers.wait

    def waited(step_transfers: StepTransfers, position: int) -> None:
        if failing and position == 5:
            raise TransferFailed("as if")
        wait(step_transfers, position)

    monkeypatch.setattr(StepTransfers, "wait", waited)
    with carried_out(model, stages, ops, budget=8 * MIB) as (executor, _, _):
        with pytest.raises(TransferFailed) as kept:
            model(X)
        failing.clear()
        assert not differing(train(network(3), loss_of, 0), train(model, loss_of, 0))
        assert not executor.notes, kept


class Between(nn.Module):
    """Something lies outside of blocks, between two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = (nn.Sequential(nn.Tanh(), nn.Linear(32, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).clone() * 2 + 1)


def test_a_list_that_a_process_cannot_put_in_order_is_kept_as_it_is() -> None:
    """The block's output is away when what lies behind it, outside of blocks, has its backward."""
    profile = ct.profile(Between(), X, loss_fn=lambda y: y.square().mean(), blocks=["first", "second"], passes=1)
    assert [ref.is_block for ref in profile.refs] == [True, False, True, False]
    found = Offloading(profile, "step", "accumulated", Destination("host", FAST), "auto", {})
    ops = [save(1), save(2), offload("saved", 1), drop("saved", 1), save(3), save(4), backward(4), backward(3)]
    ops += [save(1), backward(2), backward(1), discard("saved", 1)]
    listed = found._executable(cairn.Schedule.from_ops(found._chain, ops))
    assert listed is not None and [tuple(op)[:2] for op in listed] == [op[:2] for op in ops]


def test_a_prefetch_starts_with_the_computation_before_it_where_both_fit() -> None:
    stages = blocks(*"012")
    ops = [save(1), offload("saved", 1), save(2), drop("saved", 1), save(3), backward(3), prefetch("saved", 1)]
    ops += [backward(2), backward(1), discard("saved", 1)]
    assert transfer_plan_of(sized(stages), ops, 100 * MIB).ops[5:7] == (("prefetch", "saved", 1), ("backward", 3))
    assert transfer_plan_of(sized(stages), ops, 8 * MIB).ops[5:7] == (("backward", 3), ("prefetch", "saved", 1))


@pytest.mark.parametrize("seed", range(12))
def test_places_do_not_overlap_while_copies_live(seed: int) -> None:
    chain = sized(STAGES)
    choose = random.Random(seed)
    for stage in chain["stages"]:
        stage["output_bytes"] = choose.randint(1, 50)
        stage["options"][0]["saved_bytes"] = choose.randint(50, 200)
    ops = by_chance(seed, STAGES)
    transfer_plan = transfer_plan_of(chain, ops, 1 << 50)
    living: dict[Any, Any] = {}
    most = 0
    for position, op in enumerate(transfer_plan.ops):
        if op[0] == "offload":
            place = transfer_plan.places[position]
            assert not any(place.overlaps(other) for other in living.values())
            assert place.offset + place.size <= transfer_plan.slab_bytes
            living[op[1:]] = place
        elif op[0] == "discard":
            del living[op[1:]]
        most = max(most, sum(place.size for place in living.values()))
    assert most == transfer_plan.host_peak_bytes <= transfer_plan.slab_bytes
    problem = cairn.Chain.from_json(json.dumps(chain))
    replay = cairn.simulate(problem, cairn.Schedule.from_ops(problem, ops), None)
    assert replay.host_peak_bytes == transfer_plan.host_peak_bytes


def test_what_must_stay_is_taken_out_of_a_list() -> None:
    ops = offloading(STAGES)
    stays = without_transfers_of(frozenset({("saved", 2, 0)}), ops)
    assert not any(op[1:] == ("saved", 2) for op in stays)
    problem = cairn.Chain.from_json(json.dumps(sized(STAGES)))
    assert cairn.simulate(problem, cairn.Schedule.from_ops(problem, stays), None).valid


# -- loops ---------------------------------------------------------------------------------------------------


def test_several_forwards_before_a_backward() -> None:
    plain, other = network(), network()

    def both(model: nn.Module) -> Tensor:
        return loss_of(model) + 2 * loss_of(model)

    with carried_out(other, STAGES, offloading(STAGES)) as (executor, _, plan_tier):
        assert not differing(train(plain, both), train(other, both))
        assert any("another step" in note for note in executor.notes)
        assert not differing(train(plain, loss_of, 2), train(other, loss_of, 2))
        assert not executor.notes
        assert trace_of(plan_tier) == copies(offloading(STAGES))


def test_a_step_over_its_budget_beside_another_one_is_told_what_helps(vgg: tuple[Step, ct.Profile]) -> None:
    """Planning again would change nothing."""
    step, measured = vgg
    watched = WatchedStep(step.model, ct.plan(measured, "1GiB"), 0, True)
    watched.forward_ended(step.loss(), (), [COPIES_OF_ANOTHER])
    watched.end()
    assert watched.supposed_cause(False) == (
        "another step, whose backward has not ended, has copies in the offload tier: this one keeps its own. Pass all "
        "in one call, or plan a module that calls the model as often"
    )


@pytest.mark.parametrize("make", [offloading, inputs_offloaded])
def test_a_graph_that_is_kept(make: Any) -> None:
    plain, other = network(), network()
    with carried_out(other, STAGES, make(STAGES)):
        for model in (plain, other):
            torch.manual_seed(3)
            loss = loss_of(model)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
        assert not differing(train(plain, loss_of, 2), train(other, loss_of, 2))


def test_double_backward_and_part_of_the_gradients() -> None:
    plain, other = network(), network()
    with carried_out(other, STAGES, offloading(STAGES)):
        found = []
        for model in (plain, other):
            torch.manual_seed(3)
            first = torch.autograd.grad(loss_of(model), list(model[3].parameters()), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), list(model[0].parameters()))
            found.append([*first, *second])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_frozen_blocks_and_backwards_that_do_not_come() -> None:
    plain, other = network(), network()
    for model in (plain, other):
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
    with carried_out(other, STAGES, offloading(STAGES)):
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))


def test_autocast() -> None:
    plain, other = network(), network()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    with carried_out(other, STAGES, offloading(STAGES)):
        for step in range(2):
            assert not differing(train(plain, loss, step), train(other, loss, step))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_next_step_is_sound(where: str) -> None:
    plain, other = network(), network()
    fail = False

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if fail and where == "forward":
                raise ArithmeticError
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            if fail and where == "backward":
                raise ArithmeticError
            return grad

    for model in (plain, other):
        block = model[2]
        block.forward = lambda x, block=block: Failing.apply(nn.Sequential.forward(block, x))
    with carried_out(other, STAGES, offloading(STAGES)) as (executor, _, plan_tier):
        train(other, loss_of)
        fail = True
        with pytest.raises(ArithmeticError):
            train(other, loss_of)
        fail = False
        other.zero_grad()
        assert not differing(train(plain, loss_of, 2), train(other, loss_of, 2))
        assert not executor.notes
        assert trace_of(plan_tier) == copies(offloading(STAGES))


def test_saved_tensors_that_are_changed_in_place_are_an_error_as_ever() -> None:
    class Leaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.leaked = x.exp()
            return self.leaked * 2

    model = nn.Sequential(Leaking(), nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Tanh()))
    stages = blocks(*"012")
    with carried_out(model, stages, offloading(stages)):
        x = X.clone().requires_grad_()
        loss = model(x).sum()
        with torch.no_grad():
            model[0].leaked.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()
        del model[0].leaked  # it has the graph, and the graph has the module


def test_memory_is_flat_and_threads_end() -> None:
    model = network()
    threads = threading.active_count()
    with no_collector():
        with carried_out(model, STAGES, offloading(STAGES)):
            for _ in range(3):
                train(model, loss_of)
            before = sum(type(o) is Tensor for o in gc.get_objects())
            for _ in range(50):
                train(model, loss_of)
            assert sum(type(o) is Tensor for o in gc.get_objects()) == before
            assert threading.active_count() > threads
        assert "forward" not in vars(model)
        assert threading.active_count() == threads


def test_steps_of_several_threads_have_the_slower_memory_one_at_a_time() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(5)))
    parameters = list(model.parameters())
    found: dict[int, Any] = {}
    together = threading.Barrier(2, timeout=60)

    def wait(*_: Any) -> None:
        together.wait()

    def step(number: int) -> None:
        found[number] = torch.autograd.grad(model(X * number).square().mean(), parameters)

    with carried_out(model, STAGES, offloading(STAGES)):
        hooks = [block.register_forward_pre_hook(wait) for block in (model[0], model[4])]
        threads = [threading.Thread(target=step, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for hook in hooks:
            hook.remove()
    assert len(found) == 2
    of_threads = dict(found)
    for number in of_threads:
        step(number)
        assert all(map(torch.equal, of_threads[number], found[number]))


def test_a_step_can_be_finished_after_the_plan_was_removed() -> None:
    plain, other = network(), network()
    torch.manual_seed(0)
    loss_of(plain).backward()
    with carried_out(other, STAGES, offloading(STAGES)):
        torch.manual_seed(0)
        loss = loss_of(other)
    loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


# -- what goes wrong with offload tier ----------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("how", ["error", "short"])
def test_a_failing_copy_is_a_clear_error_and_the_next_step_is_sound(
    direction: str, how: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = network(), network()
    kind = HostTier if tier == "host" else FileTier
    real, fail = getattr(kind, direction), True
    text = "No space left on device" if direction == "write" else "Input/output error"

    def failing(self: Any, offset: int, address: int, count: int) -> None:
        if fail:
            if how == "short":
                real(self, offset, address, count // 2)
            raise OSError(28 if direction == "write" else 5, text)
        real(self, offset, address, count)

    monkeypatch.setattr(kind, direction, failing)
    with carried_out(other, STAGES, offloading(STAGES), tier) as (executor, _, plan_tier):
        with pytest.raises(TransferFailed, match=text):
            train(other, loss_of)
        fail = False
        other.zero_grad()
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes
            assert trace_of(plan_tier) == copies(offloading(STAGES))


def test_a_full_disk_is_an_error_before_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    plain, other = network(), network()
    with carried_out(other, STAGES, offloading(STAGES), f"file:{tmp_path}") as (executor, _, _):
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            with pytest.raises(TierUnavailable, match="No space left"):
                train(other, loss_of)
        assert not differing(train(plain, loss_of, 1), train(other, loss_of, 1))
        assert not executor.notes


# -- plans ---------------------------------------------------------------------------------------------------


def profile_of(step: Step) -> ct.Profile:
    return ct.profile(step.model, **step.sample, inside=False, passes=1)


@pytest.mark.parametrize("name", [*ALL, *ODD])
def test_plans_that_offload_are_exact_and_within_both_budgets(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = {**ALL, **ODD}[name]()
    measured = profile_of(step)
    points = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)
    overheads = [point.overhead for point in points if point.overhead is not None]
    assert len(overheads) == len(points)
    offloads = 0
    for point, tier in zip(points[:-1], ("host", f"file:{tmp_path}", "host"), strict=True):
        made = ct.plan(measured, point.budget_bytes, host_budget="1GiB", link=FAST, tier=tier)
        alone = _overhead_alone(measured, point.budget_bytes)
        assert alone is None or made.overhead <= alone
        found = ct.verify(step.model, made, **step.sample)
        assert found.accumulated.peak_bytes <= made.accumulated_peak_bytes + 64 * 1024
        offloads += made.offloads
        if made.offloads:
            _assert_in_order(step, made)
    assert (
        offloads or name in ODD
    )  # of these little can be offloaded, and whether it pays is a matter of measured times


def _overhead_alone(measured: ct.Profile, budget: int) -> float | None:
    try:
        return ct.plan(measured, budget).overhead
    except ct.InfeasibleBudget:
        return None


def _assert_in_order(step: Step, made: ct.Plan) -> None:
    assert made.transfer_plan is not None
    assert made.transfer_plan.slab_bytes == made.host_bytes <= made.host_budget_bytes
    with ct.apply(step.model, made) as handle:
        for _ in range(2):
            step.loss().backward()
            assert trace_of(handle.executor.plan_tier) == copies(made.ops)
            assert not handle.executor.notes
        transfers = handle.executor.plan_tier.transfers
        assert transfers.tier.capacity_bytes == made.host_bytes
    step.model.zero_grad()


@pytest.fixture(scope="module")
def vgg() -> tuple[Step, ct.Profile]:
    torch.manual_seed(0)
    step = ALL["vgg"]()
    return step, profile_of(step)


def test_without_a_host_budget_nothing_changes(vgg: tuple[Step, ct.Profile]) -> None:
    made = ct.plan(vgg[1], ct.sweep(vgg[1], 3)[0].budget_bytes)
    assert not made.offloads
    assert made.problem.get("machine") is None
    assert made.tier == ""


def test_less_than_recomputation_alone_needs(vgg: tuple[Step, ct.Profile]) -> None:
    """The budget is below the least of recomputation alone, where the model lets values leave."""
    torch.manual_seed(0)
    step = ODD["tabled"]()
    measured = profile_of(step)
    least = ct.sweep(measured, 2, host_budget="1GiB", link=FAST)[0].budget_bytes
    with pytest.raises(ct.InfeasibleBudget) as caught:
        ct.plan(measured, least)
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes > least
    made = ct.plan(measured, least, host_budget="1GiB", link=FAST)
    assert made.offloads
    assert ct.verify(step.model, made, **step.sample).ok
    with pytest.raises(ct.InfeasibleBudget) as caught:
        ct.plan(measured, made.least_budget_bytes - 1, host_budget="1GiB", link=FAST)
    assert caught.value.least_bytes == made.least_budget_bytes


def test_a_plan_holds_wherever_the_model_lies(vgg: tuple[Step, ct.Profile]) -> None:
    """Other processes of a training follow one plan, each on its own device."""
    step, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    made = ct.plan(measured, budget, host_budget="1GiB", link=FAST)
    assert made.offloads
    moved = dataclasses.replace(made, device="cuda:7")
    assert ct.verify(step.model, moved, **step.sample).ok
    with ct.apply(step.model, moved) as handle:
        step.loss().backward()
        assert handle.executor.plan_tier.transfers.device == CPU


def test_no_host_memory_and_one_byte_short(vgg: tuple[Step, ct.Profile]) -> None:
    step, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    assert not ct.plan(measured, budget, host_budget=0, link=FAST).offloads
    made = ct.plan(measured, budget, host_budget="1GiB", link=FAST)
    exact = ct.plan(measured, budget, host_budget=made.host_bytes, link=FAST)
    short = ct.plan(measured, budget, host_budget=made.host_bytes - 1, link=FAST)
    assert exact.host_bytes <= made.host_bytes
    assert short.host_bytes < made.host_bytes
    assert made.step_ns <= exact.step_ns or exact.host_bytes < made.host_bytes
    assert ct.verify(step.model, short, **step.sample).ok


def test_links(vgg: tuple[Step, ct.Profile]) -> None:
    _, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    slow = ct.plan(measured, budget, host_budget="1GiB", link=cairn.Machine(0, 1, 1))
    assert not slow.offloads
    assert ct.plan(measured, budget, host_budget="1GiB", link="20GB/s").offloads
    assert ct.plan(measured, budget, host_budget="1GiB").tier == "host"  # measured
    with pytest.raises(cairn.Error):
        ct.plan(measured, budget, host_budget="1GiB", link="0B/s")
    with pytest.raises(ct.Unsupported, match="file:PATH"):
        ct.plan(measured, budget, host_budget="1GiB", tier="tape")


def test_a_file_larger_than_the_cache_is_measured_without_it(
    vgg: tuple[Step, ct.Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(device: torch.device, tier: str, cached: bool) -> ct.Link:
        asked.append((tier.partition(":")[0], cached))
        return ct.Link(10**9, 10**9, 0, True)

    monkeypatch.setattr("cairn.torch.planning.offload_plans._measured_link", measure)
    free = budgets.free_bytes(CPU)
    for tier, size in (("host", free), (f"file:{tmp_path}", 1 << 20), (f"file:{tmp_path}", free)):
        ct.plan(vgg[1], host_budget=size, tier=tier)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ct.plan(vgg[1], host_budget="auto", tier="file:~/values", link=FAST).budget_bytes > 0
    assert asked == [("host", True), ("file", True), ("file", False)]


def test_copies_that_slow_computing_down_count_in_the_plan_s_time(vgg: tuple[Step, ct.Profile]) -> None:
    _, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    links = [ct.Link(20 * 10**9, 20 * 10**9, 0, True, slowdown) for slowdown in (0.0, 0.5)]
    free, slowed = (ct.plan(measured, budget, host_budget="1GiB", link=link) for link in links)
    assert free.offloads and slowed.offloads
    assert free.transfer_plan is not None
    assert free.problem["machine"] == slowed.problem["machine"]
    replay = cairn.simulate(free.verified.problem, free.verified.schedule, None)
    assert free.step_ns == replay.makespan_ns
    beside = traffic_of(free.problem, free.transfer_plan.ops).busy_ns - (replay.stall_ns or 0)
    assert slowed.step_ns - free.step_ns == max(0, beside) // 3


def test_a_step_under_a_cap_of_the_operating_system(tier: str) -> None:
    """The process gets what the plan says and 4 MiB: the planned step fits, bit for bit, and the plain one does not."""
    program = textwrap.dedent(f"""
        import ctypes, resource, torch
        import cairn.torch as ct
        from torch import nn

        ctypes.CDLL(None).mallopt(-3, 1 << 18)  # what is larger goes back to the system at once
        torch.set_num_threads(1)
        torch.manual_seed(0)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

            def forward(self, x):
                return x + self.down(torch.tanh(self.up(x)).sin())

        model, x = nn.Sequential(*(Block() for _ in range(8))), torch.randn(2048, 128)

        def loss_fn(output):
            return output.square().mean()

        def step():
            model.zero_grad()
            loss_fn(model(x)).backward()
            return [p.grad.clone() for p in model.parameters()]

        expected = step()
        model.zero_grad()
        profile = ct.profile(model, x, loss_fn=loss_fn)
        options = dict(host_budget="1GiB", link="1TB/s")
        budget = ct.sweep(profile, 6, **options)[1].budget_bytes
        plan = ct.plan(profile, budget, tier={tier!r}, **options)
        assert plan.offloads
        with ct.apply(model, plan) as handle:
            step()  # opens the offload tier
            model.zero_grad()
            slab = handle.executor.depot.transfers
            used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
            there = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
            cap = used + plan.created_peak_bytes - there + (4 << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
            assert all(map(torch.equal, step(), expected))
        model.zero_grad()
        try:
            step()
        except RuntimeError:
            print("capped")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "capped\n"), done.stderr


def test_a_plan_is_data(vgg: tuple[Step, ct.Profile], tmp_path: Path) -> None:
    step, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    made = ct.plan(measured, budget, host_budget="1GiB", link=FAST)
    made.save(tmp_path / "plan.json")
    again = ct.Plan.load(tmp_path / "plan.json")
    assert again.hash == made.hash
    assert again.transfer_plan == made.transfer_plan
    assert ct.verify(step.model, again, **step.sample).ok
    text = str(ct.explain(made))
    assert "offloaded" in text
    assert "offload tier" in text
    assert json.loads(json.dumps(ct.explain(made).to_json()))["offloading"]["host_bytes"] == made.host_bytes


def test_the_timeline_shows_the_copies_in_their_lanes(vgg: tuple[Step, ct.Profile]) -> None:
    _, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    made = ct.plan(measured, budget, host_budget="1GiB", link=cairn.Machine(0, "20GB/s", "20GB/s"))
    events = json.loads(cairn.trace(made.verified.problem, made.verified.schedule))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [lanes[event["tid"]] for event in events if event["ph"] == "X"]
    transfers = [name for name, _ in copies(made.ops)]
    assert drawn.count("to host") == transfers.count("offload") > 0
    assert drawn.count("to device") == transfers.count("prefetch") > 0


def test_checkpoint_in_one_call(tier: str) -> None:
    torch.manual_seed(0)
    step = ALL["vgg"]()
    plain = copy.deepcopy(step.model)
    budget = ct.sweep(profile_of(step), 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    ct.checkpoint(step.model, **step.sample, budget=budget, host_budget="1GiB", tier=tier, link=FAST, strict=True)
    assert ct.handle(step.model).plan.offloads
    for seed in range(3):
        torch.manual_seed(seed)
        step.loss().backward()
        torch.manual_seed(seed)
        assert step.loss_fn is not None
        step.loss_fn(plain(*step.args)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(step.model.parameters(), plain.parameters(), strict=True))
    assert ct.report(step.model).measured is not None
    ct.handle(step.model).remove()


def test_checkpoint_sequential_offloads() -> None:
    layers = [nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(4)]
    plain = copy.deepcopy(layers)
    x = torch.randn(256, 64)
    budget = "2MiB"
    ct.checkpoint_sequential(layers, input=x, budget=budget, host_budget="1GiB", link=FAST).sum().backward()
    nn.Sequential(*plain)(x).sum().backward()
    assert torch.equal(layers[0][0].weight.grad, plain[0][0].weight.grad)


def test_steps_of_other_shapes_have_their_own_transfers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)))
    plain = copy.deepcopy(model)

    def loss_fn(output: Tensor) -> Tensor:
        return output.square().mean()

    ct.checkpoint(
        model, torch.randn(64, 64), budget="3500KiB", loss_fn=loss_fn, host_budget="1GiB", link=FAST, inside=False
    )
    for rows in (64, 512, 100, 512):
        x = torch.randn(rows, 64)
        loss_fn(model(x)).backward()
        loss_fn(plain(x)).backward()
        assert not ct.handle(model).executor.notes
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert any(entry.plan.offloads for entry in ct.handle(model).plans)
    ct.handle(model).remove()
