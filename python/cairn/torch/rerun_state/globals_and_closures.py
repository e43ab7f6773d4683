"""What a block's forward reads past its modules: globals, attributes of classes, variables of closures.

A recorded run holds only for the constants that it found and the functions that it called, and a change to one need not
show in the few bytes that are compared. What code reads beside its arguments is in its names: `LOAD_GLOBAL` and
attribute access take theirs from `co_names`, closures from cells; `getattr` takes a text. So the search begins at the
functions that a block runs for sure (the forwards of its modules, functions among their attributes, hooks) and follows
what their names stand for: functions and classes of the same global namespace, methods of the block's own classes and
objects, functions in cells. Of an object that it comes by, in these or in defaults, the attributes count that any of
the code names, and so of objects among these. What it finds is noted, with the place to look it up again. Constants are
compared in every run, functions, classes and objects once in a step.

A name may stand for something else than what is found, so too much can be noted, which costs a recording where it
changes. What is called through a table, or by libraries of Python, PyTorch and NumPy, is not followed.
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
from .guards import Noted, Place, call, is_constant, is_noted, value_at
from .hook_closures import CALLABLES, at_hand, is_of_library, is_own_object, names_in, texts_in

#: Finds a class, a module of Python or an object; None: it is gone.
Owner = Callable[[], Any]

_FUNCTIONS_FOLLOWED = _OBJECTS_FOLLOWED = 500
_get_contents = operator.attrgetter("cell_contents")


def names_of(owners: Iterable[Any]) -> Iterator[Any]:
    """What `vars` gives of each, past functions of their classes that run where attributes are read.

    AttributeError: there is none.
    """
    return map(object.__getattribute__, owners, itertools.repeat("__dict__"))


def begin_step() -> None:
    """Definitions are compared anew from now on."""
    global _step
    _step += 1


_step = 0


class Definitions:
    """The functions, classes and objects that names in the code of blocks stand for; compared once in a step.

    Blocks that run the same code share them.
    """

    __slots__ = ("__weakref__", "_compared_in", "_counts", "_forwards", "_hold", "_noted", "_owners", "_places")

    def __init__(self, places: _Places, kinds: Sequence[type], owners: Iterable[Any]) -> None:
        self._places, self._forwards = places, kinds
        self._owners = list(map(_reference_to, owners))
        self._counts = self._counted()
        self._noted = Noted(self._namespaces(), [*places.names, range(len(kinds))])
        self._compared_in, self._hold = _step, True

    @classmethod
    def shared(cls, places: _Places, kinds: Sequence[type], owners: Sequence[Any]) -> Definitions:
        """New ones, or those of other blocks; `owners` are classes and objects to which no attribute may be added."""
        key = places.key(), tuple(kinds), tuple(map(id, owners))
        found = _shared.get(key)
        if found is None or not found.are_as_they_were():
            found = _shared[key] = cls(places, kinds, owners)
        return found

    def hold(self) -> bool:
        """Whether they were as they had been when they were first compared in this step."""
        if self._compared_in != _step:
            self._hold, self._compared_in = self.are_as_they_were(), _step
        return self._hold

    def are_as_they_were(self) -> bool:
        """Whether the names stand for the same, and no attribute was added."""
        try:
            return self._counted() == self._counts and self._noted.hold(self._namespaces())
        except (AttributeError, KeyError, TypeError, ValueError):
            return False  # one is gone

    def difference(self) -> str | None:
        """What is another than it was, for people."""
        place = self._noted.difference(self._namespaces())
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
    """What the forward of modules finds elsewhere; `objects` are the plain objects that they refer to.

    Attributes
    ----------
    read
        All names of attributes and globals in the code.
    """

    __slots__ = ("_constants", "_definitions", "_noted", "read")

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        search = _Search()
        for owner in (*modules, *objects):
            search.add_class(type(owner))
        bases = search.classes()
        search.run(_roots(modules))
        owners = [*bases, *search.objects()]
        self.read = frozenset(search.names)
        self._constants = _Places(search, is_constant)
        self._noted = Noted(self._constants.namespaces(), self._constants.names)
        others = _Places(search, lambda value: not is_constant(value))
        self._definitions = Definitions.shared(others, list(dict.fromkeys(map(type, modules))), owners)

    def hold(self) -> bool:
        """Whether all is as it was; functions, classes and objects, when it was looked at first in this step.

        AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError: one is gone, or has become a tensor.
        """
        return self._noted.hold(self._constants.namespaces()) and self._definitions.hold()

    def dicts_of_constants(self) -> list[dict[Any, Any]] | None:
        """The constants are as they are while nothing is put into these dicts, of which the first keep the others; None
        where it cannot be told by that.
        """
        if not self._constants.are_lasting or self._noted.deep_in:
            return None
        spaces = self._constants.namespaces()
        return [*spaces, *self._noted.flat_dicts(spaces)]

    def definitions_hold(self) -> bool:
        """Of `hold`, what is not about constants."""
        return self._definitions.hold()

    def difference(self) -> str | None:
        """What is another than it was, for people."""
        place = self._noted.difference(self._constants.namespaces())
        return self._definitions.difference() if place is None else _described(place)


def values_read(modules: Sequence[nn.Module], is_wanted: Callable[[Any], bool]) -> Callable[[], list[tuple[str, Any]]]:
    """What the code of modules' forwards finds elsewhere: gives the wanted names, with what they stand for then."""
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
        found = [(index, name) for index, names in enumerate(places.names) for name in names]
        return [(_described(place), value_at(spaces, place)) for place in found]

    return values


