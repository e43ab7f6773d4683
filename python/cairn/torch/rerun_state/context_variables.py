"""Context variables as they were before a block's forward, restored for its recomputation.

A model may set a `contextvars.ContextVar` for the time of its forward. The backward runs later, on an accelerator in a
thread of autograd whose context is empty. A block that needs such variables is recomputed in a copy of its forward's
context. The copy keeps alive the values of all variables, such as lists that collect tensors. So other blocks are
recomputed in a copy of the backward's context, with the numbers, flags and strings of the forward. In both cases,
variables that a block sets are lost afterwards.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..base import _compat
from ..base.tree import ATOMS, tensors_inside

_Result = TypeVar("_Result")


class Variables:
    """The context variables of this thread as they are now, with the versions of tensors that they hold."""

    __slots__ = ("_context", "_plain", "_tensors")

    def __init__(self, restores_all: bool) -> None:
        """restores_all: the block needs all values, not only numbers, flags and strings."""
        context = contextvars.copy_context()
        self._tensors = _tensors_of(context) if context else ()
        self._context = context if restores_all else None
        self._plain = [] if restores_all else [each for each in context.items() if type(each[1]) in ATOMS]

    def run(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function with these variables; variables that it sets are lost afterwards."""
        if self._context is not None:
            return self._context.copy().run(function, *args)

        def run() -> _Result:
            for variable, value in self._plain:
                variable.set(value)
            return function(*args)

        return contextvars.copy_context().run(run)

    def written(self) -> str | None:
        """The first of the variables whose tensor was modified in place since, in words; None: there is none."""
        for text, reference, version in self._tensors:
            tensor = reference()
            if tensor is not None and _compat.version(tensor) != version:
                return text
        return None


def _tensors_of(context: contextvars.Context) -> tuple[tuple[str, weakref.ref[torch.Tensor], int], ...]:
    tensors = []
    for variable, value in context.items():
        if type(value) not in ATOMS:
            what = f"the context variable '{variable.name}'"
            for path, tensor in tensors_inside(value):
                inside = "" if tensor is value else f" ({path})"
                tensors.append((f"a tensor in {what}{inside}", weakref.ref(tensor), _compat.version(tensor)))
    return tuple(tensors)
