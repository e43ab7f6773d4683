"""Steps whose inputs have other shapes than those that were planned for: planned again, refused, never over budget."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.base import memory
from cairn.torch.planning import estimates, shape_plans, shapes
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def chain(layers: int = 8, width: int = 64) -> nn.Sequential:
    block = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    return nn.Sequential(*block, nn.Dropout(0.1)).train()


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def between(profile: ct.Profile, share: float) -> int:
    """A budget that lies so far between the least and the plain one."""
    low, high = (point.budget_bytes for point in ct.sweep(profile, 2))
    return int(low + (high - low) * share)


def trained(model: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> list[torch.Tensor]:
    """Loss and gradients of a step of its own."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(*args, **kwargs)
    loss = total(output) if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def peak_of(model: nn.Module, x: torch.Tensor) -> int:
    """Of a step onto existing gradients, measured from outside; the planning that it brings about included."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    static = memory.unique_bytes([*model.parameters(), *model.buffers(), x, *(p.grad for p in model.parameters())])
    meter = memory.CpuMeter()
    with meter:
        first = meter.mark()
        total(model(x)).backward()
        last = meter.mark()
    return static + meter.peak(first, last) - meter.level(first)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_larger_and_smaller_batches_are_exact_and_within_the_budget() -> None:
    model = chain()
    plain, x = copy.deepcopy(model), torch.randn(64, 64)
    largest = ct.profile(model, x.repeat(3, 1), loss_fn=total, passes=1)
    budget = between(largest, 0.4)
    ct.checkpoint(model, x, loss_fn=total, budget=budget, passes=1, strict=True)
    handle = ct.handle(model)
    assert handle is not None and handle.plan.is_plain
    for seed, rows in enumerate((64, 40, 192, 64, 100, 192, 190, 7)):
        batch = torch.randn(rows, 64)
        assert same(trained(model, batch, seed=seed), trained(plain, batch, seed=seed))
        assert not handle.executor.notes
        assert peak_of(model, batch) <= budget
        assert handle.plan.is_plain == (rows <= 100 and handle.plan.overhead == 0)
    assert [entry.made for entry in handle.plans].count("given") == 1
    assert 2 <= len(handle.plans) <= 4
    report = ct.report(model)
    assert "shapes" in str(report) and len(report.to_json()["shapes"]) == len(handle.plans)


def test_a_plan_is_made_once_for_shapes_and_for_what_they_cover() -> None:
    model, x = chain(), torch.randn(64, 64)
    ct.checkpoint(model, x, loss_fn=total, budget="1GiB", passes=1)
    handle = ct.handle(model)
    for rows in range(65, 128):  # growing a row at a time
        trained(model, torch.randn(rows, 64))
    assert len(handle.plans) <= shapes.STEPS_PER_DOUBLING + 1
    assert all(entry.made != "measurement" for entry in handle.plans)
    before = handle.plans
    trained(model, x)
    trained(model, torch.randn(127, 64))
    assert {id(entry) for entry in handle.plans} == {id(entry) for entry in before}


def test_smaller_steps_that_come_again_get_a_faster_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_plans, "SLOWER_BY_AT_MOST", 0.0)
    model = chain()
    plain, small = copy.deepcopy(model), torch.randn(16, 64)
    profile = ct.profile(model, torch.randn(256, 64), loss_fn=total, passes=1)
    ct.checkpoint(model, torch.randn(256, 64), loss_fn=total, budget=between(profile, 0.2), passes=1, strict=True)
    handle = ct.handle(model)
    for _ in range(shape_plans.STEPS_BEFORE_OWN_PLAN):
        assert same(trained(model, small), trained(plain, small))
        assert not handle.plan.is_plain and len(handle.plans) == 1
    assert same(trained(model, small), trained(plain, small))
    assert handle.plan.is_plain and [entry.made for entry in handle.plans] == ["given", "measurement"]
    trained(model, torch.randn(256, 64))
    assert not handle.plan.is_plain


def test_many_shapes_keep_few_plans() -> None:
    model = chain(3)
    ct.checkpoint(model, torch.randn(2, 64), loss_fn=total, budget="1GiB", passes=1)
    for power in range(2, 14):
        trained(model, torch.randn(2**power, 64))
    assert len(ct.handle(model).plans) == shape_plans.KEPT
    trained(model, torch.randn(2, 64))


def test_longer_sequences_of_a_hugging_face_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are among the arguments, so that the step itself can be measured."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(shape_plans, "SLOWER_BY_AT_MOST", -1.0)  # no estimate is good enough
    step = torch_models.gpt2(length=256)
    model, plain = step.model, copy.deepcopy(step.model)

    def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
        ids = torch.randint(1000, (rows, length))
        return {"input_ids": ids, "labels": ids}

    budget = between(ct.profile(model, kwargs=batch(192), passes=1), 0.75)
    ct.checkpoint(model, kwargs=batch(96), budget=budget, passes=1, strict=True)
    handle = ct.handle(model)
    for seed, (length, rows) in enumerate([(96, 2), (192, 2), (128, 1), (192, 2), (192, 1)]):
        given = batch(length, rows)
        assert same(trained(model, seed=seed, **given), trained(plain, seed=seed, **given))
    assert "measurement" in {entry.made for entry in handle.plans}
    assert ct.report(model).measured.peak_bytes <= budget
    began = time.perf_counter()
    trained(model, **batch(160))
    assert time.perf_counter() - began < 20
    given = batch(256, 8)
    with pytest.raises(ct.InfeasibleBudget, match="was not begun") as caught:
        model(**given)
    assert caught.value.least_bytes > budget
    given = batch(192)
    assert same(trained(model, **given), trained(plain, **given))  # as if nothing had been


def test_measuring_a_step_leaves_those_whose_backward_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms save their statistics, which measuring must restore."""
    monkeypatch.setattr(shape_plans, "SLOWER_BY_AT_MOST", -1.0)  # no estimate is good enough
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(4)))
    plain, x = copy.deepcopy(model), torch.randn(64, 32)
    ct.checkpoint(model, x[:32], loss_fn=torch.sum, budget="8MiB", passes=1, check_steps=0)
    for each in (plain, model):
        (each(x[:32]).square().sum() + each(x).square().sum()).backward()
    assert [entry.made for entry in ct.handle(model).plans] == ["given", "measurement"]
    ct.handle(model).remove()
    pairs = zip((*plain.parameters(), *plain.buffers()), (*model.parameters(), *model.buffers()), strict=True)
    assert all(torch.equal(a, b) and (a.grad is None or torch.equal(a.grad, b.grad)) for a, b in pairs)


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_loss_that_does_not_fit_the_shape_leaves_the_estimate(
    is_indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_plans, "SLOWER_BY_AT_MOST", -1.0)  # measuring is tried first
    model, x, y, columns = chain(), torch.randn(64, 64), torch.randn(64, 64), torch.arange(64)

    def loss_fn(out: torch.Tensor) -> torch.Tensor:
        return out[torch.arange(len(out)), columns].sum() if is_indexed else (out - y).square().sum()

    ct.checkpoint(model, x, loss_fn=loss_fn, budget="8MiB", passes=1)
    handle = ct.handle(model)
    assert peak_of(model, torch.randn(96, 64)) <= 2**23
    assert [entry.made for entry in handle.plans] == ["given", "estimate"]


