"""For training loops that are not one's own: a callback for the Trainer of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from .api import check_checkpoint, checkpoint
from .base.errors import Unsupported
from .handle import Handle, handle
from .profiling.optimizer import unwrapped
from .reporting.report import Report
from .rerun_state.preserve import Randomness
from .trainer_step import PlannedLoss, has_own_loss, named_within, trainer_with


def trainer_callback(
    budget: Any = "auto", *, compute_loss_func: Callable[..., torch.Tensor] | None = None, **options: Any
) -> Any:
    """A TrainerCallback under which a Hugging Face Trainer trains within a budget.

    The first batch of its data is the sample: give the largest that there will be, or pad to a fixed length. The plan
    is removed when training ends; `callback.report` stays: what was planned and measured (None before training).

    Of a Trainer whose `compute_loss` or `training_step` is its own, or that is given a compute_loss_func, what is
    planned is its compute_loss, with the first batch that it is called with in training.

    Parameters
    ----------
    budget : int, str or cairn.Budget
        As for `checkpoint`.
    compute_loss_func : callable, optional
        Makes the loss from the model's output and the labels; the model's own call is planned then.
    **options
        As for `checkpoint`, but holds_output is False, because a Trainer keeps the loss alone.

    Returns
    -------
    transformers.TrainerCallback
        For `Trainer(callbacks=[...])`.

    Raises
    ------
    ImportError
        transformers is not installed.

    Examples
    --------
    >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ct.trainer_callback("8GiB")])
    """
    check_checkpoint(budget, options)
    if compute_loss_func is not None:
        if not callable(compute_loss_func):
            raise TypeError(f"compute_loss_func= takes a function, not a {type(compute_loss_func).__name__}")
        if "loss_fn" in options:
            raise TypeError("trainer_callback takes loss_fn= or compute_loss_func=, not both")
    options = {"holds_output": False, **options}
    if "optimizer" in options:
        raise TypeError("trainer_callback takes the optimizer from the Trainer: leave optimizer= out")
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise ImportError("trainer_callback needs transformers: pip install transformers") from None

    class Budgeted(TrainerCallback):
        """Plans when training begins."""

        def __init__(self) -> None:
            self._handle: Handle | None = None
            self._loss: PlannedLoss | None = None
            self._report: Report | None = None

        @property
        def report(self) -> Report | None:
            """The report of the plan: the present one in training, the last one after it, None before it."""
            applied = self._handle if self._loss is None else self._loss.handle
            if applied is not None and applied.is_applied:
                self._report = applied.report()
            return self._report

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._end()  # where training begins again, with a smaller batch, say
            model, batches = given["model"], given["train_dataloader"]
            _refuse_checkpointing(args)
            trainer = None if compute_loss_func is not None or "loss_fn" in options else trainer_with(state)
            if trainer is not None and has_own_loss(trainer):
                named = {name: named_within(options[name]) for name in options if name in ("blocks", "keep")}
                of_step: dict[str, Any] = {"budget": budget, "optimizer": _plain(given.get("optimizer"))}
                self._loss = PlannedLoss(trainer, model, {**options, **named, **of_step})
                return
            _begin(args, model, batches, given.get("optimizer"), budget, options, compute_loss_func)
            self._handle = handle(given["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._end()

        def _end(self) -> None:
            report = self.report
            if self._loss is not None:
                self._loss.remove()
            elif self._handle is not None and self._handle.is_applied:
                self._handle.remove()
            self._handle, self._loss, self._report = None, None, report

    return Budgeted()


def _refuse_checkpointing(args: Any) -> None:
    if getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False):
        raise Unsupported(
            "TrainingArguments with gradient_checkpointing or activation_checkpointing recompute every layer; leave it "
            "out, and the budget decides which layers are recomputed"
        )


def _begin(
    args: Any,
    model: nn.Module,
    batches: Any,
    optimizer: Any,
    budget: Any,
    options: dict[str, Any],
    own_loss: Callable[..., torch.Tensor] | None,
) -> None:
    device = next(model.parameters()).device
    batch = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in _first_of(batches, device).items()
    }
    if own_loss is not None:
        options = {**options, "loss_fn": _computed_by(own_loss, batch.pop("labels", None))}
    elif args.label_smoothing_factor and "labels" in batch and "loss_fn" not in options:
        options = {**options, "loss_fn": _smoothed(args, model, batch.pop("labels"))}
    model.train()
    with _precision(args, device):
        checkpoint(model, (), batch, budget=budget, optimizer=_plain(optimizer), **options)


def _computed_by(own_loss: Callable[..., torch.Tensor], labels: Any) -> Callable[[Any], torch.Tensor]:
    """The loss by a function of the user's, to which the Trainer passes the labels instead of to the model."""
    count = labels.ne(-100).sum() if isinstance(labels, torch.Tensor) else None
    return lambda output: own_loss(output, labels, num_items_in_batch=count)


def _smoothed(args: Any, model: nn.Module, labels: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """The loss as the Trainer computes it itself, from what a model returns that was not given the labels."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother

    smoother = LabelSmoother(epsilon=args.label_smoothing_factor)
    is_shifted = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return lambda output: smoother(output, labels, shift_labels=is_shifted)


def _first_of(batches: Any, device: torch.device) -> Any:
    """The first batch; the data that training sees is as without this."""
    data = batches
    while (inner := getattr(data, "dataset", None)) is not None:
        data = inner
    if isinstance(data, IterableDataset) and iter(data) is iter(data):
        raise Unsupported(
            f"{type(data).__name__} can be iterated only once, so the batch that a plan is made for would be missing "
            "in training: call cairn.torch.checkpoint with a sample of your own before training"
        )
    state = Randomness(device)
    first = next(iter(batches))
    for loader in (batches, getattr(batches, "base_dataloader", None)):
        if loader is not None and getattr(loader, "_iterator", None) is not None:
            loader._iterator = None  # workers that persist would begin training with another seed
    state.restore()
    return first


def _plain(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside wrappers, if it is one of torch's."""
    inner = unwrapped(optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _precision(args: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)
