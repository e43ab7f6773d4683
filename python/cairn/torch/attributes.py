"""What runs of a block leave in attributes, taken away again.

Blocks leave losses of their own, counts and statistics in attributes of their modules, and append to lists there. A run
that the model did not ask for (one that measures a block, or has its saved tensors once more) must not leave any: the
model would count it twice, or run a backward into a graph that is gone. Nor must sample steps leave losses in lists
that the training loop empties, or be counted as steps of training.
"""

from __future__ import annotations

import contextlib
import operator
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from . import _compat

LARGE_BYTES = 4096  # of a tensor that is no loss, nor a statistic

#: What a module has before its class gives it anything; buffers are put back by `state.py`.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NUMBERS = frozenset((bool, int, float, complex, str, bytes))
_SMALL = _NUMBERS | {type(None), tuple}
_ATOMS = _SMALL | {torch.Tensor, nn.Parameter}


class Attributes:
    """The attributes of modules and of objects among them, and what is in their lists, dicts and sets.

    Large tensors that have a name are left as they are, unless someone waits for their gradients, or they are wanted
    (`with_large`): to hold those that a run replaces takes memory.
    """

    __slots__ = ("_containers", "_first", "_replaced", "_seen", "_since", "_with_large")

    def __init__(self, modules: Iterable[nn.Module], with_large: bool = False) -> None:
        self._with_large = with_large
        self._since = _compat.history_mark()
        #: by identity: it, what is put back of it, and how much there was of it
        self._containers: dict[int, tuple[Any, Any, int]] = {}
        #: by container and name: what had tensors at the first look, and the first tensor of each at the latest one
        self._first: dict[tuple[int, Any], Any] | None = None
        self._seen: dict[tuple[int, Any], weakref.ref[torch.Tensor]] = {}
        self._replaced: set[tuple[int, Any]] = set()
        for module in modules:
            for value in self._note(vars(module)).values():
                if type(value) in _ATOMS:
                    continue
                if type(value) in (list, dict, set):
                    self._note(value)
                elif has_attributes(value) and type(vars(value)) is dict:
                    self._note(vars(value))

    def _note(self, container: Any) -> Any:
        before = _own(container, self._with_large) if type(container) is dict else container.copy()
        self._containers[id(container)] = container, before, len(container)
        return before

    def restore(self) -> None:
        """Makes all be as it was."""
        for container, before, count in self._containers.values():
            if isinstance(container, dict):
                if len(container) != count or not _holds(container, before):
                    _restore_names(container, before, self._with_large)
            elif isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)

    def have_history(self) -> bool:
        """Whether a run since left a tensor under some name that gradients could go through."""
        names = (items for items, _, _ in self._containers.values() if isinstance(items, dict))
        values = (value for items in names for name, value in items.items() if name not in OF_EVERY_MODULE)
        return any(isinstance(value, torch.Tensor) and _compat.is_made_since(value, self._since) for value in values)

    def detach(self) -> None:
        """Takes the history from tensors that were made since: that of a run whose backward is over."""
        for container, _, _ in self._containers.values():
            if isinstance(container, dict):
                now = {name: container[name] for name in container.keys() - OF_EVERY_MODULE}
                container.update({name: self._detached(value) for name, value in now.items()})
            elif isinstance(container, list):
                container[:] = map(self._detached, container)

    def restore_numbers(self) -> None:
        """Puts numbers and names back, such as a count of steps. What was made meanwhile, as caches are, may stay."""
        for container, before, _ in self._containers.values():
            if isinstance(container, dict):
                container.update({name: value for name, value in before.items() if type(value) in _NUMBERS})

    def forget_losses(self) -> None:
        """Takes the tensors out of lists that were put there since: those of steps that are over."""
        for container, before, _ in self._containers.values():
            if isinstance(container, list):
                there = set(map(id, before))
                new = [isinstance(item, torch.Tensor) and id(item) not in there for item in container]
                replaced = [was if is_new else item for item, was, is_new in zip(container, before, new, strict=False)]
                added = [item for k, item in enumerate(container) if k >= len(before) and not new[k]]
                container[:] = [*replaced, *added]

    def look(self) -> None:
        """Before each forward of several: notes which names hold other tensors than at the look before."""
        found: dict[tuple[int, Any], Any] = {}
        for key, (container, _, _) in self._containers.items():
            for name, value in container.items() if isinstance(container, dict) else ():
                tensor = None if name in OF_EVERY_MODULE else _first_tensor(value)
                if tensor is not None:
                    found[key, name] = value
                    self._see((key, name), tensor)
        if self._first is None:
            self._first = found

    def _see(self, place: tuple[int, Any], tensor: torch.Tensor) -> None:
        seen = self._seen.get(place)
        if seen is not None and seen() is not tensor:
            self._replaced.add(place)
        self._seen[place] = weakref.ref(tensor)

    def restore_states(self, left: Iterable[nn.Module]) -> None:
        """Puts back what each forward replaced, such as the state of a recurrent network; caches were made once.

        Not of the modules in `left`, whose results do not depend on it.
        """
        self.look()
        stays = {id(vars(module)) for module in left}
        for key, name in self._replaced:
            if key in stays:
                continue
            container, before, _ = self._containers[key]
            if self._first is not None and (key, name) in self._first:
                container[name] = self._first[key, name]
            elif name in before:
                container[name] = before[name]
            else:
                container.pop(name, None)
        for container, before, _ in self._containers.values():
            if isinstance(container, list):
                container[:] = before

    def _detached(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach() if _compat.is_made_since(value, self._since) else value
        if type(value) is list and id(value) not in self._containers:
            return [self._detached(item) for item in value]
        if type(value) is dict and id(value) not in self._containers:
            return {key: self._detached(item) for key, item in value.items()}
        return value


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """The body leaves what a model's modules have in attributes as it was, large tensors included."""
    attributes = Attributes(model.modules(), with_large=True)
    try:
        yield
    finally:
        attributes.restore()


def _first_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, or the first one in a list, tuple or dict."""
    if isinstance(value, torch.Tensor):
        return value
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return next((item for item in items if isinstance(item, torch.Tensor)), None)


def _holds(names: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether all that was there is there, and the same."""
    return before.keys() <= names.keys() and all(map(operator.is_, map(names.__getitem__, before), before.values()))


def _restore_names(names: dict[Any, Any], before: dict[Any, Any], with_large: bool) -> None:
    now = _own(names, with_large)
    for name in now.keys() - before.keys():
        del names[name]
    names.update({name: value for name, value in before.items() if name in now or name not in names})


def _own(names: dict[Any, Any], with_large: bool) -> dict[Any, Any]:
    """What is put back of something with names."""
    return {
        name: value
        for name, value in names.items()
        if name not in OF_EVERY_MODULE and (with_large or type(value) in _SMALL or not _is_large(value))
    }


def _is_large(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.numel() * value.element_size() <= LARGE_BYTES:
        return False
    return not value.retains_grad


def has_attributes(value: Any) -> bool:
    """Whether it is something with attributes of its own that is neither a module nor the plug-in's."""
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    if type(value).__module__.startswith(__package__ + "."):
        return False
    return hasattr(value, "__dict__")
