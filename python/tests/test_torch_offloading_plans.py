"""Plans that offload are exact and within both budgets."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import cairn
import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import budgets
from cairn.torch.schedule.transfer_plan import traffic_of
from offloading_plans_support import (
    profile_of,
    tier_fixture,  # noqa: F401
    vgg_fixture,  # noqa: F401
)
from offloading_support import CPU, FAST, copies, trace_of
from torch import Tensor, nn
from torch_models import ALL, ODD, Step


@pytest.mark.parametrize("name", [*ALL, *ODD])
def test_plans_that_offload_are_exact_and_within_both_budgets(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = {**ALL, **ODD}[name]()
    measured = profile_of(step)
    points = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)
    overheads = [point.overhead for point in points if point.overhead is not None]
    assert len(overheads) == len(points)
    offloads = 0
    for point, tier in zip(points[:-1], ("host", f"file:{tmp_path}", "host"), strict=True):
        made = ct.plan(measured, point.budget_bytes, host_budget="1GiB", link=FAST, tier=tier)
        alone = _overhead_alone(measured, point.budget_bytes)
        assert alone is None or made.overhead <= alone
        found = ct.verify(step.model, made, **step.sample)
        assert found.accumulated.peak_bytes <= made.accumulated_peak_bytes + 64 * 1024
        offloads += made.offloads
        if made.offloads:
            _assert_in_order(step, made)
    assert (
        offloads or name in ODD
    )  # of these little can be offloaded, and whether it pays is a matter of measured times


def _overhead_alone(measured: ct.Profile, budget: int) -> float | None:
    try:
        return ct.plan(measured, budget).overhead
    except ct.InfeasibleBudget:
        return None


def _assert_in_order(step: Step, made: ct.Plan) -> None:
    assert made.transfer_plan is not None
    assert made.transfer_plan.slab_bytes == made.host_bytes <= made.host_budget_bytes
    with ct.apply(step.model, made) as handle:
        for _ in range(2):
            step.loss().backward()
            assert trace_of(handle.executor.plan_tier) == copies(made.ops)
            assert not handle.executor.notes
        transfers = handle.executor.plan_tier.transfers
        assert transfers.tier.capacity_bytes == made.host_bytes
    step.model.zero_grad()


def test_without_a_host_budget_nothing_changes(vgg: tuple[Step, ct.Profile]) -> None:
    made = ct.plan(vgg[1], ct.sweep(vgg[1], 3)[0].budget_bytes)
    assert not made.offloads
    assert made.problem.get("machine") is None
    assert made.tier == ""


def test_less_than_recomputation_alone_needs(vgg: tuple[Step, ct.Profile]) -> None:
    """The budget is below the least of recomputation alone, where the model lets values leave."""
    torch.manual_seed(0)
    step = ODD["tabled"]()
    measured = profile_of(step)
    least = ct.sweep(measured, 2, host_budget="1GiB", link=FAST)[0].budget_bytes
    with pytest.raises(ct.InfeasibleBudget) as caught:
        ct.plan(measured, least)
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes > least
    made = ct.plan(measured, least, host_budget="1GiB", link=FAST)
    assert made.offloads
    assert ct.verify(step.model, made, **step.sample).ok
    with pytest.raises(ct.InfeasibleBudget) as caught:
        ct.plan(measured, made.least_budget_bytes - 1, host_budget="1GiB", link=FAST)
    assert caught.value.least_bytes == made.least_budget_bytes


def test_a_plan_holds_wherever_the_model_lies(vgg: tuple[Step, ct.Profile]) -> None:
    """Other processes of a training follow one plan, each on its own device."""
    step, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    made = ct.plan(measured, budget, host_budget="1GiB", link=FAST)
    assert made.offloads
    moved = dataclasses.replace(made, device="cuda:7")
    assert ct.verify(step.model, moved, **step.sample).ok
    with ct.apply(step.model, moved) as handle:
        step.loss().backward()
        assert handle.executor.plan_tier.transfers.device == CPU


def test_no_host_memory_and_one_byte_short(vgg: tuple[Step, ct.Profile]) -> None:
    step, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    assert not ct.plan(measured, budget, host_budget=0, link=FAST).offloads
    made = ct.plan(measured, budget, host_budget="1GiB", link=FAST)
    exact = ct.plan(measured, budget, host_budget=made.host_bytes, link=FAST)
    short = ct.plan(measured, budget, host_budget=made.host_bytes - 1, link=FAST)
    assert exact.host_bytes <= made.host_bytes
    assert short.host_bytes < made.host_bytes
    assert made.step_ns <= exact.step_ns or exact.host_bytes < made.host_bytes
    assert ct.verify(step.model, short, **step.sample).ok


def test_links(vgg: tuple[Step, ct.Profile]) -> None:
    _, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    slow = ct.plan(measured, budget, host_budget="1GiB", link=cairn.Machine(0, 1, 1))
    assert not slow.offloads
    assert ct.plan(measured, budget, host_budget="1GiB", link="20GB/s").offloads
    assert ct.plan(measured, budget, host_budget="1GiB").tier == "host"  # measured
    with pytest.raises(cairn.Error):
        ct.plan(measured, budget, host_budget="1GiB", link="0B/s")
    with pytest.raises(ct.Unsupported, match="file:PATH"):
        ct.plan(measured, budget, host_budget="1GiB", tier="tape")


def test_a_file_larger_than_the_cache_is_measured_without_it(
    vgg: tuple[Step, ct.Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(device: torch.device, tier: str, cached: bool) -> ct.Link:
        asked.append((tier.partition(":")[0], cached))
        return ct.Link(10**9, 10**9, 0, True)

    monkeypatch.setattr("cairn.torch.planning.offload_plans._measured_link", measure)
    free = budgets.free_bytes(CPU)
    for tier, size in (("host", free), (f"file:{tmp_path}", 1 << 20), (f"file:{tmp_path}", free)):
        ct.plan(vgg[1], host_budget=size, tier=tier)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ct.plan(vgg[1], host_budget="auto", tier="file:~/values", link=FAST).budget_bytes > 0
    assert asked == [("host", True), ("file", True), ("file", False)]


def test_copies_that_slow_computing_down_count_in_the_plan_s_time(vgg: tuple[Step, ct.Profile]) -> None:
    _, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    links = [ct.Link(20 * 10**9, 20 * 10**9, 0, True, slowdown) for slowdown in (0.0, 0.5)]
    free, slowed = (ct.plan(measured, budget, host_budget="1GiB", link=link) for link in links)
    assert free.offloads and slowed.offloads
    assert free.transfer_plan is not None
    assert free.problem["machine"] == slowed.problem["machine"]
    replay = cairn.simulate(free.verified.problem, free.verified.schedule, None)
    assert free.step_ns == replay.makespan_ns
    beside = traffic_of(free.problem, free.transfer_plan.ops).busy_ns - (replay.stall_ns or 0)
    assert slowed.step_ns - free.step_ns == max(0, beside) // 3


def test_a_step_under_a_cap_of_the_operating_system(tmp_path: Path) -> None:
    """The process gets what the plan says and 4 MiB: the planned step fits, bit for bit, and the plain one does not."""
    program = textwrap.dedent(f"""
        import ctypes, resource, torch
        import cairn.torch as ct
        from torch import nn

        ctypes.CDLL(None).mallopt(-3, 1 << 18)  # what is larger goes back to the system at once
        torch.set_num_threads(1)
        torch.manual_seed(0)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

            def forward(self, x):
                return x + self.down(torch.tanh(self.up(x)).sin())

        model, x = nn.Sequential(*(Block() for _ in range(8))), torch.randn(2048, 128)

        def loss_fn(output):
            return output.square().mean()

        def step():
            model.zero_grad()
            loss_fn(model(x)).backward()
            return [p.grad.clone() for p in model.parameters()]

        expected = step()
        model.zero_grad()
        profile = ct.profile(model, x, loss_fn=loss_fn)
        options = dict(host_budget="1GiB", link="1TB/s")
        budget = ct.sweep(profile, 6, **options)[1].budget_bytes
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        for tier in ("host", "file:{tmp_path}"):
            plan = ct.plan(profile, budget, tier=tier, **options)
            assert plan.offloads
            with ct.apply(model, plan) as handle:
                step()  # opens the offload tier
                model.zero_grad()
                slab = handle.executor.plan_tier.transfers
                used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
                there = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
                cap = (used << 10) + plan.created_peak_bytes - there + (4 << 20)
                resource.setrlimit(resource.RLIMIT_DATA, (cap, most))
                assert all(map(torch.equal, step(), expected))
            model.zero_grad()
            try:
                step()
            except RuntimeError:
                print("capped by", tier.partition(":")[0])
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            model.zero_grad()
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "capped by host\ncapped by file\n"), done.stderr


