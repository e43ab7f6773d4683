"""Allocator events of the CPU, the profilers that report them, and workspaces of libraries on a device."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class AllocatorEvents:
    """Records every allocation and release of the CPU allocator in this thread, and named marks between them.

    The event-list profiler keeps the order of events exactly and costs microseconds to start. Where torch no longer has
    it, the kineto profiler gives the same events with time stamps. Operators, which it would write down as well, are
    hidden from it.
    """

    def __init__(self) -> None:
        self.events: list[int | str] = []  # bytes allocated (positive) or released (negative); a string is a mark
        self._kineto: Any = None

    def start(self) -> None:
        _quiet.begin()  # else it warns of each release of memory that it has not seen allocated
        enable = getattr(torch._C._autograd, "_enable_profiler_legacy", None)
        if enable is None:
            self._kineto = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self._kineto.__enter__()
            return
        from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

        enable(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
        _show_functions(False)

    def mark(self, name: str) -> None:
        _show_functions(True)
        with torch.autograd.profiler.record_function(name):
            pass
        _show_functions(self._kineto is not None)

    def stop(self, prefix: str) -> None:
        """Ends the recording; marks are the events whose name begins with `prefix`."""
        _quiet.end()
        if self._kineto is None:
            _show_functions(True)
            self.events = _legacy_events(torch._C._autograd._disable_profiler_legacy(), prefix)
            return
        profiler, self._kineto = self._kineto, None
        profiler.__exit__(None, None, None)
        self.events = _kineto_events(profiler, prefix)


# whether this thread's operators and `record_function` show in profiles
_show_functions: Callable[[bool], None] = getattr(torch._C._autograd, "_enable_record_function", lambda shown: None)

LOG_ERRORS = 2


def _set_log_level(level: int) -> int | None:
    """Sets the log level of torch's C++ side. Returns the earlier one; None if it cannot be set."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        current = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
    before, current.value = current.value, level
    return before


class _Quiet:
    """Torch's C++ side logs errors only, while any thread records."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recordings = 0
        self._before: int | None = None

    def begin(self) -> None:
        with self._lock:
            if self._recordings == 0:
                self._before = _set_log_level(LOG_ERRORS)
            self._recordings += 1

    def end(self) -> None:
        with self._lock:
            self._recordings -= 1
            if self._recordings == 0 and self._before is not None:
                _set_log_level(self._before)


_quiet = _Quiet()


class BeforeProfilers:
    """Calls back before one of torch's profilers starts, while any thread needs it.

    A thread can have one profiler only, and the second would be refused. Only the known ways to start one are seen.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._needs = 0
        self._replaced: dict[str, Any] = {}

    def begin(self) -> None:
        with self._lock:
            self._needs += 1
            if self._needs == 1:
                self._replaced = {n: vars(_profiler)[n] for n in _STARTING if n in vars(_profiler)}
                vars(_profiler).update({n: self._calling_back(start) for n, start in self._replaced.items()})

    def end(self) -> None:
        with self._lock:
            self._needs -= 1
            if self._needs == 0:
                vars(_profiler).update(self._replaced)

    def _calling_back(self, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def starting(*args: Any, **kwargs: Any) -> Any:
            self._callback()
            return start(*args, **kwargs)

        return starting


_profiler = torch.autograd.profiler

_STARTING = ("_prepare_profiler", "_enable_profiler")


def _legacy_events(threads: list[list[Any]], prefix: str) -> list[int | str]:
    events: list[int | str] = []
    for thread in threads:
        for event in thread:
            kind = event.kind()
            if kind == "memory_alloc":
                size = event.cpu_memory_usage()
                if size:
                    events.append(size)
            elif kind == "push" and event.name().startswith(prefix):
                events.append(event.name())
    return events


def _kineto_events(profiler: Any, prefix: str) -> list[int | str]:
    timed: list[tuple[int, int | str]] = []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            timed.append((event.start_ns(), event.nbytes()))
        elif name.startswith(prefix):
            timed.append((event.start_ns(), name))
    timed.sort(key=lambda pair: pair[0])
    return [what for _, what in timed]


def clear_workspaces() -> None:
    """Frees the workspaces of cuBLAS, which allocates them again when it needs them."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def profiler_is_active() -> bool:
    """Whether some profiler records in this thread, so that another cannot."""
    enabled = getattr(torch.autograd, "_profiler_enabled", None) or getattr(
        torch._C._autograd, "_profiler_enabled", None
    )
    return bool(enabled()) if enabled is not None else False
