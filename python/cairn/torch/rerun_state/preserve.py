"""Restores a model and the random generators: gradients, buffers, attributes, random state."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.tensor_fingerprints import fingerprint
from ..base.tree import tensors_in
from .attributes import plain_tensors
from .module_state import same_numbers
from .step_attributes import StepAttributes


class Randomness:
    """The state of every generator that a step may draw from: torch's own, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state() if numpy is not None else None

    def restore_torch(self) -> None:
        """The generators that the executor restores as well."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self._device)

    def restore(self) -> None:
        self.restore_torch()
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def torch_fingerprint(self) -> int:
        """A number that differs where the states of torch's generators differ, on fake tensors as well."""
        states = [self.cpu] if self.cuda is None else [self.cpu, self.cuda]
        with _compat.without_dispatch_modes():
            return hash(tuple(map(fingerprint, states)))

    def torch_differs(self, other: Randomness) -> bool:
        if not torch.equal(self.cpu, other.cpu):
            return True
        return self.cuda is not None and other.cuda is not None and not torch.equal(self.cuda, other.cuda)

    def foreign_differs(self, other: Randomness) -> list[str]:
        """Generators outside torch that were drawn from."""
        names = ["Python's random"] if self.python != other.python else []
        if self.numpy is not None and other.numpy is not None:
            (_, *before), (_, *after) = self.numpy, other.numpy  # keys, and what was drawn of them
            if before[1:] != after[1:] or not (before[0] == after[0]).all():
                names.append("numpy.random")
        return names