def test_an_estimate_is_no_less_than_a_measurement() -> None:
    model = chain()
    small = ct.profile(model, torch.randn(64, 64), loss_fn=total, passes=1)
    large = ct.profile(model, torch.randn(160, 64), loss_fn=total, passes=1)
    by = shapes.growth(large.fingerprint["inputs"], small.fingerprint["inputs"])
    guess = estimates.scaled(small, by, large.fingerprint["inputs"])
    assert by == shapes.Growth(2.5, 1.0)
    assert guess.fingerprint["inputs"] == large.fingerprint["inputs"]
    for share in (0.0, 0.5, 1.0):
        plan = ct.plan(guess, between(guess, share))
        true = ct.plan(large, plan.budget_bytes)
        assert true.peak_bytes <= plan.budget_bytes and plan.plain_peak_bytes >= 0.99 * true.plain_peak_bytes
        result = ct.verify(model, plan, torch.randn(160, 64), loss_fn=total)
        assert result.ok


class _Skipping(nn.Module):
    """Gradients of the first half's outputs wait for those of the second half."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        sizes = [(width, width)] * depth + [(2 * width, width)] * depth
        layers = (nn.Sequential(nn.Linear(a, 4 * b), nn.GELU(), nn.Linear(4 * b, b), nn.LayerNorm(b)) for a, b in sizes)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, skips = len(self.layers) // 2, []
        for layer in self.layers[:half]:
            skips.append(x := layer(x))
        for layer in self.layers[half:]:
            x = layer(torch.cat((x, skips.pop()), -1))
        return x


@pytest.mark.parametrize("make", [_Skipping, torch_models.Branches])
def test_estimates_let_gradients_grow_that_wait_or_stay(make: type[nn.Module]) -> None:
    model, x = make(), torch.randn(1024, 64)
    kwargs = {} if make is _Skipping else {"scale": torch.rand(128)}
    profile = ct.profile(model, x[:512], kwargs, loss_fn=_mean_square, passes=1)
    expected, actual = profile.fingerprint["inputs"], shapes.described((x,), kwargs)
    guess = estimates.scaled(profile, shapes.growth(actual, expected), actual)
    least = ct.plan(guess, 2**40).least_budget_bytes
    for percent in (100, 120):
        plan = ct.plan(guess, least * percent // 100)
        result = ct.verify(model, plan, x, kwargs, loss_fn=_mean_square)
        assert result.created.peak_bytes <= plan.created_peak_bytes
        assert result.accumulated.peak_bytes <= plan.accumulated_peak_bytes


def _mean_square(output: Any) -> torch.Tensor:
    return (output["value"] if isinstance(output, dict) else output).square().mean()


def test_steps_larger_than_samples_of_one_are_measured() -> None:
    model = chain()
    ct.checkpoint(model, torch.randn(1, 64), loss_fn=total, budget="1GiB")
    for rows in (2, 4):
        model(torch.randn(rows, 64)).sum().backward()
    assert [entry.made for entry in ct.handle(model).plans] == ["given", "measurement", "estimate"]


def convolutions(depth: int = 6) -> nn.Sequential:
    layers = (nn.Sequential(nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32)) for i in range(depth))
    return nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers))


def transformer(depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(depth)))


@pytest.mark.parametrize(
    ("make", "sample", "step"),
    [(convolutions, (8, 3, 24, 24), (16, 3, 16, 16)), (transformer, (16, 32, 64), (4, 64, 64))],
)
def test_steps_of_other_proportions_are_measured(make: Any, sample: tuple[int, ...], step: tuple[int, ...]) -> None:
    """What their sizes would take that have grown, had the others not become smaller, is more than the budget."""
    model, x, y = make(), torch.randn(sample), torch.randn(step)
    plain = copy.deepcopy(model)
    ct.checkpoint(model, x, loss_fn=total, budget=between(ct.profile(model, x, loss_fn=total, passes=1), 0.5), passes=1)
    assert same(trained(model, y), trained(plain, y))
    assert [entry.made for entry in ct.handle(model).plans] == ["given", "measurement"]
    assert ct.verify(model, ct.handle(model).plan, y, loss_fn=total).ok


def test_what_profiling_takes_does_not_grow_with_the_number_of_blocks() -> None:
    few, many = (ct.profile(chain(layers), torch.randn(512, 64), loss_fn=total, passes=1) for layers in (4, 16))
    sizes = [estimates.profiling_bytes(each, shapes.Growth(1.0, 1.0)) - each.resident_bytes() for each in (few, many)]
    assert sizes[1] < 1.1 * sizes[0]


def test_an_estimate_is_not_called_the_least_budget() -> None:
    model = transformer(2)
    least = ct.plan(ct.profile(model, torch.randn(8, 16, 64), loss_fn=total, passes=1), "1GiB").least_budget_bytes
    ct.checkpoint(model, torch.randn(8, 16, 64), loss_fn=total, budget=least, passes=1)
    with pytest.raises(ct.InfeasibleBudget, match="By an estimate .* Profile and plan with a sample") as caught:
        model(torch.randn(1, 128, 64))
    assert "the least budget that works" not in str(caught.value)
    assert caught.value.least_bytes > least
    with pytest.raises(ct.InfeasibleBudget, match="the least budget that works"):
        ct.checkpoint(transformer(2), torch.randn(8, 16, 64), loss_fn=total, budget=least // 2, passes=1)


def test_growth_of_shapes() -> None:
    assert shapes.numbers_grown(["float32[8, 64, 64]"], ["float32[32, 16, 64]"]) == shapes.Growth(0.25, 4.0)
    assert shapes.numbers_grown(["float32[16, 3, 16, 16]"], ["float32[8, 3, 24, 24]"]) == shapes.Growth(1.0, 1.0)
    assert shapes.numbers_grown(["int64[2, 64]", "bool[2, 9]"], ["int64[4, 64]", "bool[2, 3]"]).linear == 3.0
    assert shapes.growth(["float32[8, 4]"], ["float32[4, 8]"]) == shapes.Growth(2.0, 1.0)
    assert shapes.growth(["int64[2, 64]", "bool[2, 1, 64, 64]"], ["int64[2, 32]", "bool[2, 1, 32, 32]"]).other == 4.0
    for grown in (shapes.growth, shapes.numbers_grown):
        assert grown(["float32[8, 4]", "int64[]"], ["float32[4, 4]", "int64[]"]) == shapes.Growth(2.0, 1.0)
        assert grown(["int64[]"], ["int64[]"]) == shapes.Growth(1.0, 1.0)
    assert shapes.growth(["float32[8]"], ["float64[8]"]) is None
    assert shapes.growth(["float32[8]"], ["float32[8]", "float32[8]"]) is None
    assert shapes.is_covered(["float32[2]", "int64[3, 4]"], ["int64[3, 5]", "float32[2]"])
    assert not shapes.is_covered(["int64[4, 4]"], ["int64[3, 5]"])
    assert shapes.is_covered(["bfloat16[2]", "int64[3]"], ["float32[2]", "int64[3]"])
    assert not shapes.is_covered(["float32[2]"], ["bfloat16[2]"]) and not shapes.is_covered(["int32[2]"], ["int64[2]"])
    assert shapes.rounded_up(["float32[100, 64]"], ["float32[64, 64]"]) == ["float32[104, 64]"]
    assert shapes.rounded_up(["float32[3, 5]"], ["float32[2, 2]"]) == ["float32[3, 5]"]


def test_other_policies() -> None:
    model, plain, x = chain(), None, torch.randn(64, 64)
    plain = copy.deepcopy(model)
    ct.checkpoint(model, x, loss_fn=total, budget="1GiB", passes=1, on_shape_change="error")
    assert same(trained(model, x[:5]), trained(plain, x[:5]))
    with pytest.raises(ct.PlanMismatch, match=r"float32\[64, 64\].*float32\[128, 64\]"):
        model(x.repeat(2, 1))
    with pytest.raises(ct.PlanMismatch, match="float64"):
        model(x.double())
    handle = ct.handle(model)
    handle.remove()
    with ct.apply(model, handle.plan, on_shape_change="nearest") as applied:
        assert same(trained(model, x.repeat(2, 1)), trained(plain, x.repeat(2, 1)))
        assert len(applied.plans) == 1
    with pytest.raises(ValueError, match="replan.*profile"):
        ct.apply(model, handle.plan, on_shape_change="replan")
    with pytest.raises(ValueError, match="on_shape_change"):
        ct.apply(model, handle.plan, on_shape_change="whatever")


def test_what_can_be_neither_compared_nor_measured_is_refused() -> None:
    model = chain()
    ct.checkpoint(model, torch.randn(64, 64), loss_fn=total, budget="16MiB", passes=1)
    with pytest.raises(ct.PlanMismatch, match="neither estimated nor measured"):
        model(torch.randn(200, 64, 64))
    with pytest.raises(ct.PlanMismatch, match="measuring it failed .*RuntimeError.*dtype") as caught:
        model(torch.randn(8, 64, dtype=torch.float64))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_step_by_a_new_plan_is_measured() -> None:
    """What an estimate cannot know comes to light, and is corrected."""
    model, x = chain(), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    budget = between(ct.profile(model, torch.randn(128, 64), loss_fn=total, passes=1), 1.0)
    ct.checkpoint(model, x, loss_fn=total, budget=budget, passes=1)
    handle = ct.handle(model)
    for _ in range(3):
        trained(model, x)
    trained(model, torch.randn(96, 64))
    missed = handle.plan
    assert [entry.made for entry in handle.plans] == ["given", "estimate"]
    hoard: list[torch.Tensor] = []
    size = budget - missed.created_peak_bytes + 2**18
    hook = model[3].register_forward_hook(lambda *_: hoard.append(torch.empty(size, dtype=torch.uint8)))
    with pytest.warns(UserWarning, match="over its budget"):
        trained(model, torch.randn(96, 64))
        hoard.clear()
        optimizer.step()
    corrected = handle.plan
    assert corrected is not missed and corrected.reserve_bytes > missed.reserve_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, torch.randn(96, 64))
        hoard.clear()
        optimizer.step()
    hook.remove()
    handle.remove()
    assert not model._forward_hooks and not model._forward_pre_hooks


# -- other arguments than the sample's ------------------------------------------------------------------------


class Scaled(nn.Module):
    """Takes a mask and a scale, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(4)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.body(x)
        x = x if mask is None else x * mask
        return x if scale is None else x * scale


