"""Steps that take more than their budget are told, with the cause."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from cairn.torch.base import memory
from cairn.torch.profiling.optimizer import KeptStates
from plan_support import UNLIMITED, Arguments, profiled
from torch import nn
from torch.optim import optimizer as optimizer_hooks

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("planned_with", [None, torch.optim.SGD])
def test_state_that_an_optimizer_creates_later_is_told(planned_with: type[torch.optim.Optimizer] | None) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(8)))
    x = torch.randn(256, 64)
    other = None if planned_with is None else planned_with(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"loss_fn": torch.sum, "passes": 1, "gradients": "created"}
    plain = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED, gradients="created")
    state = 2 * memory.unique_bytes(model.parameters())
    budget = plain.plain_peak_bytes + state // 2

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.Adam(model.parameters())
    ct.checkpoint(model, x, budget=budget, optimizer=other, **options)
    with pytest.warns(UserWarning, match="next step will take .* over its budget .* optimizer keeps .*optimizer="):
        step(optimizer)
    with warnings.catch_warnings():  # planned again, with room for the state
        warnings.simplefilter("error")
        for _ in range(3):
            step(optimizer)
    report = ct.report(model)
    assert report.measured is not None and state < report.measured.peak_bytes <= budget
    ct.checkpoint(model, x, budget=budget, optimizer=other, strict=True, **options)
    with pytest.warns(UserWarning, match="optimizer keeps"):  # of what was not promised
        step(torch.optim.Adam(model.parameters()))
    with_less = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ct.checkpoint(model, x, budget=budget + state // 4, optimizer=with_less, strict=True, **options)
    with pytest.raises(ct.BudgetExceeded, match="optimizer keeps"):
        step(torch.optim.Adam(model.parameters()))
    model.zero_grad()
    options["optimizer"] = optimizer
    ct.checkpoint(model, x, budget=budget, strict=True, **options)  # the one that is used
    for _ in range(3):
        step(optimizer)
    ct.handle(model).remove()


def test_a_step_over_its_budget_is_told() -> None:
    """What the caller holds beside the profiled step counts, and is noticed."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(8)))
    x = torch.randn(256, 64)
    options = {"loss_fn": torch.sum, "passes": 1, "blocks": model}
    top = ct.plan(ct.profile(model, x, **options), UNLIMITED, gradients="created")
    options["gradients"] = "created"
    budget, plain = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes

    def greedy_step(size: int = 2**22) -> None:
        hoard: list[torch.Tensor] = []
        hook = model[3].register_forward_hook(lambda *_: hoard.append(torch.empty(size, dtype=torch.uint8)))
        model(x).sum().backward()
        hook.remove()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ct.checkpoint(model, x, budget=plain, **options)
    before = ct.handle(model).plan
    with pytest.warns(UserWarning, match="^Sequential: the step took .* over its budget") as told:
        greedy_step((plain - budget) // 2)
    assert {str(Path(warning.filename).resolve()) for warning in told} == {str(Path(__file__).resolve())}
    after = ct.handle(model).plan  # made again
    assert after.reserve_bytes > before.reserve_bytes and after.budget_bytes == before.budget_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy_step((plain - budget) // 2)
    ct.handle(model).remove()
    ct.checkpoint(model, x, budget=budget, **options)
    before = ct.handle(model).plan
    with pytest.warns(UserWarning, match="over its budget|stays as it is"):
        greedy_step(2**22)
    assert ct.handle(model).plan is before  # nothing to be had
    ct.handle(model).remove()
    ct.checkpoint(model, x, budget=budget, strict=True, **options)
    with pytest.raises(ct.BudgetExceeded):
        greedy_step()
    ct.handle(model).remove()


def test_a_model_that_was_changed_after_planning_is_told_as_the_cause() -> None:
    def fresh() -> nn.Sequential:
        layers = (nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(4))
        return nn.Sequential(nn.Embedding(10, 64), *layers)

    def step(model: nn.Module) -> None:
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()

    x, options = torch.randint(10, (256,)), {"loss_fn": torch.sum, "passes": 1}
    top = ct.plan(ct.profile(fresh(), x, **options), UNLIMITED)
    changed = [ct.checkpoint(fresh(), x, budget=top.plain_peak_bytes + 2**16, strict=True, **options) for _ in range(3)]
    with pytest.raises(ct.BudgetExceeded, match="made for dtype 'float32', this is 'float64'. Profile and plan again"):
        step(changed[0].double())
    changed[1].extend(copy.deepcopy(changed[1][1:]))
    with pytest.raises(ct.BudgetExceeded, match="for parameters with other names, .* Profile and plan again"):
        step(changed[1])
    for k, layer in enumerate(changed[2][1:], start=1):
        changed[2][k] = nn.Sequential(layer[0], nn.Sequential(nn.Tanh(), nn.Tanh()), layer[2])
    with pytest.raises(ct.BudgetExceeded, match=r"planned blocks did not run \(1\.?.*\), .* Profile and plan again"):
        step(changed[2])


def test_what_is_told_of_the_worst_step_is_its_own_cause() -> None:
    """A later step, which is within the budget, is the one in which the optimizer creates its state."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)))
    x, state = torch.randn(256, 64), 2 * memory.unique_bytes(model.parameters())
    options: dict[str, Any] = {"loss_fn": torch.sum, "passes": 1, "blocks": model, "gradients": "created"}

    def step(times: int, kind: type[torch.optim.Optimizer]) -> None:
        sum(model(x).square().sum() for _ in range(times)).backward()
        kind(model.parameters(), lr=0.0).step()
        model.zero_grad()

    ct.checkpoint(model, x, budget="1GiB", **options)
    step(2, torch.optim.SGD)
    twice = ct.report(model).measured.peak_bytes
    budget = cairn.Budget(total=twice + state // 2, reserve=state + 2**16)
    ct.checkpoint(model, x, budget=budget, check_steps=8, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(2, torch.optim.SGD)
        step(1, torch.optim.SGD)
    with pytest.warns(UserWarning, match=r"next step will take .* ran 2 times before the backward"):
        step(1, torch.optim.Adam)


def _over_its_budget() -> tuple[nn.Module, torch.Tensor]:
    """A model under a strict plan for autocast, and its input, after a step without."""
    model, x = nn.Sequential(*(torch_models.Residual(64) for _ in range(4))), torch.randn(512, 64)
    with torch.autocast("cpu", torch.bfloat16):
        top = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED)
        ct.checkpoint(model, x, loss_fn=torch.sum, budget=top.peak_bytes + top.reserve_bytes, passes=1, strict=True)
    model(x).sum().backward()
    return model, x


def test_a_step_in_another_autocast_region_than_the_profile_is_told_as_the_cause() -> None:
    model, x = _over_its_budget()
    with pytest.raises(ct.BudgetExceeded, match="made with autocast to bfloat16, and the step ran without autocast"):
        model(x)
    ct.handle(model).remove()


def test_an_optimizer_that_was_not_counted_is_told_before_other_causes() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(64) for _ in range(4))), torch.randn(64, 64)
    options: dict[str, Any] = {"loss_fn": torch.sum, "passes": 1, "optimizer": torch.optim.SGD(model.parameters())}
    top = ct.plan(ct.profile(model, x, **options), UNLIMITED)
    ct.checkpoint(model, x, budget=top.peak_bytes + top.reserve_bytes, **options)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(UserWarning, match="the optimizer keeps .* between steps"):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x)
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    ct.handle(model).remove()


def test_a_state_that_no_profile_measures_is_told_with_what_leaves_room_for_it() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(64) for _ in range(4))), torch.randn(64, 64)
    top = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED)
    ct.checkpoint(model, x, loss_fn=torch.sum, passes=1, budget=top.peak_bytes + top.reserve_bytes)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-6, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match=r"Plan again, with Budget\(reserve=\) of that much"):
        for _ in range(2):
            optimizer.step(closure)
    ct.handle(model).remove()


def test_a_history_that_grows_is_noted_as_it_grows() -> None:
    model, x, known = nn.Linear(16, 16), torch.randn(8, 16), KeptStates()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    sizes = []
    for _ in range(4):
        optimizer.step(closure)
        known.note(optimizer, model)
        sizes.append(known.bytes)
    assert sizes[1] < sizes[2] < sizes[3]


def test_a_report_does_not_raise_and_the_next_step_does() -> None:
    model, x = _over_its_budget()
    report = ct.report(model)
    assert report.measured.peak_bytes > report.plan.budget_bytes
    with pytest.raises(ct.BudgetExceeded, match="the step ran without autocast"):
        model(x)
    ct.handle(model).remove()


def test_a_callback_takes_its_plan_away_where_the_last_step_was_over_the_budget() -> None:
    step, hooks = torch_models.made("gpt2"), len(optimizer_hooks._global_optimizer_pre_hooks)
    with torch.autocast("cpu", torch.bfloat16):
        top = ct.plan(profiled(step), UNLIMITED)
        callback = ct.trainer_callback(top.peak_bytes + top.reserve_bytes, passes=1, strict=True)
        given = {"model": step.model, "train_dataloader": [step.kwargs], "optimizer": None}
        callback.on_train_begin(Arguments(), None, None, **given)
    step.loss().backward()
    callback.on_train_end(Arguments(), None, None, **given)
    assert ct.handle(step.model) is None and callback.report.measured is not None
    assert len(optimizer_hooks._global_optimizer_pre_hooks) == hooks


def test_state_of_optimizers_that_step_in_the_backward_is_told() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(64) for _ in range(4))), torch.randn(64, 64)
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    top = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED)
    ct.checkpoint(model, x, loss_fn=torch.sum, passes=1, budget=top.peak_bytes + top.reserve_bytes)
    with pytest.warns(UserWarning, match="the optimizer keeps .* between steps"):
        for _ in range(4):
            model(x).sum().backward()
    state = sum(t.nbytes for o in optimizers.values() for entry in o.state.values() for t in entry.values())
    taken = ct.report(model).measured
    assert taken is not None and taken.peak_bytes > state + top.resident["parameters"]
    ct.handle(model).remove()


def test_steps_that_add_to_gradients_are_told_once_that_the_plan_is_for_others() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(64) for _ in range(4))), torch.randn(16, 64)
    way: dict[str, Any] = {"loss_fn": torch.sum, "passes": 1}
    plan = ct.plan(ct.profile(model, x, **way), UNLIMITED, gradients="created")
    ct.checkpoint(model, x, **way, budget=plan.peak_bytes + plan.reserve_bytes, gradients="created")
    applied = ct.handle(model).plan
    with pytest.warns(UserWarning, match="gradients existed when it began") as told:
        for _ in range(8):
            model(x).sum().backward()
    assert ct.handle(model).plan is applied and len(told) <= 3
    ct.handle(model).remove()


def test_blocks_in_another_order_are_named_where_the_step_takes_too_much() -> None:
    class Turned(nn.Sequential):
        order = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in list(self)[:: self.order]:
                x = layer(x)
            return x

    model, x = Turned(*(torch_models.Residual(64) for _ in range(4))), torch.randn(256, 64)
    way: dict[str, Any] = {"loss_fn": torch.sum, "passes": 1, "inside": False}
    least = ct.plan(ct.profile(model, x, **way), UNLIMITED).least_budget_bytes
    ct.checkpoint(model, x, **way, budget=least * 102 // 100)
    model.order = -1
    with pytest.warns(UserWarning, match="ran after blocks that the plan has behind it, kept its inputs alone"):
        for _ in range(2):
            model(x).sum().backward()
    ct.handle(model).remove()


def test_a_backward_within_the_autocast_region_is_named_where_it_takes_too_much() -> None:
    model = nn.Sequential(*(torch_models.Residual(256) for _ in range(4)))
    x, region = torch.randn(32, 256), functools.partial(torch.autocast, "cpu", torch.bfloat16)
    with region():
        plain = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED)
        budget = plain.peak_bytes + plain.reserve_bytes
        ct.checkpoint(model, x, loss_fn=torch.sum, budget=budget, passes=1, strict=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with region():
        model(x).sum().backward()
    with region(), pytest.raises(ct.BudgetExceeded, match=r"ran within the autocast region.* end before the backward"):
        model(x)
    ct.handle(model).remove()


def test_backwards_that_take_more_are_named() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(256, 64, requires_grad=True)
    plain = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED)

    def differentiated() -> None:
        (of_x,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        of_x.square().sum().backward()

    def repeated() -> None:
        output = model(x)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()

    for step, budget, cause in (
        (differentiated, plain.peak_bytes + plain.reserve_bytes, "create_graph"),
        (repeated, plain.least_budget_bytes + 2000, "more than one backward"),
    ):
        ct.checkpoint(model, x, loss_fn=torch.sum, budget=budget, passes=1, strict=True)
        step()
        with pytest.raises(ct.BudgetExceeded, match=cause):
            model(x)
        model.zero_grad()
    ct.handle(model).remove()
