"""What a profile measures, optimizers among it."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import cProfile
import importlib
import pstats
import sys
import types
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
from cairn.torch.profiling import gradient_lifetimes, option_proofs, overhead
from cairn.torch.profiling.optimizer import KeptStates, measure_optimizer
from profile_support import block_names, profiled
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    assert all(0 < stage.again_ns < 10**8 for stage in blocks)
    chain = profile.chain()
    for stage, described in zip(profile.stages, chain["stages"], strict=True):
        options = described["options"]
        assert options[0]["forward_ns"] + options[0]["backward_ns"] == stage.forward_ns + stage.backward_ns
        assert described["forward_only_ns"] >= stage.again_ns
        if all(measured.backward_ns >= stage.again_ns for measured in (stage, *stage.options)):
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
        vars(stage).update(forward_only_ns=10**7, again_ns=10**6)
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
    assert gradient_lifetimes.parted(changes) == (raised, there)


def test_what_waits_is_counted_by_kind_of_step() -> None:
    """Changes are in the order of the forward; what is there beside a stage's gradient came with the stage behind."""
    stages = [StageMeasure(name, "block") for name in "abc"]
    gradient_lifetimes.count(stages, [-4, 1, 4], [-2, 0, 5])
    assert [(stage.weight_grad_bytes, stage.waiting_bytes) for stage in stages] == [(0, 4), (0, 3), (1, 0)]
    counted = [(stage.accumulated_weight_grad_bytes, stage.accumulated_waiting_bytes) for stage in stages]
    assert counted == [(0, 2), (0, 2), (3, 0)]


def test_a_gradient_that_waits_is_on_its_way_back_with_those_of_the_chain() -> None:
    """That of a sum around the second block waits while it and the first run again and backward."""
    step = torch_models.around("around-one")
    profile = profiled(step)
    size = step.args[0].shape[0] * 256 * 4
    of_loss = 4  # waits, too, as long as the caller's backward runs
    waits = {stage.name: stage.accumulated_waiting_bytes - of_loss for stage in profile.stages}
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


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    ],
)
def test_optimizer_state_and_step_are_predicted(make: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 200))
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step()
    values = [p.detach().clone() for p in model.parameters()]
    predicted = measure_optimizer(optimizer)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert not optimizer.state
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    peak = 0
    for _ in range(2):
        meter = memory.CpuMeter()
        with meter:
            first = meter.mark()
            optimizer.step()
            last = meter.mark()
        peak = max(peak, meter.peak(first, last) - meter.level(last))
    scheduler.step()
    state = memory.unique_bytes(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
    assert predicted.state_bytes == pytest.approx(state, rel=0.001, abs=64)
    assert predicted.step_bytes == pytest.approx(peak, rel=0.01, abs=256)
    assert measure_optimizer(optimizer).state_bytes == state


class Momentum(torch.optim.Optimizer):
    """One of its own, with attributes."""

    def __init__(self, params: Any, decay: float = 0.5, **others: Any) -> None:
        super().__init__(params, {"lr": 0.1, "factor": 3})
        self.decay, self.calls = decay, [0]
        vars(self).update(others)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.mul_(self.decay).add_(p.grad), alpha=group["lr"])
                torch.empty(group["factor"] * p.numel())


