"""Agreement between ranks that run one sharded model: a step is theirs together, so all must take the same decisions.

Each function is a collective of the default process group where `is_shared`, and trivial elsewhere.
"""

from __future__ import annotations

from typing import Any

from torch import distributed


def several() -> bool:
    """Whether this process is one of several ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_first() -> bool:
    """Whether this process is the first of several ranks."""
    return distributed.get_rank() == 0


def of_first(value: Any, is_shared: bool) -> Any:
    """The value that the first rank has; values are pickled."""
    if not is_shared:
        return value
    values = [value]
    distributed.broadcast_object_list(values, 0)
    return values[0]


def largest(number: int, is_shared: bool) -> int:
    """The largest number that a rank has."""
    if not is_shared:
        return number
    numbers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(numbers, number)
    return max(numbers)
