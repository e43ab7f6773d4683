"""`compile`: a request that fails leaves the model as it was, and what cannot be followed is refused by name."""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import cairn
import cairn.torch as ct
import pytest
import torch
from cairn.torch.compiled import region_levels
from cairn.torch.compiled.compiled_model import CompiledModel, StepResult, differences, known
from cairn.torch.rerun_state.preserve import Randomness
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True, scope="module")
def few_options():
    """Each is compiled, which takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_levels, "MAX_OPTIONS", 2)
        yield


def squared(output):
    return output.square().mean()


def other_loss(output):
    return output.abs().mean()


def made(count=2, width=32):
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)) for _ in range(count))
    return nn.Sequential(*blocks), torch.randn(256, width)


def compiled(model, x, **options):
    settings = {"kernels": "eager", "loss_fn": squared, "time_limit": "300ms", "progress": False, "prove": False}
    return ct.compile(model, x, **{**settings, **options})


def grads_of(step, model, x):
    model.zero_grad()
    squared(step(x)).backward()
    return [parameter.grad for parameter in model.parameters()]


def patched(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_request_that_fails_leaves_the_plan_that_worked():
    model, x = made()
    expected = grads_of(model, model, x)
    compiled(model, x, budget="1GiB", regions=True)
    least = known(model).task().even_budgets(1)[0]
    compiled(model, x, budget=least, regions=True)
    report, regions, forwards = ct.report(model), known(model).regions, patched(model)
    began = regions.compilations
    assert forwards[0] == "" and ct.handle(model) is not None  # it has a guard of its shapes, and an executor
    other_plan = dataclasses.replace(report.regions, blocks=("2",))
    for failing in ({"loss_fn": other_loss}, {"holds_output": False}, {"plan": other_plan, "budget": "auto"}):
        with pytest.raises((ct.InfeasibleBudget, ct.PlanMismatch)):
            compiled(model, x, **{"budget": 1, "regions": True, **failing})
        assert patched(model) == forwards and ct.handle(model) is not None
        assert ct.report(model) is report and known(model).regions is regions
    assert all(map(torch.equal, grads_of(model, model, x), expected))
    assert ct.verify(model).measured_peak_bytes <= least
    assert regions.compilations == began
    compiled(model, x, budget="1GiB", regions=True, loss_fn=other_loss)
    assert known(model).regions is not regions and ct.handle(model) is None


def a_step(loss, grad, buffer=None):
    buffers = {} if buffer is None else {"count": buffer}
    return StepResult(loss, {"weight": grad}, buffers, Randomness(torch.device("cpu")), 0, 0)


def test_steps_are_compared_bit_by_bit():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.zeros(2)
    rows = torch.sparse_coo_tensor([[1]], [[1.0]], (3, 1))
    for same in (nan, zero, rows, None, torch.tensor([1 + 2j]).conj(), torch.tensor([], dtype=torch.int32)):
        copied = None if same is None else same.clone()
        assert differences(a_step(nan[0], same, nan), a_step(nan[0].clone(), copied, nan.clone())) == ()
    assert differences(a_step(zero[0], zero), a_step(-zero[0], -zero)) == (
        "the loss (0.0 and -0.0)",
        "the gradient of weight in the signs of zeros",
    )
    assert differences(a_step(zero[0], rows), a_step(zero[0], rows * 3)) == ("the gradient of weight by up to 2",)
    assert differences(a_step(zero[0], None, zero), a_step(zero[0], nan, -zero)) == (
        "the gradient of weight",
        "the buffer count",
    )


class NotANumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) / 0 * 0


def test_a_step_whose_results_are_not_numbers_is_exact():
    x = torch.randn(16, 8)
    step = compiled(NotANumber(), x, budget="1GiB", regions=False, prove=True)
    assert ct.report(step).differences == () and ct.verify(step).differences == ()


class Warming(nn.Module):
    """Divides by the number of its steps."""

    def __init__(self):
        super().__init__()
        self.blocks, self.steps = made()[0], 0

    def forward(self, x):
        self.steps += 1
        return self.blocks(x / self.steps)


@pytest.mark.parametrize("regions", [True, False])
def test_a_model_that_counts_its_steps_is_exact(regions):
    torch._dynamo.reset()
    model, x = Warming(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    step = compiled(model, x, budget="1GiB", regions=regions, prove=True)
    assert ct.report(step).differences == () and ct.verify(step).differences == () and model.steps == 0
    for _ in range(3):
        assert all(map(torch.equal, grads_of(step, model, x), grads_of(plain, plain, x)))
    assert model.steps == 3


def test_a_search_that_ends_without_a_schedule_names_its_time_limit(monkeypatch):
    limits = cairn.limits
    monkeypatch.setattr(cairn, "limits", lambda *a, **k: dataclasses.replace(limits(*a, **k), least_bytes=None))
    (model, x), host = made(), {"host_budget": "1GiB", "link": "8GB/s"}
    with pytest.raises(ct.Unsupported, match=r"no schedule .* within time_limit='90ms': give the search more time"):
        compiled(model, x, budget=1, time_limit="90ms", regions=False, **host)
    monkeypatch.setattr(cairn, "limits", limits)
    with pytest.raises(ct.InfeasibleBudget):
        compiled(model, x, budget=1, time_limit="90ms", regions=False, **host)


def test_the_search_for_a_plan_of_blocks_ends_in_time():
    model, x = made()
    with pytest.raises(ct.Unsupported, match="give it more time"):
        compiled(model, x, budget=1, time_limit="1ns", regions=True)
    assert patched(model) == []
    compiled(model, x, budget="1GiB", time_limit="2s", regions=True)
    regions, options = known(model).regions, known(model).task()._chains._options
    assert options["time_limit"] == "2s"
    compiled(model, x, budget="1GiB", time_limit="1s", regions=True)
    assert known(model).regions is regions and known(model).request.time_limit == "1s"


def test_a_plan_of_one_graph_is_refused_where_blocks_are_compiled():
    model, x = made()
    [plan] = ct.report(compiled(model, x, budget="1GiB", regions=False)).plans
    for regions in (True, [model[0]]):
        with pytest.raises(ValueError, match="captured as one graph, and regions="):
            compiled(model, x, plan=plan, regions=regions)
    assert patched(model) == []


def test_a_model_has_one_plan_at_a_time():
    model, x = made()
    ct.checkpoint(model, x, budget="1GiB", loss_fn=squared, progress=False)
    for regions in ("auto", True, False):
        with pytest.raises(ValueError, match=r"a plan is applied to this Sequential already; remove it first"):
            compiled(model, x, budget="1GiB", regions=regions)
    with pytest.raises(ct.Unsupported, match="a plan is at work on a model of which this Sequential is a part"):
        compiled(model[0], x, budget="1GiB", regions=False)
    plan = ct.report(model).plan
    ct.handle(model).remove()
    compiled(model, x, budget="1GiB", regions=True)
    report = ct.report(model)
    for other in (lambda: ct.checkpoint(model, x, budget="1GiB", loss_fn=squared), lambda: ct.apply(model, plan)):
        with pytest.raises(ct.Unsupported, match="blocks of this Sequential are compiled by cairn.torch.compile"):
            other()
    assert ct.report(model) is report
    copied = ct.checkpoint(copy.deepcopy(model), x, budget="1GiB", loss_fn=squared, progress=False)
    assert isinstance(ct.report(copied), ct.Report)


@pytest.mark.parametrize("regions", ["auto", True, False])
def test_what_several_processes_share_is_refused_by_name(monkeypatch, regions):
    class DistributedDataParallel(nn.Sequential):
        pass

    model, x = made()
    with pytest.raises(ct.Unsupported, match="compile the module inside DistributedDataParallel, before it is"):
        compiled(DistributedDataParallel(model), x, budget="1GiB", regions=regions)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=nn.Parameter))
    with pytest.raises(ct.Unsupported, match="0.0.weight is a DTensor"):
        compiled(model, x, budget="1GiB", regions=regions)


@pytest.mark.parametrize("regions", [True, False])
def test_a_given_plan_is_followed_once_if_its_step_takes_more_than_its_budget(monkeypatch, regions):
    model, x = made()
    report, copied, steps = ct.report(compiled(model, x, budget="1GiB", regions=regions)), copy.deepcopy(model), []
    measured = CompiledModel.step

    def step(self, *args):
        steps.append(measured(self, *args))
        return dataclasses.replace(steps[-1], peak_bytes=2 << 30)

    monkeypatch.setattr(CompiledModel, "step", step)
    plan = report.regions if regions else report.plans[0]
    with pytest.raises(ct.BudgetExceeded, match="took 2.00 GiB, and its plan has a budget of 1.00 GiB: compile with"):
        compiled(copied, x, plan=plan)
    assert len(steps) <= 4 and patched(copied) == []


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_planning_calls_no_hooks_of_parameters_or_inputs(kernels):
    torch._dynamo.reset()
    (model, x), calls = made(), []
    hidden = nn.functional.linear(x, model[0][0].weight[:32])  # that other layers have computed
    for tensor in (*model.parameters(), hidden):
        tensor.register_hook(calls.append)
    options = {"budget": "1GiB", "kernels": kernels, "time_limit": "300ms"}
    loss = squared(torch.compile(model, backend="cairn", options=options)(hidden))
    assert calls == []
    loss.backward()
    assert len(calls) == len(list(model.parameters())) + 1
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    squared(model(hidden.detach().requires_grad_())).backward()
    for mine, plain in list(zip(expected, model.parameters(), strict=True))[1:]:
        torch.testing.assert_close(mine, plain.grad)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = made()[0]

    def forward(self, x):
        return self.blocks(x.mul_(2))


def test_planning_writes_no_input_that_other_layers_have_computed():
    torch._dynamo.reset()
    model, x = InPlace(), torch.randn(64, 32)
    step = torch.compile(model, backend="cairn", options={"budget": "1GiB", "kernels": "eager", "time_limit": "300ms"})
    found = []
    for function in (step, model):
        leaf = x.clone().requires_grad_()
        hidden = leaf + 1
        squared(function(hidden)).backward()
        found.append([hidden.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("host", [{}, {"host_budget": "1GiB", "link": "8GB/s"}])
def test_a_plan_whose_least_budget_is_not_found_in_time_names_its_own(monkeypatch, host):
    model, x = made()
    profile = ct.profile(model, x, loss_fn=squared, passes=1, progress=False)
    compiled(model, x, budget="1GiB", regions=True, **host)
    limits, solve_many = cairn.limits, cairn.solve_many

    def without_least(*args, **options):
        return dataclasses.replace(limits(*args, **options), least_bytes=None)

    def none_least(*args, **options):
        return [dataclasses.replace(found, least_bytes=None) for found in solve_many(*args, **options)]

    monkeypatch.setattr(cairn, "limits", without_least)
    monkeypatch.setattr(cairn, "solve_many", none_least)
    plan = ct.plan(profile, "1GiB", **host)
    assert plan.least_budget_bytes == plan.peak_bytes + plan.reserve_bytes
    compiled(model, x, budget="2GiB", regions=True, **host)
    assert ct.report(model).regions.budget_bytes == 2 << 30