class _Places:
    """Namespaces, with the names that are looked up in each: of globals, of attributes, and variables of closures.

    Attributes
    ----------
    are_lasting
        The namespaces are dicts that are there as long as this is.
    """

    __slots__ = ("_cells", "_first_class", "_lasting", "_owners", "are_lasting", "names")

    def __init__(self, search: _Search, is_wanted: Callable[[Any], bool]) -> None:
        def wanted(names: Iterable[str], namespace: Any) -> list[str]:
            return [name for name in names if is_wanted(namespace[name])]

        found = [(space, wanted(names, space)) for space, names in search.globals.values()]
        owned = [(owner, wanted(names, vars(owner()))) for owner, names in search.attributes.values()]
        found += [(_dict_of(owner()), names) for owner, names in owned if _is_imported(owner())]
        owned = [(owner, names) for owner, names in owned if not _is_imported(owner())]
        owned.sort(key=lambda each: isinstance(each[0](), type))
        self._lasting = [namespace for namespace, names in found if names]
        self._owners = [owner for owner, names in owned if names]
        self._first_class = sum(not isinstance(owner(), type) for owner in self._owners)
        self._cells = [cell for cell in search.cells.values() if is_wanted(cell.cell_contents)]
        self.names: list[Any] = [names for _, names in (*found, *owned) if names]
        is_all = not self._owners and not self._cells
        self.are_lasting = is_all and all(isinstance(namespace, dict) for namespace in self._lasting)
        if self._cells:
            self.names.append(range(len(self._cells)))

    def key(self) -> Any:
        """The same for the same names in the same namespaces, as long as these are there."""
        owners = [id(owner()) for owner in self._owners]
        return tuple(map(id, self._lasting)), tuple(owners), tuple(map(id, self._cells)), tuple(map(tuple, self.names))

    def namespaces(self) -> list[Any]:
        """Where the names are looked up; those of the variables are indices.

        AttributeError or ValueError: one is gone.
        """
        if self.are_lasting:
            return self._lasting
        owned = list(names_of(map(call, self._owners)))
        classes = _compat.dicts_behind(owned[self._first_class :])
        cells = [list(map(_get_contents, self._cells))] if self._cells else ()
        return [*self._lasting, *owned[: self._first_class], *classes, *cells]


def _is_imported(owner: Any) -> bool:
    """Whether it is a module of Python, or a class at the top of one: as lasting as globals are."""
    if isinstance(owner, types.ModuleType):
        return True
    home = getattr(sys.modules.get(getattr(owner, "__module__", "")), "__dict__", {})
    return isinstance(owner, type) and home.get(owner.__qualname__) is owner


def _dict_of(owner: Any) -> Any:
    """The dict of a module of Python or of a class."""
    return vars(owner) if isinstance(owner, types.ModuleType) else _compat.dicts_behind([vars(owner)])[0]


def _described(place: Place) -> str:
    """What is at such a place, in words."""
    return f"'{place[1]}', which its code reads," if type(place[1]) is str else "a variable of a closure, or a default,"


