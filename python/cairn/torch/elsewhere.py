"""Constants that a block's forward reads past its modules: globals, attributes of classes, variables of closures.

A recorded run holds only for the constants that it found, and a change to one need not show in the few bytes that are
compared. What code reads beside its arguments is in its names: `LOAD_GLOBAL` and attribute access take theirs from
`co_names`, closures from cells. So the search begins at the functions that a block runs for sure (the forwards of its
modules, functions among their attributes, hooks) and follows what their names stand for: functions and classes of the
same global namespace, methods of the block's own classes and objects, functions in cells. What it finds that is a
constant, or a list or dict of these, is noted, with the place to look it up again.

A name may stand for something else than what is found, so too much can be noted, which costs a recording where it
changes. What is called through a table, or in libraries of Python, PyTorch and NumPy, is not followed.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .attributes import has_attributes

#: Finds a class, a module of Python or an object; None: it is gone.
Owner = Callable[[], Any]

#: Calls a function, without a function of Python in between where there is one for it.
call: Callable[..., Any] = getattr(operator, "call", lambda function, *arguments: function(*arguments))

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ITEMS_COMPARED = 100
_FUNCTIONS_FOLLOWED = 500
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", __package__.partition(".")[0])) - {"__main__"}
_get_contents = operator.attrgetter("cell_contents")


def is_comparable(value: Any) -> bool:
    """Whether a value can be noted and compared: constants, and what is filled with them."""
    return is_constant(value) or _is_filled(value)


def is_constant(value: Any) -> bool:
    """A number, a name and the like, or a tuple of them."""
    return isinstance(value, _ATOMS) or (isinstance(value, tuple) and all(isinstance(item, _ATOMS) for item in value))


def _is_filled(value: Any) -> bool:
    """Whether it is a list or a dict of constants, and no vocabulary, which would take long to compare. What is empty
    may be filled by runs, with whatever they make.
    """
    if not isinstance(value, (list, dict)) or not 0 < len(value) <= _ITEMS_COMPARED:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_comparable(item) for item in items)


def getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the items of these names, as a tuple."""
    if len(names) == 1:
        names = [*names, *names]  # of one, it would be no tuple
    return operator.itemgetter(*names) if names else _nothing


def _nothing(_: Any) -> tuple[()]:
    return ()


def names_of(owners: Iterable[Any]) -> Iterator[Any]:
    """What `vars` gives of each, past functions of their classes that run where attributes are read.

    AttributeError: there is none.
    """
    return map(object.__getattribute__, owners, itertools.repeat("__dict__"))


def first_difference(names: Sequence[str], now: Mapping[str, Any], before: Sequence[Any]) -> str | None:
    """The first of the names that stands for something else than it did."""
    for name, value in zip(names, before, strict=False):  # as `getter` gives them
        if name not in now or not _is_same(now[name], value):
            return name
    return None


def _is_same(value: Any, before: Any) -> bool:
    try:
        return value is before or bool(value == before)
    except (RuntimeError, TypeError, ValueError):  # it has become a tensor or an array
        return False


class Elsewhere:
    """What the forward of modules finds elsewhere; `objects` are the plain objects that they refer to."""

    __slots__ = ("_cells", "_contents", "_getters", "_names", "_namespaces", "_owners", "_values")

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        search = _Search()
        for owner in (*modules, *objects):
            search.add_class(type(owner))
        search.run(_roots(modules))
        self._cells = list(search.cells.values())
        self._contents = copy.deepcopy(list(map(_get_contents, self._cells)))
        self._namespaces = [namespace for namespace, _ in search.globals.values()]
        self._owners = [owner for owner, _ in search.attributes.values()]
        noted = (*search.globals.values(), *search.attributes.values())
        self._names = [list(names) for _, names in noted]
        self._getters = list(map(getter, self._names))
        self._values = copy.deepcopy(self._current())

    def is_as_it_was(self) -> bool:
        """Whether all of it has the same values.

        AttributeError, KeyError, TypeError or ValueError: something is gone.
        """
        return list(map(_get_contents, self._cells)) == self._contents and self._current() == self._values

    def difference(self) -> str | None:
        """What is another than it was, for people."""
        owners = (getattr(owner(), "__dict__", {}) for owner in self._owners)
        namespaces = (*self._namespaces, *owners)
        for names, namespace, before in zip(self._names, namespaces, self._values, strict=True):
            name = first_difference(names, namespace, before)
            if name is not None:
                return f"'{name}', which its code reads,"
        return "a variable of a closure" if list(map(_get_contents, self._cells)) != self._contents else None

    def _current(self) -> list[Any]:
        return list(map(call, self._getters, (*self._namespaces, *names_of(map(call, self._owners)))))


