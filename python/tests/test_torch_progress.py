"""What profiles tell while they are made."""

# ruff: noqa: E402

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from torch import distributed

pytestmark = pytest.mark.usefixtures("seeded")

PHASES = [
    "finding blocks",
    "measuring memory",
    "recomputing blocks after the forward",
    "timing blocks",
    "measuring the overhead of plans",
    "measuring options inside blocks",
]


class Terminal(io.StringIO):
    """What a person sees."""

    def isatty(self) -> bool:
        return True


def opened(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def profiled(**options: Any) -> ct.Profile:
    step = torch_models.made("cnn")
    return ct.profile(step.model, **step.sample, passes=2, **options)


def test_each_phase_is_told_block_by_block() -> None:
    news: list[cairn.Progress] = []
    profile = profiled(progress=news.append)
    count = sum(stage.kind == "block" for stage in profile.stages)
    told = {name: list(group) for name, group in itertools.groupby(news, lambda one: one.phase)}
    assert list(told) == PHASES
    assert [(one.done, one.total) for one in told["finding blocks"]] == [(None, None)]
    assert [(one.done, one.total) for one in told["timing blocks"]] == [(i, 2 * count) for i in range(2 * count + 1)]
    looking = told["measuring options inside blocks"]  # and at each option of those that are opened
    assert [one.done for one in looking] == list(range(len(looking))) and looking[0].total == count
    assert looking[-1].done == looking[-1].total and looking[-1].total > count
    assert told["measuring memory"][-1].done == told["measuring memory"][-1].total == count


@pytest.mark.parametrize("phase", PHASES)
def test_a_true_result_or_an_error_ends_it_and_leaves_the_model_alone(phase: str) -> None:
    step = torch_models.made("cnn")
    before, state = {key: value.clone() for key, value in step.model.state_dict().items()}, torch.get_rng_state()

    def at(progress: cairn.Progress) -> bool:
        return progress.phase == phase and progress.done != 0

    def fails(progress: cairn.Progress) -> None:
        if at(progress):
            raise KeyboardInterrupt

    with pytest.raises(cairn.Cancelled):
        ct.profile(step.model, **step.sample, passes=1, progress=at)
    with pytest.raises(KeyboardInterrupt):
        ct.checkpoint(step.model, **step.sample, passes=1, budget="1GiB", progress=fails)
    assert ct.handle(step.model) is None
    assert all(torch.equal(before[key], value) for key, value in step.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in step.model.parameters())
    ct.profile(step.model, **step.sample, passes=1, progress=lambda progress: None)


def test_a_terminal_has_a_line_from_the_start_which_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    profile = profiled()
    lines = terminal.getvalue().split("\r")
    assert re.fullmatch(rf"profiling {profile.model_name}: \d s, finding blocks\x1b\[K", lines[1])
    assert any("measuring memory 0 %" in line for line in lines)
    assert lines[-1] == "\033[K"


def test_nothing_is_written_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    profiled(progress=False)
    profiled(progress=lambda news: None)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    profiled()
    assert not terminal.getvalue()
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    profiled()
    assert terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    profiled()


def test_plans_for_other_shapes_write_nothing_among_what_a_loop_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    pytest.importorskip("transformers")
    step = torch_models.made("gpt2")
    ct.checkpoint(step.model, **step.sample, passes=1, budget="1GiB")
    written = terminal.getvalue()
    step.model(**step.kwargs, attention_mask=torch.ones_like(step.kwargs["input_ids"])).loss.backward()
    applied = ct.handle(step.model)
    assert applied is not None and [entry.made for entry in applied.plans] == ["given", "measurement"]
    assert terminal.getvalue() == written


def test_what_cannot_be_told_anything_is_refused() -> None:
    for wrong in (True, 3, "yes"):
        with pytest.raises(TypeError, match="progress must be a function"):
            profiled(progress=wrong)


_WITHOUT_A_COMPILER = """
import sys, torch, cairn.torch as ct
layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)) for _ in range(3))
model = torch.nn.Sequential(*layers)
profile = ct.profile(model, torch.randn(256, 64), loss_fn=torch.sum, blocks=list(model), passes=1)
assert any(stage.options for stage in profile.stages)
with torch.autocast("cpu", torch.bfloat16):
    ct.profile(model, torch.randn(256, 64), loss_fn=torch.sum, blocks=list(model), passes=1)
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_profile_does_not_load_torchs_compiler() -> None:
    """That would take longer than the profile."""
    assert subprocess.run([sys.executable, "-c", _WITHOUT_A_COMPILER], timeout=300).returncode == 0
