"""Guards on Python values: do the names that a recorded block reads still have the values of the recording?

A recording of a block's operations has the values of attributes, globals and closure variables built in. `ValueGuards`
keeps these values, and compares them with the present ones before a recording is replayed. Each kind of value is
compared in the cheapest way:

* by value: numbers, strings, functions without closures, classes, and lists and dicts of these. Numbers must also have
  the same type and sign;
* by identity: closures, methods, submodules and plain objects;
* by a snapshot of their contents (`snapshot.py`): other containers, partial functions and objects with slots.

Tensors are not compared, nor containers that hold tensors: a recording knows which tensors a run reads and which it
computes.

PyTorch can tell whether a dict has changed (`_compat.contents`). While it has not, no name in it has another value.
Then only the contents of lists, dicts and objects are compared.

Guards keep nothing alive that may refer to the model: they keep the `id` of an object and a weak reference to it.
Python may give the `id` of a freed object to a new one. So a guard fails as soon as an object that it compares by
identity is freed.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat
from ..base.tree import fields_in_slots
from .hook_closures import has_attributes
from .snapshot import frozen, is_array

#: Calls a function, without a function of Python in between where there is one for it.
call: Callable[..., Any] = getattr(operator, "call", lambda function, *arguments: function(*arguments))

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
_WRAPPERS = (staticmethod, classmethod, property, functools.partial)
_CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque)
_ITEMS_COMPARED = 100
_NESTED = 8  # depth to which nested containers are compared; a container that holds itself is deeper

Place = tuple[int, Any]  # a namespace, and a name or an index in it


class ValueGuards:
    """Guards on the values of names in several namespaces. A namespace is a dict, or a list whose names are indices.

    exact: says of a namespace and a name whether a number there must keep its type and sign, too.

    Attributes
    ----------
    deep_in
        The namespaces that `deep_ones_hold` reads.
    """

    __slots__ = ("_are_dicts", "_contents", "_deep", "_exact", "_flat", "_frozen", "_gone", "_ids", "_numbers",
                 "_places", "_referred", "_references", "_values", "deep_in")  # fmt: skip

    def __init__(
        self,
        namespaces: Sequence[Any],
        names: Sequence[Iterable[Any]],
        exact: Callable[[int, Any], bool] = lambda index, name: True,
    ) -> None:
        entries = [(i, name, namespaces[i][name]) for i, each in enumerate(names) for name in each]
        comparable = [(i, name, isinstance(value, (list, dict))) for i, name, value in entries if is_comparable(value)]
        self._places = _Places((i, name) for i, name, is_filled in comparable if not is_filled)
        self._values = tuple(self._places.values(namespaces))
        self._exact = getter(_inexact(self._places, self._values, exact))
        self._numbers = self._exact(self._values)
        filled = [(i, name) for i, name, is_filled in comparable if is_filled]
        flat = [(i, name) for i, name in filled if _is_flat(namespaces[i][name])]
        self._flat = _ContainerGuards(namespaces, flat, exact)
        self._deep = _ContainerGuards(namespaces, [place for place in filled if place not in flat], exact)
        self._referred = _Places((i, name) for i, name, value in entries if is_referred_to(value))
        self._gone: list[weakref.ref[Any]] = []
        self._references = [weakref.ref(value, self._gone.append) for value in self._referred.values(namespaces)]
        self._ids = list(map(id, self._referred.values(namespaces)))
        self._frozen = [(i, name, frozen(value)) for i, name, value in entries if _is_frozen(value)]
        self.deep_in = sorted({i for i, _ in self._deep.places.names} | {i for i, _, _ in self._frozen})
        self._are_dicts = all(isinstance(namespace, dict) for namespace in namespaces)
        self._contents: list[int] | None = None  # change counters of the namespaces at the last full comparison

    def hold(self, namespaces: Sequence[Any]) -> bool:
        """Whether all names have the values that they had.

        A name that is gone or has become a tensor may raise AttributeError, IndexError, KeyError, RuntimeError,
        TypeError or ValueError instead. The caller takes that as a guard failure.
        """
        contents = _compat.contents(namespaces) if self._are_dicts else None
        if contents is None or contents != self._contents:
            if not self.names_hold(namespaces):
                return False
            self._contents = contents
        return self.containers_hold(namespaces)

    def containers_hold(self, namespaces: Sequence[Any]) -> bool:
        """Whether the contents of lists, dicts and objects are the same."""
        return self._flat.hold(namespaces) and (not self.deep_in or self.deep_ones_hold(namespaces))

    def flat_dicts(self, namespaces: Sequence[Any]) -> list[dict[Any, Any]]:
        """The dicts of constants, which change only by assignment to their keys."""
        return list(self._flat.places.values(namespaces))

    def deep_ones_hold(self, namespaces: Sequence[Any] | dict[int, Any]) -> bool:
        """Whether lists, nested dicts and snapshots are the same."""
        return self._deep.hold(namespaces) and all(frozen(namespaces[i][name]) == was for i, name, was in self._frozen)

    def names_hold(self, namespaces: Sequence[Any]) -> bool:
        """Whether values that cannot change in place, and objects compared by identity, are the same."""
        values = tuple(self._places.values(namespaces))
        return (
            not self._gone
            and values == self._values
            and (all(map(operator.is_, self._exact(values), self._numbers)) or self._are_same_numbers(values))
            and list(map(id, self._referred.values(namespaces))) == self._ids
        )

    def _are_same_numbers(self, values: tuple[Any, ...]) -> bool:
        now = self._exact(values)
        if not all(map(_is_same, now, self._numbers)):
            return False
        self._numbers = now  # in most steps the next comparison sees the same objects
        return True

    def difference(self, namespaces: Sequence[Any]) -> Place | None:
        """The first place whose value differs; None if there is none."""
        compared = zip(self._places.names, self._values, strict=True), self._flat.items(), self._deep.items()
        for place, before in itertools.chain(*compared):
            if not _is_same(value_at(namespaces, place), before):
                return place
        for place, number in zip(self._referred.names, self._ids, strict=True):
            if id(value_at(namespaces, place)) != number:
                return place
        for index, name, before in self._frozen:
            if frozen(value_at(namespaces, (index, name))) != before:
                return index, name
        return None


class _ContainerGuards:
    """Copies of the lists and dicts under some names, to compare them with."""

    __slots__ = ("_copies", "_inexact", "_texts", "places")

    def __init__(self, namespaces: Sequence[Any], places: Iterable[Place], exact: Callable[[int, Any], bool]) -> None:
        self.places = _Places(places)
        self._copies = list(map(_copied, self.places.values(namespaces)))
        self._inexact = _inexact(self.places, self._copies, exact)
        self._texts = [repr(self._copies[i]) for i in self._inexact]

    def hold(self, namespaces: Sequence[Any] | dict[int, Any]) -> bool:
        if not self._copies:
            return True
        values = list(self.places.values(namespaces))
        return values == self._copies and [repr(values[i]) for i in self._inexact] == self._texts

    def items(self) -> Iterator[tuple[Place, Any]]:
        """The places, with the values that they had."""
        return zip(self.places.names, self._copies, strict=True)


class _Places:
    """Places of values, grouped by namespace: the order in which `values` yields them."""

    def __init__(self, places: Iterable[Place]) -> None:
        names: dict[int, list[Any]] = {}
        for index, name in places:
            names.setdefault(index, []).append(name)
        doubled = {i: each if len(each) > 1 else each * 2 for i, each in names.items()}  # itemgetter(x) gives no tuple
        self.names = [(i, name) for i, each in doubled.items() for name in each]
        self._getters = [operator.itemgetter(*each) for each in doubled.values()]
        self._indices = list(doubled)

    def values(self, namespaces: Sequence[Any] | dict[int, Any]) -> Iterator[Any]:
        """The values at the places now."""
        values: Iterator[Any] = map(call, self._getters, map(namespaces.__getitem__, self._indices))
        return itertools.chain.from_iterable(values)


def _inexact(places: _Places, values: Sequence[Any], exact: Callable[[int, Any], bool]) -> list[int]:
    """The indices of values whose numbers must keep type and sign."""
    return [i for i, (at, name) in enumerate(places.names) if exact(at, name) and _is_inexact(values[i])]


def getter(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the items at these indices, as a tuple."""
    if len(indices) == 1:
        indices = [*indices, *indices]
    return operator.itemgetter(*indices) if indices else lambda _: ()


