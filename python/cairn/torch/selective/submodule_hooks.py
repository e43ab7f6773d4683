"""Saved-tensor hooks that are active in some calls of a block's submodules, and the record of these calls
(`submodule_calls.py`).

A handler replaces a submodule's `forward`, as for blocks. Handlers stay from step to step, because every change of a
module's attributes fails a guard. A handler only calls the listener of the current thread, if there is one, so threads
do not disturb each other, nor do plans that share a submodule.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..base import _compat
from ..base.patched_forward import PatchedForward, is_copied_as_usual
from .saved_tensors import Pack, Unpack
from .submodule_calls import Call, Calls


class Listener(Protocol):
    """Receives the calls of submodules in one thread."""

    def call(self, module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a submodule, given by its identity."""


class SubmoduleHooks:
    """The hooks of one run of a block, active in the calls of submodules that `by_module` lists."""

    __slots__ = ("_entered", "_numbers", "_pack", "_unpack", "_wanted")

    def __init__(self, wanted: dict[int, tuple[int, ...]], pack: Pack, unpack: Unpack) -> None:
        self._wanted, self._numbers = wanted, dict.fromkeys(wanted, 0)
        self._entered: list[tuple[int, int]] = []
        self._pack, self._unpack = pack, unpack

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the block, whose submodules must have their handlers."""
        before, _thread.listener = _thread.listener, self
        try:
            return forward(*args, **kwargs)
        finally:
            _thread.listener = before

    def call(self, module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = self._wanted.get(module)
        if wanted is None:
            return forward(*args, **kwargs)
        number = self._numbers[module]
        self._numbers[module] = number + 1
        if number not in wanted:
            return forward(*args, **kwargs)
        self._entered.append((module, number))
        with saved_tensors_hooks(self._pack, self._unpack):
            return forward(*args, **kwargs)

    def entered(self, calls: Calls) -> Calls:
        """The wanted calls in which the hooks were active: all, unless a handler was removed meanwhile."""
        parts = dict(zip(self._wanted, calls, strict=True))
        entered_calls: Calls = {}
        for module, number in self._entered:
            entered_calls[parts[module]] = (*entered_calls.get(parts[module], ()), number)
        return entered_calls


def by_module(modules: Sequence[nn.Module], calls: Calls) -> dict[int, tuple[int, ...]]:
    """Calls of a block's submodules, by the submodules' identities, in the same order."""
    return {id(modules[part]): numbers for part, numbers in calls.items()}


class _CallRecorder:
    """Records the calls of submodules; `saved_count` returns the number of tensors saved so far."""

    def __init__(self, parts: dict[int, int], saved_count: Callable[[], int], calls: list[Call]) -> None:
        self._parts, self._saved_count, self._calls = parts, saved_count, calls
        self._numbers: collections.Counter[int] = collections.Counter()

    def call(self, module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part = self._parts.get(module)
        if part is None:
            return forward(*args, **kwargs)
        number, first = self._numbers[part], self._saved_count()
        self._numbers[part] += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._calls.append(Call(part, number, first, self._saved_count()))


@contextlib.contextmanager
def recorded_calls(parts: Sequence[nn.Module], saved_count: Callable[[], int], calls: list[Call]) -> Iterator[None]:
    """Record the calls of submodules that the body makes in this thread; `saved_count` counts saved tensors."""
    handled = _hookable(parts)
    with handlers_in(module for _, module in handled):
        before = _thread.listener
        _thread.listener = _CallRecorder({id(module): part for part, module in handled}, saved_count, calls)
        try:
            yield
        finally:
            _thread.listener = before


def _hookable(parts: Sequence[nn.Module]) -> list[tuple[int, nn.Module]]:
    """The submodules, each once, that can have a handler without an effect on anything else.

    There are none in a block that contains blocks of another plan, whose executor adds handlers as well.
    """
    if any(
        isinstance(vars(c).get("forward"), PatchedForward) and not _has_handler(c) for m in parts for c in m.children()
    ):
        return []
    compiled = {inner for module in parts for inner in _compat.modules_compiled_with(module)}
    first = {module: part for part, module in reversed(list(enumerate(parts)))}
    return [(part, module) for module, part in first.items() if module not in compiled and _is_hookable(module)]


def _is_hookable(module: nn.Module) -> bool:
    own = vars(module).get("forward")
    return (
        (own is None or _has_handler(module))
        and isinstance(inspect.getattr_static(type(module), "forward", None), types.FunctionType)
        and not isinstance(module, torch.jit.ScriptModule)
        and is_copied_as_usual(module)
    )


# -- handlers -------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    listener: Listener | None = None


class _Placed:
    """The handler of a submodule, and how many plans need it."""

    __slots__ = ("patch", "wanted_by")

    def __init__(self, module: nn.Module) -> None:
        self.wanted_by = 0
        self.put(module)

    def put(self, module: nn.Module) -> None:
        self.patch = PatchedForward(module, functools.partial(_called, id(module)), is_of_submodule=True)


_thread = _Thread()
_placed: weakref.WeakKeyDictionary[nn.Module, _Placed] = weakref.WeakKeyDictionary()
_placing = threading.RLock()  # the collector may end a plan while another one begins


def _called(module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    listener = _thread.listener
    return forward(*args, **kwargs) if listener is None else listener.call(module, forward, args, kwargs)


def _has_handler(module: nn.Module) -> bool:
    placed = _placed.get(module)
    return placed is not None and vars(module).get("forward") is placed.patch


class Handlers:
    """The submodules in which one plan needs handlers, from `open` to `release`."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._is_open = True

    def open(self) -> None:
        self._is_open = True

    def hold(self, modules: Iterable[nn.Module]) -> None:
        """Give these submodules handlers as well; a `forward` that someone else has replaced stays."""
        with _placing:
            for module in modules if self._is_open else ():
                if module not in self._held:
                    if module not in _placed:
                        _placed[module] = _Placed(module)
                    _placed[module].wanted_by += 1
                    self._held.add(module)
                if "forward" not in vars(module):  # other code has replaced the patch, and removed its own
                    _placed[module].patch.remove()
                    _placed[module].put(module)

    def release(self) -> None:
        """Remove the handlers that no other plan needs."""
        with _placing:
            self._is_open = False  # for a run that is under way in another thread
            for module in list(self._held):
                placed = _placed[module]
                placed.wanted_by -= 1
                if placed.wanted_by == 0:
                    del _placed[module]
                    placed.patch.remove()
            self._held.clear()


@contextlib.contextmanager
def handlers_in(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give these submodules handlers while the body runs."""
    handlers = Handlers()
    try:
        handlers.hold(modules)
        yield
    finally:
        handlers.release()
