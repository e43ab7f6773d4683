"""Modules that a step uses and its model does not register: modules of the loss, a teacher in a list, arguments.

Measured steps write to these as they do to the model: statistics of a BatchNorm, the centre of a loss, gradients of a
learned temperature. So they are searched for, and restored with the model.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..base import _compat
from .hook_closures import (
    CALLABLES,
    CONTAINERS,
    is_of_library,
    is_own_object,
    names_in,
    own_names,
    referenced_objects,
)
from .module_state import OF_EVERY_MODULE

_DEPTH = 5  # the most containers, functions and objects around a module
_MANY = 1000  # items of a container that are looked at
_MOST = 100_000  # and of all that there is


def external_modules_of(model: nn.Module, loss_fn: Callable[..., Any] | None, passed: Iterable[Any]) -> list[nn.Module]:
    """The modules outside of a model that it, its loss or its arguments refer to."""
    search = _Search(model)
    for module in list(model.modules()):
        search.search_module(module)
    for value in (loss_fn, *passed):
        search.search_value(value, _DEPTH)
    return search.modules


class _Search:
    """The search for modules outside of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self._seen = set(map(id, model.modules()))
        self._room = _MOST

    def search_module(self, module: nn.Module) -> None:
        """The unregistered objects that a module refers to: in attributes, and as globals that its methods name."""
        for name, value in list(vars(module).items()):
            if name not in OF_EVERY_MODULE and name != "forward":
                self.search_value(value, _DEPTH)
        for kind in type(module).__mro__:
            if id(kind) not in self._seen and not is_of_library(kind.__module__):
                self._seen.add(id(kind))
                for method in [each for each in vars(kind).values() if isinstance(each, types.FunctionType)]:
                    self._search_globals(method)

    def search_value(self, value: Any, depth: int) -> None:
        """Finds modules in values: containers, functions or objects."""
        self._room -= 1
        is_atom = isinstance(value, (torch.Tensor, str, bytes, int, float))
        if depth == 0 or is_atom or id(value) in self._seen or self._room < 0:
            return
        if isinstance(value, nn.Module):
            self._add(value)
            return
        inner = list(itertools.islice(_inside(value), _MANY))
        if inner:
            self._seen.add(id(value))
        for each in inner:
            self.search_value(each, depth - 1)
        if isinstance(value, types.FunctionType):
            self._search_globals(value)

    def _search_globals(self, function: types.FunctionType) -> None:
        if not is_of_library(function.__module__):
            for name in sorted(names_in(function.__code__) & function.__globals__.keys()):
                if isinstance(function.__globals__[name], nn.Module):
                    self._add(function.__globals__[name])

    def _add(self, module: nn.Module) -> None:
        new = [part for part in module.modules() if id(part) not in self._seen]
        self._seen.update(map(id, new))
        self.modules += new
        for part in new:
            self.search_module(part)


def _inside(value: Any) -> Iterator[Any]:
    """The values in a container, in a function's closure, or in an object of the user's own class."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (*CONTAINERS, tuple)):
        yield from value
    elif isinstance(value, CALLABLES):
        yield from (inner for _, inner in referenced_objects(value))
    elif is_own_object(value):
        yield from own_names(value).values()


class Leaves:
    """The leaves of autograd graphs that are no parameters of the model, with their gradients before the run."""

    def __init__(self, model: nn.Module, own: Iterable[torch.Tensor]) -> None:
        self._known = set(map(id, (*model.parameters(), *own)))
        self._leaves: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def note(self, roots: Iterable[torch.Tensor]) -> None:
        """Record the leaves of a graph whose backward is still to come, and remove their gradients until `restore`."""
        for leaf in _leaves_of(roots):
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._leaves.append((leaf, leaf.grad))
                leaf.grad = None

    def restore(self) -> None:
        """Restore the gradients of all of them."""
        for leaf, grad in self._leaves:
            leaf.grad = grad
            self._known.discard(id(leaf))
        self._leaves.clear()


def _leaves_of(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves of the autograd graph of these tensors."""
    leaves = (getattr(node, "variable", None) for node in _compat.nodes_behind(roots))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
