"""Mistakes are named before anything runs."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import functools
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from plan_support import UNLIMITED, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_loss_function_that_runs_the_backward_is_told_so() -> None:
    def step(output: torch.Tensor) -> torch.Tensor:
        loss = output.sum()
        loss.backward()
        return loss

    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with pytest.raises(ct.Unsupported, match="loss_fn takes gradients .* it must return the loss"):
        ct.profile(model, torch.randn(8, 16), loss_fn=step)


def test_losses_made_of_derivatives_by_the_input_are_left_out_of_the_profile() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))
    plain, x = copy.deepcopy(model), torch.randn(64, 16).requires_grad_()

    def equation(output: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return (slope.sum(-1) + output[:, 0]).square().mean()

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        loss = equation(model(x))
        loss.backward()
        return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]

    with pytest.raises(ct.Unsupported, match=r"loss_fn takes gradients .* leave them out of loss_fn="):
        ct.profile(model, x, loss_fn=equation)
    assert x.grad is None
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.mean, passes=1), "1GiB")
    with pytest.raises(ct.Unsupported, match="loss_fn takes gradients"):
        ct.verify(model, plan, x, loss_fn=equation)
    with ct.budget(model, plan.least_budget_bytes, x, loss_fn=torch.mean, passes=1, check_steps=0):
        assert all(map(torch.equal, step(model), step(plain)))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"budget": "12Mib"}, cairn.BadInput, "12Mib"),
        ({"budget": "12 MiB"}, cairn.BadInput, "12 MiB"),
        ({"budget": "80 %"}, ValueError, "80 %"),
        ({"budget": None}, TypeError, "NoneType"),
        ({"budget": 0}, ValueError, "positive"),
        ({"budget": 0.5}, TypeError, "ratio"),
        ({"budget": 10**30}, ValueError, "any device"),
        ({"budget": ct.Budget("1GiB", reserve="1Gib")}, cairn.BadInput, "1Gib"),
        ({"optimzer": None}, TypeError, "did you mean optimizer"),
        ({"buget": "1GiB"}, TypeError, "did you mean budget"),
        ({"solver": "chain-wek"}, ValueError, "did you mean 'chain-weak'"),
        ({"solver": "graph-search"}, ValueError, "solver must be one of"),
        ({"scope": "activation"}, ValueError, "did you mean 'activations'"),
        ({"gradients": "create"}, ValueError, "did you mean 'created'"),
        ({"on_shape_change": "eror"}, ValueError, "did you mean 'error'"),
        ({"determinism_check": "all"}, ValueError, "determinism_check must be"),
        ({"allow": ("recompte",)}, ValueError, "did you mean 'recompute'"),
        ({"allow": "recompute"}, ValueError, "allow='recompute': it is a tuple"),
        ({"kwargs": "12MiB"}, TypeError, "budget is given by name"),
        ({"loss_fn": "mse"}, TypeError, "loss_fn must be a function"),
        ({"loss_fn": nn.MSELoss()}, TypeError, "the model's output alone, and this one cannot be .*'target'"),
        ({"loss_fn": lambda: 0}, TypeError, "the model's output alone"),
        ({"keep": "zz"}, ValueError, "keep='zz' names no module"),
        ({"keep": ["", "zz"]}, ValueError, "keep='zz' names no module"),
        ({"keep": nn.Tanh()}, ValueError, "keep= has a Tanh that is no part of this Untouchable: .* another model"),
        ({"blocks": [nn.Tanh()]}, ValueError, "blocks= has a Tanh that is no part of this Untouchable"),
        ({"blocks": 3}, TypeError, "blocks must be"),
        ({"check_steps": "2"}, TypeError, "check_steps must be an integer, not '2'"),
        ({"check_steps": -1}, ValueError, "check_steps is -1; at least 0"),
        ({"strict": "no"}, TypeError, "strict must be True or False, not 'no'"),
        ({"passes": 0}, ValueError, "passes is 0; at least 1"),
        ({"inside": "yes"}, TypeError, "inside must be True or False"),
        ({"preserve_rng_state": 2}, TypeError, "preserve_rng_state must be True or False"),
        ({"host_budget": "1 GiB"}, cairn.BadInput, 'host_budget: "1 GiB" is not a size'),
        ({"host_budget": "1GiB", "tier": "hots"}, ct.Unsupported, "tier='hots': the offload tier is 'host' or 'file:"),
        ({"host_budget": "1GiB", "link": "8GB"}, cairn.BadInput, '"8GB" is not a rate such as 12GB/s'),
        ({"host_budget": "1GiB", "link": 5}, TypeError, "link must be a rate such as '12GB/s', a Link or"),
        ({"time_limit": "5"}, cairn.BadInput, '"5" is not a duration'),
        ({"slots": -1}, cairn.BadInput, "slots is -1"),
        ({"optimizer": torch.optim.AdamW}, TypeError, "the class AdamW"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
def test_mistakes_are_named_before_anything_runs(
    never_run: nn.Module, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ct.checkpoint(never_run, torch.randn(2, 4), **given)


def test_arguments_by_name_in_the_place_of_the_first_one_are_named(never_run: nn.Module) -> None:
    for call in (ct.profile, functools.partial(ct.checkpoint, budget="1GiB")):
        with pytest.raises(TypeError, match=r"takes by name \(x\): give it as kwargs="):
            call(never_run, {"x": torch.randn(2, 4)})


def test_what_cannot_be_passed_to_the_model_is_told(never_run: nn.Module) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 4), torch.zeros(4)), 2)
    for sample, message in (
        (loader, r"args is a DataLoader: give .* of one batch"),
        (iter(loader), r"one batch of it"),
        (next(iter(loader)), r"cannot be called with the sample \(too many .* the targets of a batch$"),
        ((), r"cannot be called with the sample \(missing a required argument: 'x'\)"),
    ):
        with pytest.raises(TypeError, match=message):
            ct.profile(never_run, sample)


def test_a_step_without_gradients_is_refused(never_run: nn.Module) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"leave torch.no_grad\(\)"):
        ct.profile(never_run, torch.randn(2, 4))
    with torch.inference_mode(), pytest.raises(ValueError, match=r"leave torch.inference_mode\(\)"):
        ct.profile(never_run, torch.randn(2, 4))
    with pytest.raises(ValueError, match="nothing to train"):
        ct.profile(never_run.requires_grad_(False), torch.randn(2, 4))


def test_a_plan_in_the_place_of_its_model_is_named(resnet_profile: ct.Profile) -> None:
    plan = ct.plan(resnet_profile, UNLIMITED)
    for call in (ct.report, ct.handle):
        with pytest.raises(TypeError, match="must be an nn.Module, not a Plan"):
            call(plan)


def test_mistakes_in_other_calls_are_named(never_run: nn.Module) -> None:
    with pytest.raises(TypeError, match="did you mean optimizer"):
        ct.trainer_callback("8MiB", optimzer=None)
    with pytest.raises(TypeError, match="takes the optimizer from the Trainer"):
        ct.trainer_callback("8MiB", optimizer=None)
    with pytest.raises(cairn.BadInput, match="8Mib"):
        ct.trainer_callback("8Mib")
    with pytest.raises(TypeError, match=r"nn\.Module, not a function"):
        ct.profile(lambda x: x, torch.randn(2))
    with pytest.raises(TypeError, match="not a dict"):
        ct.apply(never_run, {})
    with pytest.raises(TypeError, match="not a int"):
        ct.explain(3)
    with pytest.raises(TypeError, match="what cairn.torch.profile returns"):
        ct.plan({}, "8MiB")
    with pytest.raises(ct.Unsupported, match=r"0\.weight has no shape yet: run the model once"):
        ct.profile(nn.Sequential(nn.LazyLinear(4)), torch.randn(2, 4))
    with pytest.raises(ct.Unsupported, match="LBFGS"):
        ct.profile(never_run, torch.randn(2, 4), optimizer=torch.optim.LBFGS(never_run.parameters()))
    assert ct.handle(never_run) is None
    with pytest.raises(ValueError, match="no plan is applied"):
        ct.report(never_run)


def test_options_that_compile_does_not_have_are_named_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="compile has no option 'bugdet'; did you mean budget?"):
        ct.compile(nn.Linear(2, 2), torch.randn(2, 2), bugdet="5MiB")
    with pytest.raises(TypeError, match="compile has no option 'fullgraph'; there are .*, budget, kernels"):
        ct.compile(nn.Linear(2, 2), torch.randn(2, 2), fullgraph=True)


@pytest.mark.parametrize("call", [ct.report, ct.verify, functools.partial(ct.sweep, budgets=4)])
def test_models_that_torch_compile_made_have_no_report(call: Callable[[nn.Module], object]) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="cairn", options={"budget": "1GiB"})
    with pytest.raises(ValueError, match=r"torch.compile made this model.* need one that cairn.torch.compile returned"):
        call(compiled)


def test_losses_that_are_none_and_optimizers_of_others() -> None:
    step = torch_models.vgg()
    for loss_fn, message in (
        (lambda output: output, "one number"),
        (lambda output: None, "NoneType"),
        (lambda output: output.detach().sum(), "without gradients"),
    ):
        with pytest.raises(ValueError, match=message):
            ct.profile(step.model, step.args, loss_fn=loss_fn, passes=1)
    other = torch.optim.SGD(copy.deepcopy(step.model).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="none of the model's parameters"):
        profile = ct.profile(step.model, passes=1, optimizer=other, **step.sample)
    counts = ((0, ValueError), (-1, ValueError), ("14MiB", TypeError), (2.5, TypeError), (True, TypeError))
    for wanted, error in (*counts, (b"14MiB", TypeError), ([], ValueError)):
        with pytest.raises(error, match="sweep"):
            ct.sweep(profile, wanted)
    plan = ct.plan(profile, UNLIMITED, slots=100)
    assert len(repr(plan)) < 200
    assert len(str(ct.verify(step.model, plan, **step.sample))) < 200


def test_files_that_are_no_plans_are_named(tmp_path: Path) -> None:
    step = torch_models.vgg()
    plan = ct.plan(profiled(step), UNLIMITED)
    with pytest.raises(IsADirectoryError, match="is a directory"):
        plan.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"plan.json: there is no folder .*none$"):
        plan.save(tmp_path / "none" / "plan.json")
    assert list(tmp_path.parent.glob("*.unfinished")) == []
    path = tmp_path / "plan.json"
    plan.save(path)
    whole = path.read_bytes()
    without = json.dumps({key: value for key, value in json.loads(whole).items() if key != "solver"})
    for content, message in (
        (whole[:500], "line .*, column .*: [A-Z]"),
        (b"", "line 1, column 1"),
        (b"\xff\xfe\x00", "no plan"),
        (b"[]", "not a list"),
        (without.encode(), "solver"),
    ):
        path.write_bytes(content)
        with pytest.raises(ct.PlanMismatch, match=message) as caught:
            ct.Plan.load(path)
        assert str(path) in str(caught.value)


def test_checkpointing_that_is_enabled_after_planning_is_warned_of_once() -> None:
    step = torch_models.made("gpt2")
    ct.checkpoint(step.model, budget=UNLIMITED, passes=1, check_steps=0, **step.sample)
    step.model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="enabled after the model was planned"):
        step.loss().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.loss().backward()


def test_blocks_that_run_without_their_model_are_warned_of_once() -> None:
    class Net(nn.Sequential):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return nn.Sequential.forward(self, x)

    model = Net(*(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)))
    x = torch.randn(8, 16)
    ct.checkpoint(model, x, loss_fn=torch.sum, budget=UNLIMITED, passes=1, check_steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
        with torch.no_grad():
            model.features(x)
        model.eval().features(x)
    model.train()
    with pytest.warns(UserWarning, match="without a call of the model"):
        model.features(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.features(x).sum().backward()
    ct.handle(model).remove()


def test_parameters_that_are_trained_later_are_refused_by_name() -> None:
    """Frozen blocks are no stages, so a plan that was made with them cannot keep to its budget without."""
    step = torch_models.resnet()
    frozen = step.model.layers[:3].requires_grad_(False)
    ct.checkpoint(step.model, step.args, loss_fn=step.loss_fn, budget=UNLIMITED, passes=1, check_steps=0)
    step.loss().backward()
    step.model.layers[5].requires_grad_(False)  # takes less
    step.loss().backward()
    frozen.requires_grad_(True)
    with pytest.raises(ct.PlanMismatch, match=r"layers\.0\.reduce\.0\.weight and 32 others .*checkpoint"):
        step.loss()
    with torch.no_grad():
        step.loss()
    ct.checkpoint(step.model, step.args, loss_fn=step.loss_fn, budget=UNLIMITED, passes=1, check_steps=0)
    step.loss().backward()
    ct.handle(step.model).remove()
