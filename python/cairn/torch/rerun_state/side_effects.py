"""Detects side effects of a block that a recomputation could not undo; such a block is kept.

Problem. A recomputation repeats all of a block's Python code: it counts, appends, and adds to statistics. Changes to
attributes are restored (`attributes.py`). Changes to large tensors that are no buffers, to globals and class
attributes, to objects behind objects, and to other kinds of containers are not.

While a block is profiled, a description of such state is recorded before a run, and compared after everything that can
be restored has been. If side effects depend on data, one run does not show those of the next; but they mostly change
the same tensor, list or number.
"""

from __future__ import annotations

import collections
import types
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat
from ..base.patched_forward import PATCHED_NAMES
from ..base.tensor_fingerprints import fingerprint
from ..base.tree import fields_in_slots
from .attributes import Attributes
from .globals_and_closures import values_read
from .hook_closures import has_attributes, is_of_library
from .module_state import OF_EVERY_MODULE

_DEPTH = 5  # so far are containers and objects followed
_ENDS = 100  # items compared at each end of long containers
_MANY = 2000  # items compared of one attribute
_LARGE_BYTES = 2**26  # of tensors and arrays of which only the ends are compared,
_END_BYTES = 2**20  # which are so long
_NUMBERS = (bool, int, float, complex)
_SEQUENCES = (tuple, list, collections.deque)
_SETS = (set, frozenset)

_Places = dict[tuple[str, int], Any]  # by a place in words, and a number where several have the same


class SideEffects:
    """The state before a run of these modules, to be compared after it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._outer_values = values_read(modules, _can_change)
        self._attributes = Attributes(modules)
        self._before = self._described()

    def change(self) -> str | None:
        """The changes by a run that restoring attributes does not undo, in words. Nothing is changed by this call."""
        after = Attributes(self._modules, with_large=True)
        self._attributes.restore()
        try:
            now = self._described()
        finally:
            after.restore()
        changed = (place for place, text in now.items() if self._before.get(place, text) != text)
        return next((text for text, _ in changed), None)

    def _described(self) -> _Places:
        """A description of the present value at each place."""
        described = _Places()
        for number, module in enumerate(self._modules):
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE:
                    text = f"the attribute '{name}' of {type(module).__name__}"
                    described[text, number] = _Describer().describe(value)
        for number, (text, value) in enumerate(self._outer_values()):
            described[text, number] = _history_of(value) or _Describer().describe(value)
        return described


def attribute_descriptions(model: nn.Module) -> dict[str, Any]:
    """Descriptions of the attributes of a model's modules, by name; functions that plans have set are left out."""
    return {
        f"{prefix}.{name}".lstrip("."): _Describer().describe(value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and name not in PATCHED_NAMES
    }


def _can_change(value: Any) -> bool:
    """Whether an attribute may be state of the model."""
    if value is None or isinstance(value, (*_NUMBERS, str, bytes, torch.Tensor, Mapping, *_SEQUENCES, *_SETS)):
        return True
    has_names = has_attributes(value) or any(fields_in_slots(value))
    return has_names and not is_of_library(type(value).__module__)


class _Describer:
    """Describes values in a form that can be compared; of long containers only some items."""

    def __init__(self) -> None:
        self._room = _MANY

    def describe(self, value: Any, depth: int = _DEPTH) -> Any:
        """The description of a value."""
        kind, self._room = type(value), self._room - 1
        if isinstance(value, (str, bytes)):
            return kind, len(value), hash(value)
        if isinstance(value, _NUMBERS):
            return kind, _text_of(value)  # a value that is not a number equals itself
        if isinstance(value, torch.Tensor):
            return kind, None if value.is_nested else (tuple(value.shape), _fingerprint_of(value))
        if isinstance(value, (types.FunctionType, types.MethodType)):
            return kind, value.__qualname__  # made anew in each run, it may do the same
        if value is None or isinstance(value, (nn.Module, type, types.ModuleType)):
            return kind, id(value)
        if depth == 0 or self._room <= 0:
            return kind
        if isinstance(value, Mapping):
            return kind, len(value), self._describe_all([item for pair in value.items() for item in pair], depth)
        if isinstance(value, _SEQUENCES):
            return kind, len(value), self._describe_all(value, depth)
        if isinstance(value, _SETS):
            return kind, len(value), frozenset(self._describe_all(value, depth)) if len(value) <= _ENDS else None
        if is_of_library(kind.__module__):
            return kind, _bytes_of(value)
        fields = fields_in_slots(value)
        slots = tuple([(name, _history_of(item) or self.describe(item, depth - 1)) for name, item in fields])
        own = vars(value).items() if has_attributes(value) else ()
        return kind, slots, tuple([(name, self.describe(item, depth - 1)) for name, item in own])

    def _describe_all(self, items: Collection[Any], depth: int) -> tuple[Any, ...]:
        compared: Iterable[Any] = items
        if len(items) > 2 * _ENDS:
            listed = list(items)
            compared = [*listed[:_ENDS], *listed[-_ENDS:]]
        return tuple([self.describe(item, depth - 1) for item in compared])


def _history_of(value: Any) -> Any:
    """The identity of a tensor's autograd graph, if it has one: a loss of the user's may begin there.

    Such tensors outside of attributes are not restored, except in containers and objects that hooks change.
    """
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return None
    return type(value), _compat.sequence_number(value.grad_fn), value.output_nr


def _text_of(number: Any) -> str | None:
    try:
        return repr(number)
    except Exception:  # its class has one of its own
        return None


def _fingerprint_of(tensor: torch.Tensor) -> Any:
    """The fingerprint of a tensor; for a large one its version and the fingerprints of its two ends."""
    if tensor.layout is not torch.strided or tensor.nbytes <= _LARGE_BYTES:
        return fingerprint(tensor)
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()[:0]
    ends = fingerprint(flat[:_END_BYTES]), fingerprint(flat[-_END_BYTES:])
    return 0 if tensor.is_inference() else tensor._version, ends


def _bytes_of(value: Any) -> int | None:
    """The fingerprint of an array of numbers, such as NumPy's; for a large one that of its two ends."""
    try:
        with memoryview(value) as view, view.cast("B") as flat:
            if flat.nbytes <= _LARGE_BYTES:
                return zlib.crc32(flat)
            return zlib.crc32(flat[-_END_BYTES:], zlib.crc32(flat[:_END_BYTES]))
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
