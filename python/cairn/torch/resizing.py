"""Steps of a model with its sample resized to other batches, or to other lengths."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cairn
import torch
from cairn import Progress
from torch import nn

from .base.choices import ACCUMULATED
from .base.errors import is_out_of_memory
from .base.progress import ProgressReporter
from .base.tree import Tree
from .evaluation.verification import verify
from .planning import arguments
from .planning.plan import Plan
from .planning.shapes import sized
from .planning.step_profile import Profile
from .profiler import profile


class Resizing:
    """A sample, and how it is resized."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, dim: Any) -> None:
        if isinstance(dim, bool) or not hasattr(type(dim), "__index__"):
            raise TypeError(f"dim must be an integer, the dimension to resize, not {dim!r}")
        self.dim = operator.index(dim)
        self._tree = Tree.of((args, kwargs, targets))  # of all: a tensor that is in both stays one
        sizes = [t.size(self.dim) for t in sized((args, kwargs)) if self._has_dim(t)]
        if not sizes:
            raise ValueError(f"dim={self.dim}: no tensor in the sample has this dimension, so there is none to resize")
        self.batch = sizes[0]
        if self.batch == 0:
            raise ValueError(f"dim={self.dim}: the sample's size there is 0; give a sample of at least 1")

    def _has_dim(self, tensor: torch.Tensor) -> bool:
        return -tensor.dim() <= self.dim < tensor.dim()

    def to(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Positional arguments, keyword arguments and targets of this batch."""
        resized: tuple[tuple[Any, ...], dict[str, Any], Any] = self._tree.build(
            [self._resized(t, batch) for t in self._tree.leaves]
        )
        return resized

    def _resized(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        if batch == self.batch or not self._has_dim(tensor) or tensor.size(self.dim) != self.batch:
            return tensor
        rows = torch.arange(batch, device=tensor.device) % self.batch
        resized = tensor.detach().index_select(self.dim, rows)
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
        if layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout):
            resized = resized.contiguous(memory_format=layout)
        return resized.requires_grad_(tensor.requires_grad)


def _loss_with(loss_fn: Callable[..., torch.Tensor], targets: Any, output: Any) -> torch.Tensor:
    return loss_fn(output, targets)


class CannotResize(ValueError):
    """The step cannot be run with another batch."""


@contextlib.contextmanager
def explained_as_resized(
    first: int, batch: int, dim: int, passes_through: Callable[[Exception], bool] = lambda error: False
) -> Iterator[None]:
    """Turn errors of the body into `CannotResize`, which names the resized sample.

    passes_through: which errors stay as they are.
    """
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
        if isinstance(error, cairn.Error) or passes_through(error):
            raise
        raise CannotResize(
            f"the step cannot be run with the sample resized from {first} to {batch} at dimension {dim} "
            f"({type(error).__name__}: {error}): pass what the loss compares the output with as targets=, to "
            "loss_fn(output, targets), and give a sample in which only what belongs to the batch has its size there"
        ) from error


@dataclasses.dataclass
class Steps:
    """Steps of a model with samples of any batch."""

    model: nn.Module
    resizing: Resizing
    loss_fn: Callable[..., torch.Tensor] | None
    reporter: ProgressReporter
    options: Mapping[str, Any]
    stopped_by: Exception | None = None  # what a progress callback raised

    def profiled(self, batch: int) -> Profile:
        """The profile of a step."""
        to_profile = arguments.sorted_options(self.options)[0]
        args, kwargs, loss_fn = self._sample(batch)
        with self._resized_to(batch):
            return profile(self.model, args, kwargs, loss_fn=loss_fn, **to_profile, progress=self._progress_of(batch))

    def measured(self, batch: int, plan: Plan) -> int:
        """The peak of a step with this plan."""
        self.reporter.begin(f"batch {batch}: measuring the planned step")
        args, kwargs, loss_fn = self._sample(batch)
        with self._resized_to(batch):
            verification = verify(self.model, plan, args, kwargs, loss_fn=loss_fn, compare=False, strict=False)
        return verification.accumulated.peak_bytes if plan.gradients == ACCUMULATED else verification.created.peak_bytes

    def _progress_of(self, batch: int) -> Callable[[Progress], None]:
        def report(news: Progress) -> None:
            try:
                self.reporter.pass_on(f"batch {batch}", news)
            except Exception as error:
                self.stopped_by = error
                raise

        return report

    def _sample(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor] | None]:
        args, kwargs, targets = self.resizing.to(batch)
        if self.loss_fn is None or targets is None:
            return args, kwargs, self.loss_fn
        return args, kwargs, functools.partial(_loss_with, self.loss_fn, targets)

    def _resized_to(self, batch: int) -> contextlib.AbstractContextManager[None]:
        """Says of errors in the body that they are of a resized sample."""
        first, dim = self.resizing.batch, self.resizing.dim
        if batch == first:
            return contextlib.nullcontext()
        return explained_as_resized(
            first, batch, dim, passes_through=lambda error: is_out_of_memory(error) or self.stopped_by is error
        )
