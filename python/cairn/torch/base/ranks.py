"""Agreement between ranks that run one sharded model: a step is theirs together, so all must decide the same."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

from torch import distributed


def is_distributed() -> bool:
    """Whether this process is a rank, perhaps the only one."""
    return distributed.is_available() and distributed.is_initialized()


def several() -> bool:
    """Whether this process is one of several ranks."""
    return is_distributed() and distributed.get_world_size() > 1


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that share a model. Other ranks, such as those of another pipeline stage, take no part.

    Each method is a collective of all of them, or trivial where nobody shares the model.

    Attributes
    ----------
    groups
        The process groups of this rank, one for each dimension of the device mesh. A value goes through all of them in
        turn, and so reaches every rank of the mesh. Empty: the model is not shared.
    """

    groups: tuple[distributed.ProcessGroup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.groups)

    def is_first(self) -> bool:
        """Whether this rank is the first in each dimension."""
        return all(distributed.get_rank(group) == 0 for group in self.groups)

    def of_first(self, value: Any) -> Any:
        """The value that the first rank has; values are pickled."""
        for group in self.groups:
            values = [value]
            distributed.broadcast_object_list(values, distributed.get_global_rank(group, 0), group)
            value = values[0]
        return value

    def of_all(self, value: Any) -> list[Any]:
        """What each rank has, in an order that is the same on all; values are pickled."""
        values = [value]
        for group in self.groups:
            lists: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(lists, values, group)
            values = list(chain.from_iterable(lists))
        return values

    def largest(self, number: int) -> int:
        """The largest number that a rank has."""
        return max(self.of_all(number))
