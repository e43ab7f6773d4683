"""What budgets are, how they are refused, and what is allowed within them."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import functools
import math
import resource
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from cairn.torch.base import budgets
from executor_support import no_collector
from plan_support import UNLIMITED
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def test_an_infeasible_budget_says_what_would_do(resnet_profile: ct.Profile) -> None:
    with pytest.raises(ct.InfeasibleBudget) as caught:
        ct.plan(resnet_profile, "1MiB")
    error = caught.value
    assert isinstance(error, cairn.InfeasibleBudget)
    assert error.budget_bytes == 2**20 and error.least_bytes is not None
    assert ct.plan(resnet_profile, error.least_bytes).budget_bytes == error.least_bytes
    with pytest.raises(ct.InfeasibleBudget):
        ct.plan(resnet_profile, error.least_bytes - 1)
    total = sum(error.composition.values())
    assert total + error.reserve_bytes == error.least_bytes
    assert error.composition["parameters"] == resnet_profile.resident["parameters"]
    assert error.peak_at and error.blocking and str(error.least_bytes) in str(error)


def test_an_optimizer_that_needs_more_than_the_step_sets_the_floor() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    profile = ct.profile(model, torch.randn(2, 256), loss_fn=torch.sum, optimizer=optimizer, passes=1)
    with pytest.raises(ct.InfeasibleBudget, match="step of the optimizer") as caught:
        ct.plan(profile, 1000)
    plan = ct.plan(profile, caught.value.least_bytes)
    assert plan.peak_bytes == plan.optimizer_peak_bytes
    assert "optimizer's step" in str(ct.explain(plan))


def test_what_a_plan_or_its_refusal_holds_goes_without_the_collector() -> None:
    x = torch.randn(64, 64)
    model = nn.Sequential(*(torch_models.Residual(64) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    with no_collector():
        profile = ct.profile(model, x, loss_fn=torch.sum, optimizer=optimizer, passes=1)
        budget = ct.plan(profile, UNLIMITED).least_budget_bytes * 11 // 10  # the next profile has other times
        ct.checkpoint(model, x, loss_fn=torch.sum, optimizer=optimizer, budget=budget, passes=1)
        with contextlib.suppress(ct.InfeasibleBudget):
            model(torch.randn(4096, 64))
        with contextlib.suppress(ct.InfeasibleBudget):
            ct.plan(profile, 1000)
        watched = [weakref.ref(each) for each in (profile, optimizer, model)]
        del profile, optimizer
        assert [reference() for reference in watched] == [None, None, model]
        del model
        assert watched[2]() is None


def test_plans_for_other_shapes_count_the_optimizer_that_the_first_was_made_with() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(64) for _ in range(3))), torch.randn(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    ct.checkpoint(model, x, loss_fn=torch.sum, optimizer=optimizer, budget="80MiB", passes=1)
    model(torch.randn(64, 2, 64))  # of another rank, and measured
    given, made = (entry.plan.resident for entry in ct.handle(model).plans)
    assert made["optimizer state"] == given["optimizer state"] > 0
    ct.handle(model).remove()


CPU = torch.device("cpu")


def test_sizes() -> None:
    assert budgets.resolve(12345, CPU) == 12345
    assert budgets.resolve("8GiB", CPU) == 8 * 2**30
    assert budgets.resolve("8GB", CPU) == 8 * 10**9
    assert budgets.resolve(cairn.Budget("2MiB"), CPU) == 2 * 2**20
    assert budgets.resolve(2**63 - 1, CPU) == 2**63 - 1
    assert budgets.resolve(2.0, CPU) == 2
    assert budgets.resolve("50%", CPU) == budgets.total_bytes(CPU) // 2
    assert budgets.resolve("100%", CPU) == budgets.total_bytes(CPU)
    assert 0 < budgets.resolve("auto", CPU) < budgets.total_bytes(CPU)
    assert budgets.resolve("auto", CPU, 10**15) > 10**15


def test_what_a_process_may_have_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of what the machine, the process's limits and its control groups leave."""
    fields = {"MemAvailable": 75, "VmData": 50, "VmSize": 20}
    limits = {resource.RLIMIT_DATA: 90, resource.RLIMIT_AS: 70}
    groups = [(80, 30)]
    monkeypatch.setattr(budgets, "_physical_bytes", lambda: 100)
    monkeypatch.setattr(budgets, "_status", lambda path, field: fields[field])
    monkeypatch.setattr(budgets, "memory_limits", lambda: groups)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limits[what], 1))
    assert (budgets.total_bytes(CPU), budgets.free_bytes(CPU)) == (70, 90 - 50)
    assert budgets.resolve("auto", CPU, 7) == 40 * 95 // 100 + 7
    limits[resource.RLIMIT_AS] = 45
    assert (budgets.total_bytes(CPU), budgets.free_bytes(CPU)) == (45, 45 - 20)
    limits.update(dict.fromkeys(limits, resource.RLIM_INFINITY))
    assert (budgets.total_bytes(CPU), budgets.free_bytes(CPU)) == (80, 80 - 30)
    groups.clear()
    assert (budgets.total_bytes(CPU), budgets.free_bytes(CPU)) == (100, 75)
    groups.append((80, 90))
    assert budgets.free_bytes(CPU) == 0


