"""Trainers of transformers whose step is not `model(**batch)`: planned is what they do, or it is refused by name."""

# ruff: noqa: E402

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

import cairn.torch as ct
from torch import nn

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("error:.*over its budget"),
    pytest.mark.filterwarnings("error:.*follows no plan"),
]


class Model(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """With a head of its own for training, as trl's patched forward has: log probabilities, no logits, no loss."""

    def forward(self, *args: Any, fused_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_head:
            return super().forward(*args, labels=labels, **kwargs)
        hidden = self.model(*args, **kwargs).last_hidden_state
        logits = self.lm_head(hidden[:, :-1]).float()
        return {"log_probs": -nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")}


class Fused(transformers.Trainer):  # type: ignore[misc, name-defined]
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, fused_head=True)
        loss = -outputs["log_probs"].mean()
        return (loss, outputs) if return_outputs else loss


class Scaled(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Keeps the labels, and has a loss of its own beside the model's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        loss = outputs.loss + 0.1 * torch.stack([h.tanh().square().mean() for h in outputs.hidden_states]).sum()
        return (loss, outputs) if return_outputs else loss


class Twice(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Two forwards (R-Drop)."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = [model(**inputs) for _ in range(2)]
        loss = outputs[0].loss + outputs[1].loss + (outputs[0].logits - outputs[1].logits).square().mean()
        return (loss, outputs[0]) if return_outputs else loss


class Popping(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Takes the labels out of the batch, and notes metrics in attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.metrics, self.seen = {"train": defaultdict(list)}, 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.metrics["train"]["loss"].append(loss.item())
        self.seen += labels.numel()
        return (loss, outputs) if return_outputs else loss


class Repeats(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Two backwards in a step, each by compute_loss."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        first = super().training_step(model, dict(inputs), num_items_in_batch)
        return first + super().training_step(model, inputs, num_items_in_batch)


class Past(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Trains past compute_loss."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss * 2
        loss.backward()
        return loss.detach()


class Field(nn.Module):
    """A function of points, for an equation with its derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 32), nn.Linear(32, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = self.first(points)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class Differentiates(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Its loss has a derivative of the model's output."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        points = inputs["points"].detach().requires_grad_()
        output = model(points)
        (slope,) = torch.autograd.grad(output.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        loss = (slope[:, 1] - second[:, 0] + output[:, 0].sin()).square().mean()
        return (loss, output) if return_outputs else loss


def differentiated(folder: Path, *callbacks: Any) -> Field:
    torch.manual_seed(0)
    field = Field()
    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=128, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    points = torch.rand(256, 2)
    Differentiates(field, settings, train_dataset=[{"points": p} for p in points], callbacks=list(callbacks)).train()
    return field


def trained(kind: Any, folder: Path, callback: Any = None, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=32, attention_dropout=0.1,
    )  # fmt: skip
    model = Model(config)
    tokens = torch.randint(64, (16, 24), generator=torch.Generator().manual_seed(1))
    settings = {
        "per_device_train_batch_size": 4, "max_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no", "remove_unused_columns": False,
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
    trainer = kind(
        model,
        transformers.TrainingArguments(str(folder), **{**settings, **options}),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        eval_dataset=[{"input_ids": row, "labels": row} for row in tokens[:4]],
        callbacks=[callback] if callback else [],
        **given,
    )
    trainer.train()
    return model, trainer


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    each = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return each / num_items_in_batch


CASES: list[tuple[Any, dict[str, Any]]] = [
    (Fused, {}),
    (Scaled, {}),
    (Twice, {}),
    (Popping, {"gradient_accumulation_steps": 2}),
    (Repeats, {}),
    (Scaled, {"bf16": True}),
    (Scaled, {"eval_strategy": "steps", "eval_steps": 1}),
    (transformers.Trainer, {"compute_loss_func": own_loss}),
]


@pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", None) or str([*value])
)
def test_the_step_that_a_trainer_makes_is_planned(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain, before = trained(kind, tmp_path, **options)
    loose = ct.trainer_callback("1GiB", passes=1)
    trained(kind, tmp_path, loose, **options)
    top = loose.report.plan
    budget = (top.least_budget_bytes + top.plain_peak_bytes) // 2
    callback = ct.trainer_callback(budget, passes=1, strict=True)
    planned, trainer = trained(kind, tmp_path, callback, **options)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))
    report = callback.report
    assert not report.plan.is_plain
    assert 0.9 * report.predicted_peak_bytes <= report.measured.peak_bytes <= budget
    assert "compute_loss" not in vars(trainer) and not planned._forward_pre_hooks
    if kind is Popping:  # profiles and recomputations leave no metrics behind
        assert (trainer.metrics, trainer.seen) == (before.metrics, before.seen)


def test_blocks_are_named_as_they_are_in_the_model(tmp_path: Path) -> None:
    callback = ct.trainer_callback("1GiB", passes=1, blocks="model.layers.*", keep=["model.layers.0"])
    trained(Scaled, tmp_path, callback)
    assert [*callback.report.plan.kept_because] == ["model.model.layers.0"]


def test_a_trainer_that_trains_past_its_compute_loss_is_refused_by_name(tmp_path: Path) -> None:
    callback = ct.trainer_callback("1GiB", passes=1)
    with pytest.raises(ct.Unsupported, match=r"Past trains the Model without Past\.compute_loss"):
        trained(Past, tmp_path, callback)


def test_a_budget_that_is_too_small_for_the_step_of_a_trainer_is_refused_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(ct.InfeasibleBudget, match="no plan fits"):
        trained(Twice, tmp_path, ct.trainer_callback("300KiB", passes=1))


def test_a_trainer_whose_loss_has_derivatives_has_the_options_of_its_step(tmp_path: Path) -> None:
    """What the Trainer's attributes are compared with is no operation of that step."""
    plain, loose = differentiated(tmp_path), ct.trainer_callback("1GiB", passes=1)
    differentiated(tmp_path, loose)
    top = loose.report.plan
    assert top.least_budget_bytes < 0.9 * top.plain_peak_bytes
    callback = ct.trainer_callback(top.least_budget_bytes, passes=1, strict=True)
    planned = differentiated(tmp_path, callback)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))
    assert callback.report.measured.peak_bytes <= callback.report.plan.budget_bytes
