"""Guards on the globals, class attributes and closure variables that a block's forward reads.

A recording is valid only while these constants and functions are unchanged, and the few bytes that are compared after
a recomputation may not show a change. The names in a function's code show which it reads: `LOAD_GLOBAL` and attribute
access use `co_names`, closures use cells, and `getattr` uses a string.

The search begins at the functions that a block surely runs: the forwards of its modules, functions among their
attributes, hooks. It follows the values of their names: functions and classes of the same global namespace, methods of
the block's own classes and objects, functions in cells. Of an object in these or in defaults, it follows the attributes
that any of the code names. Each value is recorded with the place to look it up again. Constants are compared in every
run; functions, classes and objects once in a step.

A name in the code may mean another object than the search assumes. So there can be guards too many, and their failure
costs a new recording. Calls through a table, and calls by libraries of Python, PyTorch and NumPy, are not followed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat
from .guards import Place, ValueGuards, call, is_constant, is_guarded, value_at
from .hook_closures import CALLABLES, is_of_library, is_own_object, names_in, referenced_objects, texts_in

#: Returns a class, a Python module or an object; None if it no longer exists.
Owner = Callable[[], Any]

_FUNCTIONS_FOLLOWED = _OBJECTS_FOLLOWED = 500
_get_contents = operator.attrgetter("cell_contents")


def names_of(owners: Iterable[Any]) -> Iterator[Any]:
    """`vars` of each, without calling attribute functions of their classes.

    Raises AttributeError for an object without a dict.
    """
    return map(object.__getattribute__, owners, itertools.repeat("__dict__"))


def begin_step() -> None:
    """Start a step: definitions are compared anew."""
    global _step
    _step += 1


_step = 0


class Definitions:
    """Guards on the functions, classes and objects that the code of blocks names; compared once in a step.

    Blocks that run the same code share them.
    """

    __slots__ = ("__weakref__", "_compared_in", "_counts", "_forwards", "_hold", "_guards", "_owners", "_places")

    def __init__(self, places: _Places, kinds: Sequence[type], owners: Iterable[Any]) -> None:
        self._places, self._forwards = places, kinds
        self._owners = list(map(_reference_to, owners))
        self._counts = self._counted()
        self._guards = ValueGuards(self._namespaces(), [*places.names, range(len(kinds))])
        self._compared_in, self._hold = _step, True

    @classmethod
    def shared(cls, places: _Places, kinds: Sequence[type], owners: Sequence[Any]) -> Definitions:
        """New guards, or those of a block with the same code; no attribute may be added to `owners`."""
        key = places.key(), tuple(kinds), tuple(map(id, owners))
        definitions = _shared.get(key)
        if definitions is None or not definitions.are_as_they_were():
            definitions = _shared[key] = cls(places, kinds, owners)
        return definitions

    def hold(self) -> bool:
        """Whether they were unchanged at their first comparison in this step."""
        if self._compared_in != _step:
            self._hold, self._compared_in = self.are_as_they_were(), _step
        return self._hold

    def are_as_they_were(self) -> bool:
        """Whether the names still have the same values, and no attribute was added."""
        try:
            return self._counted() == self._counts and self._guards.hold(self._namespaces())
        except (AttributeError, KeyError, TypeError, ValueError):
            return False  # one is gone

    def difference(self) -> str | None:
        """The first value that has changed, in words; None if none has."""
        place = self._guards.difference(self._namespaces())
        if place is None:
            return None if self._counted() == self._counts else "the number of attributes of a class or an object"
        if place[0] == len(self._places.names):
            return f"the forward of {self._forwards[place[1]].__name__}"
        return _described(place)

    def _counted(self) -> list[int]:
        return list(map(len, names_of(map(call, self._owners))))

    def _namespaces(self) -> list[Any]:
        return [*self._places.namespaces(), list(map(_forward_of, self._forwards))]


_shared: weakref.WeakValueDictionary[Any, Definitions] = weakref.WeakValueDictionary()
_forward_of = operator.attrgetter("forward")


class GlobalsAndClosures:
    """Guards on values outside of modules that their forwards read; `objects`: plain objects that modules refer to.

    Attributes
    ----------
    read
        All names of attributes and globals in the code.
    """

    __slots__ = ("_constants", "_definitions", "_guards", "read")

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        search = _Search()
        for owner in (*modules, *objects):
            search.add_class(type(owner))
        bases = search.classes()
        search.run(_roots(modules))
        owners = [*bases, *search.objects()]
        self.read = frozenset(search.names)
        self._constants = _Places(search, is_constant)
        self._guards = ValueGuards(self._constants.namespaces(), self._constants.names)
        others = _Places(search, lambda value: not is_constant(value))
        self._definitions = Definitions.shared(others, list(dict.fromkeys(map(type, modules))), owners)

    def hold(self) -> bool:
        """Whether all is unchanged; for functions, classes and objects at the first comparison in this step.

        May raise AttributeError, IndexError, KeyError, RuntimeError, TypeError or ValueError for a value that no longer
        exists, or has become a tensor.
        """
        return self._guards.hold(self._constants.namespaces()) and self._definitions.hold()

    def dicts_of_constants(self) -> list[dict[Any, Any]] | None:
        """The dicts whose change counters show that no constant has changed; None if counters cannot show it.

        The first of them keep the others alive.
        """
        if not self._constants.are_all_global or self._guards.deep_in:
            return None
        spaces = self._constants.namespaces()
        return [*spaces, *self._guards.flat_dicts(spaces)]

    def definitions_hold(self) -> bool:
        """The part of `hold` that does not compare constants."""
        return self._definitions.hold()

    def difference(self) -> str | None:
        """The first value that has changed, in words; None if none has."""
        place = self._guards.difference(self._constants.namespaces())
        return self._definitions.difference() if place is None else _described(place)


def values_read(modules: Sequence[nn.Module], is_wanted: Callable[[Any], bool]) -> Callable[[], list[tuple[str, Any]]]:
    """The values that the code of modules' forwards reads outside of them: the wanted names with their values."""
    search = _Search(is_wanted)
    for module in modules:
        search.add_class(type(module))
    search.run(_roots(modules))
    places = _Places(search, is_wanted)

    def values() -> list[tuple[str, Any]]:
        try:
            spaces = places.namespaces()
        except (AttributeError, ValueError):  # one is gone
            return []
        places_of_names = [(index, name) for index, names in enumerate(places.names) for name in names]
        return [(_described(place), value_at(spaces, place)) for place in places_of_names]

    return values