def test_fields_of_the_kernels_tables(tmp_path: Path) -> None:
    table = tmp_path / "status"
    table.write_text("VmSizes:\t 1 kB\nVmSize:\t  12 kB\nVmData: none\n")
    assert budgets._status(str(table), "VmSize") == 12 * 1024
    assert budgets._status(str(table), "VmData") is None
    assert budgets._status(str(table), "VmPeak") is None
    assert budgets._status(str(tmp_path / "none"), "VmSize") is None


@pytest.mark.parametrize("ratio", [0.5, 1.0, 0.01])
def test_ratios_are_refused_with_a_hint(ratio: float) -> None:
    with pytest.raises(TypeError, match=f"activation_memory_budget.*'{100 * ratio:g}%'"):
        budgets.resolve(ratio, CPU)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0, "budget must be positive, not 0"),
        (-1, "budget must be positive, not -1"),
        (math.nan, "budget must be positive, not nan"),
        (-0.5, "budget must be positive, not -0.5"),
        ("0", "budget must be positive, not 0"),
        ("0%", "above 0% and up to 100%"),
        ("101%", "above 0% and up to 100%"),
        ("x%", "budget 'x%' is no share"),
        ("eight", 'budget: "eight" is not a size'),
        (2**63, "more than any device has"),
    ],
)
def test_senseless_sizes_are_refused(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        budgets.resolve(value, CPU)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "not NoneType"),
        (True, "not bool"),
        (1.5, "=1.5: bytes are a whole number"),
        (math.inf, "=inf: bytes are a whole number"),
        ([8], "not list"),
    ],
)
def test_what_is_no_size_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"^budget.*{reason}"):
        budgets.resolve(value, CPU)


def test_a_reserve_of_ones_own(resnet_profile: ct.Profile) -> None:
    least = ct.plan(resnet_profile, UNLIMITED).least_budget_bytes
    default = ct.plan(resnet_profile, least)
    assert default.reserve_bytes > 0
    none = ct.plan(resnet_profile, cairn.Budget(least, reserve=0))
    assert none.reserve_bytes == 0 and none.least_budget_bytes == least - default.reserve_bytes
    with pytest.raises(ct.InfeasibleBudget):
        ct.plan(resnet_profile, cairn.Budget(least, reserve="1MiB"))


def test_activations_alone(resnet_profile: ct.Profile) -> None:
    step = ct.plan(resnet_profile, UNLIMITED)
    activations = ct.plan(resnet_profile, UNLIMITED, scope="activations")
    state = sum(resnet_profile.resident[name] for name in ("parameters", "buffers", "optimizer state"))
    assert step.plain_peak_bytes - activations.plain_peak_bytes == state + resnet_profile.gradient_bytes
    with pytest.raises(ValueError, match="scope"):
        ct.plan(resnet_profile, UNLIMITED, scope="layer")


