"""Budgets and those who look for a batch that fits: a budget that cannot be kept is an out-of-memory error to them."""

# ruff: noqa: E402

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH = 64
SMALL = "2500KiB"  # too little for 64 rows, enough for a quarter of them


def net() -> nn.Sequential:
    return nn.Sequential(*(torch_models.Residual(WIDTH) for _ in range(6)))


def step_of(rows: int) -> nn.Sequential:
    """A model that was planned within SMALL for a batch of so many rows."""
    return ct.checkpoint(net(), torch.randn(rows, WIDTH), loss_fn=torch.sum, budget=SMALL, passes=1)


def lightning_says_out_of_memory(error: BaseException) -> bool:
    """How Lightning's batch-size finder (2.6) knows it, on CUDA and on the CPU."""
    if not (isinstance(error, RuntimeError) and len(error.args) == 1):
        return False
    is_cuda = "CUDA" in error.args[0] and "out of memory" in error.args[0]
    return is_cuda or "DefaultCPUAllocator: can't allocate memory" in error.args[0]


@pytest.fixture(scope="module")
def infeasible() -> ct.InfeasibleBudget:
    with pytest.raises(ct.InfeasibleBudget) as caught:
        step_of(4096)
    return caught.value


def test_a_budget_that_is_too_small_is_out_of_memory_to_others(infeasible: ct.InfeasibleBudget) -> None:
    assert isinstance(infeasible, (torch.OutOfMemoryError, cairn.InfeasibleBudget))
    assert isinstance(infeasible, torch.OutOfMemoryError) and isinstance(infeasible, cairn.InfeasibleBudget)
    assert lightning_says_out_of_memory(infeasible)
    assert "out of memory" in str(infeasible)
    assert str(infeasible) == infeasible.message  # what others look for is not what people read
    assert "CUDA" not in str(infeasible)


def test_it_says_all_that_it_did_after_a_pickle(infeasible: ct.InfeasibleBudget) -> None:
    again = pickle.loads(pickle.dumps(infeasible))
    assert type(again) is ct.InfeasibleBudget and again.args == infeasible.args and str(again) == str(infeasible)
    assert again.least_bytes == infeasible.least_bytes and again.composition == infeasible.composition


def test_a_step_that_cannot_be_planned_for_is_out_of_memory_as_well() -> None:
    model = step_of(16)
    with pytest.raises(torch.OutOfMemoryError, match="was not begun: out of memory") as caught:
        model(torch.randn(1 << 16, WIDTH))
    assert isinstance(caught.value, ct.InfeasibleBudget) and lightning_says_out_of_memory(caught.value)


def test_a_step_over_its_budget_is_out_of_memory_as_well() -> None:
    error = ct.BudgetExceeded("the step took 3 MiB, 1 MiB over its budget")
    assert isinstance(error, torch.OutOfMemoryError) and lightning_says_out_of_memory(error)
    assert str(error) == "the step took 3 MiB, 1 MiB over its budget"


def test_other_errors_are_not() -> None:
    for kind in (ct.Unsupported, ct.PlanMismatch, ct.RecomputationError, ct.VerificationFailed):
        assert not isinstance(kind("no"), torch.OutOfMemoryError)
        assert not lightning_says_out_of_memory(kind("no"))


def test_accelerate_goes_on_with_a_smaller_batch() -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    tried: list[int] = []
    sizes = iter((2048, 16, 1))

    @memory.find_executable_batch_size(starting_batch_size=4096, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> torch.Tensor:
        tried.append(batch_size)
        model, x = step_of(batch_size), torch.randn(batch_size, WIDTH)
        return model(x).sum()

    train().backward()
    assert tried == [4096, 2048, 16]


def test_the_trainer_finds_a_batch_that_fits(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 16))]
    begun: list[int] = []

    class Notes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            begun.append(state.train_batch_size)

    def trained(budget: Any, batch: int) -> ct.Report:
        settings = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=batch, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, auto_find_batch_size=True,
        )  # fmt: skip
        callback = ct.trainer_callback(budget, passes=1)
        trainer = transformers.Trainer(model, settings, train_dataset=rows, callbacks=[Notes(), callback])
        trainer.train()
        assert trainer.state.global_step == 2
        return callback.report

    least = trained("1GiB", 28).plan.least_budget_bytes
    found = trained(least * 101 // 100, 32)  # 32 and 28 are what it tries first
    assert begun == [28, 32, 28]
    assert found.measured.peak_bytes <= found.plan.budget_bytes
