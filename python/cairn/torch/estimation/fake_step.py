"""Profiles of a step on fake tensors, for any batch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.errors import Unsupported
from ..base.tree import tensors_in
from ..planning.step_profile import Profile
from ..profiler import profile
from ..rerun_state.hook_closures import captured_values
from ..resizing import Resizing, explained_as_resized
from .devices import DeviceModel, OperatorTimes
from .fake_model import REPORTED_DEVICE, Fakes
from .gpu_kernels import GpuKernels
from .sharding import sharded
from .virtual_device import VirtualDevice
from .workspaces import Workspaces


@dataclasses.dataclass
class FakeStep:
    """A training step that is never run.

    sample: positional arguments, keyword arguments, targets of the loss.
    options: of `profile`.
    """

    model: nn.Module
    sample: tuple[tuple[Any, ...], dict[str, Any], Any]
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    device: DeviceModel
    shard: int
    dim: int
    options: Mapping[str, Any]
    _known: dict[int, Profile] = dataclasses.field(default_factory=dict)

    @property
    def batch(self) -> int:
        """The sample's batch: the size of its first tensor at `dim`, or 1 without a tensor."""
        try:
            return Resizing(*self.sample, self.dim).batch
        except ValueError:
            return 1

    def profiled(self, batch: int) -> Profile:
        """The profile of a step with this batch."""
        if batch not in self._known:
            resized = (
                contextlib.nullcontext() if batch == self.batch else explained_as_resized(self.batch, batch, self.dim)
            )
            with _explained(self.model), resized:
                profiled = self._whole(batch)
            given_bytes = profiled.input_bytes - self._given_twice_bytes()
            profiled = dataclasses.replace(profiled, device=self.device.type, present_bytes=0, input_bytes=given_bytes)
            self._known[batch] = sharded(profiled, self.model, self.shard)
        return self._known[batch]

    def _given_twice_bytes(self) -> int:
        """Bytes of the sample's tensors that the loss function also holds, which the profile counts a second time."""
        given = memory.storages(tensors_in(self.sample))
        brought = memory.storages(tensors_in(list(captured_values(self.loss_fn))))
        return sum(size for key, size in brought.items() if key in given)

    def _whole(self, batch: int) -> Profile:
        """The profile of the step; where the model reads numbers of a mask, the mask is made as in tracing."""
        try:
            return self._profile(batch, _without_tracing_branches())
        except _compat.NEEDS_NUMBERS:
            return self._profile(batch, contextlib.nullcontext())

    def _profile(self, batch: int, how: contextlib.AbstractContextManager[Any]) -> Profile:
        is_gpu = self.device.type == "cuda"
        kernels: contextlib.AbstractContextManager[Any] = GpuKernels() if is_gpu else contextlib.nullcontext()
        device = VirtualDevice(OperatorTimes(self.device), Workspaces(measured=not is_gpu), is_cpu=not is_gpu)
        fakes = Fakes()
        with (
            torch.random.fork_rng(devices=[]),
            device.runs(),
            fakes.replacing_parameters(self.model),
            how,
            kernels,
            _autocast_of(self.device.type),
        ):
            args, kwargs, targets = fakes.with_fakes(self.sample)
            if batch != self.batch:
                args, kwargs, targets = Resizing(args, kwargs, targets, self.dim).to(batch)
            loss_fn = self.loss_fn
            if loss_fn is not None and targets is not None:
                loss_fn = _WithTargets(loss_fn, targets)
            optimizer = None if self.optimizer is None else _on_fakes(self.optimizer, fakes, is_gpu)
            return profile(
                self.model, args, kwargs, loss_fn=loss_fn, optimizer=optimizer, passes=1, outside=False, **self.options
            )


def _autocast_of(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """The caller's autocast region for a GPU, applied to fakes, which claim to lie on the CPU."""
    if device_type == REPORTED_DEVICE.type or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(REPORTED_DEVICE.type, torch.get_autocast_dtype(device_type))


class _WithTargets:
    def __init__(self, loss_fn: Callable[..., torch.Tensor], targets: Any) -> None:
        self._loss_fn, self._targets = loss_fn, targets

    def __call__(self, output: Any) -> torch.Tensor:
        return self._loss_fn(output, self._targets)


def _on_fakes(optimizer: torch.optim.Optimizer, fakes: Fakes, is_gpu: bool) -> torch.optim.Optimizer:
    """A copy of the optimizer for the fakes; on a GPU with torch's default `foreach`, which is True there."""
    copied = copy.copy(optimizer)
    copied.param_groups = [{**group, "params": fakes.with_fakes(group["params"])} for group in optimizer.param_groups]
    for group in copied.param_groups:
        if is_gpu and group.get("foreach") is None and not group.get("fused"):
            group["foreach"] = True
    state = {fakes.of(p): fakes.with_fakes(dict(entry)) for p, entry in optimizer.state.items()}
    copied.state = type(optimizer.state)(dict, state)
    return copied


@contextlib.contextmanager
def _without_tracing_branches() -> Iterator[None]:
    """Stop transformers from taking fake tensors for tracing, in which it makes masks that a real step does not."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(utils, "is_fake_tensor", None)
    if before is None:
        yield
        return
    utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        utils.is_fake_tensor = before


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turn an error about missing numbers into `Unsupported`, which names the operator and the line."""
    try:
        yield
    except _compat.NEEDS_NUMBERS as error:
        operator = getattr(error, "func", None) or (error.args[0] if error.args else "an operator")
        raise Unsupported(
            f"{operator} at {_line(error)} needs the numbers in a tensor, and an estimate has shapes alone: what this "
            f"{type(model).__name__} does next, or a shape, depends on them. Estimate with a branch that does not (a "
            "fixed number of tokens for each expert, no data-dependent early exit), or profile the model where it runs"
        ) from error


def _line(error: BaseException) -> str:
    """The innermost line outside of torch and of this package."""
    own = (torch.__path__[0], __file__.rpartition("estimation")[0])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown line"
