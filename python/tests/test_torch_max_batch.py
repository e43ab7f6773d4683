"""The largest batch, or the longest input, within a budget: found, measured, and refused by name."""

# ruff: noqa: E402

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from cairn.torch import batch_size
from cairn.torch.resizing import Resizing, Steps
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH, CLASSES = 48, 10


def chain(layers: int = 4) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES)).train()


class Attention(nn.Module):
    """Blocks that save a number for each pair of positions, and a mask of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        return x


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


def least_of(model: nn.Module, rows: int) -> int:
    """The least budget of a step with so many rows."""
    x, y = batch_of(rows)
    profile = ct.profile(model, x, loss_fn=lambda output: F.cross_entropy(output, y), inside=False)
    return ct.plan(profile, "1GiB").least_budget_bytes


def found(model: nn.Module, budget: Any, rows: int = 8, **options: Any) -> ct.MaxBatch:
    x, y = batch_of(rows)
    return ct.max_batch(
        model, x, budget=budget, loss_fn=F.cross_entropy, targets=y, **{"passes": 1, "inside": False, **options}
    )


@pytest.mark.parametrize("rows", [8, 300])
def test_the_batch_fits_and_a_larger_one_does_not(rows: int) -> None:
    """Found from a smaller sample as from one that does not fit."""
    model = chain()
    budget = least_of(model, 80)
    best = found(model, budget, rows)
    assert best.limit == "budget"
    assert 0 < best.measured_peak_bytes <= budget
    assert best.predicted_peak_bytes <= budget
    assert 76 <= best.batch <= 84  # profiles may find other parts to keep
    assert least_of(model, best.batch * 6 // 5) > budget
    x, y = batch_of(best.batch)
    assert ct.verify(model, best.plan, x, loss_fn=lambda output: F.cross_entropy(output, y)).ok
    assert f"batch {best.batch}: peak" in str(best)


def test_extra_time_limits_the_batch() -> None:
    model = chain()
    budget = least_of(model, 200)
    best = found(model, budget, extra_time=0.1)
    assert best.limit == "extra_time"
    assert best.extra_time <= 0.1
    assert best.batch < 0.95 * found(model, budget).batch
    assert "the extra time refuses more" in str(best)


def test_a_longer_input() -> None:
    """Attention grows as the square of it; what belongs to the positions is resized, too."""
    model = Attention().train()
    sample = torch.randn(2, 8, 16), torch.zeros(2, 8, dtype=torch.bool)
    longer = torch.randn(2, 60, 16), torch.zeros(2, 60, dtype=torch.bool)
    options: dict[str, Any] = {"loss_fn": lambda output: output.square().mean(), "passes": 1, "inside": False}
    budget = ct.plan(ct.profile(model, longer, **options), "1GiB").least_budget_bytes
    best = ct.max_batch(model, sample, dim=1, budget=budget, **options)
    assert 56 <= best.batch <= 64
    assert best.dim == 1
    assert best.plan.fingerprint["inputs"] == [f"float32[2, {best.batch}, 16]", f"bool[2, {best.batch}]"]
    assert best.measured_peak_bytes <= budget


def test_a_model_that_takes_its_labels_by_name() -> None:
    step = torch_models.made("gpt2")
    profile = ct.profile(step.model, **step.sample, inside=False)
    budget = ct.plan(profile, "1GiB").plain_peak_bytes
    best = ct.max_batch(step.model, step.args, step.kwargs, budget=budget, inside=False, passes=1)
    assert best.batch > len(next(iter((*step.args, *step.kwargs.values()))))
    assert best.measured_peak_bytes <= budget


def test_a_step_that_misses_its_prediction_is_planned_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain()
    budget, more = least_of(model, 80), 100_000
    measured = Steps.measured
    monkeypatch.setattr(Steps, "measured", lambda self, batch, plan: measured(self, batch, plan) + more)
    best = found(model, budget)
    assert best.measured_peak_bytes <= budget
    assert best.plan.reserve_bytes >= more - 50_000
    assert best.batch < 76


def test_steps_that_keep_missing_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, peaks = chain(), iter(range(100_000, 10**9, 100_000))
    measured = Steps.measured
    monkeypatch.setattr(batch_size, "PROVED", 2)
    monkeypatch.setattr(Steps, "measured", lambda self, batch, plan: measured(self, batch, plan) + next(peaks))
    with pytest.raises(ct.BudgetExceeded, match=r"a batch of \d+ took .* were predicted; a batch of \d+ took"):
        found(model, least_of(model, 400))


def test_where_memory_runs_out_the_batch_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that other processes use: while it is profiled, and while it is measured."""
    model, limits = chain(), {"profiled": 50, "measured": 40}
    for name, limit in limits.items():
        original = getattr(Steps, name)

        def refusing(self: Steps, batch: int, *plan: Any, original: Any = original, limit: int = limit) -> Any:
            if batch > limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return original(self, batch, *plan)

        monkeypatch.setattr(Steps, name, refusing)
    monkeypatch.setattr(batch_size, "PROVED", 20)
    best = found(model, least_of(chain(), 80))
    assert (best.batch, best.limit) == (40, "budget")


