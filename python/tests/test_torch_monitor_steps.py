"""Which steps are measured, and when measuring ends."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.base import memory
from executor_support import no_collector
from plan_support import UNLIMITED, least_of
from torch import nn
from torch.optim import optimizer as optimizer_hooks

pytestmark = pytest.mark.usefixtures("seeded")


def test_measuring_ends_with_the_model() -> None:
    """What records its memory would go on for ever, and hide operators from other observers."""

    def plan_and_begin() -> None:
        model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(8, 16)
        ct.checkpoint(model, x, loss_fn=torch.sum, budget="1GiB", passes=1)
        model(x).sum().backward()
        assert memory.CpuMeter._in_thread.running is not None

    hooks = optimizer_hooks._global_optimizer_post_hooks
    before = len(hooks)
    with no_collector():
        plan_and_begin()
    assert getattr(memory.CpuMeter._in_thread, "running", None) is None and len(hooks) == before


def test_forwards_before_one_backward_are_measured_together() -> None:
    """Each follows a plan for one of them, but what they keep is there at once."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(8)))
    plain_model, x = copy.deepcopy(model), torch.randn(256, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"loss_fn": torch.sum, "passes": 1, "blocks": model, "gradients": "created"}

    def pair(of: nn.Module) -> torch.Tensor:
        loss = (of(x) * of(2 * x)).sum()
        loss.backward()
        return loss

    plain = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=model), UNLIMITED, gradients="created")
    ct.checkpoint(model, x, budget=plain.plain_peak_bytes + plain.reserve_bytes, **options)
    with pytest.warns(UserWarning, match="ran 2 times before the backward|the plan stays as it is"):
        loss = pair(model)
        optimizer.step()
    assert ct.handle(model).report().measured.peak_bytes > ct.handle(model).plan.budget_bytes
    assert torch.equal(loss, pair(plain_model))
    optimizer.zero_grad()
    model(x)  # one whose graph is dropped is none of them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
        optimizer.step()
    ct.handle(model).remove()


def test_gradients_of_several_backwards_are_taken_off_once() -> None:
    """Where gradients do not count, what a step creates of them is taken off its measured peak."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(4)))
    x, peaks = torch.randn(64, 64), []
    for forwards in (1, 2):
        model.zero_grad()
        ct.checkpoint(model, x, loss_fn=torch.sum, budget=UNLIMITED, passes=1, scope="activations")
        for loss in [model(x).sum() for _ in range(forwards)]:
            loss.backward()
        peaks.append(ct.report(model).measured.peak_bytes)
    assert 0 < peaks[0] < peaks[1]
    ct.handle(model).remove()


def test_steps_that_end_or_begin_within_a_backward_are_left_unmeasured_there() -> None:
    """Autograd runs a backward in a state of its own, in which measurements can neither end nor begin."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)))
    x = torch.randn(32, 16, requires_grad=True)
    ct.checkpoint(model, x, loss_fn=torch.sum, budget=UNLIMITED, passes=1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in model.parameters()]
    for _ in range(3):
        model(x).sum().backward()
    assert ct.report(model).measured is not None
    for handle in handles:
        handle.remove()
    ct.checkpoint(model, x, loss_fn=torch.sum, budget=UNLIMITED, passes=1)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum().backward()  # the forward is in the backward
    assert ct.report(model).measured is None
    model(x).sum().backward()
    assert ct.report(model).measured is not None
    ct.profile(model, x, loss_fn=torch.sum, passes=1)
    ct.handle(model).remove()


def test_steps_that_cannot_be_judged_are_not_measured_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a generator whose critic steps between its forward and its backward: measuring takes time."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    critic = nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (critic, model)]
    ct.checkpoint(model, x, loss_fn=torch.sum, budget=UNLIMITED, passes=1)
    measured = []

    def counted(*args: Any, of: Callable[..., Any] = memory.meter_for, **kwargs: Any) -> Any:
        measured.append(args)
        return of(*args, **kwargs)

    monkeypatch.setattr(memory, "meter_for", counted)
    for _ in range(12):
        made = model(x)
        for value, optimizer in zip((made.detach(), made), optimizers, strict=True):
            critic(value).sum().backward()
            optimizer.step()
    assert 1 < len(measured) < 12
    assert ct.report(model).measured is None
    ct.handle(model).remove()


def test_measuring_gives_way_to_profilers() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    started = torch.autograd.profiler._enable_profiler
    ct.checkpoint(model, x, loss_fn=torch.sum, budget=UNLIMITED, passes=1)
    for around_forward in (True, False):
        model(x).sum().backward()
        loss = model(x).sum()
        with torch.profiler.profile() as recorded:
            (model(x).sum() if around_forward else loss).backward()
        assert any("AddmmBackward" in event.name for event in recorded.events())
    assert torch.autograd.profiler._enable_profiler is started
    ct.handle(model).remove()


def test_watched_models_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ct.checkpoint(model, torch.randn(4, 8), loss_fn=torch.sum, budget=UNLIMITED, passes=1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(4, 8)).sum().backward()
        assert ct.handle(twin) is None
    ct.handle(model).remove()


def test_steps_of_several_threads_are_measured_soundly() -> None:
    """One at a time, and a measurement that a thread began is ended by no other."""
    step = torch_models.vgg()
    plain = copy.deepcopy(step.model)
    ct.checkpoint(step.model, budget=least_of(step), passes=1, check_steps=3, **step.sample)
    together, failures = threading.Barrier(3, timeout=60), []

    def train(alone: bool = False) -> None:
        try:
            for _ in range(3):
                output = step.model(*step.args)
                if not alone:
                    together.wait()  # all forwards have run, and no backward has
                step.loss_fn(output).backward()
        except Exception as error:
            failures.append(error)

    for threads in ([threading.Thread(target=train) for _ in range(3)], [threading.Thread(target=train, args=(True,))]):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    train(alone=True)
    assert failures == []
    measured = ct.report(step.model).measured
    assert measured is not None and measured.peak_bytes <= ct.handle(step.model).plan.budget_bytes
    assert not torch.autograd._profiler_enabled()
    ct.handle(step.model).remove()
    ct.profile(plain, passes=1, **step.sample)  # the process can still measure
