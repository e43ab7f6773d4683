"""What a profile measures of a model's blocks, and what it leaves as it was."""

# ruff: noqa: E402

from __future__ import annotations

import cProfile
import importlib
import pstats
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.base import memory
from cairn.torch.base._compat import profiler_events
from cairn.torch.base.blocks import Block
from cairn.torch.base.stage_measure import StageMeasure
from cairn.torch.profiling import gradient_lifetimes, overhead
from profile_support import block_names, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_linear_chain_is_measured_to_the_byte() -> None:
    batch, width = 32, 48
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
    profile = ct.profile(
        model, torch.randn(batch, width), loss_fn=torch.sum, passes=1, blocks=[model[0], model[1], model[2]]
    )
    size, weight = 4 * batch * width, 4 * (width * width + width)
    stage = profile.stages[1]
    assert stage.output_bytes == stage.grad_bytes == size
    assert stage.saved_bytes == size  # Tanh saves its output, Linear only the block's input
    assert stage.weight_grad_bytes == weight
    assert stage.forward_rise_bytes == 2 * size
    assert profile.resident["output of 2"] == size  # the caller holds it
    assert profile.gradient_bytes == profile.resident["parameters"] == 3 * weight
    assert profile.input_bytes == size


def test_identical_blocks_measure_alike() -> None:
    stages = [stage for stage in profiled(torch_models.made("gpt2")).stages if stage.kind == "block"]
    assert len({stage.signature() for stage in stages}) == 1
    assert [stage.left_bytes for stage in stages] == [0, 0, stages[0].output_bytes]  # it stays behind the last block
    assert len({(stage.forward_ns, stage.backward_ns) for stage in stages}) == 1
    assert all(stage.random and stage.forward_ns > 0 and stage.backward_ns > 0 for stage in stages)


def test_batch_norm_is_noticed() -> None:
    stages = {stage.name: stage for stage in profiled(torch_models.cnn()).stages}
    assert set(stages["1-2"].writes_buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert not stages["0"].writes_buffers


def test_what_the_caller_holds_is_counted() -> None:
    step = torch_models.made("gpt2")
    logits = step.model(**step.kwargs).logits
    assert profiled(step).held_bytes == logits.numel() * 4 + 4


def test_running_again_costs_more_than_the_run() -> None:
    """By the mechanism's own time, which grows with what a block saves; kept blocks are free of it."""
    profile = profiled(torch_models.resnet())
    blocks = [stage for stage in profile.stages if stage.kind == "block"]
    assert all(0 < stage.recompute_overhead_ns < 10**8 for stage in blocks)
    chain = profile.chain()
    for stage, described in zip(profile.stages, chain["stages"], strict=True):
        options = described["options"]
        assert options[0]["forward_ns"] + options[0]["backward_ns"] == stage.forward_ns + stage.backward_ns
        assert described["forward_only_ns"] >= stage.recompute_overhead_ns
        if all(measured.backward_ns >= stage.recompute_overhead_ns for measured in (stage, *stage.options)):
            # so that nothing is saved that no backward uses
            assert described["forward_only_ns"] <= min(option["forward_ns"] for option in options)
    known = overhead.cost()
    few, many = (known.of(Block("", (nn.Linear(4, 4),)), count) for count in (2, 40))
    assert 0 < few <= many


def test_bookkeeping_is_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, of which one may wait for a core that something else has, would be in all of its times."""
    threads: set[int] = set()
    timed = overhead._time

    def time_of(run: Callable[[], None]) -> int:
        threads.add(torch.get_num_threads())
        return timed(run)

    monkeypatch.setattr(overhead, "_time", time_of)
    torch.set_num_threads(2)
    overhead.cost.__wrapped__()
    assert threads == {1}
    assert torch.get_num_threads() == 2


def test_nothing_is_saved_to_be_dropped_unused() -> None:
    """Where recomputing costs something, to save and drop is no way around it."""
    profile = profiled(torch_models.made("llama"))
    times = {"forward_ns": 10**7, "backward_ns": 2 * 10**7}
    for stage in profile.stages:
        for measured in (stage, *stage.options):
            vars(measured).update(times)
        vars(stage).update(forward_only_ns=10**7, recompute_overhead_ns=10**6)
    top = ct.plan(profile, 2**40)
    low, high = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes
    plans = [ct.plan(profile, low + (high - low) * i // 10) for i in range(10)]
    assert any(len(plan.ops) > len(top.ops) for plan in plans)
    assert not any(op[:2] == ["drop", "saved"] for plan in plans for op in plan.ops)


@pytest.mark.parametrize(
    ("changes", "raised", "there"),
    [
        ([], [], []),
        ([3, 0, 2], [3, 0, 2], [0, 0, 0]),  # gradients of parameters
        ([5, 0, -5], [0, 0, 0], [5, 5, 0]),  # one that waits
        ([5, 4, -5, -2], [2, 0, 0, 0], [3, 7, 2, 0]),
        ([-3, 2, 1, -1], [0, 2, 0, 0], [0, 0, 1, 0]),  # what goes first was counted elsewhere
    ],
)
def test_what_waits_in_a_backward_is_told_from_what_stays(
    changes: list[int], raised: list[int], there: list[int]
) -> None:
    assert gradient_lifetimes.split_lasting(changes) == (raised, there)


def test_what_waits_is_counted_by_kind_of_step() -> None:
    """Changes are in the order of the forward; what is there beside a stage's gradient came with the stage behind."""
    stages = [StageMeasure(name, "block") for name in "abc"]
    gradient_lifetimes.count(stages, [-4, 1, 4], [-2, 0, 5])
    assert [(stage.weight_grad_bytes, stage.pending_grad_bytes) for stage in stages] == [(0, 4), (0, 3), (1, 0)]
    counted = [(stage.accumulated_weight_grad_bytes, stage.accumulated_pending_grad_bytes) for stage in stages]
    assert counted == [(0, 2), (0, 2), (3, 0)]


def test_a_gradient_that_waits_is_on_its_way_back_with_those_of_the_chain() -> None:
    """That of a sum around the second block waits while it and the first run again and backward."""
    step = torch_models.around("around-one")
    profile = profiled(step)
    size = step.args[0].shape[0] * 256 * 4
    of_loss = 4  # waits, too, as long as the caller's backward runs
    waits = {stage.name: stage.accumulated_pending_grad_bytes - of_loss for stage in profile.stages}
    assert [waits[f"blocks.{i}"] for i in range(6)] == [0, size, size, size, 0, 0]
    second = profile.stages[1]
    assert profile.chain()["stages"][1]["grad_bytes"] == second.grad_bytes + size + of_loss


def test_outputs_that_a_list_has_until_the_forward_ends_are_held_by_nobody() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = []
            for block in self.blocks:
                made.append(block(x))
                x = x + made[-1]
            return x

    model, x = Listing(), torch.randn(256, 64)
    profile = ct.profile(model, x, loss_fn=lambda y: y.square().mean(), passes=1)
    assert all(stage.also_held_bytes <= stage.output_bytes for stage in profile.stages)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=lambda y: y.square().mean()).ok


