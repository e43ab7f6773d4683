"""`compile`: a request that fails leaves the model as it was, and what cannot be followed is refused by name."""

import dataclasses

import cairn.torch as ct
import pytest
import torch
from cairn.torch.compiled import region_levels
from cairn.torch.compiled.compiled_model import known
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
