"""In which calls of a block's parts its tensors are saved.

Hooks cost some microseconds for every tensor that autograd saves, and most options only ask of most tensors that they
be kept, which autograd does by itself. So hooks are put in force in those calls of parts alone in which something is
saved that is to be dropped, or to be at hand for recomputing; in all of the block, where that is no more.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

CALL_COST = 4  # as much as the hooks of so many saved tensors cost

#: By part of a block, in which of its calls.
Calls = dict[int, tuple[int, ...]]


class Call(NamedTuple):
    """One call of a part within a run of its block, and the tensors that are saved in it: from `first` to before `end`.

    Calls are listed as they end, those of inner parts before those that they are within.
    """

    part: int  # among the block's modules
    number: int  # of the part's calls
    first: int
    end: int


def covering(calls: Sequence[Call], wanted: Sequence[int], saved_count: int) -> list[Call] | None:
    """The calls in which all wanted tensors (ascending) are saved and as few others as can be, in the order of running.

    None where hooks had better be in force in all of the block, which saves so many tensors.
    """
    chosen: list[Call] = []
    for call in calls:
        inside = bisect.bisect_left(chosen, call.first, key=lambda other: other.first)
        if _holds_all(chosen[inside:], _within(wanted, call)) and _cost(chosen[inside:]) <= _cost([call]):
            continue
        del chosen[inside:]
        if _within(wanted, call):
            chosen.append(call)
    return chosen if _holds_all(chosen, wanted) and _cost(chosen) < saved_count else None


def _within(wanted: Sequence[int], call: Call) -> Sequence[int]:
    return wanted[bisect.bisect_left(wanted, call.first) : bisect.bisect_left(wanted, call.end)]


def _holds_all(calls: Sequence[Call], wanted: Sequence[int]) -> bool:
    return sum(len(_within(wanted, call)) for call in calls) == len(wanted)


def _cost(calls: Sequence[Call]) -> int:
    return sum(call.end - call.first + CALL_COST for call in calls)