def test_each_plan_reports_its_own_measurements() -> None:
    model, x = chain(), torch.randn(64, 64)
    ct.checkpoint(model, x, loss_fn=total, budget="1GiB", passes=1)
    assert ct.report(model).measured is None
    trained(model, x)
    small = ct.report(model)
    trained(model, torch.randn(192, 64))
    large = ct.report(model)
    assert large.plan is not small.plan
    assert large.measured.peak_bytes > small.measured.peak_bytes
    trained(model, x)
    again = ct.report(model)
    assert again.plan is small.plan and again.measured.peak_bytes == small.measured.peak_bytes
    assert again.measured.peak_bytes <= again.predicted_peak_bytes
    handle = ct.handle(model)
    ct.checkpoint(model, x, loss_fn=total, budget="1GiB", passes=1)  # takes the old plan's place
    assert ct.report(model).measured is None
    with pytest.raises(ValueError, match="no longer applied"):
        handle.report()
    ct.handle(model).remove()
    with pytest.raises(ValueError, match="no plan is applied"):
        ct.report(model)


def test_single_numbers_change_no_plan() -> None:
    model, x = Scaled(), torch.randn(64, 64)
    plain = copy.deepcopy(model)
    scale = torch.tensor(2.0)
    budget = between(ct.profile(model, x, loss_fn=total, passes=1), 0.5)
    ct.checkpoint(model, x, budget=budget, loss_fn=total, passes=1, on_shape_change="error")
    for args, kwargs in (((x,), {}), ((x,), {"scale": scale}), ((x, None, scale), {})):
        assert all(map(torch.equal, trained(model, *args, **kwargs), trained(plain, *args, **kwargs)))
    assert len(ct.handle(model).plans) == 1