def _roots(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """What surely runs, or may be called by its name in an instance."""
    for module in modules:
        yield getattr(type(module), "forward", None)
        yield from vars(module).values()
        yield from module._forward_hooks.values()
        yield from module._forward_pre_hooks.values()


class _Search:
    """Follows functions; `globals` are namespaces and the names to note in them, `attributes` classes and objects with
    theirs, `cells` variables of closures.
    """

    def __init__(self) -> None:
        self.globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self.attributes: dict[int, tuple[Owner, dict[str, None]]] = {}
        self.cells: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._seen: set[int] = set()
        self._waiting: list[types.FunctionType] = []

    def add_class(self, cls: type) -> None:
        """Methods and constants of this class may be meant by names."""
        self._classes.update((id(base), base) for base in _own_bases(cls))

    def run(self, roots: Iterable[Any]) -> None:
        """Follows them, and what they lead to."""
        for root in roots:
            self._follow(root)
        while self._waiting and len(self._seen) < _FUNCTIONS_FOLLOWED:
            self._read(self._waiting.pop())

    def _follow(self, value: Any) -> None:
        """If it is something that runs."""
        for function in _functions_of(value):
            if id(function) not in self._seen and not _is_of_library(function.__module__):
                self._seen.add(id(function))
                self._waiting.append(function)

    def _read(self, function: types.FunctionType) -> None:
        names = _names_in(function.__code__) | {"__call__"}  # of objects, which no name tells
        namespace = function.__globals__
        for name in names & namespace.keys():
            self._found(namespace[name], names, functools.partial(self._note_global, namespace, name))
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                self._found(cell.cell_contents, names, functools.partial(self.cells.__setitem__, id(cell), cell))
        for cls in list(self._classes.values()):
            self._look_into(cls, names)

    def _found(self, value: Any, names: set[str], note: Callable[[], Any]) -> None:
        """What a name stands for: a constant is noted, of others that is looked at which the names may mean."""
        if is_comparable(value):
            note()
        elif isinstance(value, (types.FunctionType, functools.partial)):
            self._follow(value)
        elif isinstance(value, type):
            self._follow(value)
            self.add_class(value)
            for base in _own_bases(value):
                self._look_into(base, names)
        elif isinstance(value, types.ModuleType):
            if not _is_of_library(value.__name__):
                self._look_into(value, names)
        elif has_attributes(value) and not _is_of_library(type(value).__module__):
            self.add_class(type(value))
            self._look_into(value, names)

    def _look_into(self, owner: Any, names: set[str]) -> None:
        """The attributes of a class, a module or an object that have one of these names."""
        attributes = vars(owner)
        for name in names & attributes.keys():
            if is_comparable(attributes[name]):
                self.attributes.setdefault(id(owner), (_reference_to(owner), {}))[1][name] = None
            else:
                self._follow(attributes[name])

    def _note_global(self, namespace: dict[str, Any], name: str) -> None:
        self.globals.setdefault(id(namespace), (namespace, {}))[1][name] = None


def _own_bases(cls: type) -> Iterator[type]:
    """A class and what it inherits from, but for those of libraries."""
    return (base for base in cls.__mro__ if not _is_of_library(base.__module__))


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
    elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
        yield from _functions_of(vars(value).get("forward"))


def _names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that code reads, what is defined in it included."""
    names = {name for name in code.co_names if not name.startswith("__")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _is_of_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES
