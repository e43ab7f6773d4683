"""The measured trade-off curve: plans beside what PyTorch offers, as data and as a picture."""

# ruff: noqa: E402

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from cairn.torch.base import clock
from cairn.torch.evaluation import alternatives
from cairn.torch.profiling.sample import Sample
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("seeded")
SEQUENTIAL = "checkpoint_sequential"


def measured(step: torch_models.Step, count: int = 3, **options: Any) -> ct.Sweep:
    profile = ct.profile(step.model, **step.sample, passes=1)
    return ct.sweep(profile, count, model=step.model, rounds=1, **step.sample, **options)


def of_method(found: ct.Sweep, method: str) -> list[ct.Measurement]:
    return [m for m in found.measured if m.method == method]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def resnet() -> tuple[torch_models.Step, ct.Sweep]:
    torch.manual_seed(0)
    step = torch_models.resnet()
    return step, measured(step, beside=["every block", SEQUENTIAL])


# -- what is measured ----------------------------------------------------------------------------------------


def test_measured_peaks_are_the_predicted_ones(resnet: tuple[torch_models.Step, ct.Sweep]) -> None:
    found = resnet[1]
    assert not found.left_out and found.rounds == 1
    for row in found.measured:
        assert row.predicted_peak_bytes is not None and row.predicted_overhead is not None
        assert row.peak_bytes <= row.predicted_peak_bytes <= 1.01 * row.peak_bytes, row.name
        assert row.same_loss is True, row.name


def test_plans_of_both_curves_are_measured(resnet: tuple[torch_models.Step, ct.Sweep]) -> None:
    found = resnet[1]
    assert len(found) == len(found.points) == len(found.whole_blocks) == 3 and found[-1] is found.points[-1]
    for method, points in found.curves.items():
        told = {(p.budget_bytes, p.peak_bytes) for p in points}
        rows = of_method(found, method)
        assert rows and {(row.budget_bytes, row.predicted_peak_bytes) for row in rows} <= told
        assert all(row.peak_bytes <= row.budget_bytes for row in rows if row.budget_bytes is not None)


def test_all_numbers_of_segments_are_measured(resnet: tuple[torch_models.Step, ct.Sweep]) -> None:
    step, found = resnet
    plain, *_ = of_method(found, "plain")
    assert [row.segments for row in of_method(found, SEQUENTIAL)] == list(range(2, len(step.model.layers) + 1))
    assert all(row.peak_bytes < plain.peak_bytes for row in of_method(found, SEQUENTIAL))


def test_the_result_is_data_with_units(resnet: tuple[torch_models.Step, ct.Sweep]) -> None:
    data = json.loads(json.dumps(resnet[1].to_json()))
    assert data["format"] == "cairn-torch-sweep" and len(data["points"]) == 3
    assert {"method", "peak_bytes", "step_ns", "overhead", "segments", "same_loss"} <= set(data["measured"][0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"beside": [SEQUENTIAL]}, TypeError, "beside are for steps that are measured: give model="),
        ({"loss_fn": torch.sum}, TypeError, "are for steps that are measured: give model="),
        ({"beside": SEQUENTIAL}, ValueError, f"beside= takes a list of .*, not '{SEQUENTIAL}'$"),
        ({"beside": iter(["nothing"])}, ValueError, "beside= takes a list of .*, not 'nothing'$"),
        ({"rounds": 0}, ValueError, "rounds is 0; at least 1"),
    ],
)
def test_what_is_to_be_measured_is_checked(given: dict[str, Any], error: type[Exception], message: str) -> None:
    profile = ct.profile(nn.Linear(4, 4), torch.randn(2, 4), progress=False)
    with pytest.raises(error, match=message):
        ct.sweep(profile, 2, **given)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    step = torch_models.resnet()
    profile = ct.profile(step.model, **step.sample, passes=1)
    handle = ct.apply(step.model, ct.plan(profile, ct.sweep(profile, 2)[0].budget_bytes))
    before, random = state_of(step.model), torch.get_rng_state()
    forwards = {name: vars(m).get("forward") for name, m in step.model.named_modules()}
    ct.sweep(profile, 2, model=step.model, rounds=1, beside=[SEQUENTIAL], **step.sample)
    after = state_of(step.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in step.model.parameters())
    assert handle.is_applied and ct.handle(step.model) is handle
    handle.remove()
    assert forwards.keys() == dict(step.model.named_modules()).keys()
    assert all("forward" not in vars(m) for m in step.model.modules())


@pytest.mark.parametrize("gradients", ["created", "accumulated"])
def test_activations_alone_are_measured_as_they_are_predicted(gradients: str) -> None:
    step = torch_models.resnet()
    found = measured(step, 2, beside=["every block"], scope="activations", gradients=gradients)
    for row in found.measured:
        assert row.predicted_peak_bytes is not None and row.peak_bytes <= row.predicted_peak_bytes
        assert row.peak_bytes >= 0.5 * row.predicted_peak_bytes


def test_times_are_medians_of_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts block runs: checkpointing every one of four blocks runs four more."""
    runs = [0]

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs[0] += 1
            return super().forward(x).tanh()

    model = nn.Sequential(*(Counting(16, 16) for _ in range(4)))
    step = torch_models.Step(model.train(), (torch.randn(8, 16),), {}, lambda y: y.square().mean())
    profile = ct.profile(step.model, **step.sample, passes=1)
    monkeypatch.setattr(clock, "read", lambda: 1000 * runs[0])
    found = ct.sweep(profile, [2**30], model=model, beside=["every block", SEQUENTIAL], rounds=3, **step.sample)
    extra = {row.name: row.overhead for row in found.measured if row.budget_bytes is None}
    told = {f"{SEQUENTIAL}, {k} segments": 4 // k * (k - 1) / 4 for k in (2, 3, 4)}
    assert extra == {"plain": 0, "every block": 1, **told}
    assert of_method(found, "plain")[0].step_ns == 4000


# -- PyTorch's own ways --------------------------------------------------------------------------------------


def test_transformers_checkpoint_by_themselves() -> None:
    step = torch_models.made("gpt2")
    found = measured(step, 2, beside=["every block", SEQUENTIAL])
    plain, every = of_method(found, "plain")[0], of_method(found, "every block")[0]
    assert every.peak_bytes < plain.peak_bytes and every.same_loss and every.predicted_peak_bytes is None
    assert not any(getattr(m, "gradient_checkpointing", False) for m in step.model.modules())
    assert [row.segments for row in of_method(found, SEQUENTIAL)] == [2, 3]
    assert all(row.same_loss for row in found.measured)


def test_torch_compile_keeps_less_by_its_budget() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(x)))

    model = nn.Sequential(*(Block() for _ in range(4)))
    step = torch_models.Step(model.train(), (torch.randn(512, 64),), {}, lambda y: y.square().mean())
    found = measured(step, 2, beside=["torch.compile"])
    assert not found.left_out
    peaks = {row.activation_memory_budget: row.peak_bytes for row in of_method(found, "torch.compile")}
    assert list(peaks) == list(alternatives.SHARES) and peaks[0.5] < peaks[1.0]


def test_segments_are_those_of_torch() -> None:
    """The same blocks run in the same order as torch's own function runs them."""
    order: list[int] = []

    class Noted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append(self.number)
            return super().forward(x).tanh()

    model = nn.Sequential(*(Noted(8, 8) for _ in range(7)))
    for number, layer in enumerate(model):
        layer.number = number
    x = torch.randn(4, 8)
    sample = Sample(model, (x,), {}, lambda y: y.square().mean())
    profile = ct.profile(model, x, loss_fn=sample.loss_fn, passes=1)
    found, left_out = alternatives.alternatives(sample, profile.refs, [SEQUENTIAL])
    assert not left_out and [way.segments for way in found] == [2, 3, 4, 5, 6, 7]
    for way in found:
        order.clear()
        with way.turn() as run:
            run(x).square().mean().backward()
        mine = list(order)
        order.clear()
        torch.utils.checkpoint.checkpoint_sequential(model, way.segments, x, use_reentrant=False).sum().backward()
        assert mine == order


# -- what is left out ----------------------------------------------------------------------------------------


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return torch.tanh(self.first(x)), torch.tanh(self.second(x if y is None else y))


class Wired(nn.Module):
    """Blocks in a list that the model wires in some way."""

    def __init__(self, how: str, block: type[nn.Module] = nn.Tanh, count: int = 3) -> None:
        super().__init__()
        self.how = how
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        if self.how == "pairs":
            y = None
            for block in self.blocks:
                x, y = block(x, y)
            return x + y
        for block in self.blocks:
            x = block(x) if self.how != "residual" else x + block(x)
            if self.how == "again":
                x = block(x)
        return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Wired("pairs", Twofold), "returns more than one tensor"),
        (Wired("residual", lambda: nn.Linear(8, 8)), "is not called with what"),  # type: ignore[arg-type]
        (Wired("again", lambda: nn.Linear(8, 8)), "runs several times"),  # type: ignore[arg-type]
    ],
)
def test_blocks_that_are_no_sequence_are_left_out_by_name(model: nn.Module, reason: str) -> None:
    step = torch_models.Step(model.train(), (torch.randn(4, 8),), {}, lambda y: y.square().mean())
    profile = ct.profile(model, **step.sample, blocks=model.blocks, passes=1)
    found = ct.sweep(profile, 2, model=model, rounds=1, beside=[SEQUENTIAL, "every block"], **step.sample)
    assert list(found.left_out) == [SEQUENTIAL] and reason in found.left_out[SEQUENTIAL]
    assert all(row.same_loss for row in found.measured) and of_method(found, "every block")


