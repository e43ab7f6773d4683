"""Changes of dicts, detected by CPython's own change counters."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .tensor_guards import _guards


def contents(dicts: Iterable[dict[Any, Any]]) -> list[int] | None:
    """A change counter for each dict: it changes when a key gets another value. None if torch has no counters.

    The order of keys does not count, nor do changes inside of values.
    """
    number = number_of_contents()
    try:
        return None if number is None else list(map(number, dicts))
    except SystemError:  # there is something else among them
        return None


def dicts_behind(proxies: Sequence[Any]) -> Sequence[Any]:
    """The dicts behind `vars` of classes, only to be read. Views of them if the interpreter hides the dicts."""
    behind = gc.get_referents(*proxies)
    return behind if len(behind) == len(proxies) else proxies


@functools.cache
def number_of_contents() -> Callable[[dict[Any, Any]], int] | None:
    """The change counter of a dict; None if there is none. From Python 3.12 on torch's own misses some changes."""
    number, at = getattr(_guards, "dict_version", None), number_at()
    if number is not None and tells_changes(number):
        return number
    return None if at is None else functools.partial(_number_in, at)


@functools.cache
def number_at() -> int | None:
    """The offset of the interpreter's own change counter in a dict; None if there is none (from Python 3.13 on)."""
    is_known = sys.implementation.name == "cpython" and ctypes.sizeof(ctypes.c_void_p) == WORD_BYTES
    if not is_known or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    offsets = [at for at in _IN_DICT if tells_changes(functools.partial(_number_in, at))]
    return offsets[0] if len(offsets) == 1 else None


Word = ctypes.c_uint64

WORD_BYTES = ctypes.sizeof(Word)

_IN_DICT = range(2 * WORD_BYTES, 6 * WORD_BYTES, WORD_BYTES)  # all that a dict itself has behind its class


def word(place: int) -> int:
    """The number at an address in memory."""
    return Word.from_address(place).value


def _number_in(at: int, names: dict[Any, Any]) -> int:
    return word(id(names) + at)


class _Owner:
    """Has attributes."""


def tells_changes(number: Callable[[dict[Any, Any]], int]) -> bool:
    """Whether counters change with every way of setting attributes and items, and differ between dicts."""
    owner = _Owner()
    names = vars(owner)
    ways: list[Callable[[object], Any]] = [
        functools.partial(_set_attribute, owner),
        functools.partial(setattr, owner, "value"),
        functools.partial(names.__setitem__, "value"),
        lambda value: names.update(value=value),
        lambda value: names.__ior__({"value": value}),
        lambda value: names.pop("value"),
        functools.partial(names.setdefault, "value"),
        lambda value: delattr(owner, "value"),
        functools.partial(_set_attribute, owner),
        lambda value: names.clear(),
    ]
    kind = type("Kind", (), {})
    ways_of_class: list[Callable[[object], Any]] = [
        functools.partial(_set_attribute, kind),
        functools.partial(setattr, kind, "value"),
        lambda value: delattr(kind, "value"),
    ]
    try:
        numbers = _numbers_through(number, names, ways)
        numbers += _numbers_through(number, dicts_behind([vars(kind)])[0], ways_of_class)
        return len(set(numbers)) == len(numbers)
    except Exception:
        return False


def _numbers_through(
    number: Callable[[dict[Any, Any]], int], names: Any, ways: Iterable[Callable[[object], Any]]
) -> list[int]:
    """The counter of a dict, at the beginning and after every change."""
    numbers = [number(names)]
    for _ in range(_TIMES):
        for way in ways:
            way(object())
            numbers.append(number(names))
    return numbers


_TIMES = 100  # after a few the interpreter has its own short way of doing it


def _set_attribute(owner: Any, value: object) -> None:
    owner.value = value