def test_a_budget_for_no_batch_names_the_least() -> None:
    model = chain()
    with pytest.raises(ct.InfeasibleBudget, match="not even a batch of 1 fits: .* the least budget that works") as info:
        found(model, "100KiB")
    least = info.value.least_bytes
    assert least is not None
    assert info.value.composition
    assert found(model, least + 4096).batch >= 1


def test_extra_time_for_no_batch_names_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ct.Plan, "overhead", property(lambda plan: 0.0 if plan.is_plain else 0.25))
    x = torch.randn(1, 512, WIDTH)
    model, options = chain(), {"loss_fn": lambda output: output.square().mean()}
    plain = ct.plan(ct.profile(model, x, **options), "1GiB")
    budget = plain.least_budget_bytes + 20_000
    with pytest.raises(ct.InfeasibleBudget, match=r"a batch of 1 fits in .* with 25.0 % extra time") as info:
        ct.max_batch(model, x, budget=budget, extra_time=0.1, **options)
    assert info.value.least_bytes is not None
    assert budget < info.value.least_bytes <= 1.1 * plain.plain_peak_bytes


def test_targets_that_stay_are_named() -> None:
    x, y = batch_of(8)
    with pytest.raises(ValueError, match=r"resized from 8 to \d+ at dimension 0 .* as targets="):
        ct.max_batch(chain(), x, budget="8MiB", loss_fn=lambda output: F.cross_entropy(output, y))


def test_the_model_is_left_as_it_was_when_it_is_interrupted() -> None:
    model = nn.Sequential(*chain(3)[:-1], nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)).train()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    phases: list[str] = []

    def told(news: cairn.Progress) -> bool:
        phases.append(news.phase)
        if len(phases) > 1 and "measuring memory" in news.phase and news.phase != "batch 8: measuring memory":
            raise KeyboardInterrupt
        return False

    def stopping(news: cairn.Progress) -> None:
        if news.phase.startswith("batch 64:"):
            raise ValueError("enough")

    x, y = torch.randn(8, WIDTH), torch.randint(CLASSES, (8,))
    torch.set_rng_state(random)
    with pytest.raises(KeyboardInterrupt):
        ct.max_batch(model, x, budget="4MiB", loss_fn=F.cross_entropy, targets=y, progress=told)
    assert "batch 8: finding blocks" in phases
    assert any(phase.startswith("predicting batch") for phase in phases)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ValueError, match="^enough$"):
        ct.max_batch(model, x, budget="4MiB", loss_fn=F.cross_entropy, targets=y, progress=stopping)
    with pytest.raises(cairn.Cancelled):
        ct.max_batch(model, x, budget="4MiB", loss_fn=F.cross_entropy, targets=y, progress=lambda news: True)


def test_resized_samples() -> None:
    """What has the batch's size is resized, once where it appears twice; the rest stays, as do memory formats."""
    images = torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    ids, weights, scale = torch.arange(3), torch.randn(5), torch.tensor(2.0)
    resizing = Resizing((images, ids), {"labels": ids, "weights": weights, "scale": scale}, [ids], 0)
    for size in (2, 3, 7):
        args, kwargs, targets = resizing.to(size)
        rows = torch.arange(size) % 3
        assert torch.equal(args[0], images[rows])
        assert args[0].requires_grad
        assert args[0].is_leaf
        assert args[0].is_contiguous(memory_format=torch.channels_last)
        assert args[1] is kwargs["labels"] is targets[0]
        assert torch.equal(args[1], rows)
        assert kwargs["weights"] is weights
        assert kwargs["scale"] is scale


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ValueError, "dim=3: no tensor in the sample has this dimension", {"dim": 3}),
        (TypeError, "dim must be an integer", {"dim": 0.5}),
        (TypeError, "dim must be an integer", {"dim": True}),
        (TypeError, "a budget is bytes or a size such as '8GiB', not a ratio", {"budget": 0.5}),
        (ValueError, "budget must be positive", {"budget": -1}),
        (TypeError, "extra_time must be a share", {"extra_time": "30%"}),
        (ValueError, "extra_time is -0.1", {"extra_time": -0.1}),
        (ValueError, "extra_time is nan", {"extra_time": float("nan")}),
        (TypeError, "max_batch has no option 'extra_tim'; did you mean extra_time", {"extra_tim": 0.1}),
        (TypeError, "max_batch has no option 'determinism_check'", {"determinism_check": "none"}),
        (ValueError, "passes is 0; at least 1", {"passes": 0}),
        (ValueError, "solver must be one of", {"solver": "nothing"}),
        (ValueError, r"targets= are for loss_fn", {"loss_fn": None}),
        (TypeError, r"loss_fn is called as loss_fn\(output, targets\)", {"loss_fn": lambda output: output.mean()}),
        (TypeError, "loss_fn must be a function", {"loss_fn": 3}),
        (TypeError, "progress must be a function", {"progress": 1}),
    ],
)
def test_wrong_arguments_are_named(error: type[Exception], text: str, options: dict[str, Any]) -> None:
    x, y = batch_of(4)
    asked = {"budget": "8MiB", "loss_fn": F.cross_entropy, "targets": y, **options}
    with pytest.raises(error, match=text):
        ct.max_batch(chain(1), x, **asked)


def test_an_empty_sample_is_named() -> None:
    with pytest.raises(ValueError, match="the sample's size there is 0"):
        ct.max_batch(chain(1), torch.randn(0, WIDTH), budget="8MiB")
