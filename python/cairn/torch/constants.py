"""What a recorded run of a block depends on beside its arguments: constants, and what it is made of.

A recording holds numbers that the block's code found in attributes, globals and closures, and the operations that its
parts, functions and hooks ran. It is followed only where all of these are as they were.
"""

from __future__ import annotations

import copy
import operator
import types
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from . import takeover
from .attributes import OF_EVERY_MODULE, has_attributes
from .elsewhere import Elsewhere, call, first_difference, getter, is_comparable, is_constant, names_of
from .frozen import OBJECT_DEPTH


class Constants:
    """The attributes of modules, and of plain objects among them, that a forward may read: numbers, names, lists and
    dicts of these, parts, hooks; and what of that it finds elsewhere.

    Parts, functions and plain objects are compared by identity. That of one which is gone may be given to another, so
    it is noted when one goes. All are referred to weakly, so that a model is freed as ever. `flags` are the modules'
    training flags.
    """

    __slots__ = ("_compared", "_counts", "_elsewhere", "_gone", "_hooks", "_ids", "_objects", "_owners", "_references",
                 "_referring", "_values", "_values_of", "_with_parts", "flags")  # fmt: skip

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        objects = _plain_objects(modules)
        owners = [*modules, *objects]
        self.flags = [module.training for module in modules]
        self._objects = [weakref.ref(value) for value in objects]
        attributes = [vars(owner) for owner in owners]
        self._counts = list(map(len, attributes))
        self._hooks = _hooks_of(attributes[: len(modules)])
        self._owners = [type(owner).__name__ for owner in owners]
        self._compared = [[n for n, v in names.items() if _is_compared(n, v)] for names in attributes]
        self._values_of = list(map(getter, self._compared))
        self._values = copy.deepcopy(list(map(call, self._values_of, attributes)))
        referred = [[n for n, v in vars(owner).items() if _is_referred_to(v)] for owner in owners]
        self._referring = [(index, getter(names)) for index, names in enumerate(referred) if names]
        self._with_parts = [index for index, module in enumerate(modules) if module._modules]
        found = self._referred(attributes)
        self._gone: list[weakref.ref[Any]] = []
        self._references = [weakref.ref(value, self._gone.append) for value in found if value is not None]
        self._ids = list(map(id, found))
        self._elsewhere = Elsewhere(modules, objects)

    def hold(self, modules: Sequence[dict[str, Any]]) -> bool:
        """Whether all are as they were, in what are the attributes of the modules now."""
        if self._gone:
            return False
        try:
            attributes = [*modules, *names_of(map(call, self._objects))]
            return (
                list(map(len, attributes)) == self._counts
                and _hooks_of(modules) == self._hooks
                and list(map(call, self._values_of, attributes)) == self._values
                and list(map(id, self._referred(attributes))) == self._ids
                and self._elsewhere.is_as_it_was()
            )
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # one is gone, or has become a tensor or an array

    def difference(self, modules: Sequence[dict[str, Any]]) -> str:
        """Where they do not hold: what is another than it was, for people."""
        objects = [vars(owner) for reference in self._objects if (owner := reference()) is not None]
        attributes = [*modules, *objects]
        for owner, names, now, before in zip(self._owners, self._compared, attributes, self._values, strict=False):
            name = first_difference(names, now, before)
            if name is not None:
                return f"the attribute '{name}' of {owner}"
        return self._elsewhere.difference() or "a hook, a function, an object or a part"

    def _referred(self, attributes: Sequence[dict[str, Any]]) -> list[Any]:
        """The functions, plain objects and parts that modules and plain objects refer to, in a fixed order."""
        found: list[Any] = []
        for index, objects_of in self._referring:
            found += objects_of(attributes[index])
        for index in self._with_parts:
            found += attributes[index]["_modules"].values()
        return found


def _hooks_of(modules: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The numbers of the hooks that run in the modules' calls; torch gives none of them twice."""
    return [*map(tuple, map(_pre_hooks, modules)), *map(tuple, map(_forward_hooks, modules))]


_pre_hooks, _forward_hooks = operator.itemgetter("_forward_pre_hooks"), operator.itemgetter("_forward_hooks")


def _plain_objects(modules: Sequence[nn.Module]) -> list[Any]:
    """The plain objects that modules refer to, and those that these refer to."""
    found: dict[int, Any] = {}
    owners: Sequence[Any] = modules
    for _ in range(OBJECT_DEPTH):
        owners = [v for owner in owners for v in vars(owner).values() if _is_plain_object(v) and id(v) not in found]
        found.update((id(value), value) for value in owners)
    return list(found.values())


def _is_compared(name: str, value: Any) -> bool:
    """Whether an attribute is compared by its value."""
    return is_constant(value) or (name not in OF_EVERY_MODULE and is_comparable(value))


def _is_referred_to(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__module__ != takeover.__name__
    return _is_plain_object(value)


def _is_plain_object(value: Any) -> bool:
    """Something with attributes of its own that can be referred to weakly."""
    return has_attributes(value) and hasattr(type(value), "__weakref__")
