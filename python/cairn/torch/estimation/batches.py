"""The largest batch that fits, from few batches: what a step needs grows with the batch nearly along a line."""

from __future__ import annotations

from collections.abc import Callable

TRIED = 6  # batches, at most
MOST = 1 << 24


def largest(needed: Callable[[int], int], first: int, memory_bytes: int) -> int:
    """The largest batch that needs no more than the memory, 0 if not even that of 1 does; `first` is tried first.

    The line through the two nearest batches predicts it; that batch is tried in its turn, until it is one of those that
    were tried.
    """
    known = {batch: needed(batch) for batch in (first, 2 * first)}
    while len(known) < TRIED:
        found = _predicted(known, memory_bytes)
        if found in known or found == 0:
            break
        known[found] = needed(found)
    return max((batch for batch, size in known.items() if size <= memory_bytes), default=0)


def _predicted(known: dict[int, int], memory_bytes: int) -> int:
    """By the two batches that need the most like the memory."""
    one, other = sorted(known, key=lambda batch: abs(known[batch] - memory_bytes))[:2]
    slope = (known[other] - known[one]) / (other - one)
    if slope <= 0:
        return max(known)
    found = one + int((memory_bytes - known[one]) // slope)
    fitting = max((batch for batch, size in known.items() if size <= memory_bytes), default=0)
    passing = min((batch for batch, size in known.items() if size > memory_bytes), default=MOST)
    return min(max(found, fitting), passing - 1)
