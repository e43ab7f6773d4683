"""What a profile tells while it is made: what is being done, and how much of it is; to a function, or on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import cairn
from cairn import Progress, ProgressCallback
from torch import distributed

SECONDS_BETWEEN = 0.2  # two pieces of news of the same phase on a terminal


class ProgressTeller:
    """Tells somebody, or nobody, how far a call has come."""

    def __init__(self, to: ProgressCallback | None = None) -> None:
        self._to = to
        self._phase, self._done, self._total = "", 0, 0

    def begin(self, phase: str, total: int = 0) -> None:
        """From now on, this is done; in so many pieces, or in one of unknown size."""
        self._phase, self._done, self._total = phase, 0, total
        self._tell()

    def more(self, pieces: int) -> None:
        """So many pieces more turn out to be needed."""
        self._total += pieces

    def one_done(self) -> None:
        """One piece more is done."""
        self._done += 1
        self._tell()

    def pass_on(self, of: str, news: Progress) -> None:
        """Tells how far a part of the call has come."""
        self._phase, self._done, self._total = f"{of}: {news.phase}", news.done or 0, news.total or 0
        self._tell()

    def _tell(self) -> None:
        if self._to is None:
            return
        done, total = (self._done, self._total) if self._total else (None, None)
        if self._to(Progress(self._phase, done, total, best_ns=None, lower_bound_ns=None)):
            raise cairn.Cancelled("the progress callback asked to stop before the profile was made")


@contextlib.contextmanager
def telling(progress: Any, what: str) -> Iterator[ProgressTeller]:
    """A teller for the body. `progress` is a function; or None, for a line on the terminal if there is one, or False,
    for nothing. `what` is done, in the words of that line.
    """
    check_progress(progress)
    if progress is not None or not _may_write():
        yield ProgressTeller(None if progress is False else progress)
        return
    line = _Line(what)
    try:
        yield ProgressTeller(line)
    finally:
        line.clear()


def check_progress(progress: Any) -> None:
    """Raises TypeError for what cannot be told anything."""
    if progress is not None and progress is not False and not callable(progress):
        raise TypeError(f"progress must be a function of a cairn.Progress, or False, not {type(progress).__name__}")


def _may_write() -> bool:
    """Whether people look at what this process writes; of those of a job, at the first one's."""
    is_first = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
    return is_first and sys.stderr is not None and sys.stderr.isatty()


class _Line:
    """A line on the terminal that is written over."""

    def __init__(self, what: str) -> None:
        self._what, self._begun = what, time.monotonic()
        self._phase, self._written = "", 0.0

    def __call__(self, news: Progress) -> None:
        now = time.monotonic()
        if news.phase == self._phase and now - self._written < SECONDS_BETWEEN:
            return
        share = f" {100 * news.done // news.total} %" if news.total and news.done is not None else ""
        self._write(f"{self._what}: {now - self._begun:.0f} s, {news.phase}{share}")
        self._phase, self._written = news.phase, now

    def clear(self) -> None:
        """Takes the line away."""
        self._write("")

    @staticmethod
    def _write(text: str) -> None:
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