def value_at(namespaces: Sequence[Any], place: Place) -> Any:
    """The value at a place, or `_Gone` if the name is gone."""
    try:
        return namespaces[place[0]][place[1]]
    except (IndexError, KeyError):
        return _Gone


class _Gone:
    """The value at a place whose name is gone: equal to no other."""


def _is_same(value: Any, before: Any) -> bool:
    if value is before:
        return True
    try:
        return type(value) is type(before) and bool(value == before) and repr(value) == repr(before)
    except (RuntimeError, TypeError, ValueError):  # it has become a tensor or an array
        return False


# -- kinds of values -------------------------------------------------------------------------------------------


def is_guarded(value: Any, depth: int = _NESTED) -> bool:
    """Whether a guard compares this value at all."""
    return is_comparable(value, depth) or is_referred_to(value) or _is_frozen(value, depth)


def is_comparable(value: Any, depth: int = _NESTED) -> bool:
    """Whether it is compared by value: constants, functions, classes, and lists and dicts of these."""
    return _is_atom(value) or _is_top_level(value) or _is_filled(value, is_comparable, depth)


def is_constant(value: Any, depth: int = _NESTED) -> bool:
    """Whether it is a number, a string or the like, or a list or dict of these."""
    return _is_atom(value) or _is_filled(value, is_constant, depth)


