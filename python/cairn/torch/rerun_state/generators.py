"""Random generators in a model's attributes: torch's, Python's and NumPy's."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch


def restorer_of(value: Any) -> Callable[[], Any] | None:
    """A call that restores a generator's present state; None if the value is no generator."""
    kind = type(value)
    if kind is torch.Generator:
        return functools.partial(value.set_state, value.get_state())
    if kind is random.Random:
        return functools.partial(value.setstate, value.getstate())
    if not str(kind.__module__).startswith("numpy.random"):
        return None
    numpy = sys.modules["numpy"].random
    if isinstance(value, numpy.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.BitGenerator):
        return functools.partial(setattr, value, "state", value.state)
    return functools.partial(value.set_state, value.get_state()) if isinstance(value, numpy.RandomState) else None