def test_a_profile_is_data() -> None:
    profile = profiled(torch_models.branches())
    again = ct.Profile.from_json(profile.to_json())
    assert again == profile and again.chain() == profile.chain()
    with pytest.raises(ValueError, match="version"):
        ct.Profile.from_json({**profile.to_json(), "version": 99})


def test_evaluation_mode_is_pointed_out() -> None:
    step = torch_models.cnn()
    step.model.eval()
    with pytest.warns(UserWarning, match="evaluation mode"):
        profiled(step)


def test_a_loss_outside_is_pointed_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert any("loss_fn" in note for note in ct.profile(model, torch.randn(4, 8), passes=1).notes)


def test_wrappers_that_hook_gradients_are_refused() -> None:
    class DistributedDataParallel(nn.Module):
        pass

    with pytest.raises(ct.Unsupported, match="before it is wrapped"):
        ct.profile(DistributedDataParallel(), torch.randn(1))


def test_a_model_that_recomputes_by_itself_is_refused() -> None:
    step = torch_models.made("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers is renaming it
        step.model.gradient_checkpointing_enable()
    with pytest.raises(ct.Unsupported, match="gradient_checkpointing_disable"):
        profiled(step)


def test_no_warning_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profiled(torch_models.branches())


def test_meter_reads_levels_and_peaks() -> None:
    meter = memory.CpuMeter()
    with meter:
        a = meter.mark()
        kept = torch.empty(1000)
        torch.empty(5000)
        b = meter.mark()
        del kept
        last = torch.empty(250)
        c = meter.mark()
        del last
    assert (meter.level(a), meter.level(b), meter.level(c)) == (0, 4000, 1000)
    assert (meter.peak(a, b), meter.peak(b, c), meter.peak(a, c)) == (24000, 4000, 24000)


def test_a_meter_hides_operators_from_its_events_and_shows_them_to_the_next_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are many more than what a meter looks at, in blocks of many small operations."""
    if not hasattr(torch._C._autograd, "_enable_profiler_legacy"):
        pytest.skip("torch has no profiler of events in order")
    read, kinds = profiler_events._legacy_events, []

    def noted(threads: Any, prefix: str) -> Any:
        kinds.extend(event.kind() for thread in threads for event in thread)
        return read(threads, prefix)

    monkeypatch.setattr(profiler_events, "_legacy_events", noted)
    value = torch.ones(10)
    with memory.CpuMeter() as meter:
        meter.mark()
        for _ in range(20):
            value = value + 1
        meter.mark()
    assert kinds.count("push") == 2 and kinds.count("memory_alloc") >= 40
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as later:
        value + 1
    assert "aten::add" in {event.key for event in later.key_averages()}


def test_a_profile_can_be_profiled() -> None:
    importlib.import_module("torch._dynamo")  # its calls are watched for
    python = cProfile.Profile()
    python.enable()
    profiled(torch_models.branches())
    python.disable()
    assert any(function == "measure_optimizer" for _, _, function in pstats.Stats(python).stats)  # type: ignore[attr-defined]


def test_a_profiler_of_python_that_could_not_go_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._dynamo")
    monkeypatch.setattr(sys, "getprofile", lambda: range(0))  # as that of pyinstrument, which is no function
    with pytest.raises(ct.Unsupported, match=r"a profiler of Python runs in this thread \(builtins\)"):
        profiled(torch_models.branches())
    monkeypatch.undo()
    assert sys.getprofile() is None


def test_stages_of_stages_are_opened_but_blocks_with_small_lists_in_them_are_not() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(torch_models.Bottleneck(32, 8, 1) for _ in range(2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.path(x)

    model = nn.Sequential(nn.Conv2d(3, 32, 3), Stage(), Residual(), Residual())
    profile = ct.profile(model, torch.randn(2, 3, 16, 16), loss_fn=torch.sum, passes=1)
    assert block_names(profile) == ["0", "1.layers.0", "1.layers.1", "2", "3"]
