"""What a schedule frees, and when."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.torch.base._compat import StorageRef
from cairn.torch.base.errors import RecomputationError
from cairn.torch.runtime.executor import Executor
from cairn.torch.runtime.step_run import Run
from cairn.torch.selective.saved_tensors import Holder, Lease
from executor_models import STAGES, loss_of, net
from executor_support import (
    Op,
    blocks,
    every_block,
    expected_runs,
    from_input,
    no_collector,
    persistent,
    planned,
    train,
    wild,
)
from torch import Tensor, nn


class Probe(nn.Module):
    """Returns something new each time, saves its input and its output, and reports when it runs."""

    def __init__(self, report: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.report = report
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight)
        self.report(x, y)
        return y


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_alive_that_the_schedule_dropped(seed: int) -> None:
    """At the end of every run of a block, no more copies of blocks' outputs are in memory than by the schedule."""
    stages = blocks(*(str(i) for i in range(6)))
    ops = (wild if seed % 2 else persistent)(stages, seed)
    seen: list[collections.Counter[int]] = []
    storages: list[tuple[int, Any]] = []

    def reporter(stage: int) -> Callable[[Tensor, Tensor], None]:
        def report(x: Tensor, y: Tensor) -> None:
            storages.append((stage, StorageRef(y)))
            seen.append(collections.Counter(number for number, ref in storages[:-1] if ref.alive()))

        return report

    model = nn.Sequential(*(Probe(reporter(stage)) for stage in range(1, 7)))
    with planned(model, stages, ops) as executor:
        model(torch.randn(64)).sum().backward()
    assert executor.trace == expected_runs(stages, ops)
    for alive, resident in zip(seen, resident_before_runs(ops), strict=True):
        assert alive <= resident


def resident_before_runs(ops: list[Op]) -> list[collections.Counter[int]]:
    """By run of a block: how many copies of each stage's output are resident while it runs.

    What the last block returned is the model's own, until the next block has taken it.
    """
    there: set[tuple[str, int]] = set()
    found = []
    furthest = 0
    for op in ops:
        if op[0].startswith("forward"):
            in_forward = 0 < furthest < 6
            found.append(collections.Counter([stage for _, stage in there] + [furthest] * in_forward))
            furthest = max(furthest, op[1])
            there.add(("saved" if op[0] == "forward_save" else "output", op[1]))
            if op[0] == "forward_drop":
                there.remove(("output", op[1] - 1))
        elif op[0] == "backward":
            there -= {("saved", op[1]), ("output", op[1] - 1)}
        else:
            there.remove((op[1], op[2]))
    return found


def executor_objects() -> int:
    return sum(type(thing) in (Run, Holder, Lease) for thing in gc.get_objects())


@pytest.fixture
def others() -> int:
    """What other tests of this process still hold."""
    gc.collect()
    return executor_objects()


def tensor_objects() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("ops", [every_block(STAGES), from_input(STAGES), wild(STAGES, 3)])
def test_fifty_steps_leave_nothing_without_the_collector(ops: list[Op], others: int) -> None:
    model = net()
    with planned(model, STAGES, ops), no_collector():
        train(model, loss_of)
        tensors = tensor_objects()
        for step in range(50):
            train(model, loss_of, step)
        assert executor_objects() == others
        assert tensor_objects() == tensors
        assert gc.collect() == 0


def test_a_backward_that_failed_leaves_nothing(others: int) -> None:
    """Nor does its error, which knows the frame that has the loss."""
    model = net()
    with planned(model, STAGES, from_input(STAGES)), no_collector():
        fail_twice(model)
        assert executor_objects() == others
        assert gc.collect() == 0


def fail_twice(model: nn.Module) -> None:
    loss = loss_of(model)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.add_(1)
    for text in ("modified in place", "an earlier backward of this step failed"):
        try:
            loss.backward(retain_graph=True)
        except RecomputationError as error:
            assert text in str(error)
        else:
            raise AssertionError(text)


def test_forward_without_backward_leaves_nothing(others: int) -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)), no_collector():
        loss = loss_of(model)
        assert executor_objects() > others
        del loss
        assert executor_objects() == others


def test_after_backward_only_the_loss_is_held() -> None:
    model, before = net(), {id(thing) for thing in gc.get_objects() if type(thing) in (Holder, Lease)}
    with planned(model, STAGES, wild(STAGES, 3)), no_collector():
        loss = loss_of(model)
        loss.backward()
        held = [thing for thing in gc.get_objects() if type(thing) in (Holder, Lease)]
        assert not [thing for thing in held if id(thing) not in before]  # though the graph's nodes are still there
        del loss


def test_a_planned_model_is_freed_without_the_collector() -> None:
    from weakref import ref

    model = net()
    executor = Executor(model, STAGES, from_input(STAGES))
    executor.attach()
    train(model, loss_of)
    with no_collector():
        watched = ref(model), ref(model.layers[0])
        del model, executor
        assert [reference() for reference in watched] == [None, None]
