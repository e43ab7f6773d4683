"""Restores attributes between whole steps of a model, so that every sample step starts from the same state.

Forwards change attributes in different ways, which no single step can tell apart. A *cache* is made once and stays. The
*state* of a recurrent network is replaced by every forward, and so is a *loss* that a block stores in an attribute. A
*record* is appended to a container by every forward. So the attributes are recorded before each of several forwards,
and the observed changes of each name decide how it is restored.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..base.tree import children
from .attributes import ATOMS, CONTAINERS, DICTS, MANY, NESTED, NUMBERS, SEQUENCES, Attributes, Contents, refill
from .hook_closures import own_names


class StepAttributes(Attributes):
    """The attributes of modules, and how steps change them."""

    __slots__ = ("_extents", "_first", "_of_steps", "_replaced", "_seen", "_written")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        #: by container and name: what had tensors at the first record, and the first tensor of each at the latest one
        self._first: dict[tuple[int, Any], Any] | None = None
        self._seen: dict[tuple[int, Any], weakref.ref[torch.Tensor]] = {}
        self._replaced: set[tuple[int, Any]] = set()
        self._of_steps: set[tuple[int, Any]] = set()  # what had tensors that gradients could go through
        self._extents: dict[tuple[int, Any], Any] = {}  # of containers with a new name, as they were first seen
        self._written: set[tuple[int, Any]] = set()  # those of them in which every forward writes something down

    def record(self) -> None:
        """Record changes, before each of several forwards.

        These are: names that hold other tensors than at the last call, names that hold tensors with the last forward's
        autograd graph, and new containers to which forwards append.
        """
        first: dict[tuple[int, Any], Any] = {}
        for key, contents in self._contents.items():
            for name, value in contents.container.items() if isinstance(contents.container, dict) else ():
                tensor = None if name in contents.ignored else _first_tensor(value)
                if tensor is not None:
                    first[key, name] = value
                    self._record_tensor((key, name), tensor)
                    if tensor.grad_fn is not None:
                        self._of_steps.add((key, name))
            for place, extent in _new_extents(contents):
                if self._extents.setdefault(place, extent) != extent:
                    self._written.add(place)
        if self._first is None:
            self._first = first

    def _record_tensor(self, place: tuple[int, Any], tensor: torch.Tensor) -> None:
        seen = self._seen.get(place)
        if seen is not None and seen() is not tensor:
            self._replaced.add(place)
        self._seen[place] = weakref.ref(tensor)

    def modules_with_new_attributes(self) -> set[int]:
        """The identities of the modules that have assigned an attribute that did not exist or was None before.

        Only values made once count, not values that every forward assigns, such as losses of routers.
        """
        owners = (contents for contents in self._contents.values() if contents.are_names)
        return {id(contents.place[0]) for contents in owners if any(map(self._is_new_once, _new_in(contents)))}

    def _is_new_once(self, new: tuple[int, Any, Any]) -> bool:
        key, name, value = new
        place = key, name
        is_anew = place in self._of_steps or place in self._replaced or place in self._written
        return not is_anew and not _has_history(value)

    def forget_losses(self) -> None:
        """Remove tensors, numbers and containers of them that finished steps have appended to lists.

        In modules that made a cache meanwhile, only tensors are removed.
        """
        stays = self.modules_with_new_attributes()
        for contents in self._contents.values():
            container, before = contents.container, contents.before
            if isinstance(container, SEQUENCES):
                is_out = _is_tensor if id(contents.place[0]) in stays else _is_record
                pairs = zip(container, before, strict=False)
                kept = [was if item is not was and is_out(item) else item for item, was in pairs]
                added = [item for item in itertools.islice(container, len(before), None) if not is_out(item)]
                refill(container, [*kept, *added])

    def restore_numbers(self) -> None:
        """Restore numbers, names, states of generators and values of small tensors, such as counts of steps.

        Caches that were made meanwhile may stay, and so may the other attributes of modules that made one.
        """
        stays = self.modules_with_new_attributes()
        for contents in self._contents.values():
            container, before = contents.container, contents.before
            if isinstance(container, dict):
                for name, value in before.items():
                    if type(value) in NUMBERS:
                        container[name] = value
                is_filled = not contents.are_names and id(contents.place[0]) not in stays
                new = [name for name in container if name not in before] if is_filled else []
                if all(type(container[name]) in NUMBERS for name in new):
                    for name in new:
                        del container[name]
            elif (
                isinstance(container, set)
                and id(contents.place[0]) not in stays
                and _differ_by_numbers(container, before)
            ):
                container.clear()
                container.update(before)
        self._forget_written()
        self._restore_inside(but_of=stays)

    def _forget_written(self) -> None:
        """Remove containers to which every forward has appended."""
        for key, name in self._written:
            contents = self._contents[key]
            if name in contents.names:
                contents.container[name] = None  # as it was
            else:
                contents.container.pop(name, None)

    def restore_states(self) -> None:
        """Restore values that each forward replaced, such as the state of a recurrent network, but no caches."""
        self.record()
        first = self._first or {}
        for key, name in self._replaced:
            contents = self._contents[key]
            if (key, name) in first:
                contents.container[name] = first[key, name]
            elif name in contents.before:
                contents.container[name] = contents.before[name]
            else:
                contents.container.pop(name, None)
        made = self.modules_with_new_attributes()
        for contents in self._contents.values():
            if isinstance(contents.container, SEQUENCES) and id(contents.place[0]) not in made:
                refill(contents.container, contents.before)

    def restore_named(self) -> None:
        """Restore the values of names that were not None before."""
        for contents in self._contents.values():
            for name, value in contents.before.items() if isinstance(contents.container, dict) else ():
                if value is not None and name in contents.container and name != "forward":
                    contents.container[name] = value

    def forget_graphs(self) -> None:
        """Remove tensors with a graph that finished steps have assigned; detach those that replaced a value.

        Their graphs would hold the steps' saved tensors.
        """
        for contents in self._contents.values():
            for _, name, value in list(_new_in(contents)) if isinstance(contents.container, dict) else ():
                if self._has_history(value):
                    if name in contents.names:
                        contents.container[name] = None
                    else:
                        del contents.container[name]
        self.detach()


def _is_record(value: Any, depth: int = NESTED) -> bool:
    """Whether a value is what a step may record: a tensor, a number, or a container of them."""
    if isinstance(value, torch.Tensor) or type(value) in NUMBERS:
        return True
    if type(value) not in (tuple, list, dict) or depth == 0 or not value:
        return False
    return all(_is_record(item, depth - 1) for item in (value.values() if type(value) is dict else value))


def _differ_by_numbers(items: set[Any], before: set[Any]) -> bool:
    return all(type(item) in NUMBERS for item in items ^ before)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _new_extents(contents: Contents) -> Iterator[tuple[tuple[int, Any], Any]]:
    """The containers with new names, by place, each with its extent."""
    for key, name, value in list(_new_in(contents)) if isinstance(contents.container, dict) else ():
        if type(value) in CONTAINERS:
            yield (key, name), _extent(value)


def _extent(value: Any, depth: int = NESTED) -> Any:
    """The extent of a value, which changes when something is appended: numbers, and the lengths of containers."""
    kind = type(value)
    if kind not in CONTAINERS:
        return value if kind in NUMBERS else None
    if kind is set or depth == 0 or len(value) > MANY:
        return len(value)
    return tuple(_extent(item, depth - 1) for item in (value.values() if kind in DICTS else value))


def _new_in(contents: Contents) -> Iterator[tuple[int, Any, Any]]:
    """Names that did not exist or were None before, without `forward`: container, name and value."""
    for name, value in contents.container.items():
        if name not in contents.names:
            is_new = name != "forward"
        else:
            is_new = value is not None and contents.before.get(name, contents) is None
        if is_new:
            yield id(contents.container), name, value


def _has_history(value: Any) -> bool:
    tensor = _first_tensor(value)
    return tensor is not None and tensor.grad_fn is not None


def _first_tensor(value: Any, depth: int = NESTED) -> torch.Tensor | None:
    """A tensor, or the first one in a container, to a limited depth and number of items.

    Objects are searched only if they are attributes themselves.
    """
    if isinstance(value, torch.Tensor):
        return value
    if depth == 0 or type(value) in ATOMS:
        return None
    inner = children(value)
    if inner is None and depth == NESTED and isinstance(names := own_names(value), dict):
        inner = list(names.items())
    items = (_first_tensor(item, depth - 1) for _, item in itertools.islice(inner or (), MANY))
    return next((tensor for tensor in items if tensor is not None), None)
