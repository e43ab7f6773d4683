"""Agreement between ranks that run one sharded model: a step is theirs together, so all must take the same decisions.

Functions with `is_shared` are collectives of the default process group if it is true, and trivial otherwise.
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
    return max(of_all(number)) if is_shared else number


def of_all(value: Any, group: Any = None) -> list[Any]:
    """What each rank of a process group has, in their order; values are pickled. By default, of all ranks."""
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group)
    return values
