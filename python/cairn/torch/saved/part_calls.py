"""In which calls of a block's parts its tensors are saved.

Hooks cost some microseconds for every tensor that autograd saves, and most options only ask of most tensors that they
be kept, which autograd does by itself. So hooks are put in force in those calls of parts alone in which something is
saved that is to be dropped, or to be at hand for rebuilding; in all of the block, where that is no more.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base import _compat

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


@contextlib.contextmanager
def noted(parts: Sequence[nn.Module], saved_count: Callable[[], int], calls: list[Call]) -> Iterator[None]:
    """Notes the calls of parts that the body makes in this thread; `saved_count` says how many tensors were saved so
    far.
    """
    numbers: collections.Counter[int] = collections.Counter()
    here = threading.get_ident()

    def noting(part: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here or _compat.compiler_is_active():
                return forward(*args, **kwargs)
            number, first = numbers[part], saved_count()
            numbers[part] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                calls.append(Call(part, number, first, saved_count()))

        return run

    found = _that_can_be_told(parts)
    for part, module in found:
        vars(module)["forward"] = noting(part, module.forward)
    try:
        yield
    finally:
        for _, module in found:
            del vars(module)["forward"]


def _that_can_be_told(parts: Sequence[nn.Module]) -> list[tuple[int, nn.Module]]:
    """The parts, each once, in whose calls its class's forward runs, and what is set in its place would."""
    compiled = {inner for module in parts for inner in _compat.parts_compiled_with(module)}
    first = {module: part for part, module in reversed(list(enumerate(parts)))}
    return [
        (part, module)
        for module, part in first.items()
        if not (module in compiled or isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module))
    ]


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
