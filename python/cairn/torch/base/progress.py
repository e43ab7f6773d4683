"""Progress reports of a profile, to a function or on a terminal: the phase, and how much of it is done."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import cairn
from cairn import Progress, ProgressCallback
from torch import distributed

from . import ranks

SECONDS_BETWEEN = 0.2  # two pieces of news of the same phase on a terminal


class ProgressReporter:
    """Reports the progress of a call to a function, or to nothing."""

    def __init__(self, to: ProgressCallback | None = None) -> None:
        self._to = to
        self._phase, self._done, self._total = "", 0, 0

    def begin(self, phase: str, total: int = 0) -> None:
        """Begin a phase of `total` pieces; 0 if their number is unknown."""
        self._phase, self._done, self._total = phase, 0, total
        self._report()

    def more(self, pieces: int) -> None:
        """Add pieces to the phase."""
        self._total += pieces

    def one_done(self) -> None:
        """Report that one more piece is done."""
        self._done += 1
        self._report()

    def pass_on(self, of: str, news: Progress) -> None:
        """Report the progress of a part of the call."""
        self._phase, self._done, self._total = f"{of}: {news.phase}", news.done or 0, news.total or 0
        self._report()

    def _report(self) -> None:
        if self._to is None:
            return
        done, total = (self._done, self._total) if self._total else (None, None)
        if self._to(Progress(self._phase, done, total, best_ns=None, lower_bound_ns=None)):
            raise cairn.Cancelled("the progress callback asked to stop before the profile was made")


@contextlib.contextmanager
def reported_progress(progress: Any, what: str) -> Iterator[ProgressReporter]:
    """The progress reporter for the body.

    progress: a function; None for a line on the terminal, if there is one; False for nothing. what: the words of that
    line.
    """
    check_progress(progress)
    if progress is not None or not _may_write():
        yield ProgressReporter(None if progress is False else progress)
        return
    line = _Line(what)
    try:
        yield ProgressReporter(line)
    finally:
        line.clear()


def check_progress(progress: Any) -> None:
    """Raise TypeError if `progress` is neither a function, None nor False."""
    if progress is not None and progress is not False and not callable(progress):
        raise TypeError(f"progress must be a function of a cairn.Progress, or False, not {type(progress).__name__}")


def _may_write() -> bool:
    """Whether to write to the terminal: it is one, and this is the first process of a distributed job."""
    is_first = not ranks.is_distributed() or distributed.get_rank() == 0
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
