"""Further budgets of one compiled model: what they share, and what they must not."""

import copy

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import _compat
from cairn.torch.compiled import backend, fused_costs, joint_graph
from cairn.torch.compiled.captured import Captured
from cairn.torch.compiled.request import Request
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def squared(output):
    return output.float().square().mean()


def compiled_with(model, x, budget, **options):
    torch._dynamo.reset()
    return ct.compile(model, x, budget=budget, loss_fn=squared, time_limit="300ms", progress=False, **options)


def tanh_and_dropout():
    """Its backward reads the result of tanh, which is also what dropout reads."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)))


def test_the_backward_draws_no_random_numbers_again():
    with torch._inductor.config.patch(fallback_random=True):  # torch keeps random operators that nothing reads then
        compiled = compiled_with(tanh_and_dropout(), torch.randn(64, 32), "1GiB", kernels="eager")
    assert ct.report(compiled).differences == ()


def at_shares(model, x, shares, plain):
    """The model compiled for budgets between its least and that of `plain`, without a new capture in between."""
    least = plain.least_budget_bytes
    span = plain.plain_peak_bytes + plain.reserve_bytes - least
    options = {"kernels": "eager", "loss_fn": squared, "time_limit": "300ms", "progress": False}
    return [ct.compile(model, x, budget=int(least + share * span) + 4096, **options) for share in shares]


@pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9 traces a graph anew for each cut")
def test_further_budgets_use_what_was_captured_and_each_keeps_its_plan(monkeypatch):
    def captured(*_):
        raise AssertionError("captured or traced again")

    model, x = tanh_and_dropout(), torch.randn(64, 32)
    roomy = compiled_with(model, x, "1GiB", kernels="eager")
    [plain] = ct.report(roomy).plans
    monkeypatch.setattr(Captured, "__init__", captured)
    monkeypatch.setattr(_compat.graph_compilers, "compiled_by_operators", captured)
    monkeypatch.setattr(joint_graph, "read", captured)
    compiled = [roomy, *at_shares(model, x, (0.6, 0.1), plain)]
    reports = [ct.report(each) for each in compiled]
    assert reports[0].plans[0].recomputed < reports[-1].plans[0].recomputed
    for each, report in [*zip(compiled, reports, strict=True)] * 2:
        again = ct.verify(each)
        assert report.differences == again.differences == ()
        assert again.measured_peak_bytes == report.measured_peak_bytes <= report.plans[0].budget_bytes


def test_a_changed_model_is_captured_again():
    model, x = tanh_and_dropout(), torch.randn(64, 32)
    [plain] = ct.report(compiled_with(model, x, "1GiB", kernels="eager")).plans
    model[0][0].weight = nn.Parameter(torch.randn(32, 32))
    [replaced] = at_shares(model, x, (0.3,), plain)
    assert ct.report(replaced).differences == ()
    model[1][0].weight.requires_grad_(False)
    [frozen] = at_shares(model, x, (0.9,), plain)
    assert ct.report(frozen).differences == ()
    assert len(ct.report(frozen).plans[0].problem["nodes"]) < len(plain.problem["nodes"])
    model.eval()
    [evaluated] = at_shares(model, x[:32], (0.9,), plain)
    assert ct.report(evaluated).differences == ()
    assert ct.report(evaluated).measured_peak_bytes < ct.report(frozen).measured_peak_bytes


def test_a_copy_of_a_compiled_model_plans_for_itself():
    model, x = tanh_and_dropout(), torch.randn(64, 32)
    compiled = compiled_with(model, x, "1GiB", kernels="eager")
    squared(copy.deepcopy(compiled)(x)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert ct.verify(compiled).differences == ()


def test_verify_compiles_anew_what_dynamo_forgot():
    model, x = tanh_and_dropout(), torch.randn(64, 32)
    compiled = compiled_with(model, x, "1GiB", kernels="eager")
    torch._dynamo.reset()
    again = ct.verify(compiled)
    assert again.differences == ()
    assert again.measured_peak_bytes == ct.report(compiled).measured_peak_bytes
    assert len(again.plans) == 1


def test_costs_of_fused_kernels_make_no_constants_of_symbolic_sizes():
    torch._dynamo.reset()
    found = []

    def partition(module, inputs, *, num_fwd_outputs, **_):
        found.append(fused_costs.estimated(joint_graph.read(module, num_fwd_outputs), torch.device("cpu")))
        return _compat.cut_without_recomputation(module, inputs, num_fwd_outputs)

    def capture(module, inputs):
        return _compat.compiled_by_operators(module, inputs, partition)

    model = nn.Sequential(nn.Linear(32, 8), nn.Tanh())
    step = torch.compile(model, backend=capture, dynamic=True)
    for rows in (128, 96):
        squared(step(torch.randn(rows, 32))).backward()
    assert len(found) == 1


@pytest.mark.parametrize(("least_fits", "excess_bytes", "plans"), [(True, 1, 3), (False, 1, 3), (True, 1 << 20, 1)])
def test_plan_of_least_memory_is_the_last_that_is_tried(monkeypatch, least_fits, excess_bytes, plans):
    model, x = tanh_and_dropout(), torch.randn(64, 32)
    [plain] = ct.report(compiled_with(model, x, "1GiB", kernels="eager")).plans
    budget, tried = (plain.least_budget_bytes + 3 * plain.plain_peak_bytes) // 4, []

    def measured(compiled, inputs, planner, budget_bytes):
        tried.append(planner.request.least)
        fits = planner.request.least and least_fits
        return budget_bytes if fits else budget_bytes + excess_bytes

    monkeypatch.setattr(backend, "_measured", measured)
    torch._dynamo.reset()
    made = backend.Backend(Request(budget=ct.Budget(budget, reserve=0), kernels="eager", time_limit="300ms"))
    step = torch.compile(model, backend=made, fullgraph=True)
    if least_fits:
        squared(step(x)).backward()
        [plan] = made.plans
        assert plan.recomputed
    else:
        with pytest.raises(ct.InfeasibleBudget) as caught:
            step(x)
        assert caught.value.least_bytes > budget
    assert tried == [False] * plans + [True]  # one alone where no plan is predicted to fit the corrected budget