def _roots(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """What surely runs, or may be called by its name in an instance."""
    for module in modules:
        yield getattr(type(module), "forward", None)
        yield from list(vars(module).values())  # another thread may put a handler into it
        yield from list(module._forward_hooks.values())
        yield from list(module._forward_pre_hooks.values())


class _Search:
    """Follows functions; `globals` are namespaces and the names to note in them, or defaults and which of them,
    `attributes` classes and objects with theirs, `cells` variables of closures.
    """

    def __init__(self, is_wanted: Callable[[Any], bool] = is_noted) -> None:
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
        """Methods and constants of this class may be meant by names."""
        self._classes.update((id(base), base) for base in _own_bases(cls))

    def classes(self) -> list[type]:
        """Those that were added."""
        return list(self._classes.values())

    def objects(self) -> list[Any]:
        """Those that it came by; no modules, into which plans put attributes of their own."""
        return [value for value in self._objects.values() if not isinstance(value, nn.Module)]

    def run(self, roots: Iterable[Any]) -> None:
        """Follows them, and what they lead to."""
        for root in roots:
            self._follow(root)
        looked: tuple[int, int] | None = None
        while self._waiting or looked != (len(self.names), len(self._objects)):
            while self._waiting:
                self._read(self._waiting.pop())
            looked = len(self.names), len(self._objects)
            for value in list(self._objects.values()):
                self._look_into_object(value)

    def _follow(self, value: Any) -> None:
        """If it is something that runs."""
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
            self._found(namespace[name], names, functools.partial(self._note_item, namespace, name))
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                self._found(cell.cell_contents, names, functools.partial(self.cells.__setitem__, id(cell), cell))
        for space, name, value in _defaults_of(function):
            self._found(value, names, functools.partial(self._note_default, function, space, name))
        for cls in list(self._classes.values()):
            self._look_into(cls, names)

    def _found(self, value: Any, names: set[str], note: Callable[[], Any]) -> None:
        """What a name stands for is noted, followed if it runs, and looked at for what the names may mean."""
        if self._is_wanted(value):
            note()
        self._follow(value)
        self._add_object(value)
        if isinstance(value, type):
            self.add_class(value)
            for base in _own_bases(value):
                self._look_into(base, names)
        elif isinstance(value, types.ModuleType):
            self._look_into_module(value, names, set())

    def _add_object(self, value: Any) -> None:
        """If its attributes may be meant by names: a module, an object of the user's, or one that is but its names."""
        is_such = isinstance(value, (nn.Module, types.SimpleNamespace, argparse.Namespace)) or is_own_object(value)
        if is_such and len(self._objects) < _OBJECTS_FOLLOWED:
            self._objects[id(value)] = value

    def _look_into_object(self, value: Any) -> None:
        """The attributes, of its own or of its class, that any of the code names; and a module's forward and parts."""
        self.add_class(type(value))
        for owner in (value, *_own_bases(type(value))):
            self._look_into(owner, self.names)
        if isinstance(value, nn.Module):
            self._follow(type(value).forward)
            for name in self.names & value._modules.keys():
                self._add_object(value._modules[name])

    def _look_into_module(self, module: types.ModuleType, names: set[str], seen: set[int]) -> None:
        """And into modules in it: code says `nn.functional.silu`."""
        if id(module) not in seen:
            seen.add(id(module))
            self._look_into(module, names)
            for name in names & vars(module).keys():
                if isinstance(vars(module)[name], types.ModuleType):
                    self._look_into_module(vars(module)[name], names, seen)

    def _look_into(self, owner: Any, names: set[str]) -> None:
        """The attributes of a class, a module or an object that have one of these names."""
        attributes = vars(owner)
        for name in names & attributes.keys():
            if self._is_wanted(attributes[name]):
                self.attributes.setdefault(id(owner), (_reference_to(owner), {}))[1][name] = None
            self._follow(attributes[name])
            self._add_object(attributes[name])

    def _note_item(self, namespace: Any, name: Any) -> None:
        self.globals.setdefault(id(namespace), (namespace, {}))[1][name] = None

    def _note_default(self, function: types.FunctionType, defaults: Any, name: Any) -> None:
        """What may be filled with something else, of a function that lasts: what others have is not to be held."""
        if isinstance(defaults[name], (list, dict)) and "<locals>" not in function.__qualname__:
            self._note_item(defaults, name)


def _held_by(value: Any) -> Iterator[Any]:
    """What something that is called is passed beside its arguments: an object, or what a partial function has."""
    if isinstance(value, (types.MethodType, functools.partial)):
        yield from (held for _, held in at_hand(value))
    elif callable(value) and is_own_object(value):
        yield value


def _defaults_of(function: types.FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    """The defaults of a function: a tuple or a dict of them, an index or a name there, and what it is."""
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    yield from ((positional, index, value) for index, value in enumerate(positional))
    yield from ((named, name, value) for name, value in named.items())


def _own_bases(cls: type) -> Iterator[type]:
    """A class and what it inherits from, but for those of libraries."""
    return (base for base in cls.__mro__ if not is_of_library(base.__module__))


def _reference_to(owner: Any) -> Owner:
    """Finds something again, which is not kept alive for it if that can be."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """What runs where a value is called, or read as a property."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_of(value.__func__)
    elif isinstance(value, property):
        yield from _functions_of(value.fget)
    elif isinstance(value, functools.partial):
        yield from _functions_of(value.func)
    elif isinstance(value, (tuple, list, dict)) and is_noted(value):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _functions_of(item)
    elif callable(value) and is_own_object(value):
        yield from _functions_of(type(value).__call__)
    elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
        yield from _functions_of(vars(value).get("forward"))
