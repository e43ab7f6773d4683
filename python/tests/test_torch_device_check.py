"""What recomputed blocks compute is compared on the device: that of the tests is played by the CPU."""

# ruff: noqa: E402

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.base.errors import RecomputationError
from cairn.torch.runtime import recompute_check
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 32
OTHER_VALUES = "'blocks.0', 'blocks.1', 'blocks.2' computed other values when recomputed in an earlier step"


class Region:
    scale = 1.0


class Reads(nn.Module):
    """Its output depends on a global."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * Region.scale)


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * Region.scale)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


class Saves(Reads):
    """Only what it saves depends on the global."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(_Doubles.apply(self.up(x))))


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Reads) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Device:
    """Does what it is told as late as it may: when somebody waits for it, or the test lets it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.waits = 0  # of the host

    def work(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def sent(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        source, done = source.clone(), []
        self.queue.append(lambda: done.append(target.copy_(source)))
        device = self

        class Event:
            def query(self) -> bool:
                return bool(done)

            def synchronize(self) -> None:
                device.waits += not done
                device.work()

        return Event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The CPU plays a device: the host compares no values by itself."""
    played = Device()
    monkeypatch.setattr(recompute_check, "copy_to_host", played.sent)
    monkeypatch.setattr("cairn.torch.runtime.recomputation.spread", lambda tensor: None)
    monkeypatch.setattr(
        "cairn.torch.runtime.executor.checks_for",
        lambda device, kind: recompute_check.Checks(CPU) if kind == "default" else None,
    )
    return played