def test_gradients_that_a_step_creates_are_no_activations() -> None:
    """Many parameters, few activations: a step that creates its gradients keeps to a budget for activations."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
    x = torch.randn(32, 256)

    def loss_fn(output: Any) -> Any:
        return output.square().mean()

    profile = ct.profile(model, x, loss_fn=loss_fn)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED, scope="activations").least_budget_bytes, scope="activations")
    assert plan.budget_bytes < profile.gradient_bytes
    verified = ct.verify(model, plan, x, loss_fn=loss_fn)
    assert verified.created.peak_bytes <= verified.accumulated.peak_bytes <= plan.budget_bytes
    ct.checkpoint(model, x, loss_fn=loss_fn, budget=plan.budget_bytes, scope="activations")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(model(x)).backward()
        model.zero_grad()
        loss_fn(model(x)).backward()
        loss_fn(model(x)).backward()
        measured = ct.report(model).measured
    assert measured is not None and measured.peak_bytes <= plan.budget_bytes
    ct.handle(model).remove()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allow": ("recompute", "offload")}, "how much memory its tier has, by host_budget="),
        ({"allow": ("recompute",), "host_budget": "1MiB"}, "add 'offload', or leave host_budget= out"),
        ({"allow": ("recompute", "ofload")}, "did you mean 'offload'"),
        ({"allow": ("offload",), "host_budget": "1MiB"}, "contains 'recompute' always"),
        ({"allow": 3}, "it is a tuple of names, of 'recompute', 'inside', 'offload'"),
        pytest.param({"allow": iter(("recompute",))}, "it is a tuple of names", id="an iterator"),
        ({"solver": "joint-chain"}, "how much memory its tier has, by host_budget="),
        ({"tier": "file:."}, "how much memory its tier has, by host_budget="),
        ({"link": "8GB/s"}, "how much memory its tier has, by host_budget="),
        ({"solver": "chain-weak", "host_budget": "1MiB"}, "'chain-weak' offloads nothing: leave host_budget= out"),
    ],
    ids=str,
)
def test_what_cannot_be_allowed_is_refused(
    resnet_profile: ct.Profile, given: dict[str, Any], message: str, never_run: nn.Module
) -> None:
    for call in (functools.partial(ct.plan, resnet_profile), functools.partial(ct.sweep, resnet_profile)):
        with pytest.raises(ValueError, match=message):
            call(**given)
    with pytest.raises(ValueError, match=message):
        ct.checkpoint(never_run, torch.randn(2, 4), **given)
    if "host_budget" in given:
        budget = ct.Budget(UNLIMITED, host=given["host_budget"])
        with pytest.raises(ValueError, match=message):
            ct.plan(resnet_profile, budget, **{name: value for name, value in given.items() if name != "host_budget"})


def test_a_sweep_takes_the_budgets_that_a_plan_takes(resnet_profile: ct.Profile) -> None:
    size, text = ct.plan(resnet_profile, UNLIMITED).plain_peak_bytes, "1000GiB"
    np = pytest.importorskip("numpy")
    wanted = iter([size, np.int64(size), str(size), text, ct.Budget(size, reserve=0)])
    points = ct.sweep(resnet_profile, budgets=wanted)
    assert [point.budget_bytes for point in points] == [size, size, size, 1000 * 2**30, size]
    for wrong, error, message in (
        ("1000 GiB", cairn.BadInput, r'budgets\[1\]: "1000 GiB" is not a size'),
        ("99999999TiB", cairn.BadInput, r"budgets\[1\]"),
        ("0%", ValueError, r"budgets\[1\] '0%'"),
        (0.5, TypeError, r"budgets\[1\]=0.5: .* write '50%'"),
        (None, TypeError, r"budgets\[1\] must be bytes or a size such as '8GiB', not NoneType"),
        (-1, ValueError, r"budgets\[1\] must be positive"),
        (ct.Budget("1GiB", host="1GiB"), ValueError, r"budgets\[1\]: the curve has one host_budget="),
    ):
        with pytest.raises(error, match=message):
            ct.sweep(resnet_profile, budgets=[size, wrong])


def test_offloading_is_allowed_and_forbidden_by_name(resnet_profile: ct.Profile) -> None:
    plain = ct.plan(resnet_profile, UNLIMITED)
    budget = (plain.least_budget_bytes + plain.plain_peak_bytes) // 2
    where = {"host_budget": "64MiB", "link": "100GB/s"}
    assert ct.plan(resnet_profile, budget, **where).offloads
    without_parts = ct.plan(resnet_profile, budget, allow=("recompute", "offload"), **where)
    assert without_parts.offloads and not without_parts.selective
    assert not ct.plan(resnet_profile, budget, allow=("recompute", "inside")).offloads
    assert ct.sweep(resnet_profile, [budget], allow=["recompute", "offload"], **where)[0].step_ns is not None