class _Places:
    """Namespaces with the names that are read in each: globals, attributes, and closure variables.

    Attributes
    ----------
    are_all_global
        All namespaces are dicts of Python modules or classes, which exist as long as this object.
    """

    __slots__ = ("_cells", "_first_class", "_namespaces", "_owners", "are_all_global", "names")

    def __init__(self, search: _Search, is_wanted: Callable[[Any], bool]) -> None:
        def wanted(names: Iterable[str], namespace: Any) -> list[str]:
            return [name for name in names if is_wanted(namespace[name])]

        namespaces = [(space, wanted(names, space)) for space, names in search.globals.values()]
        owned = [(owner, wanted(names, vars(owner()))) for owner, names in search.attributes.values()]
        namespaces += [(_dict_of(owner()), names) for owner, names in owned if _is_imported(owner())]
        owned = [(owner, names) for owner, names in owned if not _is_imported(owner())]
        owned.sort(key=lambda each: isinstance(each[0](), type))
        self._namespaces = [namespace for namespace, names in namespaces if names]
        self._owners = [owner for owner, names in owned if names]
        self._first_class = sum(not isinstance(owner(), type) for owner in self._owners)
        self._cells = [cell for cell in search.cells.values() if is_wanted(cell.cell_contents)]
        self.names: list[Any] = [names for _, names in (*namespaces, *owned) if names]
        is_all = not self._owners and not self._cells
        self.are_all_global = is_all and all(isinstance(namespace, dict) for namespace in self._namespaces)
        if self._cells:
            self.names.append(range(len(self._cells)))

    def key(self) -> Any:
        """A key that is equal for the same names in the same namespaces, as long as these exist."""
        owners = [id(owner()) for owner in self._owners]
        return (
            tuple(map(id, self._namespaces)),
            tuple(owners),
            tuple(map(id, self._cells)),
            tuple(map(tuple, self.names)),
        )

    def namespaces(self) -> list[Any]:
        """The namespaces in which the names are looked up; closure variables have indices for names.

        Raises AttributeError or ValueError if one no longer exists.
        """
        if self.are_all_global:
            return self._namespaces
        owned = list(names_of(map(call, self._owners)))
        classes = _compat.dicts_behind(owned[self._first_class :])
        cells = [list(map(_get_contents, self._cells))] if self._cells else ()
        return [*self._namespaces, *owned[: self._first_class], *classes, *cells]