def test_a_plan_is_data(vgg: tuple[Step, ct.Profile], tmp_path: Path) -> None:
    step, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    made = ct.plan(measured, budget, host_budget="1GiB", link=FAST)
    made.save(tmp_path / "plan.json")
    again = ct.Plan.load(tmp_path / "plan.json")
    assert again.hash == made.hash
    assert again.transfer_plan == made.transfer_plan
    assert ct.verify(step.model, again, **step.sample).ok
    text = str(ct.explain(made))
    assert "offloaded" in text
    assert "offload tier" in text
    assert json.loads(json.dumps(ct.explain(made).to_json()))["offloading"]["host_bytes"] == made.host_bytes


def test_the_timeline_shows_the_copies_in_their_lanes(vgg: tuple[Step, ct.Profile]) -> None:
    _, measured = vgg
    budget = ct.sweep(measured, 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    made = ct.plan(measured, budget, host_budget="1GiB", link=cairn.Machine(0, "20GB/s", "20GB/s"))
    events = json.loads(cairn.trace(made.verified.problem, made.verified.schedule))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [lanes[event["tid"]] for event in events if event["ph"] == "X"]
    transfers = [name for name, _ in copies(made.ops)]
    assert drawn.count("to host") == transfers.count("offload") > 0
    assert drawn.count("to device") == transfers.count("prefetch") > 0


def test_checkpoint_in_one_call(tier: str) -> None:
    torch.manual_seed(0)
    step = ALL["vgg"]()
    plain = copy.deepcopy(step.model)
    budget = ct.sweep(profile_of(step), 4, host_budget="1GiB", link=FAST)[1].budget_bytes
    ct.checkpoint(step.model, **step.sample, budget=budget, host_budget="1GiB", tier=tier, link=FAST, strict=True)
    assert ct.handle(step.model).plan.offloads
    for seed in range(3):
        torch.manual_seed(seed)
        step.loss().backward()
        torch.manual_seed(seed)
        assert step.loss_fn is not None
        step.loss_fn(plain(*step.args)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(step.model.parameters(), plain.parameters(), strict=True))
    assert ct.report(step.model).measured is not None
    ct.handle(step.model).remove()


def test_checkpoint_sequential_offloads() -> None:
    layers = [nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(4)]
    plain = copy.deepcopy(layers)
    x = torch.randn(256, 64)
    budget = "2MiB"
    ct.checkpoint_sequential(layers, input=x, budget=budget, host_budget="1GiB", link=FAST).sum().backward()
    nn.Sequential(*plain)(x).sum().backward()
    assert torch.equal(layers[0][0].weight.grad, plain[0][0].weight.grad)


def test_steps_of_other_shapes_have_their_own_transfers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)))
    plain = copy.deepcopy(model)

    def loss_fn(output: Tensor) -> Tensor:
        return output.square().mean()

    ct.checkpoint(
        model, torch.randn(64, 64), budget="3500KiB", loss_fn=loss_fn, host_budget="1GiB", link=FAST, inside=False
    )
    for rows in (64, 512, 100, 512):
        x = torch.randn(rows, 64)
        loss_fn(model(x)).backward()
        loss_fn(plain(x)).backward()
        assert not ct.handle(model).executor.notes
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert any(entry.plan.offloads for entry in ct.handle(model).plans)
    ct.handle(model).remove()
