"""What compiled models report, and what errors about their budgets say."""

import dataclasses
import json
import re
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import cairn  # noqa: E402
import cairn.torch as ct  # noqa: E402
from cairn.torch.base.errors import InfeasibleBudget  # noqa: E402
from cairn.torch.compiled import backend  # noqa: E402
from cairn.torch.compiled.request import Request  # noqa: E402
from test_torch_compile import compiled_with, least, made, squared  # noqa: E402


def refused(model, x, budget, **options):
    with pytest.raises(ct.InfeasibleBudget) as caught:
        compiled_with(model, x, budget, **options)
    return caught.value


def test_an_error_of_generated_kernels_names_what_was_measured():
    model, x = made("layers")
    error = refused(model, x, 1)
    told = re.search(r"the compiled step was measured at [^(]*\((\d+) bytes\)", error.message)
    assert told, error.message
    measured = int(told.group(1))
    assert error.least_bytes == measured + error.reserve_bytes
    assert "a smaller one may work, too" in error.message
    assert "least budget that works" not in error.message and "first thing" not in error.message
    assert ct.report(compiled_with(model, x, error.least_bytes)).measured_peak_bytes <= error.least_bytes


def test_an_error_names_the_lowest_peak_of_several_plans():
    parts = {"parameters": 3}
    text = InfeasibleBudget.of_measured_step(5, [7, 9], 1, parts, "backward", "").message
    assert "measured at 9 B (9 bytes). A budget of 10 B" in text
    assert (
        "may work, too: another plan was measured at 7 B (7 bytes). Its peak is during the backward: 3 B param" in text
    )
    assert text.endswith("Smaller batches need less")
    assert "another plan" not in InfeasibleBudget.of_measured_step(5, [9, 7], 1, parts, "backward", "").message


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            {"kernels": "eager"},
            'Smaller batches need less, and so may kernels="inductor" or host_budget= or regions=True',
        ),
        (
            {"kernels": "eager", "host_budget": "4MiB", "link": "8GB/s"},
            'less, and so may kernels="inductor" or regions=True',
        ),
        (
            {"kernels": "eager", "regions": True},
            'kernels="inductor" or host_budget= or regions= that cut the model finer',
        ),
        ({}, "need less, and so may host_budget= or regions=True"),
    ],
)
def test_errors_advise_arguments_of_compile(options, advice):
    error = refused(*made("layers"), 1, **options)
    assert error.message.endswith(advice)


def test_a_report_counts_the_results_that_are_recomputed_and_the_calls():
    model, x = made("layers")
    [plan] = ct.report(compiled_with(model, x, least("layers"), kernels="eager", prove=False)).plans
    runs = Counter(op[1] for op in plan.schedule["ops"] if op[0] == "compute")
    results = sum(count > 1 for count in runs.values())
    assert 0 < results <= len(plan.problem["nodes"])
    text = f"recomputed  {results} of {len(plan.problem['nodes'])} results, by {plan.recomputed} calls in the backward"
    assert text in str(plan)
    assert "the least is about" in str(plan)
    inductor = cairn.torch.CompiledPlan(**{**vars(plan), "kernels": "inductor"})
    assert re.search("the least is estimated at [^;]* before code is generated", str(inductor))
    assert json.dumps(plan.to_json())


def test_the_bound_of_a_corrected_plan_is_that_of_the_budget(monkeypatch):
    model, x = made("layers")
    [plain] = ct.report(compiled_with(model, x, "1GiB", kernels="eager", prove=False)).plans
    low, high = plain.least_budget_bytes, plain.plain_peak_bytes
    budget, excess_bytes, steps = (low + 3 * high) // 4, (high - low) // 3, []

    def measured(compiled, inputs, planner, budget_bytes):
        """The first step is over the budget, so the second plan is made for a smaller one."""
        steps.append(planner)
        return budget_bytes + (excess_bytes if len(steps) == 1 else 0)

    monkeypatch.setattr(backend, "_measured", measured)
    torch._dynamo.reset()
    planned = backend.Backend(Request(budget=ct.Budget(budget, reserve=0), kernels="eager", time_limit="900ms"))
    squared(torch.compile(model, backend=planned, fullgraph=True)(x)).backward()
    [plan] = planned.plans
    assert len(steps) == 2 and plan.schedule["budget_bytes"] < budget
    faster = cairn.solve(plan.graph, budget, time_limit="1s")
    double_counted_ns = faster.store_all_ns - plan.plain_ns
    assert plan.lower_bound_ns <= faster.makespan_ns - double_counted_ns < plan.step_ns
    assert plan.gap == pytest.approx(1 - plan.lower_bound_ns / plan.step_ns)


def test_a_report_says_when_the_step_took_another_time_than_predicted():
    model, x = made("layers")
    report = ct.report(compiled_with(model, x, "1GiB", kernels="eager", prove=False))
    [plan] = report.plans
    text = "predicted and measured times differ by a factor of 9: "

    def told(factor, **changed):
        return str(dataclasses.replace(report, step_ns=int(factor * plan.step_ns), **changed))

    assert text + "compile again in a new process, the machine was busy" in told(1 / 9)
    assert text + "the machine was busy, or the step is short" in told(9)
    assert "times differ" not in told(1) and "times differ" not in told(9, plans=(plan, plan))
    fused = (dataclasses.replace(plan, kernels="inductor"),)
    assert text + "times of generated kernels are estimates" in told(1 / 9, plans=fused)


def test_errors_of_the_backend_advise_its_options():
    model, x = made("layers")
    torch._dynamo.reset()
    step = torch.compile(model, backend="cairn", options={"budget": 1, "kernels": "eager", "time_limit": "300ms"})
    with pytest.raises(ct.InfeasibleBudget) as caught:
        step(x)
    assert caught.value.message.endswith('and so may kernels="inductor" or host_budget=')
