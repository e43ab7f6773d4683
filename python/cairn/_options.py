"""The options that solvers take."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import _structs
from ._library import lib, text_of

_TYPE_NAMES = ("size", "rate", "duration", "count", "choice", "text", "flag")


@dataclass(frozen=True)
class OptionInfo:
    """An option of ``solve``.

    Attributes
    ----------
    name
        As a keyword argument, such as "time_limit".
    type
        "size" (bytes), "rate" (bytes per second), "duration" (nanoseconds), "count", "choice", "text" or "flag".
    min
        Least number, inclusive.
    max
        Largest number, inclusive.
    choices
        Of a "choice".
    fallback
        What holds when it is not set, in words.
    help
        One line.
    """

    name: str
    type: str
    min: int
    max: int
    choices: tuple[str, ...]
    fallback: str
    help: str


def _option_of(info: _structs.OptionInfo) -> OptionInfo:
    choices = text_of(info.choices)
    return OptionInfo(
        text_of(info.name).replace("-", "_"),
        _TYPE_NAMES[info.type],
        info.min,
        info.max,
        tuple(choices.split("|")) if choices else (),
        text_of(info.fallback),
        text_of(info.help),
    )


def options() -> tuple[OptionInfo, ...]:
    """The options that ``solve``, ``limits`` and ``bound`` take by keyword.

    Returns
    -------
    tuple of OptionInfo
        Name, type, help and default of each.
    """
    options: list[OptionInfo] = []
    while pointer := lib.cairn_option_at(len(options)):
        options.append(_option_of(pointer.contents))
    return tuple(options)


@functools.cache
def option_types() -> dict[str, str]:
    """Name of an option, as on the command line, to its type."""
    return {option.name.replace("_", "-"): option.type for option in options()}
