"""Reports: what a plan does, and what was measured of it."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.planning.measured_step import Measured
from plan_support import UNLIMITED, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_report_adds_up() -> None:
    step = torch_models.made("gpt2")
    profile = profiled(step)
    least = ct.plan(profile, UNLIMITED).least_budget_bytes
    report = ct.explain(ct.plan(profile, least))
    assert sum(report.composition.values()) == report.plan.peak_bytes
    held = report.composition["held by the caller: the model's output and loss"]
    assert held == profile.held_bytes
    data = json.loads(json.dumps(report.to_json()))
    assert data["peak_bytes"] == report.plan.peak_bytes and len(data["stages"]) == len(profile.stages)
    assert sum(row["forwards"] for row in data["stages"]) == sum(op[0].startswith("forward") for op in report.plan.ops)
    text = str(report)
    assert "transformer.h.1" in text and "recomputed" in text and "outside blocks" in text
    assert "kept" in str(ct.explain(ct.plan(profile, UNLIMITED)))


def test_what_makes_up_a_peak_is_never_negative_and_lies_somewhere() -> None:
    profile = profiled(torch_models.made("t5"))
    least = ct.plan(profile, UNLIMITED).least_budget_bytes
    report = ct.explain(ct.plan(profile, least))
    assert min(*report.composition.values(), *report.floor.values()) > 0
    assert sum(report.floor.values()) == least - report.plan.reserve_bytes
    assert any(name.startswith("saved before encoder.") for name in report.floor)
    with pytest.raises(ct.InfeasibleBudget, match="does not fit is the forward before encoder"):
        ct.plan(profile, 1000)


def test_the_distance_from_the_optimum_is_rounded_up() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    profile = ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, passes=1)
    plan = dataclasses.replace(ct.plan(profile, UNLIMITED), step_ns=100_000)
    for bound_ns, words in (
        (94_960, "at most 5.1 % from"),
        (95_000, "at most 5.0 % from"),
        (100_000, "proved optimal"),
    ):
        assert words in str(ct.explain(dataclasses.replace(plan, lower_bound_ns=bound_ns)))


def test_a_report_says_which_operators_each_option_recomputes() -> None:
    pools = [layer for width in (8, 8, 8) for layer in (nn.Conv2d(8, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *pools, nn.Flatten(), nn.Linear(128, 10))
    profile = ct.profile(model, torch.randn(4, 3, 32, 32), loss_fn=lambda out: out.square().mean(), passes=1)
    top = ct.plan(profile, UNLIMITED)
    least, span = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes - top.least_budget_bytes
    for share in range(0, 100, 10):
        report = ct.explain(ct.plan(profile, least + span * share // 100))
        options = [row.option for row in report.rows if row.option]
        assert all(f"option {row.option}" in row.action for row in report.rows if row.option)
        told = re.findall(r"option (\d+) in (\d+) of \d+ blocks: recomputes", str(report))
        assert sorted(options) == sorted(int(option) for option, count in told for _ in range(int(count)))


def test_what_is_measured_and_swept_prints_for_people(resnet_profile: ct.Profile) -> None:
    assert re.fullmatch(
        r"<Profile of \w+ on cpu: \d+ blocks, \S+ MiB saved, .* resident, .* a step>", f"{resnet_profile}"
    )
    none, plain = curve = ct.sweep(resnet_profile, ["1000", UNLIMITED])
    measured = ct.Measurement("plain", peak_bytes=2**20, step_ns=2_000_000, overhead=0.0, same_loss=True)
    assert str(dataclasses.replace(curve, measured=(measured,))).splitlines() == [
        str(none), str(plain), "plain, measured: peak 1.00 MiB, 2.00 ms, +0.0 %"
    ]  # fmt: skip
    assert str(none) == "budget 1000 B: no plan" and str(plain).startswith("budget 1.00 TiB: peak ")
    assert str(plain).endswith("s, +0.0 %")


def test_reports_tell_what_the_latest_step_did_otherwise() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))), torch.randn(4, 32)
    least = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=model), UNLIMITED).least_budget_bytes
    with ct.budget(model, least + 2**15, x, loss_fn=torch.sum, passes=1, blocks=model) as handle:
        model(x).sum().backward()
        assert handle.report().notes == () and "deviations" not in str(handle.report())
        model[1] = nn.Tanh()
        model(x).sum().backward()
        assert handle.report().notes == ("planned blocks did not run: 1",)
        del model[5]
        model(x).sum().backward()
        assert handle.report().notes == ("planned blocks did not run: 1, 5",)
        assert "deviations  planned blocks did not run: 1, 5" in str(handle.report())
        assert handle.report().to_json()["notes"] == list(handle.report().notes)
        notes = (*(f"'{name}' ran more often" for name in "aabcd"), "'e' was recorded again", "another step has copies")
        lines = str(dataclasses.replace(handle.report(), notes=notes)).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if "deviations" in line] == [
        "a, b and 2 more: each ran more often", "e was recorded again", "another step has copies"
    ]  # fmt: skip


def test_reports_say_when_predicted_and_measured_times_are_far_apart(resnet_profile: ct.Profile) -> None:
    plan = ct.plan(resnet_profile, UNLIMITED)

    def report(step_ns: int) -> str:
        return str(ct.explain(plan, Measured(plan.peak_bytes, step_ns, True)))

    text = "  times off   predicted and measured times differ by a factor of 17: "
    assert text + "profile again, the machine was busy" in report(plan.step_ns // 17)
    assert text + "the machine was busy, or measuring took most of a short step" in report(17 * plan.step_ns)
    assert "times off" not in report(plan.step_ns // 2 + 1) and "times off" not in report(2 * plan.step_ns)


def test_reports_explain_stages_outside_blocks_ranges_and_outputs_that_count_later() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(8, 64), nn.Linear(64, 4)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for layer in self.layers:
                x = layer(x)
            return self.out(x)

    profile = ct.profile(Layers(), torch.randn(512, 8), loss_fn=lambda output: output.square().mean(), passes=1)
    lines = str(ct.explain(ct.plan(profile, UNLIMITED))).splitlines()
    heading = lines.index("  modules outside blocks:")
    assert lines[heading + 1 : heading + 3] == ["    before layers.0.0-1: inp", "    after layers.5.2: out"]
    [last] = [line for line in lines if line.startswith("  layers.5.2 ")]
    assert re.search(r" counted after ", last)
    assert "  layers.0.0-1 is one block: the modules from layers.0.0 to layers.0.1" in lines


def test_reports_name_blocks_that_are_always_kept() -> None:
    step = torch_models.resnet()
    report = ct.explain(ct.plan(profiled(step, keep="layers.1"), UNLIMITED))
    assert "layers.1 is always kept: it is listed in keep=" in str(report)


def test_sweep_draws(resnet_profile: ct.Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    points = ct.sweep(resnet_profile, ["1MiB", UNLIMITED], plot=path)
    assert points[0].step_ns is None and points[1].overhead == 0
    assert path.read_bytes().startswith(b"\x89PNG")
