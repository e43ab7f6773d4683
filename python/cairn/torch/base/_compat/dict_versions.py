"""Detects in one call whether the dicts of some objects have changed.

Problem. In every run, a planned block must check that none of about a hundred dicts has changed since it was recorded.
Reading the change counter of each by a call of its own would take as long as a small kernel.

So the addresses at which CPython keeps these counters are determined once (`number_at`), and one call of C
compares all of them: for an object its class and its dict, for a dict its counter. If objects do not have the expected
memory layout, there is no such check, and the caller compares the values themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...._library import lib
from .dict_contents import WORD_BYTES, Word, number_at, word

_CLASS = WORD_BYTES  # where an object has its class: behind the count of those who refer to it
_MANAGED = 1 << 4  # objects of classes with this flag
_BEFORE = -3 * WORD_BYTES  # have their dict so far before themselves
_holds: Callable[..., bool] = lib.with_lock_held("cairn_words_hold")


class DictVersions:
    """Numbers of dicts, and where they lie. Nothing is kept alive by it."""

    __slots__ = ("_arguments",)

    def __init__(self, places: Sequence[int], words: Sequence[int]) -> None:
        array = Word * len(places)
        self._arguments = array(*places), array(*words), ctypes.c_int64(len(places))

    @classmethod
    def of(cls, owners: Iterable[Any], dicts: Iterable[dict[Any, Any]]) -> DictVersions | None:
        """The check for the attributes of objects, and for other dicts, which exist as long as those attributes do.

        None if the memory layout is unknown.
        """
        at = number_at()
        if at is None:
            return None
        places: list[int] = []
        for owner in owners:
            names = object.__getattribute__(owner, "__dict__")
            own = id(owner) + _CLASS, id(owner) + _dict_at(type(owner))
            if list(map(word, own)) != [id(type(owner)), id(names)]:
                return None
            places += (*own, id(names) + at)
        places += [id(names) + at for names in dicts]
        return cls(places, list(map(word, places)))

    def holds(self) -> bool:
        """Whether nothing was put into the dicts since. Only to be called while all objects that it is of exist."""
        return _holds(*self._arguments)


def _dict_at(cls: type) -> int:
    """The offset of the dict in objects of a class; that of their class if it is unknown."""
    return _BEFORE if cls.__flags__ & _MANAGED else max(_CLASS, cls.__dictoffset__)
