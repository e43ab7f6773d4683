"""Search for the largest batch that fits, in a few profiles: memory grows nearly linearly with the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

TRIED = 5  # largest number of batches profiled after the first ones
LEAP = 8  # growth of the batch where memory does not grow with it, because something else makes the peak
MOST = 1 << 24


def largest(needed: Callable[[int], int], first: Iterable[int], memory_bytes: int) -> int:
    """The largest batch that needs no more than the memory, or 0 if a batch of 1 needs more.

    Starts from two or more batches. A line through the two nearest batches predicts the next one to try. The search
    ends at a batch that was tried already.
    """
    known = {batch: needed(batch) for batch in first}
    for _ in range(TRIED):
        batch = _predicted(known, memory_bytes)
        if batch in known or batch == 0:
            break
        known[batch] = needed(batch)
    return max((batch for batch, size in known.items() if size <= memory_bytes), default=0)


def _predicted(known: dict[int, int], memory_bytes: int) -> int:
    """Interpolate between the batches just below and above the memory; else use the two whose need is nearest to it.

    If another moment of the step makes the peak in between, the answer may be less than the largest batch, never more.
    """
    fitting = max((batch for batch, size in known.items() if size <= memory_bytes), default=0)
    passing = min((batch for batch, size in known.items() if size > memory_bytes), default=MOST)
    one, other = sorted(known, key=lambda batch: abs(known[batch] - memory_bytes))[:2]
    if fitting and passing < MOST:
        one, other = fitting, passing
    slope = (known[other] - known[one]) / (other - one)
    batch = one + int((memory_bytes - known[one]) // slope) if slope > 0 else LEAP * max(known)
    return min(max(batch, fitting), passing - 1)
