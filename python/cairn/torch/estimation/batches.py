"""The largest batch that fits, from few batches: what a step needs grows with the batch nearly along a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

TRIED = 5  # batches, at most, beside those that it begins with
LEAP = 8  # where what is needed does not grow: something else than the batch makes the peak
MOST = 1 << 24


def largest(needed: Callable[[int], int], first: Iterable[int], memory_bytes: int) -> int:
    """The largest batch that needs no more than the memory, 0 if not even that of 1 does; it begins with two or more.

    The line through the two nearest batches predicts it; that batch is tried in its turn, until it is one of those that
    were tried.
    """
    known = {batch: needed(batch) for batch in first}
    for _ in range(TRIED):
        found = _predicted(known, memory_bytes)
        if found in known or found == 0:
            break
        known[found] = needed(found)
    return max((batch for batch, size in known.items() if size <= memory_bytes), default=0)


def _predicted(known: dict[int, int], memory_bytes: int) -> int:
    """By the batches on both sides of the memory; else by the two that need the most like it.

    Where what makes the peak changes in between, the answer may be less than the largest batch, never more.
    """
    fitting = max((batch for batch, size in known.items() if size <= memory_bytes), default=0)
    passing = min((batch for batch, size in known.items() if size > memory_bytes), default=MOST)
    one, other = sorted(known, key=lambda batch: abs(known[batch] - memory_bytes))[:2]
    if fitting and passing < MOST:
        one, other = fitting, passing
    slope = (known[other] - known[one]) / (other - one)
    found = one + int((memory_bytes - known[one]) // slope) if slope > 0 else LEAP * max(known)
    return min(max(found, fitting), passing - 1)
