"""What a run of a block changes that is not put back after another run: such a block is kept.

Problem. A block that is recomputed does all that its Python code does once more: it counts, appends, and adds to
statistics. What it does to attributes is taken away again (`attributes.py`), but not what it does to large tensors that
are no buffers, to globals and attributes of classes, to objects behind objects, or to containers of other kinds.

So while a block is profiled, all that is said of such state is noted before a run, and compared after what can be put
back was. One run's changes do not show the next one's where these depend on data; but what is written in place then is
mostly the same tensor, list or number.
"""

from __future__ import annotations

import collections
import types
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base.patched_forward import TAKEN
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
    """The state that a run of these modules finds, to be compared after it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._elsewhere = values_read(modules, _can_change)
        self._attributes = Attributes(modules)
        self._before = self._said()

    def change(self) -> str | None:
        """What a run since has changed and putting attributes back does not, in words. All stays as the run left it."""
        after = Attributes(self._modules, with_large=True)
        self._attributes.restore()
        try:
            now = self._said()
        finally:
            after.restore()
        changed = (place for place, said in now.items() if self._before.get(place, said) != said)
        return next((text for text, _ in changed), None)

    def _said(self) -> _Places:
        """What there is now at each place."""
        found = _Places()
        for number, module in enumerate(self._modules):
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE:
                    found[f"the attribute '{name}' of {type(module).__name__}", number] = _Telling().say(value)
        for number, (text, value) in enumerate(self._elsewhere()):
            found[text, number] = _history_of(value) or _Telling().say(value)
        return found


def said_by(model: nn.Module) -> dict[str, Any]:
    """What the attributes of a model's modules say, by their names; without the functions that plans put there."""
    return {
        f"{prefix}.{name}".lstrip("."): _Telling().say(value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and name not in TAKEN
    }


def _can_change(value: Any) -> bool:
    """Whether what stands under a name may be a state of the model."""
    if value is None or isinstance(value, (*_NUMBERS, str, bytes, torch.Tensor, Mapping, *_SEQUENCES, *_SETS)):
        return True
    has_names = has_attributes(value) or any(fields_in_slots(value))
    return has_names and not is_of_library(type(value).__module__)


class _Telling:
    """Says what values say, in a form that is compared; of many items no more than there is room for."""

    def __init__(self) -> None:
        self._room = _MANY

    def say(self, value: Any, depth: int = _DEPTH) -> Any:
        """All that a value says."""
        kind, self._room = type(value), self._room - 1
        if isinstance(value, (str, bytes)):
            return kind, len(value), hash(value)
        if isinstance(value, _NUMBERS):
            return kind, _text_of(value)  # a value that is not a number equals itself
        if isinstance(value, torch.Tensor):
            return kind, None if value.is_nested else (tuple(value.shape), _print_of(value))
        if isinstance(value, (types.FunctionType, types.MethodType)):
            return kind, value.__qualname__  # made anew in each run, it may do the same
        if value is None or isinstance(value, (nn.Module, type, types.ModuleType)):
            return kind, id(value)
        if depth == 0 or self._room <= 0:
            return kind
        if isinstance(value, Mapping):
            return kind, len(value), self._say_all([item for pair in value.items() for item in pair], depth)
        if isinstance(value, _SEQUENCES):
            return kind, len(value), self._say_all(value, depth)
        if isinstance(value, _SETS):
            return kind, len(value), frozenset(self._say_all(value, depth)) if len(value) <= _ENDS else None
        if is_of_library(kind.__module__):
            return kind, _bytes_of(value)
        slots = tuple([(name, _history_of(item) or self.say(item, depth - 1)) for name, item in fields_in_slots(value)])
        own = vars(value).items() if has_attributes(value) else ()
        return kind, slots, tuple([(name, self.say(item, depth - 1)) for name, item in own])

    def _say_all(self, items: Collection[Any], depth: int) -> tuple[Any, ...]:
        found: Iterable[Any] = items
        if len(items) > 2 * _ENDS:
            listed = list(items)
            found = [*listed[:_ENDS], *listed[-_ENDS:]]
        return tuple([self.say(item, depth - 1) for item in found])


def _history_of(value: Any) -> Any:
    """Of a tensor through which gradients can go, which way that is; a loss of somebody's may begin there. What stands
    for such a tensor elsewhere is not put back, but for what is in containers and objects that hooks fill.
    """
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return None
    return type(value), value.grad_fn._sequence_nr(), value.output_nr


def _text_of(number: Any) -> str | None:
    try:
        return repr(number)
    except Exception:  # its class has one of its own
        return None


def _print_of(tensor: torch.Tensor) -> Any:
    """The fingerprint of a tensor; of a large one how often it was written, and those of its ends."""
    if tensor.layout is not torch.strided or tensor.nbytes <= _LARGE_BYTES:
        return fingerprint(tensor)
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()[:0]
    ends = fingerprint(flat[:_END_BYTES]), fingerprint(flat[-_END_BYTES:])
    return 0 if tensor.is_inference() else tensor._version, ends


def _bytes_of(value: Any) -> int | None:
    """Of an array of numbers, such as NumPy's: what tells them from others; of a large one its ends."""
    try:
        with memoryview(value) as view, view.cast("B") as flat:
            if flat.nbytes <= _LARGE_BYTES:
                return zlib.crc32(flat)
            return zlib.crc32(flat[-_END_BYTES:], zlib.crc32(flat[:_END_BYTES]))
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
