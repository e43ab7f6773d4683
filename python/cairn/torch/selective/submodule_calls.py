"""The calls of a block's submodules in which saved-tensor hooks must be active.

Hooks cost some microseconds for every saved tensor, and most options simply keep most tensors, which autograd does
without hooks. So hooks are active only in those calls of submodules that save a tensor to be dropped, or to be held for
recomputation. They are active in the whole block if that covers no more tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

CALL_COST = 4  # the cost of hooks around a call, as a number of saved tensors

#: By submodule of a block, the numbers of its calls.
Calls = dict[int, tuple[int, ...]]


class Call(NamedTuple):
    """One call of a submodule in a run of its block, and the range of tensors that it saves: `first` to before `end`.

    Calls are listed in the order in which they end, so inner calls come before the calls that contain them.
    """

    part: int  # among the block's modules
    number: int  # of the part's calls
    first: int
    end: int


def covering(calls: Sequence[Call], wanted: Sequence[int], saved_count: int) -> list[Call] | None:
    """The calls that save all wanted tensors (ascending) and as few others as possible, in the order in which they run.

    None if hooks in the whole block, which saves `count` tensors, cost no more.
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