def test_a_step_with_other_arguments_is_measured_or_the_argument_is_named() -> None:
    model, x = Scaled(), torch.randn(64, 64)
    plain = copy.deepcopy(model)
    budget = between(ct.profile(model, x, loss_fn=total, passes=1), 0.7)
    ct.checkpoint(model, x, budget=budget, loss_fn=total, passes=1)
    mask = torch.ones(64, 64)
    for args, kwargs in (((x[:40],), {"mask": mask[:40]}), ((x[:30].unsqueeze(0),), {})):
        assert all(map(torch.equal, trained(model, *args, **kwargs), trained(plain, *args, **kwargs)))
    assert [entry.made for entry in ct.handle(model).plans] == ["given", "measurement", "measurement"]
    ct.checkpoint(model, (x, mask), budget=budget, loss_fn=total, passes=1, on_shape_change="error")
    with pytest.raises(ct.PlanMismatch, match=r"without mask that the sample had"):
        model(x)
    ct.checkpoint(model, x, budget=budget, loss_fn=total, passes=1, on_shape_change="error")
    with pytest.raises(ct.PlanMismatch, match=r"with mask that the sample had not"):
        model(x, mask)


def test_models_that_have_grown_since_they_were_planned_are_told() -> None:
    model, x = chain(4), torch.randn(32, 64)
    profile = ct.profile(model, x, loss_fn=total)
    ct.checkpoint(model, x, budget=between(profile, 0.5), loss_fn=total)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, x)
    model[1] = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    with pytest.warns(UserWarning, match="when the plan was made"):
        trained(model, x)


def test_plans_made_in_training_are_of_the_kind_that_was_asked_for() -> None:
    """Of whole blocks, or without transfers' memory, say."""
    model, x = chain(), torch.randn(256, 64)
    profile = ct.profile(model, x.repeat(2, 1), loss_fn=total, passes=1)
    budget = between(profile, 0.5)
    ct.checkpoint(model, x, loss_fn=total, budget=budget, passes=1, inside=False)
    trained(model, x.repeat(2, 1))
    entries = ct.handle(model).plans
    assert len(entries) == 2 and not any(entry.plan.selective for entry in entries)

    limited = ct.Budget(budget, host="64MiB")
    link = ct.Link(10**9, 10**9, 0, is_shared=True)
    ct.checkpoint(model, x, loss_fn=total, budget=limited, passes=1, inside=False, link=link)
    trained(model, x.repeat(2, 1))
    assert len(ct.handle(model).plans) == 2
