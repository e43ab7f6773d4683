"""Environments of long calls: progress, Ctrl-C and other signals, exceptions of callbacks."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from . import _structs
from ._errors import Error
from ._library import lib, number_of, text_of


@dataclass(frozen=True)
class Progress:
    """The progress of a long call.

    Attributes
    ----------
    phase
        The present phase, in words.
    done
        Work units done in this phase; None when not known.
    total
        Work units of this phase; None when not known.
    best_ns
        Makespan of the best answer so far, nanoseconds; None when there is none.
    lower_bound_ns
        The proved lower bound on every makespan so far, nanoseconds; None when there is none.
    """

    phase: str
    done: int | None
    total: int | None
    best_ns: int | None
    lower_bound_ns: int | None


#: Called now and then, in the calling thread. A true result asks the call to stop with its best answer so far.
ProgressCallback = Callable[[Progress], object]

#: Each poll waits for the interpreter lock, up to 5 ms where another thread computes.
_POLL_INTERVAL_NS = 50_000_000

_SIGNALS = tuple(sorted(signal.valid_signals()))


class SignalHold:
    """Holds Python signal handlers back while a C function runs.

    Python runs signal handlers at the first bytecode of whatever comes next. Inside a ctypes callback an exception from
    there (KeyboardInterrupt) would be printed and lost, before any try could catch it. So for the time of the call,
    handlers only note that the signal came; deliver() then runs the real ones where their exceptions can be caught.
    Only the main thread runs handlers: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def __enter__(self) -> SignalHold:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    self._replace(number, self._note)
        return self

    def _replace(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        try:
            signal.signal(number, handler)
        except (ValueError, OSError):  # a subinterpreter, or a signal that cannot be caught
            self._handlers.pop(number, None)

    def deliver(self) -> None:
        """Runs the handlers of the signals that came; raises what they raise."""
        while self._arrived:
            number, frame = self._arrived.pop(0)
            self._handlers[number](number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._restore(list(self._handlers.items()))
        finally:
            self.deliver()

    def _restore(self, handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]]) -> None:
        """Puts the handlers back, all of them even when one that is back already raises."""
        while handlers:
            number, handler = handlers.pop()
            try:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
            except BaseException:
                self._restore(handlers)
                raise


class Call:
    """One call of a C function that takes an environment first and an error last, and that may be long.

    Whatever a signal handler or a callback raises meanwhile stops the function, which returns its best answer so far.
    run() keeps such exceptions, and the error of the function itself, until finish() raises the first that there is.
    """

    def __init__(self, progress: ProgressCallback | None = None) -> None:
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function of a cairn.Progress, not {type(progress).__name__}")
        self._progress = progress
        self._hold = SignalHold()
        self._interrupt: BaseException | None = None
        self._error: Error | None = None

    @property
    def failed(self) -> bool:
        """Whether the function itself reported an error, and so has no result."""
        return self._error is not None

    @property
    def interrupted(self) -> bool:
        """Whether a callback or a signal handler raised."""
        return self._interrupt is not None

    def run(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls the function with the environment before and the error after these arguments."""
        env = _structs.Env(poll_interval_ns=_POLL_INTERVAL_NS)
        if self._progress is not None or threading.current_thread() is threading.main_thread():
            env.poll = _structs.PollCallback(self._poll)
        try:
            with self._hold:
                try:
                    lib.check(function, ctypes.byref(env), *arguments)
                except Error as error:
                    self._error = error
        except BaseException as error:  # a signal that came after the last poll
            self._interrupt = self._interrupt or error

    def finish(self, result: object = None) -> None:
        """Raises what was kept. An interrupt carries the result as its attribute ``solution``."""
        if self._interrupt is not None:
            with contextlib.suppress(AttributeError):
                self._interrupt.solution = result  # type: ignore[attr-defined]
        raised = self._interrupt or self._error
        self._interrupt = self._error = None  # else the exception's frames and this call would hold each other
        try:
            if raised is not None:
                raise raised
        finally:
            del raised

    def _poll(self, _context: Any, progress: Any) -> int:
        try:
            if self._interrupt is None:
                self._hold.deliver()
                if self._progress is not None and progress:
                    return 1 if self._progress(_progress_of(progress.contents)) else 0
        except BaseException as error:
            self._interrupt = error
        return 0 if self._interrupt is None else 1

    def protect(self, function: Callable[..., Any]) -> Callable[..., int]:
        """A callback that keeps what function raises; from then on it does nothing but return 1."""

        def guarded(*arguments: Any) -> int:
            if self._interrupt is None:
                try:
                    function(*arguments)
                except BaseException as error:
                    self._interrupt = error
            return 0 if self._interrupt is None else 1

        return guarded


def _progress_of(progress: _structs.Progress) -> Progress:
    return Progress(
        text_of(progress.phase),
        number_of(progress.done),
        number_of(progress.total),
        number_of(progress.best_ns),
        number_of(progress.lower_bound_ns),
    )
