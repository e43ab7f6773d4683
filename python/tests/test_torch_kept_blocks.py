"""What plans and reports say of blocks that are always kept."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.base.stage_measure import StageMeasure
from cairn.torch.planning.step_profile import _chain_stage
from selective_support import Mlp, Net, mean_square


def test_the_times_of_a_block_that_is_always_kept_are_those_of_plain_training() -> None:
    """What recomputing it would cost beside the run is no part of its forward, nor taken out of its backward."""
    measured = {"name": "a", "kind": "block", "forward_ns": 30, "backward_ns": 50, "recompute_overhead_ns": 400}
    kept = _chain_stage(StageMeasure(**measured, keep_reason="draws"), 0, True)
    assert (kept["options"][0]["forward_ns"], kept["options"][0]["backward_ns"]) == (30, 50)
    recomputed = _chain_stage(StageMeasure(**measured), 0, True)
    assert recomputed["options"][0]["forward_ns"] + recomputed["options"][0]["backward_ns"] == 80
    assert recomputed["forward_only_ns"] == 400


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("share", [0, 1])
def test_reports_show_times_of_forwards_and_backwards_without_what_recomputing_costs_beside(share: float) -> None:
    """The problem counts that with each forward, and takes it out of the backward, which may have nothing left."""
    model, x = Net(Mlp), torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=mean_square, passes=1)
    blocks = {stage.name: stage for stage in profile.stages if stage.kind == "block"}
    slow = tuple(dataclasses.replace(stage, recompute_overhead_ns=10**9) for stage in profile.stages)
    slow = tuple(dataclasses.replace(s, keep_reason="no") if s.name == list(blocks)[0] else s for s in slow)
    profile = dataclasses.replace(profile, stages=slow)
    top = ct.plan(profile, 2**40)
    least, plain = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes
    plan = ct.Plan.from_json(ct.plan(profile, least + int(share * (plain - least))).to_json())
    with ct.apply(model, plan):
        rows = {row.name: row for row in ct.report(model).rows if row.kind == "block"}
    assert rows.keys() == blocks.keys()
    for name, stage in blocks.items():
        measured = stage if not rows[name].option else stage.options[rows[name].option]
        assert (rows[name].forward_ns, rows[name].backward_ns) == (measured.forward_ns, measured.backward_ns)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("gradients", ["accumulated", "created"])
@pytest.mark.parametrize("beside", [{}, {"host_budget": "1GiB", "link": "20GB/s"}])
@pytest.mark.parametrize("keep", ["layers.1", "layers.*"])
def test_every_plan_names_the_least_budget_that_works(keep: str, beside: dict[str, str], gradients: str) -> None:
    model, x = Net(Mlp), torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=mean_square, passes=1, keep=keep, inside=False)
    least = ct.plan(profile, "1TiB", gradients=gradients, **beside).least_budget_bytes
    with pytest.raises(ct.InfeasibleBudget) as refused:
        ct.plan(profile, least - 1, gradients=gradients, **beside)
    assert refused.value.least_bytes == least
    assert ct.plan(profile, least, gradients=gradients, **beside).least_budget_bytes == least
