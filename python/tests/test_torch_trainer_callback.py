"""The callback for the Trainer of transformers."""

# ruff: noqa: E402

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from plan_support import UNLIMITED, Arguments, profiled
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def test_the_callback_of_a_trainer() -> None:
    step = torch_models.made("gpt2")
    budget = UNLIMITED
    callback = ct.trainer_callback(budget, passes=1, check_steps=0)
    state = torch.get_rng_state()
    given = {"model": step.model, "train_dataloader": [step.kwargs], "optimizer": None}
    callback.on_train_begin(Arguments(), None, None, **given)
    assert torch.equal(torch.get_rng_state(), state)
    handle = ct.handle(step.model)
    assert handle is not None and handle.plan.budget_bytes == budget
    callback.on_train_end(Arguments(), None, None, **given)
    assert ct.handle(step.model) is None
    both = Arguments()
    both.gradient_checkpointing = True
    with pytest.raises(ct.Unsupported, match="gradient_checkpointing"):
        callback.on_train_begin(both, None, None, **given)


def test_the_callback_knows_the_loss_of_a_trainer_that_smooths_labels() -> None:
    """The Trainer does not give them to the model then."""
    step, smooth = torch_models.made("gpt2"), Arguments()
    smooth.label_smoothing_factor = 0.1
    given = {"model": step.model, "train_dataloader": [step.kwargs]}
    callback = ct.trainer_callback(UNLIMITED, passes=1, check_steps=0)
    callback.on_train_begin(smooth, None, None, **given)
    handle = ct.handle(step.model)
    assert handle is not None
    budget = handle.plan.least_budget_bytes * 51 // 50
    tight = ct.trainer_callback(budget, passes=1, check_steps=0)
    handle.remove()
    tight.on_train_begin(smooth, None, None, **given)
    step.model(**{name: tensor for name, tensor in step.kwargs.items() if name != "labels"}).logits.sum().backward()
    callback.on_train_end(smooth, None, None, **given)


def test_the_callback_is_told_the_loss_that_a_trainer_computes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    plain = torch_models.made("gpt2").model
    planned = copy.deepcopy(plain)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(50, (6, 32))]

    def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        each = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return each / num_items_in_batch

    def train(model: nn.Module, *callbacks: Any) -> float:
        settings = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, settings, train_dataset=rows, callbacks=[*callbacks], compute_loss_func=own_loss
        )
        return float(trainer.train()[1])

    callback = ct.trainer_callback(UNLIMITED, compute_loss_func=own_loss, passes=1)
    assert train(planned, callback) == train(plain)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))
    report = callback.report
    assert not report.plan.holds_output
    assert report.measured.peak_bytes <= report.predicted_peak_bytes <= 1.01 * report.measured.peak_bytes
    with pytest.raises(TypeError, match="not both"):
        ct.trainer_callback(UNLIMITED, compute_loss_func=own_loss, loss_fn=own_loss)
    with pytest.raises(TypeError, match="takes a function, not a str"):
        ct.trainer_callback(UNLIMITED, compute_loss_func="mean")


def test_a_trainer_with_a_loss_of_its_own_that_the_callback_does_not_know_is_told_how_to_tell_it() -> None:
    step = torch_models.made("gpt2")
    callback = ct.trainer_callback(UNLIMITED, passes=1)
    callback.on_train_begin(Arguments(), None, None, model=step.model, train_dataloader=[step.kwargs])
    without = {name: tensor for name, tensor in step.kwargs.items() if name != "labels"}
    with pytest.raises(ct.PlanMismatch, match=r"without labels that the sample had; .*compute_loss_func="):
        step.model(**without)
    callback.on_train_end(Arguments(), None, None, model=step.model)


def test_layers_that_are_passed_a_count_of_tokens_keep_their_parts() -> None:
    """As the Trainer of transformers does, of which the sample has none."""
    step = torch_models.made("llama")
    profile = profiled(step)
    top = ct.plan(profile, UNLIMITED)
    plan = ct.plan(profile, (top.least_budget_bytes + top.plain_peak_bytes) // 2)
    plain = copy.deepcopy(step.model)
    assert plan.selective
    with ct.apply(step.model, plan) as handle:
        for model in (step.model, plain):
            torch.manual_seed(0)
            model(**step.kwargs, num_items_in_batch=torch.tensor(40)).loss.backward()
        assert not handle.executor.notes
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(step.model.parameters(), plain.parameters(), strict=True))


_WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}, _WORKERS], ids=str)
def test_a_trainer_trains_to_the_same_bits_and_leaves_its_report(how: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    plain = transformers.GPT2LMHeadModel(config)
    planned = copy.deepcopy(plain)
    tokens = [{"input_ids": row, "labels": row} for row in torch.randint(64, (10, 16))]

    def train(model: nn.Module, *callbacks: Any) -> float:
        settings = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, **how,
        )  # fmt: skip
        return float(transformers.Trainer(model, settings, train_dataset=tokens, callbacks=[*callbacks]).train()[1])

    callback = ct.trainer_callback("4MiB", passes=1)
    assert callback.report is None
    assert train(planned, callback) == train(plain)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))
    assert ct.handle(planned) is None
    assert callback.report.measured is not None and callback.report.measured.peak_bytes <= 4 * 2**20
    assert len(callback.report.shapes) == 1  # the number of tokens that the Trainer passes along changes nothing