def loss_fn(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def planned(model: nn.Module, **options: Any) -> tuple[ct.Handle, torch.Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    profile = ct.profile(model, x, loss_fn=loss_fn, inside=False, progress=False)
    return ct.apply(model, ct.plan(profile, ct.plan(profile, 1 << 40).least_budget_bytes), **options), x


def step(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> None:
    """A step whose forward finds a scale that is gone in its backward."""
    model.zero_grad(set_to_none=True)
    Region.scale = scale
    try:
        loss = loss_fn(model(x))
    finally:
        Region.scale = 1.0
    loss.backward()


@pytest.mark.parametrize("kind", [Reads, Saves])
def test_a_difference_is_an_error_that_names_the_blocks(device: Device, kind: type[nn.Module]) -> None:
    model = Model(kind)
    handle, x = planned(model)
    with handle:
        step(model, x)
        step(model, x, scale=1.5)
        with pytest.raises(RecomputationError, match=OTHER_VALUES):
            step(model, x)
        step(model, x)  # it is told once, and the next step is sound
        step(model, x)


def test_it_is_told_before_the_next_forward_where_the_device_has_done_it(device: Device) -> None:
    model, ran = Model(), []
    handle, x = planned(model)
    with handle:
        step(model, x, scale=1.5)
        device.work()
        hook = model.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
        with pytest.raises(RecomputationError, match=OTHER_VALUES):
            step(model, x)
        hook.remove()
    assert not ran and not device.waits


def test_the_host_waits_for_no_step_but_an_earlier_one(device: Device) -> None:
    model = Model()
    handle, x = planned(model)
    with handle:
        for number in range(4):
            assert device.waits == max(0, number - 1)
            step(model, x)
            assert device.queue
    assert device.waits == 4


def test_nothing_reads_numbers_of_the_device_while_comparing(device: Device) -> None:
    class Reading(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func._overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal)
            return func(*args, **(kwargs or {}))

    checks = recompute_check.Checks(CPU)
    check, x = recompute_check.StepCheck(checks, _Stages()), torch.randn(5, 7)  # type: ignore[arg-type]
    with Reading():
        marks = [check.new_fingerprints()]
        marks.append(check.new_fingerprints(marks[0]))
        for each in marks:
            each.saved(x)
            each.returned((x, x.bfloat16()))
        check.compare(1, *marks)
    checks.raise_differing(wait=True)


class _Stages:
    stage_count = 1

    def ref(self, stage: int) -> str:
        return f"stage {stage}"


def test_a_difference_in_the_last_step_is_told_when_the_plan_is_removed(device: Device) -> None:
    model = Model()
    handle, x = planned(model)
    step(model, x, scale=1.5)
    with pytest.raises(RecomputationError, match=OTHER_VALUES):
        handle.remove()
    assert not handle.is_applied and "forward" not in vars(model)
    with pytest.raises(RecomputationError, match=OTHER_VALUES), planned(model)[0]:
        step(model, x, scale=1.5)
    handle, x = planned(model)
    with pytest.raises(ZeroDivisionError), handle:  # an error of the loop's own comes first
        step(model, x, scale=1.5)
        raise ZeroDivisionError
    with pytest.raises(RecomputationError, match=OTHER_VALUES):
        handle.executor.check_recomputations()


def test_a_difference_in_the_last_step_is_told_in_a_report(device: Device) -> None:
    model = Model()
    handle, x = planned(model)
    with handle:
        step(model, x, scale=1.5)
        with pytest.raises(RecomputationError, match=OTHER_VALUES):
            handle.report()


def test_what_nobody_reads_is_a_warning_in_the_end(device: Device) -> None:
    checks = recompute_check.Checks(CPU)
    check = recompute_check.StepCheck(checks, _Stages())  # type: ignore[arg-type]
    marks = [check.new_fingerprints(), check.new_fingerprints()]
    marks[0].returned(torch.zeros(3))
    marks[1].returned(torch.ones(3))
    check.compare(1, *marks)
    with pytest.warns(UserWarning, match="'stage 1' computed other values"):
        recompute_check._warn_of_last(checks.pending)
    assert not checks.pending


def test_it_can_be_accepted(device: Device) -> None:
    model = Model()
    handle, x = planned(model, determinism_check="none")
    with handle:
        step(model, x, scale=1.5)
        step(model, x)
    assert not device.queue


def test_exact_steps_of_all_kinds_pass(device: Device) -> None:
    class Mixed(Reads):
        """Dropout, a buffer that is written, a frozen weight, several outputs, and a tensor with gaps."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
            self.up.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.up(self.norm(x)).chunk(2, dim=1)
            return x + self.down(self.drop(torch.cat((a * torch.sigmoid(b), b), dim=1)))

    model = Model(Mixed)
    handle, x = planned(model)
    with handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(model, x)
            loss = loss_fn(model(x)) + loss_fn(model(x))
            loss.backward(retain_graph=True)
            loss.backward()
        del loss
        gc.collect()


BASE = torch.arange(2 * 6 * 10, dtype=torch.float32).reshape(2, 6, 10)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.transpose(0, 2),
        BASE[:, :, 2:5],
        BASE[:, :1].expand(2, 6, 10),
        BASE.bfloat16()[0, :, :5].contiguous().view(-1)[:15],
        BASE > 3,
        BASE.to(torch.complex64),
        BASE.double(),
        BASE.to(torch.float8_e5m2),
        BASE[0, 0, 3],
    ],
    ids=["plain", "transposed", "gaps", "expanded", "odd", "bool", "complex", "double", "float8", "number"],
)
def test_the_numbers_of_what_is_returned_tell_each_element(tensor: torch.Tensor) -> None:
    def numbers(value: torch.Tensor) -> list[int]:
        marks = recompute_check.Fingerprints(CPU)
        marks.saved(value)
        marks.returned(value)
        return marks.numbers.tolist()

    before = numbers(tensor)
    assert len(before) == 2 and numbers(tensor) == before
    other = tensor.clone()
    flat = other.view(-1) if other.is_contiguous() else other.reshape(-1)
    flat[-1] = 0
    assert numbers(flat.reshape(tensor.shape))[1] != numbers(tensor.clone().reshape(-1).reshape(tensor.shape))[1]


def test_parameters_arguments_and_what_libraries_reserve_are_left_out() -> None:
    marks = recompute_check.Fingerprints(CPU)
    weight = nn.Parameter(torch.ones(3, 4))
    marks.saved(weight.t())
    marks.saved(torch.ones(3), is_argument=True)
    marks.saved(torch.ones(300, dtype=torch.uint8))
    marks.saved(torch.ones((), dtype=torch.int64))
    marks.returned(())
    assert marks.numbers.numel() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [Reads, Saves])
def test_on_cuda(kind: type[nn.Module]) -> None:
    model = Model(kind).cuda()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    profile = ct.profile(model, x, loss_fn=loss_fn, inside=False, progress=False)
    with ct.apply(model, ct.plan(profile, ct.plan(profile, 1 << 40).least_budget_bytes)):
        step(model, x)
        step(model, x, scale=1.5)
        with pytest.raises(RecomputationError, match="computed other values when recomputed in an earlier step"):
            step(model, x)
        step(model, x)
