"""Snapshots of values without their tensors, which can be compared and hashed.

Two snapshots are equal only if a forward reads the same from both values, to a limited depth of objects. A snapshot
keeps no object alive that may hold a tensor.
"""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import functools
import types
from typing import Any

import torch
from torch import nn

from ..base.tree import PLAIN, children, fields_in_slots
from .hook_closures import has_attributes

OBJECT_DEPTH = 2  # so far are objects followed that hold others
_BYTES_COMPARED = 4096  # of arrays

_NUMBERS = (int, float, complex, str, bytes, fractions.Fraction, decimal.Decimal)  # and what is made of these


def frozen(value: Any, depth: int = OBJECT_DEPTH) -> Any:
    """A value, or a tree with slots in the places of its tensors."""
    cls = type(value)
    if cls in PLAIN:
        return value
    if cls is tuple or cls is list:
        return cls, tuple([item if type(item) in PLAIN else frozen(item, depth) for item in value])
    if cls is dict:
        items = value.items()
        return cls, tuple([(key, item if type(item) in PLAIN else frozen(item, depth)) for key, item in items])
    if isinstance(value, enum.Enum):
        return cls, value.name
    if isinstance(value, _NUMBERS):
        return cls, repr(value)  # 1, 1.0 and True are equal, 0.0 and -0.0, too
    if cls is slice:
        return cls, frozen((value.start, value.stop, value.step))
    if isinstance(value, (torch.Tensor, torch.Generator)) or depth == 0:
        return cls
    if isinstance(value, nn.Module):
        return cls, id(value)
    return cls, _parts(value, depth - 1)


def _parts(value: Any, depth: int) -> Any:
    """The items of a container, and the objects that a function or another object refers to."""
    items = children(value)
    if items is not None:
        return tuple([(key, frozen(item, depth)) for key, item in items])
    if isinstance(value, (set, frozenset)):
        return frozenset([frozen(item, depth) for item in value])
    if isinstance(value, collections.deque):
        return tuple([frozen(item, depth) for item in value])
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return value.__code__, frozen((value.__defaults__, value.__kwdefaults__, cells), depth)
    if isinstance(value, types.MethodType):
        return frozen((value.__func__, value.__self__), depth)
    if isinstance(value, types.BuiltinFunctionType):
        return value.__module__, value.__qualname__, frozen(value.__self__, depth)
    if isinstance(value, (staticmethod, classmethod)):
        return frozen(value.__func__, depth)
    if isinstance(value, property):
        return frozen(value.fget, depth)
    if isinstance(value, functools.partial):
        return frozen((value.func, value.args, value.keywords), depth)
    own = {**dict(fields_in_slots(value)), **(vars(value) if has_attributes(value) else {})}
    return frozen(own, depth) if own else _bytes_of(value)


def is_array(value: Any) -> bool:
    """Whether it is a small array of numbers, such as NumPy's."""
    return _bytes_of(value) is not None


def _bytes_of(value: Any) -> bytes | None:
    """The bytes of a small array; None for another value."""
    try:
        with memoryview(value) as view:
            return view.tobytes() if view.nbytes <= _BYTES_COMPARED else None
    except (TypeError, ValueError, BufferError):
        return None
