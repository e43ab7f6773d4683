"""Plans the `compute_loss` of a Trainer of transformers that computes a loss of its own, instead of `model(**batch)`.

Subclasses of the Trainer (those of trl, for example) pass more than the batch to the model, call it more than once, or
compute the loss from other outputs. So a module is wrapped around the model, whose forward is the Trainer's
`compute_loss`. It is planned with the first batch. From then on, each call of `compute_loss` in training is a step of
that module.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .api import checkpoint
from .base.blocks import StepModule
from .base.errors import Unsupported
from .handle import Handle, handle
from .rerun_state.attributes import restored_attributes

_OF_TRANSFORMERS = "transformers.trainer"


def trainer_with(state: Any) -> Any:
    """The Trainer of transformers that has this state; None if there is none. Callbacks are not told theirs."""
    kind = getattr(sys.modules.get(_OF_TRANSFORMERS), "Trainer", None)
    if kind is None or state is None:
        return None
    trainers = (each for each in gc.get_objects() if issubclass(type(each), kind))
    return next((each for each in trainers if vars(each).get("state") is state), None)


def has_own_loss(trainer: Any) -> bool:
    """Whether a Trainer's step may be another one than a call of the model with the batch, and its loss."""
    given = getattr(trainer, "compute_loss_func", None) is not None
    return given or _is_own(trainer, "compute_loss") or _is_own(trainer, "training_step")


def _is_own(trainer: Any, method: str) -> bool:
    return method in vars(trainer) or getattr(type(trainer), method).__module__ != _OF_TRANSFORMERS


class TrainerStep(StepModule):
    """A module whose forward is a Trainer's `compute_loss`.

    A forward that is not a step (while it is profiled) leaves the Trainer's attributes as they were: metrics that it
    collects there would count the sample several times.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.is_running = False
        self._compute = trainer.compute_loss
        self._passed: list[nn.Module] = []  # what the Trainer calls in its steps: the model, perhaps in a wrapper

    def forward(self, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loss."""
        self.is_running, before = True, self.is_running
        try:
            if handle(self) is not None:
                return self._compute(self._passed[0], inputs, *args, **kwargs)
            trainer = nn.Module()
            vars(trainer)["trainer"] = self._compute.__self__ if hasattr(self._compute, "__self__") else None
            with restored_attributes(trainer):
                return self._compute(self.model, inputs, *args, **kwargs)
        finally:
            self.is_running = before

    def passing(self, model: nn.Module) -> TrainerStep:
        """The step as the Trainer makes it in training, with its model."""
        self._passed, self.training = [model], True
        return self


class PlannedLoss:
    """Stands for a Trainer's `compute_loss` until it is removed; `options` are those of `checkpoint`."""

    def __init__(self, trainer: Any, model: nn.Module, options: Mapping[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self._before: Callable[..., Any] = trainer.compute_loss
        self._was_replaced = "compute_loss" in vars(trainer)
        self._step = TrainerStep(trainer, model)
        self._is_planned = False
        self._guard = model.register_forward_pre_hook(self._refuse_other_steps)
        trainer.compute_loss = self._compute

    @property
    def handle(self) -> Handle | None:
        """The handle of the plan; None before the first step."""
        return handle(self._step)

    def remove(self) -> None:
        """Takes the plan away, and gives the Trainer its own method back."""
        self._guard.remove()
        if vars(self._trainer).get("compute_loss") == self._compute:
            del self._trainer.compute_loss
            if self._was_replaced:
                self._trainer.compute_loss = self._before
        applied = self.handle
        if applied is not None:
            applied.remove()

    def _compute(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_step = torch.is_grad_enabled() and self._step.model.training
        if not is_step or kwargs.get("return_outputs") or (args and args[0]):
            return self._before(model, inputs, *args, **kwargs)
        step = self._step.passing(model)
        if not self._is_planned:
            checkpoint(step, (inputs, *args), kwargs, **self._options)
            self._is_planned = True
        return step(inputs, *args, **kwargs)

    def _refuse_other_steps(self, model: nn.Module, args: Any) -> None:
        """Before each call of the model: a step that does not go by compute_loss would follow no plan."""
        if model.training and torch.is_grad_enabled() and not self._step.is_running:
            kind = type(self._trainer).__name__
            raise Unsupported(
                f"{kind} trains the {type(model).__name__} without {kind}.compute_loss(model, inputs), which is the "
                "step that trainer_callback plans: let its training_step call compute_loss and take the loss alone, or "
                "leave the callback out and call cairn.torch.checkpoint with a sample of what the model is called with"
            )


def named_within(wanted: Any) -> Any:
    """The names that `blocks=` or `keep=` give, as names within the step, of which the model is a submodule."""
    if isinstance(wanted, str):
        return wanted if wanted == "auto" else f"model.{wanted}" if wanted else "model"
    return [named_within(each) for each in wanted] if isinstance(wanted, (list, tuple)) else wanted
