"""Tells by one look whether anything was put into the dicts of some objects since.

Problem. A planned block has to know, in every run, whether anything is another than when it was recorded: of a hundred
dicts, spread over memory. To ask for the number of each by a call of its own takes as long as running a small kernel.

So where CPython keeps these numbers is found out once (`_compat.number_at`), and one call of C compares all of them:
for an object that its class and its dict are those that they were, for a dict that its number is. Where objects do not
lie in memory as supposed, there is no witness, and whoever asks has to look himself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._library import lib
from . import _compat

_CLASS = _compat.WORD_BYTES  # where an object has its class: behind the count of those who refer to it
_MANAGED = 1 << 4  # objects of classes with this flag
_BEFORE = -3 * _compat.WORD_BYTES  # have their dict so far before themselves
_holds: Callable[..., bool] = lib.with_lock_held("cairn_words_hold")


class DictVersions:
    """Numbers of dicts, and where they lie. Nothing is kept alive by it."""

    __slots__ = ("_arguments",)

    def __init__(self, places: Sequence[int], words: Sequence[int]) -> None:
        array = _compat.Word * len(places)
        self._arguments = array(*places), array(*words), ctypes.c_int64(len(places))

    @classmethod
    def of(cls, owners: Iterable[Any], dicts: Iterable[dict[Any, Any]]) -> DictVersions | None:
        """Of the attributes of objects, and of other dicts, which are there as long as those attributes are.

        None where it cannot be told.
        """
        at = _compat.number_at()
        if at is None:
            return None
        places: list[int] = []
        for owner in owners:
            names = object.__getattribute__(owner, "__dict__")
            own = id(owner) + _CLASS, id(owner) + _dict_at(type(owner))
            if list(map(_compat.word, own)) != [id(type(owner)), id(names)]:
                return None
            places += (*own, id(names) + at)
        places += [id(names) + at for names in dicts]
        return cls(places, list(map(_compat.word, places)))

    def holds(self) -> bool:
        """Whether nothing was put into the dicts since. Only to be called while all objects that it is of exist."""
        return _holds(*self._arguments)


def _dict_at(cls: type) -> int:
    """Where an object of a class has its dict; that of its class where this is not known."""
    return _BEFORE if cls.__flags__ & _MANAGED else max(_CLASS, cls.__dictoffset__)
