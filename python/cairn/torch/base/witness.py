"""Tells by one look whether anything was put into the dicts of some objects since.

Problem. A planned block has to know, in every run, whether anything is another than when it was recorded: of a hundred
dicts, spread over memory. To ask for the number of each by a call of its own takes as long as running a small kernel.

So where CPython keeps these numbers (`_compat.contents`) is found out once, and one call of C compares all of them: for
an object that its class and its dict are those that they were, for a dict that its number is. Where objects do not lie
in memory as supposed, there is no witness, and whoever asks has to look himself.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._library import lib
from . import _compat

_Word = ctypes.c_uint64
_WORD = ctypes.sizeof(_Word)
_CLASS = _WORD  # where an object has its class: behind the count of those who refer to it
_IN_DICT = range(2 * _WORD, 6 * _WORD, _WORD)  # where a dict may have its number
_MANAGED, _BEFORE = 1 << 4, -3 * _WORD  # objects of classes with this flag have their dict so far before themselves
_holds: Callable[..., bool] = lib.with_lock_held("cairn_words_hold")


class Witness:
    """Numbers of dicts, and where they lie. Nothing is kept alive by it."""

    __slots__ = ("_arguments",)

    def __init__(self, places: Sequence[int], words: Sequence[int]) -> None:
        count = len(places)
        self._arguments = (_Word * count)(*places), (_Word * count)(*words), ctypes.c_int64(count)

    @classmethod
    def of(cls, owners: Iterable[Any], dicts: Iterable[dict[Any, Any]]) -> Witness | None:
        """Of the attributes of objects, and of other dicts, which are there as long as those attributes are.

        None where it cannot be told.
        """
        at = number_at()
        if at is None:
            return None
        places: list[int] = []
        for owner in owners:
            names = object.__getattribute__(owner, "__dict__")
            own = id(owner) + _CLASS, id(owner) + _dict_at(type(owner))
            if list(map(_word, own)) != [id(type(owner)), id(names)]:
                return None
            places += (*own, id(names) + at)
        places += [id(names) + at for names in dicts]
        return cls(places, list(map(_word, places)))

    def holds(self) -> bool:
        """Whether nothing was put into the dicts since. Only to be called while all objects that it is of exist."""
        return _holds(*self._arguments)


@functools.cache
def number_at() -> int | None:
    """Where in a dict its number lies; None if that cannot be told."""
    number = _compat.number_of_contents()
    is_known = sys.implementation.name == "cpython" and ctypes.sizeof(ctypes.c_void_p) == _WORD
    if number is None or not is_known or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    samples: list[dict[Any, Any]] = [{}, {1: 2}, dict.fromkeys(range(100)), vars(_Sample())]
    found = [at for at in _IN_DICT if all(_word(id(names) + at) == number(names) for names in samples)]
    return found[0] if len(found) == 1 and _compat.tells_changes(lambda names: _word(id(names) + found[0])) else None


class _Sample:
    """Has an attribute."""

    def __init__(self) -> None:
        self.attribute = None


def _dict_at(cls: type) -> int:
    """Where an object of a class has its dict; that of its class where this is not known."""
    return _BEFORE if cls.__flags__ & _MANAGED else max(_CLASS, cls.__dictoffset__)


def _word(place: int) -> int:
    return _Word.from_address(place).value
