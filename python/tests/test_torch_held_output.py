"""What the training loop holds: the output of the model, or the loss alone."""

# ruff: noqa: E402

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from plan_support import UNLIMITED, Arguments, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


@functools.cache
def _wide_profiles() -> dict[bool, ct.Profile]:
    """Of a model whose output is large: for loops that hold it, and for such that do not."""
    return {holds: profiled(_wide(), holds_output=holds) for holds in (True, False)}


def _wide() -> torch_models.Step:
    """Logits of half the memory."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    y = torch.randint(1000, (256,))
    return torch_models.Step(
        nn.Sequential(*layers, nn.Linear(32, 1000)),
        (torch.randn(256, 32),),
        loss_fn=lambda output: nn.functional.cross_entropy(output, y),
    )


@pytest.mark.parametrize("holds", [True, False])
def test_plans_are_for_loops_that_hold_the_output_or_do_not(holds: bool) -> None:
    step, profile = _wide(), _wide_profiles()[holds]
    plan = ct.plan(profile, UNLIMITED)
    assert ct.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan and plan.holds_output is holds
    assert ct.Profile.from_json(json.loads(json.dumps(profile.to_json()))).holds_output is holds
    assert ct.verify(step.model, plan, **step.sample).ok
    model = ct.checkpoint(
        step.model, *step.args, loss_fn=step.loss_fn, budget=UNLIMITED, passes=1, holds_output=holds, progress=False
    )
    for _ in range(2):
        output = model(*step.args)
        loss = step.loss_fn(output)
        if not holds:
            del output
        loss.backward()
        model.zero_grad()
    report = ct.report(model)
    assert report.measured.peak_bytes <= report.predicted_peak_bytes <= 1.01 * report.measured.peak_bytes


def test_what_a_loop_does_not_hold_makes_room() -> None:
    held, dropped = (_wide_profiles()[holds] for holds in (True, False))
    logits = 256 * 1000 * 4
    assert ct.plan(held, UNLIMITED).least_budget_bytes - ct.plan(dropped, UNLIMITED).least_budget_bytes > 0.9 * logits


def test_reports_tell_of_outputs_that_the_loop_lets_go_of() -> None:
    for told, options in ((True, {}), (False, {"holds_output": False})):
        step = _wide()
        model = ct.checkpoint(step.model, *step.args, loss_fn=step.loss_fn, budget=UNLIMITED, passes=1, **options)
        step.loss_fn(model(*step.args)).backward()
        report = ct.report(model)
        assert report.measured is not None and report.measured.dropped_bytes == 256 * 1000 * 4
        assert ("lets go of the model's output, 1000 KiB, which the plan counts" in str(report)) is told


def test_a_loop_that_holds_an_output_against_its_plan_is_told() -> None:
    step, profile = _wide(), _wide_profiles()[False]
    least = ct.plan(profile, UNLIMITED).least_budget_bytes
    ct.checkpoint(
        step.model, *step.args, loss_fn=step.loss_fn, budget=least + least // 50, passes=1, holds_output=False,
        progress=False,
    )  # fmt: skip
    output = step.model(*step.args)
    step.loss_fn(output).backward()
    with pytest.warns(UserWarning, match="still had the model's output during the backward"):
        ct.report(step.model)
    ct.handle(step.model).remove()


def test_an_output_without_a_loss_is_held() -> None:
    step = _wide()
    with pytest.raises(ValueError, match="the model's output has no loss: give loss_fn=, too"):
        ct.profile(step.model, *step.args, holds_output=False, progress=False)
    with pytest.raises(TypeError, match="holds_output"):
        ct.profile(step.model, *step.args, holds_output="no")


def test_data_that_can_be_iterated_once_are_not_begun() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return rows

    step = torch_models.made("gpt2")
    rows = iter([{name: tensor[0] for name, tensor in step.kwargs.items()}] * 4)
    callback = ct.trainer_callback(UNLIMITED)
    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    with pytest.raises(ct.Unsupported, match="Stream can be iterated only once"):
        callback.on_train_begin(Arguments(), None, None, model=step.model, train_dataloader=loader)
    assert len(list(rows)) == 4