class Buffers:
    """The values of the buffers of a module, and the buffers themselves."""

    def __init__(self, module: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._empty: list[tuple[nn.Module, str]] = []  # names without a buffer
        with torch.no_grad():
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is None:
                        self._empty.append((part, name))
                    else:
                        self._kept.append((part, name, buffer, buffer.clone()))
        self._versions = _compat.versions(buffer for _, _, buffer, _ in self._kept)

    def changed(self) -> list[str]:
        """Names of the buffers whose value is no longer the recorded one."""
        return [name for part, name, buffer, value in self._kept if _differs(part, name, buffer, value)]

    def written(self) -> list[str]:
        """Names of changed buffers, and of buffers that were written with the same value."""
        now = _compat.versions(buffer for _, _, buffer, _ in self._kept)
        counted = [name for (_, name, _, _), a, b in zip(self._kept, self._versions, now, strict=True) if a != b]
        return list(dict.fromkeys([*self.changed(), *counted]))

    def restore(self) -> None:
        with torch.no_grad():
            for part, name, buffer, value in self._kept:
                if _differs(part, name, buffer, value):
                    part._buffers[name] = buffer
                    if buffer.shape == value.shape:
                        buffer.data.copy_(value)  # not counted: a graph whose backward is to come may have saved it
                    else:
                        buffer.data = value.clone()
        for part, name in self._empty:
            part._buffers[name] = None


def _differs(part: nn.Module, name: str, buffer: torch.Tensor, value: torch.Tensor) -> bool:
    current = part._buffers.get(name)
    return current is not buffer or not same_numbers(buffer, value)


class Parameters:
    """The parameters and attribute tensors of a model that its own forward may write, copied before they are written.

    Examples are the parameters of a teacher that follows its student, and statistics that are no buffers. Copies of all
    tensors would take too much memory, so the operations of a forward are watched and only those tensors are copied
    that are about to be written. A tensor whose storage was replaced gets its old storage back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_compiled = any(_compat.compiled_inside(module) is not None for module in model.modules())
        registered = {id(p) for p in (*model.parameters(), *model.buffers())}
        own = [(p, p.detach()) for p in model.parameters() if _compat.storage_key(p)]
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = [*own]
        self._owners: dict[int, nn.Module] = {}  # by storage: of tensors in attributes
        for tensor, module in plain_tensors(model):
            if id(tensor) not in registered and not tensor.requires_grad and _compat.storage_key(tensor):
                self._kept.append((tensor, tensor.detach()))
                self._owners[_compat.storage_key(tensor)] = module
        self._parameters = {_compat.storage_key(old) for _, old in own}
        self._lying: dict[int, list[torch.Tensor]] = {}  # by storage
        for _, old in self._kept:
            self._lying.setdefault(_compat.storage_key(old), []).append(old)
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by storage: tensors and their copies

    def watching(self, told: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[Any]:
        """Copy the tensors that the body writes, and report each write."""
        return contextlib.nullcontext() if self._is_compiled else _Writes(self, told)

    def keep(self, written: torch.Tensor) -> bool:
        """Copy the recorded tensors that share storage with one about to be written; True if one is a parameter."""
        key = _compat.storage_key(written)
        there = self._lying.get(key, ())
        if there and key not in self._copies:
            self._copies[key] = [(old, old.clone()) for old in there]
        return key in self._parameters

    def restore(self, but_of: Container[int] = ()) -> None:
        """Restore everything, except attribute tensors of modules of these identities."""
        for tensor, old in self._kept:
            now, before = _compat.addresses((tensor, old))
            if now != before and not self._is_of(old, but_of):
                tensor.data = old
        for old, copy in (pair for pairs in self._copies.values() for pair in pairs):
            if not self._is_of(old, but_of):
                old.data.copy_(copy)

    def _is_of(self, tensor: torch.Tensor, owners: Container[int]) -> bool:
        owner = self._owners.get(_compat.storage_key(tensor))
        return owner is not None and id(owner) in owners


class _Writes(_compat.DispatchMode):
    """Detects writes to parameters."""

    def __init__(self, parameters: Parameters, on_write: Callable[[], None]) -> None:
        super().__init__()
        self._parameters, self._on_write = parameters, on_write

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = _compat.schema_of(function)
        if schema is not None and schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False), **(kwargs or {}))
            names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            written = [self._parameters.keep(t) for name in names for t in tensors_in(given.get(name))]
            if any(written):
                self._on_write()
        return function(*args, **(kwargs or {}))


_alone = threading.RLock()


@contextlib.contextmanager
def preserved(
    model: nn.Module,
    device: torch.device,
    attributes: StepAttributes | None = None,
    others: Sequence[nn.Module] = (),
) -> Iterator[Parameters]:
    """Run the body without existing gradients, parameters' hooks and garbage collection, and then restore everything.

    Parameters are restored if they were written while the body watched them.

    `attributes`: the record of the model's attributes, if the caller takes it before each forward. `others`: modules
    that are restored with the model.

    Random generators and the collector belong to the whole process, so one body runs at a time: other threads wait.
    """
    with _alone, memory.not_collecting(), _restored(nn.ModuleList([model, *others]), device, attributes) as parameters:
        yield parameters


@contextlib.contextmanager
def _restored(model: nn.Module, device: torch.device, attributes: StepAttributes | None) -> Iterator[Parameters]:
    state, buffers = Randomness(device), Buffers(model)
    attributes = StepAttributes(model.modules()) if attributes is None else attributes
    parameters = Parameters(model)
    grads = [(p, p.grad) for p in model.parameters()]
    hooks = [(registered, dict(registered)) for p in model.parameters() for registered in _compat.parameter_hooks(p)]
    gc.collect()
    try:
        for p, _ in grads:
            p.grad = None
        for registered, _ in hooks:
            registered.clear()  # an optimizer that steps in the backward, for example
        yield parameters
    finally:
        for p, grad in grads:
            p.grad = grad
        for registered, kept in hooks:
            registered.clear()
            registered.update(kept)
        buffers.restore()
        parameters.restore(but_of=attributes.modules_with_new_attributes())
        state.restore()
        attributes.forget_losses()
        attributes.restore_numbers()
        attributes.restore_named()
        attributes.forget_graphs()
