"""Attributes of modules and hooks on them, recorded after a block's forward and restored for its recomputation.

A model may set an attribute of its blocks, or register hooks on their submodules, only for the time of its forward. If
the profile shows that a block needs it, these attributes and hooks are recorded in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..base.patched_forward import PATCHED_NAMES
from .module_state import OF_EVERY_MODULE, is_light

_IGNORED = OF_EVERY_MODULE | PATCHED_NAMES
_HOOKS = sorted(name for name in OF_EVERY_MODULE if "forward" in name and "hooks" in name)
_ABSENT = object()  # stands for the value of an attribute that does not exist


class AttributesAndHooks:
    """The attributes of modules that take almost no memory, and all hooks around their forwards."""

    __slots__ = ("_hooks", "_names")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._names: list[tuple[dict[str, Any], dict[str, Any], frozenset[str]]] = []
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for module in modules:
            own = vars(module)
            values = {name: value for name, value in own.items() if name not in _IGNORED and is_light(value)}
            self._names.append((own, values, frozenset(own)))
            self._hooks += [(own[name], dict(own[name])) for name in _HOOKS]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Set these attributes and hooks for the body, and restore the present ones after it."""
        with contextlib.ExitStack() as undo:
            for own, values, names in self._names:
                for name in [name for name in own if name not in names and name not in _IGNORED]:
                    _put(own, name, _ABSENT, undo)
                for name, value in values.items():
                    if own.get(name, _ABSENT) is not value:
                        _put(own, name, value, undo)
            for registry, there in self._hooks:
                if list(registry.items()) != list(there.items()):
                    undo.callback(_refill, registry, dict(registry))
                    _refill(registry, there)
            yield


def _put(own: dict[str, Any], name: str, value: Any, undo: contextlib.ExitStack) -> None:
    before = own.get(name, _ABSENT)
    undo.callback(_set, own, name, before)
    _set(own, name, value)


def _set(own: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        own.pop(name, None)
    else:
        own[name] = value


def _refill(registry: dict[int, Any], items: dict[int, Any]) -> None:
    registry.clear()
    registry.update(items)
