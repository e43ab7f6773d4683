"""The order and the places of a plan's transfers."""

from __future__ import annotations

import json
import random
from typing import Any

import cairn
import cairn.torch as ct
import pytest
import torch
from cairn.torch.base.errors import TransferFailed
from cairn.torch.base.stages import StageRef
from cairn.torch.planning.offload_plans import Destination, Offloading, without_transfers_of
from cairn.torch.runtime.step_transfers import StepTransfers
from cairn.torch.schedule.transfer_plan import peak_with_transfers, transfer_plan_of
from executor_support import backward, blocks, differing, drop, save, train
from offloading_plans_support import STAGES, X, loss_of, network
from offloading_support import FAST, MIB, by_chance, carried_out, discard, offload, offloading, prefetch, sized
from torch import Tensor, nn


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
            assert all(place.stop <= other.start or other.stop <= place.start for other in living.values())
            assert place.stop <= transfer_plan.slab_bytes
            living[op[1:]] = place
        elif op[0] == "discard":
            del living[op[1:]]
        most = max(most, sum(map(len, living.values())))
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
