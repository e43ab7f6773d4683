"""Observations other than operators while a step is recorded: the running module, and drawn random numbers."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..base import _compat, memory


class Places:
    """Says in which module the step is: in the forward by hooks, in the backward by autograd's sequence numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._open: list[str] = []
        self._by_sequence: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Places:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def named(self, operation: str, in_backward: bool) -> str:
        """The name of an operation that is performed now, with its module before it."""
        place = self._place(in_backward)
        if not in_backward:
            self._by_sequence.setdefault(_compat.next_sequence_number() - 1, place)
        operation = f"{operation} (backward)" if in_backward else operation
        return f"{place}: {operation}" if place else operation

    def here(self) -> str:
        """Where the step is, for messages: in a module, or nowhere in particular."""
        place = self._place(in_backward=False) or self._place(in_backward=True)
        return f" in {place!r}" if place else ""

    def _place(self, in_backward: bool) -> str:
        if in_backward:
            return self._by_sequence.get(_compat.backward_sequence_number(), "")
        return self._open[-1] if self._open else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._names and not torch.compiler.is_compiling():  # as bodies of higher-order operators are
            self._open.append(self._names[id(module)])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._names and not torch.compiler.is_compiling() and self._open:
            self._open.pop()


class Draws:
    """Sees whether random numbers are drawn from the default generators."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._states: list[Callable[[], torch.Tensor]] = [torch.default_generator.get_state]
        for device in devices:
            if device.type == "cuda":
                self._states.append(functools.partial(torch.cuda.get_rng_state, device))

    def before(self) -> list[torch.Tensor]:
        """The states of the generators."""
        return [state() for state in self._states]

    def changed(self, before: Sequence[torch.Tensor]) -> bool:
        """Whether they are others than those."""
        return not all(torch.equal(old, state()) for old, state in zip(before, self._states, strict=True))


class Generators:
    """The states of generators that the step was given, from before it drew from them."""

    def __init__(self) -> None:
        self._states: dict[torch.Generator, torch.Tensor] = {}

    def note(self, generator: torch.Generator) -> None:
        """Remembers a generator as it is when it is first met."""
        if generator not in self._states:
            self._states[generator] = generator.get_state()

    def restore(self) -> None:
        """Puts the states back."""
        for generator, state in self._states.items():
            generator.set_state(state)


def existing_storages() -> list[_compat.StorageRef]:
    """References to the storages of all tensors that Python knows; while they exist no other storage looks like one."""
    return [
        _compat.StorageRef(each)
        for each in gc.get_objects()
        if type(each) in _compat.PLAIN_CLASSES and memory.has_storage(each) and _is_defined(each)
    ]


def _is_defined(tensor: torch.Tensor) -> bool:
    """Whether this is a gradient. Some releases of torch have a placeholder for a missing one."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True
