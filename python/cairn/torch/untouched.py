"""Leaves a model and the random generators as they were: gradients, buffers, numbers in attributes, random state."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Iterator

import torch
from torch import nn

from . import _compat
from .attributes import Attributes


class RandomState:
    """The state of every generator that a step may draw from: torch's own, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state() if numpy is not None else None

    def restore_torch(self) -> None:
        """Those that the executor replays as well."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self._device)

    def restore(self) -> None:
        self.restore_torch()
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def torch_differs(self, other: RandomState) -> bool:
        if not torch.equal(self.cpu, other.cpu):
            return True
        return self.cuda is not None and other.cuda is not None and not torch.equal(self.cuda, other.cuda)

    def foreign_differs(self, other: RandomState) -> list[str]:
        """Generators outside torch that were drawn from."""
        found = ["Python's random"] if self.python != other.python else []
        if self.numpy is not None and other.numpy is not None:
            before, after = self.numpy, other.numpy
            if before[2] != after[2] or not (before[1] == after[1]).all():
                found.append("numpy.random")
        return found


class Buffers:
    """The values of the buffers of a module, and the buffers themselves."""

    def __init__(self, module: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        self._kept.append((part, name, buffer, buffer.clone()))

    def changed(self) -> list[str]:
        """Names of the buffers whose value is no longer the kept one."""
        return [name for part, name, buffer, value in self._kept if _differs(part, name, buffer, value)]

    def restore(self) -> None:
        with torch.no_grad():
            for part, name, buffer, value in self._kept:
                if _differs(part, name, buffer, value):
                    part._buffers[name] = buffer
                    buffer.copy_(value)


def _differs(part: nn.Module, name: str, buffer: torch.Tensor, value: torch.Tensor) -> bool:
    current = part._buffers.get(name)
    return current is not buffer or not torch.equal(buffer, value)


@contextlib.contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Runs its body without gradients, parameters' hooks and garbage collection, and then puts everything back."""
    state, buffers, attributes = RandomState(device), Buffers(model), Attributes(model.modules())
    grads = [(p, p.grad) for p in model.parameters()]
    hooks = [(found, dict(found)) for p in model.parameters() for found in _compat.parameter_hooks(p)]
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for p, _ in grads:
            p.grad = None
        for found, _ in hooks:
            found.clear()  # an optimizer that steps in the backward, for example
        yield
    finally:
        for p, grad in grads:
            p.grad = grad
        for found, kept in hooks:
            found.clear()
            found.update(kept)
        buffers.restore()
        state.restore()
        attributes.forget_losses()
        attributes.restore_numbers()
        if collecting:
            gc.enable()