def _is_flat(value: Any) -> bool:
    """Whether it is a dict whose values cannot change in place."""
    return isinstance(value, dict) and all(map(_is_atom, value.values()))


def _is_atom(value: Any) -> bool:
    return isinstance(value, _ATOMS) or (isinstance(value, tuple) and all(isinstance(item, _ATOMS) for item in value))


def _is_inexact(value: Any) -> bool:
    """Whether it may equal a value of another type or sign, as 1, 1.0 and True do, or 0.0 and -0.0."""
    if isinstance(value, (tuple, list)):
        return any(map(_is_inexact, value))
    if isinstance(value, dict):
        return any(map(_is_inexact, itertools.chain(value, value.values())))
    return isinstance(value, (bool, int, float, complex))


def _is_top_level(value: Any) -> bool:
    """Whether it is a Python function, class or module without closure variables, and so without the model."""
    if isinstance(value, types.ModuleType):
        return True
    if isinstance(value, property):
        return all(map(_is_top_level, filter(None, (value.fget, value.fset, value.fdel))))
    if isinstance(value, (staticmethod, classmethod)):
        return _is_top_level(value.__func__)
    if not isinstance(value, _FUNCTIONS) or "<locals>" in value.__qualname__:
        return False
    return isinstance(getattr(value, "__self__", None), (type(None), types.ModuleType, type))


def _is_filled(value: Any, is_such: Callable[[Any, int], bool], depth: int) -> bool:
    """Whether it is a list or dict of such values, and small: a vocabulary would take long to compare."""
    return isinstance(value, (list, dict)) and _is_full_of(value, is_such, depth)


def _is_full_of(container: Any, is_such: Callable[[Any, int], bool], depth: int) -> bool:
    return depth > 0 and _is_small(container) and all(is_such(item, depth - 1) for item in items_of(container))


def _is_small(value: Any) -> bool:
    """Whether a container is neither large nor empty. Runs may fill an empty one with their results."""
    return 0 < len(value) <= _ITEMS_COMPARED


def _copied(value: Any) -> Any:
    """A copy with its own lists and dicts, also where their classes refuse changes."""
    if isinstance(value, dict):
        made = _copy_of(value)
        dict.update(made, {key: _copied(item) for key, item in value.items()})
        return made
    if isinstance(value, list):
        items = _copy_of(value)
        list.__setitem__(items, slice(None), map(_copied, value))
        return items
    return value


def _copy_of(value: Any) -> Any:
    """A shallow copy of a list or dict; of the same class, if that can be copied."""
    try:
        return copy.copy(value)
    except Exception:  # its class refuses, by an error of its own
        return list(value) if isinstance(value, list) else dict(value)


def items_of(value: Any) -> Iterator[Any]:
    """The items of a small container; a value that is no container is its own only item."""
    if not isinstance(value, _CONTAINERS):
        return iter((value,))
    if not _is_small(value):
        return iter(())
    return itertools.chain(value, value.values()) if isinstance(value, dict) else iter(value)


def is_referred_to(value: Any) -> bool:
    """Whether it is compared by identity."""
    if is_comparable(value) or isinstance(value, _WRAPPERS):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, type, nn.Module)):
        return True
    return has_attributes(value) and type(value).__weakrefoffset__ != 0


def _is_frozen(value: Any, depth: int = _NESTED) -> bool:
    """Whether it is compared by a snapshot of its contents."""
    if is_comparable(value, depth) or is_referred_to(value) or isinstance(value, (torch.Tensor, torch.Generator)):
        return False
    if isinstance(value, _CONTAINERS):
        return _is_full_of(value, is_guarded, depth)
    return isinstance(value, (*_WRAPPERS, types.SimpleNamespace)) or any(fields_in_slots(value)) or is_array(value)
