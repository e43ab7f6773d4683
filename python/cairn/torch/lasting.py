"""What a run of a block changes that is not put back after another run: such a block is kept.

Problem. A block that runs again does all that its Python code does once more: it counts, appends, and adds to
statistics. What it does to attributes is taken away again (`attributes.py`), but not what it does to large tensors that
are no buffers, to globals and attributes of classes, to objects behind objects, or to containers of other kinds.

So while a block is profiled, all that is said of such state is noted before a run, and compared after what can be put
back was. One run's changes do not show the next one's where these depend on data; but what is written in place then is
mostly the same tensor, list or number.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .attributes import OF_EVERY_MODULE, Attributes, has_attributes
from .elsewhere import is_of_library, values_read
from .prints import fingerprint
from .tree import fields_in_slots

_DEPTH = 5  # so far are containers and objects followed
_ENDS = 100  # items compared at each end of long containers
_NUMBERS = (bool, int, float, complex, str, bytes)
_SEQUENCES = (tuple, list, collections.deque)
_SETS = (set, frozenset)

_Places = dict[tuple[str, int], Any]  # by a place in words, and a number where several have the same


class Lasting:
    """The state that a run of these modules finds, to be compared after it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._elsewhere = values_read(modules, _can_change)
        self._attributes = Attributes(modules)
        self._before = self._said()

    def change(self) -> str | None:
        """What a run since has changed and putting attributes back does not, in words. All stays as the run left it."""
        after = Attributes(self._modules)
        self._attributes.restore()
        try:
            now = self._said()
        finally:
            after.restore()
        changed = (place for place, said in now.items() if self._before.get(place, said) != said)
        return next((text for text, _ in changed), None)

    def _said(self) -> _Places:
        """What there is now at each place."""
        found: _Places = {}
        for number, module in enumerate(self._modules):
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE:
                    found[f"the attribute '{name}' of {type(module).__name__}", number] = _said(value)
        for number, (text, value) in enumerate(self._elsewhere()):
            found[text, number] = _said(value)
        return found


def said_by(model: nn.Module) -> dict[str, Any]:
    """What the attributes of a model's modules say, by their names; without the functions that plans put there."""
    return {
        f"{prefix}.{name}".lstrip("."): _said(value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and name != "forward"
    }


def _can_change(value: Any) -> bool:
    """Whether what stands under a name may be a state of the model."""
    if isinstance(value, (*_NUMBERS, torch.Tensor, Mapping, *_SEQUENCES, *_SETS)):
        return True
    return has_attributes(value) and not is_of_library(type(value).__module__)


def _said(value: Any, depth: int = _DEPTH) -> Any:
    """All that a value says, in a form that is compared."""
    kind = type(value)
    if isinstance(value, _NUMBERS):
        return kind, repr(value)  # a value that is not a number equals itself
    if isinstance(value, torch.Tensor):
        return kind, tuple(value.shape), fingerprint(value)
    if value is None or isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return kind, id(value)
    if depth == 0:
        return kind
    if isinstance(value, Mapping):
        return kind, len(value), _all_said([item for pair in value.items() for item in pair], depth)
    if isinstance(value, _SEQUENCES):
        return kind, len(value), _all_said(list(value), depth)
    if isinstance(value, _SETS):
        return kind, len(value), frozenset(_all_said(value, depth)) if len(value) <= _ENDS else None
    if is_of_library(kind.__module__):
        return kind, _bytes_of(value)
    own = [*fields_in_slots(value), *(vars(value).items() if has_attributes(value) else ())]
    return kind, tuple([(name, _said(item, depth - 1)) for name, item in own])


def _all_said(items: Iterable[Any], depth: int) -> tuple[Any, ...]:
    found = list(items)
    if len(found) > 2 * _ENDS:
        found = [*found[:_ENDS], *found[-_ENDS:]]
    return tuple([_said(item, depth - 1) for item in found])


def _bytes_of(value: Any) -> int | None:
    """Of an array of numbers, such as NumPy's: what tells them from others."""
    try:
        with memoryview(value) as view:
            return hash(view.tobytes())
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
