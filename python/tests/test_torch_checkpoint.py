"""The calls that do everything: checkpoint and budget."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from plan_support import UNLIMITED, least_of
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def test_checkpoint_trains_within_the_budget_and_reports() -> None:
    step = torch_models.resnet()
    budget = least_of(step)
    plain = copy.deepcopy(step.model)
    model = ct.checkpoint(step.model, step.args, loss_fn=step.loss_fn, budget=budget, passes=1)
    assert model is step.model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step.loss().backward()
    report = ct.report(model)
    assert report.measured is not None and report.measured.peak_bytes <= budget
    assert abs(report.predicted_peak_bytes / report.measured.peak_bytes - 1) < 0.01
    assert re.search(r"measured    .* in the first steps; .* [mu]?s, measuring included", str(report))
    for _ in range(3):
        step.loss_fn(plain(*step.args)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    handle = ct.handle(model)
    assert handle is not None
    handle.remove()
    with pytest.raises(ValueError, match="no plan"):
        ct.report(model)


def distilbert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(vocab_size=500, dim=64, hidden_dim=256, n_layers=4, n_heads=4)
    ids = torch.randint(500, (4, 48))
    return DistilBertForMaskedLM(config), {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 3), ("ffn_dim", 256))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 300}
    config = WhisperConfig(
        d_model=64, num_mel_bins=16, max_source_positions=96, dropout=0.1, **sizes, **heads, **tokens
    )
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 16, 192),
        "labels": torch.randint(3, 300, (2, 32)),
    }


@pytest.mark.parametrize("make", [distilbert, whisper])
def test_the_three_lines_train_a_hugging_face_model(make: Any) -> None:
    """As the README says, from a budget between the least and the plain one; every loss and parameter as plainly."""
    pytest.importorskip("transformers")
    model, batch = make()
    points = ct.sweep(ct.profile(model.train(), kwargs=batch, passes=1), 4)
    losses: list[list[torch.Tensor]] = []
    trained = []
    for budget in (None, points[1].budget_bytes):
        torch.manual_seed(1)
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters())
        if budget is not None:
            ct.checkpoint(own, kwargs=batch, budget=budget, strict=True, passes=1)
            assert not ct.handle(own).plan.is_plain
        losses.append([])
        for _ in range(3):
            loss = own(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
        trained.append(own)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in trained), strict=True))


def test_checkpoint_leaves_an_infeasible_model_alone() -> None:
    step = torch_models.resnet()
    with pytest.raises(ct.InfeasibleBudget):
        ct.checkpoint(step.model, step.args, loss_fn=step.loss_fn, budget="1MiB", passes=1)
    assert ct.handle(step.model) is None
    assert all("forward" not in vars(module) for module in step.model.modules())


def test_a_budget_for_the_body_of_a_with_statement() -> None:
    step = torch_models.resnet()
    with ct.budget(step.model, least_of(step), step.args, loss_fn=step.loss_fn, passes=1) as handle:
        assert ct.handle(step.model) is handle
        step.loss().backward()
    assert ct.handle(step.model) is None


def test_a_budget_for_a_while_leaves_the_plan_that_was_there() -> None:
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), torch.randn(64, 32)
    ct.checkpoint(model, x, loss_fn=torch.sum, budget="1GiB", passes=1)
    before = ct.handle(model)
    with ct.budget(model, "2GiB", x, loss_fn=torch.sum, passes=1) as meanwhile:
        assert ct.handle(model) is meanwhile and meanwhile is not before
    assert ct.handle(model) is before and before is not None and before.is_applied
    model(x).sum().backward()


def test_several_optimizers_are_told_what_to_do() -> None:
    model, x = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Flatten(), nn.Linear(32, 4)), torch.ones(8, 4).long()
    sparse, rest = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[2].parameters())
    with pytest.raises(TypeError, match="Of several, pass the one that keeps most"):
        ct.profile(model, x, loss_fn=torch.sum, optimizer=[sparse, rest])
    profile = ct.profile(model, x, loss_fn=torch.sum, optimizer=sparse, passes=1)
    assert profile.resident["optimizer state"] >= 2 * 100 * 8 * 4


def test_steps_larger_than_the_nearest_plan_do_not_change_it() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))), torch.randn(1024, 64)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    budget = ct.plan(profile, UNLIMITED).plain_peak_bytes * 11 // 10
    ct.checkpoint(model, x, loss_fn=torch.sum, budget=budget, passes=1, on_shape_change="nearest", check_steps=5)
    plan = ct.handle(model).plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.warns(UserWarning, match="over its budget"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(1536, 64)).sum().backward()
            optimizer.step()
    model(x).sum().backward()
    assert ct.handle(model).plan is plan