def _is_imported(owner: Any) -> bool:
    """Whether it is a Python module, or a class at the top level of one, and so lives as long as globals do."""
    if isinstance(owner, types.ModuleType):
        return True
    home = getattr(sys.modules.get(getattr(owner, "__module__", "")), "__dict__", {})
    return isinstance(owner, type) and home.get(owner.__qualname__) is owner


def _dict_of(owner: Any) -> Any:
    """The dict of a module of Python or of a class."""
    return vars(owner) if isinstance(owner, types.ModuleType) else _compat.dicts_behind([vars(owner)])[0]


def _described(place: Place) -> str:
    """A place, in words for a message."""
    return f"'{place[1]}', which its code reads," if type(place[1]) is str else "a variable of a closure, or a default,"


def _roots(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """The functions of a module that surely run, or that an instance may call by name."""
    for module in modules:
        yield getattr(type(module), "forward", None)
        yield from list(vars(module).values())  # another thread may put a handler into it
        yield from list(module._forward_hooks.values())
        yield from list(module._forward_pre_hooks.values())


class _Search:
    """Follows functions and collects the names that they read.

    `globals`: namespaces and names in them, or defaults and which of them; `attributes`: classes and objects with names
    of attributes; `cells`: closure variables.
    """

    def __init__(self, is_wanted: Callable[[Any], bool] = is_guarded) -> None:
        self._is_wanted = is_wanted
        self.globals: dict[int, tuple[Any, dict[Any, None]]] = {}
        self.attributes: dict[int, tuple[Owner, dict[str, None]]] = {}
        self.cells: dict[int, Any] = {}
        self.names: set[str] = set()
        self._classes: dict[int, type] = {}
        self._objects: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._waiting: list[types.FunctionType] = []

    def add_class(self, cls: type) -> None:
        """Add a class, whose methods and constants the names may mean."""
        self._classes.update((id(base), base) for base in _own_bases(cls))

    def classes(self) -> list[type]:
        """The classes that were added."""
        return list(self._classes.values())

    def objects(self) -> list[Any]:
        """The objects that the search has met, without modules, to which plans add attributes of their own."""
        return [value for value in self._objects.values() if not isinstance(value, nn.Module)]

    def run(self, roots: Iterable[Any]) -> None:
        """Follow functions, and all functions that they name."""
        for root in roots:
            self._follow(root)
        looked: tuple[int, int] | None = None
        while self._waiting or looked != (len(self.names), len(self._objects)):
            while self._waiting:
                self._read(self._waiting.pop())
            looked = len(self.names), len(self._objects)
            for value in list(self._objects.values()):
                self._search_object(value)

    def _follow(self, value: Any) -> None:
        """Follow a value if it is a function or can be called."""
        for function in _functions_of(value):
            is_new = id(function) not in self._seen and len(self._seen) < _FUNCTIONS_FOLLOWED
            if is_new and not is_of_library(function.__module__):
                self._seen.add(id(function))
                self._waiting.append(function)
        for held in _held_by(value):
            self._add_object(held)
            if isinstance(held, CALLABLES):
                self._follow(held)

    def _read(self, function: types.FunctionType) -> None:
        names = names_in(function.__code__) | texts_in(function.__code__) | {"__call__"}  # of objects: no name tells
        self.names |= names
        namespace = function.__globals__
        for name in names & namespace.keys():
            self._add_value(namespace[name], names, functools.partial(self._record_item, namespace, name))
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                self._add_value(cell.cell_contents, names, functools.partial(self.cells.__setitem__, id(cell), cell))
        for space, name, value in _defaults_of(function):
            self._add_value(value, names, functools.partial(self._record_default, function, space, name))
        for cls in list(self._classes.values()):
            self._search_value(cls, names)

    def _add_value(self, value: Any, names: set[str], note: Callable[[], Any]) -> None:
        """Record a name's value, follow it if it can be called, and search its attributes for the names."""
        if self._is_wanted(value):
            note()
        self._follow(value)
        self._add_object(value)
        if isinstance(value, type):
            self.add_class(value)
            for base in _own_bases(value):
                self._search_value(base, names)
        elif isinstance(value, types.ModuleType):
            self._search_module(value, names, set())

    def _add_object(self, value: Any) -> None:
        """Search a value whose attributes the names may mean: a module, a user's object, or a plain namespace."""
        is_such = isinstance(value, (nn.Module, types.SimpleNamespace, argparse.Namespace)) or is_own_object(value)
        if is_such and len(self._objects) < _OBJECTS_FOLLOWED:
            self._objects[id(value)] = value

    def _search_object(self, value: Any) -> None:
        """Record the attributes of an object or its class that any of the code names; of a module also its forward."""
        self.add_class(type(value))
        for owner in (value, *_own_bases(type(value))):
            self._search_value(owner, self.names)
        if isinstance(value, nn.Module):
            self._follow(type(value).forward)
            for name in self.names & value._modules.keys():
                self._add_object(value._modules[name])

    def _search_module(self, module: types.ModuleType, names: set[str], seen: set[int]) -> None:
        """Record names of a Python module, and of modules in it, as in `nn.functional.silu`."""
        if id(module) not in seen:
            seen.add(id(module))
            self._search_value(module, names)
            for name in names & vars(module).keys():
                if isinstance(vars(module)[name], types.ModuleType):
                    self._search_module(vars(module)[name], names, seen)

    def _search_value(self, owner: Any, names: set[str]) -> None:
        """The attributes of a class, a module or an object that have one of these names."""
        attributes = vars(owner)
        for name in names & attributes.keys():
            if self._is_wanted(attributes[name]):
                self.attributes.setdefault(id(owner), (_reference_to(owner), {}))[1][name] = None
            self._follow(attributes[name])
            self._add_object(attributes[name])

    def _record_item(self, namespace: Any, name: Any) -> None:
        self.globals.setdefault(id(namespace), (namespace, {}))[1][name] = None

    def _record_default(self, function: types.FunctionType, defaults: Any, name: Any) -> None:
        """Record a list or dict among the defaults of a function; those of local functions must not be held."""
        if isinstance(defaults[name], (list, dict)) and "<locals>" not in function.__qualname__:
            self._record_item(defaults, name)


def _held_by(value: Any) -> Iterator[Any]:
    """The implicit arguments of a callable: the object of a bound method, or the arguments of a partial function."""
    if isinstance(value, (types.MethodType, functools.partial)):
        yield from (held for _, held in referenced_objects(value))
    elif callable(value) and is_own_object(value):
        yield value


def _defaults_of(function: types.FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    """The defaults of a function: a tuple or a dict of them, an index or a name in it, and the value."""
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    yield from ((positional, index, value) for index, value in enumerate(positional))
    yield from ((named, name, value) for name, value in named.items())


def _own_bases(cls: type) -> Iterator[type]:
    """A class and its base classes, without those of libraries."""
    return (base for base in cls.__mro__ if not is_of_library(base.__module__))


def _reference_to(owner: Any) -> Owner:
    """A function that returns a value again, by a weak reference if possible."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The function that runs when a value is called, or read as a property."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_of(value.__func__)
    elif isinstance(value, property):
        yield from _functions_of(value.fget)
    elif isinstance(value, functools.partial):
        yield from _functions_of(value.func)
    elif isinstance(value, (tuple, list, dict)) and is_guarded(value):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _functions_of(item)
    elif callable(value) and is_own_object(value):
        yield from _functions_of(type(value).__call__)
    elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
        yield from _functions_of(vars(value).get("forward"))
