"""Training loops of every kind with offloading, and copies that fail in them."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base.errors import TierUnavailable, TransferFailed
from cairn.torch.monitor.watched_step import WatchedStep
from cairn.torch.offloading.tiers import FileTier, HostTier
from cairn.torch.runtime.executor import COPIES_OF_ANOTHER
from executor_support import blocks, differing, no_collector, train
from offloading_plans_support import (
    STAGES,
    X,
    loss_of,
    network,
    tier_fixture,  # noqa: F401
    vgg_fixture,  # noqa: F401
)
from offloading_support import carried_out, copies, inputs_offloaded, offloading, trace_of
from torch import Tensor, nn
from torch_models import Step

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


def test_a_folder_that_is_not_there_is_refused_before_the_profile_and_when_a_plan_is_applied(tmp_path: Path) -> None:
    """A profile of a large model takes minutes."""
    model, seen = network(), list[Any]()
    options: dict[str, Any] = {"host_budget": "1GiB", "link": "20GB/s", "tier": f"file:{tmp_path}/gone/"}
    with pytest.raises(TierUnavailable, match=rf"there is no folder {tmp_path}/gone for offloading: No such file"):
        ct.checkpoint(model, X, budget="1GiB", loss_fn=seen.append, **options)
    assert not seen
    profile = ct.profile(model, X, loss_fn=torch.sum, passes=1)
    made = ct.plan(profile, ct.sweep(profile, 2, **options)[0].budget_bytes, **options)
    with pytest.raises(TierUnavailable, match="there is no folder"):
        ct.apply(model, made)
    (tmp_path / "gone").mkdir()
    with ct.apply(model, made):
        model(X).sum().backward()
