"""Hooks on saved tensors that are in force in some calls of a block's parts (`part_calls.py`).

A part that has such calls gets a handler in the place of its `forward`, beside its class's own, as blocks do. It stays
there from step to step, for every change of a module's attributes has to be looked at again, and passes everything on
in threads that do not run the block.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..base.takeover import Takeover
from ..saved.holders import Pack, Unpack
from ..saved.part_calls import Calls


class PartHooks:
    """The hooks of one run of a block, for the calls of its parts that want them."""

    __slots__ = ("_numbers", "_pack", "_unpack", "_wanted")

    def __init__(self, modules: Sequence[nn.Module], calls: Calls, pack: Pack, unpack: Unpack) -> None:
        self._wanted = {id(modules[part]): numbers for part, numbers in calls.items()}
        self._numbers = dict.fromkeys(self._wanted, 0)
        self._pack, self._unpack = pack, unpack

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the block; its parts have to have their handlers."""
        before = _thread.hooks
        _thread.hooks = self
        try:
            return forward(*args, **kwargs)
        finally:
            _thread.hooks = before

    def call(self, module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a part, given by its identity."""
        wanted = self._wanted.get(module)
        if wanted is None:
            return forward(*args, **kwargs)
        number = self._numbers[module]
        self._numbers[module] = number + 1
        if number not in wanted:
            return forward(*args, **kwargs)
        with saved_tensors_hooks(self._pack, self._unpack):
            return forward(*args, **kwargs)


class _Thread(threading.local):
    hooks: PartHooks | None = None  # of the block that it runs


_thread = _Thread()
_placed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Takeover]] = weakref.WeakKeyDictionary()  # modules have them
_placing = threading.Lock()


def _called(module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hooks = _thread.hooks
    return forward(*args, **kwargs) if hooks is None else hooks.call(module, forward, args, kwargs)


def place(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Gives parts their handlers; returns those that had none."""
    with _placing:
        found = [module for module in modules if not _has_handler(module)]
        for module in found:
            takeover = Takeover(module, functools.partial(_called, id(module)), may_be_compiled=True)
            _placed[module] = weakref.ref(takeover)
    return found


def _has_handler(module: nn.Module) -> bool:
    known = _placed.get(module)
    return known is not None and known() is not None


def remove(modules: Iterable[nn.Module]) -> None:
    """Takes the handlers of parts away again."""
    with _placing:
        for module in modules:
            known = _placed.pop(module, None)
            takeover = known() if known is not None else None
            if takeover is not None:
                takeover.remove()


@contextlib.contextmanager
def placed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The body finds handlers in these parts, also where the plan has been removed meanwhile."""
    added = place(modules)
    try:
        yield
    finally:
        remove(added)
