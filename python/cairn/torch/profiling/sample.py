"""One training step on sample data: runs its forward and its backward, and computes its loss."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..base import memory
from ..base.errors import Unsupported
from ..base.layouts import saving_nothing
from ..base.progress import ProgressReporter
from ..base.tree import Tree, tensors_in
from ..head.replacements import Replaced, Replacements
from ..rerun_state.attributes import restored_attributes
from ..rerun_state.external_modules import Leaves, external_modules_of
from ..rerun_state.hook_closures import captured_values
from ..rerun_state.kv_caches import own_caches
from ..rerun_state.preserve import Parameters, Randomness, preserved
from ..rerun_state.sharded import ranks_of
from ..rerun_state.step_attributes import StepAttributes
from . import isolated_block
from .sample_inputs import InputRecord, record_of

LOSS_DIFFERENTIATES = (
    "loss_fn takes gradients (autograd.grad or backward) itself: it must return the loss, of which the backward is run "
    "for it. For derivatives in a loss (create_graph=True: physics-informed losses, gradient penalties), put the model "
    "and its loss into a module whose forward takes them and returns the loss, and plan that module: what the "
    "derivatives save is then counted, and a part of it recomputed; cairn.torch.compile needs less. Or leave them "
    "out of loss_fn=, and leave room for them by Budget(reserve=): such steps are exact, and all that autograd saves "
    "for the derivatives is kept"
)


class Sample:
    """One training step on sample data: forward and loss.

    Every forward begins with the same random state, so that the same layers are skipped at random each time, and with
    the same numbers in attributes, such as counts of steps.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_fn: Callable[[Any], torch.Tensor] | None,
        holds_output: bool = True,
    ) -> None:
        self.model, self.loss_fn, self.holds_output = model, loss_fn, holds_output
        self.ranks = ranks_of(model)
        self._call = Tree.of((args, kwargs))
        # the caller's own tensors must not get gradients, nor a backward run on into the caller's graph
        self._tensors = list(map(_own, self._call.leaves))
        self._records: list[InputRecord] = []
        self.has_no_loss = False
        self.reporter = ProgressReporter()  # of the pass that runs it
        #: modules that are no part of the model and that the step uses
        self.others = external_modules_of(model, loss_fn, self._call.opaque)
        self._leaves = Leaves(model, self._tensors)
        self.attributes = StepAttributes([*model.modules(), *self.others])
        self.replaced = Replaced(model, Replacements())
        self._random: Randomness | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of a forward, with fresh lists, dicts and caches, which a model may change."""
        return self._built()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of a forward, with fresh containers."""
        return self._built()[1]

    def _built(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return own_caches(*self._call.build(self._tensors))

    def forward(self, returned: Callable[[], None] = lambda: None) -> tuple[Any, torch.Tensor | None]:
        """Run the forward and return its `results`. `returned` is called when the model has returned."""
        output = self.output()
        returned()
        return self.results(output)

    def results(self, output: Any) -> tuple[Any, torch.Tensor | None]:
        """The values that the training loop holds in the backward, and the loss; None if it is computed elsewhere."""
        loss = self.loss(output)
        self.has_no_loss = loss is None
        if loss is None and not self.holds_output:
            raise ValueError(
                "holds_output=False is for loops that keep the loss alone, and the model's output has no loss: give "
                "loss_fn=, too"
            )
        self._leaves.note(tensors_in((output, loss)))
        return (output if self.holds_output else loss), loss

    def output(self, function: Callable[..., Any] | None = None) -> Any:
        """The model's output, or that of a function that runs the model, such as its compiled code."""
        self.attributes.record()
        self.attributes.forget_losses()
        self.attributes.restore_numbers()
        self.random.restore()
        with self.replaced.during_forward():
            args, kwargs = self._built()
            return (self.model if function is None else function)(*args, **kwargs)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Free the tensors of the arguments after the body of a with statement. Later they exist in `redrawn` alone."""
        try:
            yield
        finally:
            own = memory.storages([*self.model.parameters(), *self.model.buffers()])
            for tensor in self._tensors:
                is_of_model = not own.keys().isdisjoint(memory.storages([tensor]))
                self._records.append(record_of(tensor, is_of_model))
            self._tensors.clear()
            self._call.leaves.clear()

    @contextlib.contextmanager
    def redrawn(self) -> Iterator[None]:
        """The arguments of a released sample exist during the body of a with statement, some with other values."""
        self._tensors += (record.made() for record in self._records)
        self._leaves = Leaves(self.model, self._tensors)
        try:
            yield
        finally:
            self._tensors.clear()

    @contextlib.contextmanager
    def preserved(self, device: torch.device) -> Iterator[Parameters]:
        """`preserve.preserved` of the model, and of all other modules that its step and its loss use."""
        with preserved(self.model, device, self.attributes, self.others) as parameters:
            try:
                yield parameters
            finally:
                self._leaves.restore()

    @contextlib.contextmanager
    def stateless(self) -> Iterator[None]:
        """Restore, after the body, the attributes that every forward sets anew."""
        try:
            yield
        finally:
            self.attributes.restore_states()

    def drop_gradients(self) -> None:
        """Remove the gradients of the model's parameters."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def watch(self, parameters: Parameters) -> None:
        """Run a forward that saves nothing, and record the parameters that it writes, to restore them."""
        with restored_attributes(self.model), saving_nothing(), parameters.watching():
            self.output()

    @property
    def random(self) -> Randomness:
        """Record the random state as that with which every forward begins."""
        if self._random is None:
            self._random = self._random_now()
        return self._random

    def begin_with(self, state: Randomness) -> None:
        """Set the random state with which a forward begins."""
        self._random = state

    def begin_with_seed(self, seed: int) -> None:
        """Set a new random state, by a seed for every generator."""
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        self._random = self._random_now()

    def draws(self) -> bool:
        """Whether the last forward has drawn random numbers."""
        now = self._random_now()
        return self.random.torch_differs(now) or bool(self.random.foreign_differs(now))

    def _random_now(self) -> Randomness:
        return Randomness(memory.device_of(self.model))

    def loss(self, output: Any) -> torch.Tensor | None:
        if self.loss_fn is not None:
            return self._checked(output, self._made_loss(output, self.loss_fn))
        if isinstance(output, torch.Tensor):
            return output if output.numel() == 1 else None
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        return loss if isinstance(loss, torch.Tensor) else None

    @staticmethod
    def _made_loss(output: Any, loss_fn: Callable[[Any], Any]) -> Any:
        try:
            return loss_fn(output)
        except RuntimeError as error:
            if "have been used in the graph" in str(error):  # by the caller's own tensors, of which copies are run
                raise Unsupported(LOSS_DIFFERENTIATES) from error
            raise

    def _checked(self, output: Any, loss: Any) -> torch.Tensor:
        """The result of loss_fn, if a backward can begin with it."""
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                f"loss_fn must return the loss, a tensor of one number; it returned a {type(loss).__name__}"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn must return the loss, a tensor of one number; it returned one of {list(loss.shape)}"
            )
        if torch.is_grad_enabled() and not loss.requires_grad and any(t.requires_grad for t in tensors_in(output)):
            raise ValueError("loss_fn returned a tensor without gradients: is there a detach() or no_grad() in it?")
        return loss

    def static_tensors(self) -> list[torch.Tensor]:
        """The caller's tensors: the arguments, and those that the loss function holds."""
        return list(tensors_in((self.args, self.kwargs, list(captured_values(self.loss_fn)))))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Copies of tensors with the same values, because a forward may call `requires_grad_` on its arguments."""
    if tensor.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor.detach() if type(tensor) is torch.Tensor and tensor.is_floating_point() else tensor


def backward_of(output: Any, loss: torch.Tensor | None) -> None:
    """Run the backward from the loss, or without one from gradients of the output's size."""
    roots = isolated_block.differentiable(output) if loss is None else [loss]
    with isolated_block.as_in_backward(roots[0].device):
        if loss is not None:
            loss.backward()
        else:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