class Whole(Momentum):
    """Copies of it have all that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


class Later(Momentum):
    """Takes more from the second step on."""

    def step(self, closure: Any = None) -> None:
        super().step()
        torch.empty(10**5 if self.calls[0] > 1 else 0)


class Aside(Momentum):
    """Needs what no copy has."""

    def step(self, closure: Any = None) -> None:
        self.table.zero_()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Momentum, Whole])
def test_optimizers_with_attributes_and_hooks_are_measured_without_a_step(kind: type[Momentum]) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 50, bias=False))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer, calls = kind(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step()
    values = [p.detach().clone() for p in model.parameters()]
    found = measure_optimizer(optimizer)
    assert found.state_bytes == memory.unique_bytes(model.parameters())
    assert 0 <= found.step_bytes - 3 * 100 * 100 * 4 < 256
    assert (calls, optimizer.calls, len(optimizer.state)) == ([], [0], 0)
    assert all(map(torch.equal, model.parameters(), values))


def test_what_an_optimizer_takes_is_that_of_its_largest_group_and_of_what_it_trains() -> None:
    frozen, large, small = (nn.Parameter(torch.zeros(n)) for n in (3000, 1000, 100))
    frozen.requires_grad_(False)
    groups = [{"params": [frozen, large], "factor": 5}, {"params": [small], "factor": 9}, {"params": [frozen.clone()]}]
    found = measure_optimizer(Momentum(groups))
    assert found.state_bytes == 1100 * 4
    assert 0 <= found.step_bytes - 5 * 1000 * 4 < 256
    assert 0 <= measure_optimizer(Later([small])).step_bytes - 10**5 * 4 < 256
    both = {"params": [large, nn.Parameter(torch.zeros(500))]}
    alone = measure_optimizer(Momentum([{**both, "foreach": True, "fused": True}])).step_bytes
    assert alone == measure_optimizer(Momentum([both])).step_bytes
    assert measure_optimizer(Momentum([{**both, "foreach": True}])).step_bytes == alone * 3 // 2
    assert measure_optimizer(Momentum([{"params": [nn.Parameter(torch.zeros(0))]}])).state_bytes == 0


def test_an_optimizer_that_no_copy_can_stand_for_is_refused() -> None:
    model = nn.Linear(8, 8)
    optimizer = Aside(model.parameters(), table=torch.ones(8))
    with pytest.raises(ct.Unsupported, match="Aside .* 'table'.* leave optimizer= out"):
        ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, optimizer=optimizer, passes=1)
    assert torch.equal(vars(optimizer)["table"], torch.ones(8))


def test_what_an_optimizer_keeps_is_looked_at_when_it_has_more_or_fewer_entries() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer, second = Momentum([*model.parameters(), *other.parameters()]), Momentum(model.parameters())
    kept = KeptStates()
    assert not kept.note(optimizer, model) and kept.bytes == 0
    for p in (*model.parameters(), *other.parameters()):
        p.grad = torch.ones_like(p)
    optimizer.step()
    size = memory.unique_bytes(model.parameters())
    assert kept.note(optimizer, model) and kept.bytes == size  # but not the state of others
    assert not kept.note(optimizer, model)
    second.step()
    assert kept.note(second, model) and kept.bytes == 2 * size
    optimizer.state.clear()
    assert kept.note(optimizer, model) and kept.bytes == size
    away = nn.Linear(8, 8, device="meta")
    third = Momentum(away.parameters())
    third.state[away.weight]["mean"] = torch.zeros(8)  # on the CPU, for a model elsewhere
    assert not kept.note(third, away) and kept.bytes == size


class Wrapper(torch.optim.Optimizer):
    """All is another optimizer's, as accelerate does it."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str = "optimizer") -> None:
        vars(self).update({"inner": name, name: optimizer})

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return vars(self)[self.inner].param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)[self.inner].param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return vars(self)[self.inner].state

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)[self.inner].state = state

    def step(self, closure: Any = None) -> Any:
        return vars(self)[self.inner].step(closure)


def test_an_optimizer_within_others_is_measured_and_left_as_it_was() -> None:
    step = torch_models.vgg()
    optimizer = torch.optim.AdamW(step.model.parameters())
    step.loss_fn(step.model(*step.args)).backward()
    optimizer.step()
    groups, states = optimizer.param_groups[0]["params"], len(optimizer.state)
    expected = ct.profile(step.model, passes=1, optimizer=optimizer, **step.sample)
    values = [p.detach().clone() for p in step.model.parameters()]
    found = ct.profile(step.model, passes=1, optimizer=Wrapper(Wrapper(optimizer)), **step.sample)
    assert (found.resident, found.optimizer_step_bytes) == (expected.resident, expected.optimizer_step_bytes)
    assert found.present_bytes == expected.present_bytes
    with pytest.raises(ct.Unsupported, match="Wrapper has its parameters in another optimizer: pass that one"):
        ct.profile(step.model, passes=1, optimizer=Wrapper(optimizer, "hidden"), **step.sample)
    assert optimizer.param_groups[0]["params"] is groups and len(optimizer.state) == states
    assert all(map(torch.equal, step.model.parameters(), values))


