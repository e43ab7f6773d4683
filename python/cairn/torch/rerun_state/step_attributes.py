"""What whole steps of a model leave in attributes, put back so that each sample step finds what the first one found.

What one forward leaves is of different kinds, and no single step tells them apart: a *cache* is made once and stays;
the *state* of a recurrent network is replaced by every forward, and so is the *loss* that a block leaves in an
attribute; a *record* is written down by every forward in a container. So the attributes are looked at before each
forward of several, and what is put back afterwards goes by what has been seen of each name.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..base.tree import children
from .attributes import ATOMS, CONTAINERS, DICTS, MANY, NESTED, NUMBERS, SEQUENCES, Attributes, Found, refill
from .hook_closures import own_names


class StepAttributes(Attributes):
    """The attributes of modules, and what steps do with them."""

    __slots__ = ("_extents", "_first", "_of_steps", "_replaced", "_seen", "_written")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        #: by container and name: what had tensors at the first look, and the first tensor of each at the latest one
        self._first: dict[tuple[int, Any], Any] | None = None
        self._seen: dict[tuple[int, Any], weakref.ref[torch.Tensor]] = {}
        self._replaced: set[tuple[int, Any]] = set()
        self._of_steps: set[tuple[int, Any]] = set()  # what had tensors that gradients could go through
        self._extents: dict[tuple[int, Any], Any] = {}  # of containers with a new name, as they were first seen
        self._written: set[tuple[int, Any]] = set()  # those of them in which every forward writes something down

    def look(self) -> None:
        """Before each forward of several: notes which names hold other tensors than at the look before, which hold what
        the forward before has left for its backward, and in which new containers forwards write.
        """
        first: dict[tuple[int, Any], Any] = {}
        for key, found in self._found.items():
            for name, value in found.container.items() if isinstance(found.container, dict) else ():
                tensor = None if name in found.hidden else _first_tensor(value)
                if tensor is not None:
                    first[key, name] = value
                    self._see((key, name), tensor)
                    if tensor.grad_fn is not None:
                        self._of_steps.add((key, name))
            for place, extent in _new_extents(found):
                if self._extents.setdefault(place, extent) != extent:
                    self._written.add(place)
        if self._first is None:
            self._first = first

    def _see(self, place: tuple[int, Any], tensor: torch.Tensor) -> None:
        seen = self._seen.get(place)
        if seen is not None and seen() is not tensor:
            self._replaced.add(place)
        self._seen[place] = weakref.ref(tensor)

    def made_something(self) -> set[int]:
        """The identities of the modules that have something under a name with nothing before: what is made once, and so
        not what each forward leaves there anew, as losses of routers are.
        """
        owners = (found for found in self._found.values() if found.are_names)
        return {id(found.place[0]) for found in owners if any(map(self._is_made_once, _new_in(found)))}

    def _is_made_once(self, new: tuple[int, Any, Any]) -> bool:
        key, name, value = new
        place = key, name
        is_anew = place in self._of_steps or place in self._replaced or place in self._written
        return not is_anew and not _has_history(value)

    def forget_losses(self) -> None:
        """Takes out of lists what was put there since by steps that are over: tensors, numbers, and what has such; only
        tensors in the modules that made something meanwhile.
        """
        stays = self.made_something()
        for found in self._found.values():
            container, before = found.container, found.before
            if isinstance(container, SEQUENCES):
                is_out = _is_tensor if id(found.place[0]) in stays else _is_record
                pairs = zip(container, before, strict=False)
                kept = [was if item is not was and is_out(item) else item for item, was in pairs]
                added = [item for item in itertools.islice(container, len(before), None) if not is_out(item)]
                refill(container, [*kept, *added])

    def restore_numbers(self) -> None:
        """Puts back numbers, names, states of generators and values of small tensors, such as counts of steps. What was
        made meanwhile, as caches are, may stay, and in the modules that made such what belongs to it.
        """
        stays = self.made_something()
        for found in self._found.values():
            container, before = found.container, found.before
            if isinstance(container, dict):
                for name, value in before.items():
                    if type(value) in NUMBERS:
                        container[name] = value
                is_filled = not found.are_names and id(found.place[0]) not in stays
                new = [name for name in container if name not in before] if is_filled else []
                if all(type(container[name]) in NUMBERS for name in new):
                    for name in new:
                        del container[name]
            elif (
                isinstance(container, set) and id(found.place[0]) not in stays and _differ_by_numbers(container, before)
            ):
                container.clear()
                container.update(before)
        self._forget_written()
        self._restore_inside(but_of=stays)

    def _forget_written(self) -> None:
        """Takes away containers in which every forward has written something down."""
        for key, name in self._written:
            found = self._found[key]
            if name in found.names:
                found.container[name] = None  # as it was
            else:
                found.container.pop(name, None)

    def restore_states(self) -> None:
        """Puts back what each forward replaced, such as the state of a recurrent network; caches were made once."""
        self.look()
        first = self._first or {}
        for key, name in self._replaced:
            found = self._found[key]
            if (key, name) in first:
                found.container[name] = first[key, name]
            elif name in found.before:
                found.container[name] = found.before[name]
            else:
                found.container.pop(name, None)
        made = self.made_something()
        for found in self._found.values():
            if isinstance(found.container, SEQUENCES) and id(found.place[0]) not in made:
                refill(found.container, found.before)

    def restore_named(self) -> None:
        """Puts back what stood under names, if that was something: forwards may have put other things there."""
        for found in self._found.values():
            for name, value in found.before.items() if isinstance(found.container, dict) else ():
                if value is not None and name in found.container and name != "forward":
                    found.container[name] = value

    def forget_graphs(self) -> None:
        """Takes out, and where something else was before takes the history from, what steps that are over have left
        under names: it holds what they saved.
        """
        for found in self._found.values():
            for _, name, value in list(_new_in(found)) if isinstance(found.container, dict) else ():
                if self._has_history(value):
                    if name in found.names:
                        found.container[name] = None
                    else:
                        del found.container[name]
        self.detach()


def _is_record(value: Any, depth: int = NESTED) -> bool:
    """Whether it is what a step would write down: a tensor, a number, or what is filled with such."""
    if isinstance(value, torch.Tensor) or type(value) in NUMBERS:
        return True
    if type(value) not in (tuple, list, dict) or depth == 0 or not value:
        return False
    return all(_is_record(item, depth - 1) for item in (value.values() if type(value) is dict else value))


def _differ_by_numbers(items: set[Any], before: set[Any]) -> bool:
    return all(type(item) in NUMBERS for item in items ^ before)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _new_extents(found: Found) -> Iterator[tuple[tuple[int, Any], Any]]:
    """The containers with a new name, by place, each with its extent."""
    for key, name, value in list(_new_in(found)) if isinstance(found.container, dict) else ():
        if type(value) in CONTAINERS:
            yield (key, name), _extent(value)


def _extent(value: Any, depth: int = NESTED) -> Any:
    """What changes when something is written down: numbers, and how many items containers have."""
    kind = type(value)
    if kind not in CONTAINERS:
        return value if kind in NUMBERS else None
    if kind is set or depth == 0 or len(value) > MANY:
        return len(value)
    return tuple(_extent(item, depth - 1) for item in (value.values() if kind in DICTS else value))


def _new_in(found: Found) -> Iterator[tuple[int, Any, Any]]:
    """The names that were not there, but for `forward`, and those that stood for None and no longer do: whose, and with
    what they stand for.
    """
    for name, value in found.container.items():
        if name not in found.names:
            is_new = name != "forward"
        else:
            is_new = value is not None and found.before.get(name, found) is None
        if is_new:
            yield id(found.container), name, value


def _has_history(value: Any) -> bool:
    tensor = _first_tensor(value)
    return tensor is not None and tensor.grad_fn is not None


def _first_tensor(value: Any, depth: int = NESTED) -> torch.Tensor | None:
    """A tensor, or the first one in a container: among a limited number of items, as deep as containers are opened.
    Objects are opened in attributes alone.
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