def test_every_way_begins_with_the_state_that_the_model_has() -> None:
    model = torch_models.Stateful()
    step = torch_models.Step(model, (torch.randn(64, 64),), {}, torch.sum)
    profile = ct.profile(model, **step.sample, passes=1)
    found = ct.sweep(profile, 2, model=model, rounds=1, beside=[SEQUENTIAL], **step.sample)
    assert found.measured and all(row.same_loss for row in found.measured)
    assert model.state is None


class Centred(nn.Module):
    """A loss that keeps the centre of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(64))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        self.centre += output.detach().mean(0)
        return (output - self.centre).square().mean()


class Averaging(nn.Module):
    """Its forward moves a parameter, as a teacher follows its student."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
        self.teacher = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.lerp_(x.mean(0), 0.5)
        return self.layers(x + self.teacher)


@pytest.mark.parametrize("loss_fn", [Centred(), lambda y: y.square().mean()], ids=["in the loss", "in the model"])
def test_every_way_begins_with_the_state_of_the_loss_and_of_written_parameters(loss_fn: Callable[[Any], Any]) -> None:
    step = torch_models.Step(Averaging(), (torch.randn(64, 64),), {}, loss_fn)
    profile = ct.profile(step.model, **step.sample, passes=1)
    found = ct.sweep(profile, 2, model=step.model, rounds=1, beside=["every block"], **step.sample)
    assert found.measured and all(row.same_loss for row in found.measured)
    assert not step.model.teacher.any()


def test_what_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    step = torch_models.cnn()
    found = measured(step, 2, beside=["torch.compile"])
    assert len(found.left_out) == len(alternatives.SHARES)
    assert set(found.left_out.values()) == {"RuntimeError: no compiler here"}
    assert of_method(found, "plain") and not of_method(found, "torch.compile")


def test_a_plain_step_that_fails_leaves_the_predicted_one_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where plain training does not fit: here the model refuses to run without its plan."""
    step = torch_models.resnet()
    profile = ct.profile(step.model, **step.sample, passes=1, inside=False)
    forward = type(step.model).forward

    def refuses(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and ct.handle(model) is None:
            raise RuntimeError("out of memory")
        return forward(model, images)

    monkeypatch.setattr(type(step.model), "forward", refuses)
    found = ct.sweep(profile, 2, model=step.model, beside=[], rounds=1, **step.sample)
    assert found.left_out == {"plain": "RuntimeError: out of memory"}
    assert found.measured and all(row.same_loss is None and row.overhead > -1 for row in found.measured)


# -- pictures and mistakes -----------------------------------------------------------------------------------


def test_the_picture_has_all_that_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = torch_models.resnet()
    path = tmp_path / "curve.svg"
    measured(step, plot=path, beside=["every block", SEQUENTIAL])
    bare = tmp_path / "bare.svg"
    ct.sweep(ct.profile(step.model, **step.sample, passes=1), 3, plot=bare)
    assert path.stat().st_size > bare.stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"beside": "every block"}, ValueError),
        ({"beside": ["every layer"]}, ValueError),
        ({"rounds": 0}, ValueError),
        ({"rounds": True}, TypeError),
        ({"loss_fn": 3}, TypeError),
        ({"model": None}, TypeError),
        ({"plot": "."}, IsADirectoryError),
        ({"plot": "no such folder/curve.png"}, FileNotFoundError),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception]) -> None:
    step = torch_models.cnn()
    profile = ct.profile(step.model, **step.sample, passes=1, inside=False)
    with pytest.raises(error):
        ct.sweep(profile, 2, **{"model": step.model, **step.sample, **options})


def test_another_model_is_refused() -> None:
    step, other = torch_models.cnn(), torch_models.resnet()
    profile = ct.profile(step.model, **step.sample, passes=1, inside=False)
    with pytest.raises(ct.PlanMismatch):
        ct.sweep(profile, 2, model=other.model, **other.sample)


def test_predictions_need_stages_that_may_run_again() -> None:
    step = torch_models.resnet()
    profile = ct.profile(step.model, **step.sample, passes=1, inside=False, keep="layers.1")
    chain = cairn.Chain.from_json(json.dumps(profile.chain()))
    numbers = {ref.name: number for number, ref in enumerate(profile.refs, 1)}
    assert alternatives.predicted(chain, [(numbers["layers.1"],) * 2]) is None
    assert alternatives.predicted(chain, [(numbers["layers.2"],) * 2]) is not None