def test_optimizers_that_accelerate_has_prepared_are_left_as_they_were() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(8, 8)
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    optimizer.step()
    profile = ct.profile(model, x, loss_fn=torch.sum, optimizer=optimizer, passes=1)
    assert profile.resident["optimizer state"] >= 2 * memory.unique_bytes(model.parameters())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert len(optimizer.state) == 2


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


class Leaves(nn.Linear):
    """A block with a loss of its own, left in an attribute."""

    penalty: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.weight.square().mean() + x.mean()
        return super().forward(x).tanh()


@pytest.mark.parametrize("layers", [1, 4, 8])
def test_what_a_block_leaves_beside_its_result_reaches_the_loss(layers: int) -> None:
    model = nn.Sequential(*(Leaves(64, 64) for _ in range(layers)))
    x = torch.randn(32, 64)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.sum() + sum(layer.penalty for layer in model)

    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok


def test_what_a_block_leaves_counts_only_if_the_loss_reads_it() -> None:
    model, x = nn.Sequential(*(Leaves(64, 64) for _ in range(3))), torch.randn(32, 64)
    unread = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    first = ct.profile(model, x, loss_fn=lambda output: output.sum() + model[0].penalty, passes=1)

    def rises(profile: ct.Profile) -> list[int]:
        return [stage.backward_rise_bytes for stage in profile.stages[:3]]

    weight = model[0].weight.nbytes
    assert rises(first)[0] >= rises(unread)[0] + 2 * weight
    assert rises(first)[1:] == rises(unread)[1:]


def test_the_gradient_of_what_a_block_leaves_waits_for_the_block() -> None:
    class Aside(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.left = super().forward(x)
            return x + self.left

    model, x = nn.Sequential(*(Aside(64, 64) for _ in range(4))), torch.randn(256, 64)
    profile = ct.profile(model, x, loss_fn=lambda y: y.sum() + model[1].left.square().sum(), passes=1)
    waits = [stage.waiting_bytes // x.nbytes for stage in profile.stages[:4]]
    assert waits == [0, 1, 1, 1]


class Appending(nn.Module):
    """A block that appends a loss of its own to a list, and counts its runs."""

    def __init__(self, losses: list[torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)
        self.losses, self.seen = losses, types.SimpleNamespace(runs=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        self.losses.append(y.square().mean())
        self.seen.runs += 1
        return x + y


class Collecting(nn.Module):
    """Reads what its blocks appended, and empties the lists afterwards; they share one, or each has its own."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        losses: list[torch.Tensor] = []
        self.layers = nn.ModuleList(Appending(losses if shares else []) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        found = {id(layer.losses): layer.losses for layer in self.layers}.values()
        loss = x.square().mean() + sum(sum(losses) for losses in found)
        for losses in found:
            losses.clear()
        return loss


@pytest.mark.parametrize("shares", [False, True])
def test_runs_that_the_model_did_not_ask_for_leave_nothing_in_attributes(shares: bool) -> None:
    model, x = Collecting(shares), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    profile = ct.profile(model, x, passes=1)
    assert not any(stage.keep_reason for stage in profile.stages if stage.kind == "block")
    least = ct.plan(profile, ct.plan(profile, "1GiB").least_budget_bytes)
    assert ct.verify(model, least, x).ok
    runs = [layer.seen.runs for layer in model.layers]
    with ct.apply(model, least):
        for _ in range(3):
            for other in (model, plain):
                other.zero_grad()
                other(x).backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert [layer.seen.runs for layer in model.layers] == [run + 3 for run in runs]


def test_all_sample_steps_are_the_same_step_of_a_model_that_counts_its_own() -> None:
    class Alternating(nn.Module):
        """Every other step takes more memory, the first one, too."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.steps = nn.Sequential(*(Leaves(32, 32) for _ in range(4))), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.layers(x.sin().exp().tanh() if self.steps % 2 else x)

    model, x = Alternating(), torch.randn(256, 32, requires_grad=True)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    least = ct.plan(profile, 2**40).least_budget_bytes
    report = ct.verify(model, ct.plan(profile, least), x, loss_fn=torch.sum)
    assert report.ok and model.steps == 0


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="torch does not say whose hooks there are",
)
def test_blocks_in_checkpoints_of_the_models_own_are_refused() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = nn.Sequential(Checkpointed(*(Leaves(16, 16) for _ in range(3))), nn.Linear(16, 16), nn.Tanh())
    with pytest.raises(ct.Unsupported, match=r"calls '0\.0' within saved-tensor hooks .* take them out"):
        ct.profile(model, torch.randn(8, 16), loss_fn=torch.sum, blocks="0.*")
    plan = ct.plan(ct.profile(model, torch.randn(8, 16), loss_fn=torch.sum, blocks=model), "1GiB")
    assert ct.verify(model, plan, torch.randn(8, 16), loss_fn=torch.sum).ok


def test_blocks_in_reentrant_checkpoints_of_the_models_own_are_refused() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model = nn.Sequential(nn.Linear(16, 16), Checkpointed(*(Leaves(16, 16) for _ in range(3))), nn.Tanh())
    x = torch.randn(8, 16)
    for blocks in ("1.*", Leaves):
        with pytest.raises(ct.Unsupported, match=r"calls '1\.0' within .* use_reentrant=True: take it out"):
            ct.profile(model, x, loss_fn=torch.sum, blocks=blocks)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, blocks=model), "1GiB")
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok


class Transforming(torch_models.Residual):
    """A block that transforms its activation, or its layers, by torch.func."""

    def __init__(self, transform: str) -> None:
        super().__init__(32)
        self.transform = transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        func = torch.func
        y = super().forward(x)
        if self.transform == "grad":
            return x + func.grad(lambda t: torch.tanh(t).sum())(y)
        if self.transform == "vjp":
            return x + func.vjp(torch.tanh, y)[1](y)[0]
        if self.transform == "jvp":
            return x + func.jvp(torch.tanh, (y,), (y,))[1]
        return x + self.down(func.vmap(self.up)(y))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp"])
def test_derivatives_by_torch_func_inside_a_model_are_refused_by_name(transform: str) -> None:
    model = nn.Sequential(*(Transforming(transform) for _ in range(3)))
    with pytest.raises(ct.Unsupported, match=r"'0' differentiates by torch\.func .* plan the parts of the model"):
        ct.profile(model, torch.randn(8, 32), loss_fn=torch.sum)


def test_layers_that_run_in_vmap_are_part_of_the_block_around_it() -> None:
    model, x = nn.Sequential(*(Transforming("vmap") for _ in range(3))), torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_blocks_that_run_in_vmap_are_refused_by_name() -> None:
    class Mapping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = torch.func.vmap(layer)(x)
            return x

    model = nn.Sequential(nn.Linear(32, 32), Mapping(*(nn.Linear(32, 32) for _ in range(3))), nn.Tanh())
    with pytest.raises(ct.Unsupported, match=r"calls '1\.0' within a transform of torch\.func .*blocks="):
        ct.profile(model, torch.randn(8, 32), loss_fn=torch.sum, blocks="1.*")


def test_blocks_with_weights_that_the_model_computes_are_refused_by_name() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = {name: p * self.scale for name, p in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, weights, (x,))

    model, plain, x = Scaling(), Scaling(), torch.randn(64, 32)
    plain.load_state_dict(model.state_dict())
    with pytest.raises(ct.Unsupported, match=r"calls 'inner\.0' with weights .* plan the module that functional_call"):
        ct.profile(model, x, loss_fn=torch.sum)
    profile = ct.profile(model.inner, x, loss_fn=torch.sum)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    with ct.apply(model.inner, plan):
        for one in (model, plain):
            torch.manual_seed(0)
            one(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class CheckpointInside(torch_models.Residual):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_blocks_are_part_of_them(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointInside, "reentrant", reentrant)
    model, x = nn.Sequential(*(CheckpointInside(32) for _ in range(4))), torch.randn(64, 32, requires_grad=True)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    least = ct.plan(profile, 2**40).least_budget_bytes
    plan = ct.plan(profile, least)
    assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_outputs_without_gradients_are_refused_with_what_may_take_them() -> None:
    model = nn.Sequential(*(CheckpointInside(32) for _ in range(2)))
    for loss_fn in (None, torch.sum):
        with pytest.raises(ValueError, match=r"output does not require gradients.* use_reentrant=False does"):
            ct.profile(model, torch.randn(8, 32), loss_fn=loss_fn)


def test_what_a_backward_cannot_recompute_is_no_option_even_if_the_memory_looks_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The LSTM of oneDNN returns memory that only its backward reads, never quite written; none where there is none."""
    monkeypatch.setattr(option_proofs, "_same", lambda first, second: True)
    profile = profiled(torch_models.recurrent())
    assert not any("rnn" in option.recomputes for stage in profile.stages for option in stage.options)


def test_modules_with_parts_are_not_merged_although_nothing_saves_what_lies_between_them() -> None:
    class Shifted(torch_models.Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - 1)

    model = nn.Sequential(*(Shifted() for _ in range(4)))
    for _ in range(3):
        assert block_names(ct.profile(model, torch.randn(32, 64), loss_fn=torch.sum, passes=1)) == ["0", "1", "2", "3"]


def test_arguments_that_a_block_hands_on_are_not_its_output() -> None:
    class HandingOn(nn.Linear):
        def forward(self, packed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(super().forward(packed[0])), packed[1]

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(64, 64), nn.Linear(64, 64)
            self.blocks = nn.ModuleList(HandingOn(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, lengths = self.blocks[0]((self.enter(x), torch.ones(256, 64)))
            x, lengths = self.blocks[1]((x.exp(), lengths))
            return (self.leave(x) * lengths).sum()

    model, x = Packed(), torch.randn(256, 64)
    profile = ct.profile(model, x, loss_fn=lambda loss: loss, passes=1, blocks=model.blocks)
    size = 256 * 64 * 4
    blocks = [stage for stage in profile.stages if stage.kind == "block"]
    assert [(stage.output_bytes, stage.left_bytes) for stage in blocks] == [
        (0, size),
        (size, 0),
    ]  # nobody keeps a tanh's
    for point in ct.sweep(profile, 4):
        assert ct.verify(model, ct.plan(profile, point.budget_bytes), x, loss_fn=lambda loss: loss).ok


def test_losses_in_a_list_that_the_loop_empties() -> None:
    class Lists(nn.Linear):
        def __init__(self, losses: list[torch.Tensor]) -> None:
            super().__init__(64, 64)
            self.losses = losses

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).tanh()
            self.losses.append(y.square().mean())
            return y

    losses = [torch.zeros(())]
    model, x = nn.Sequential(*(Lists(losses) for _ in range(4))), torch.randn(32, 64)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        assert len(losses) <= 1 + 2 * len(model)  # of this step, and of blocks that are measured in it
        return output.square().mean() + sum(losses)

    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    assert len(losses) == 1
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok
    assert len(losses) == 1


def test_router_losses_collected_from_inside_blocks_are_part_of_the_step() -> None:
    step = torch_models.made("mixtral")
    step.model.config.output_router_logits = True
    profile = profiled(step)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert ct.verify(step.model, plan, (), step.kwargs).ok


def test_a_profile_within_a_cache_of_weights_is_refused() -> None:
    """It would take every weight to be there already."""
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2)))
    with nn.utils.parametrize.cached(), pytest.raises(ct.Unsupported, match=r"cached\(\) span the model's forward"):
        ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum)
    ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, passes=1)


def test_a_block_that_descends_in_its_own_forward_is_kept() -> None:
    class Descending(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(super().forward(inner).square().sum(), inner)
            return super().forward(x - gradient)

    model, x = nn.Sequential(nn.Linear(8, 8), Descending(8, 8)), torch.randn(4, 8)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert [stage.keep_reason for stage in profile.stages[:2]] == ["", "takes gradients in its own forward"]
    assert ct.verify(model, ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes), x, loss_fn=torch.sum).ok
