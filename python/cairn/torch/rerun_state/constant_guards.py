"""Guards on the constants that a recorded block reads, and on the modules, functions and hooks that it consists of.

A recording has numbers built in that the block's code read from attributes, globals and closures, and the operations
that its submodules, functions and hooks ran. It is replayed only if all of these are unchanged.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as all_modules

from ..base import _compat
from ..base.patched_forward import names_but_handlers
from .globals_and_closures import GlobalsAndClosures, names_of
from .guards import ValueGuards, call, is_comparable, is_guarded, is_referred_to, items_of
from .hook_closures import has_attributes, is_of_library
from .module_state import OF_EVERY_MODULE, attributes_of, children_of
from .snapshot import OBJECT_DEPTH


class Constants:
    """Guards on everything besides tensors that a block's forward may read.

    These are the attributes of its modules, and of plain objects in them; their classes, submodules and hooks; and the
    constants and functions that it reads from globals and closures. References to modules and objects are weak.

    Attributes
    ----------
    flags
        The modules' training flags.
    numbers
        Change counters of the modules' dicts at the last full comparison. None before, and if PyTorch has none.
    """

    __slots__ = ("_children", "_counts", "_deep", "_outer_values", "_gone", "_hooks", "_kinds", "_guards", "_objects",
                 "_parts", "_versions", "_versions_of_all", "flags", "numbers")  # fmt: skip

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        objects = _plain_objects(modules)
        attributes = list(map(attributes_of, modules))
        self.flags = [module.training for module in modules]
        self.numbers: list[int] | None = None
        self._kinds = list(map(type, [*modules, *objects]))
        self._gone: list[weakref.ref[Any]] = []
        self._parts = [weakref.ref(module, self._gone.append) for module in modules]
        self._objects = [weakref.ref(value, self._gone.append) for value in objects]
        self._versions: _compat.DictVersions | None = None  # changes in modules and objects
        self._versions_of_all: _compat.DictVersions | None = (
            None  # and in globals, which some scripts change in every step
        )
        self._children, self._hooks = children_of(attributes), _hooks_of(attributes)
        self._outer_values = GlobalsAndClosures(modules, objects)
        owned = [*map(dict.copy, attributes), *names_of(objects)]  # copies: another thread may add handlers to modules
        names = list(map(names_but_handlers, owned))
        self._counts = list(map(len, names))
        guarded = [
            [name for name in each if _is_guarded(name, own[name])] for own, each in zip(owned, names, strict=True)
        ]
        self._guards = ValueGuards(owned, guarded, self._is_exact)
        self._deep = [[*self._parts, *self._objects][index] for index in self._guards.deep_in]

    def _is_exact(self, index: int, name: Any) -> bool:
        """Whether a guard compares a number's type and sign, too.

        It does if the block's code contains the name, or if the class is a library's, whose code is not searched. Other
        attributes can only be read by `getattr`, where types hardly matter.
        """
        is_opaque = is_of_library(self._kinds[index].__module__) and name not in OF_EVERY_MODULE
        return is_opaque or name in self._outer_values.read

    def hold(
        self, modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]], children: Sequence[int] | None = None
    ) -> bool:
        """Whether all guards hold.

        children: the identities of the submodules that are registered in the modules, if they are known.
        """
        try:
            owned = self._owned(modules, attributes)
            numbers = _numbers_of(owned, attributes)
            if numbers is None or numbers != self.numbers:
                if not self._names_hold(owned, attributes, children):
                    return False
                self.numbers = numbers
            return self._guards.containers_hold(owned) and self._outer_values.hold()
        except _CHANGED:
            return False

    def watch(self, modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> bool:
        """Called when the guards hold: from now on `still_hold` is a cheap check. False if that is impossible."""
        if self._versions is None or not self._versions.holds():
            objects = list(map(call, self._objects))
            dicts = [*_HOOKS_OF_ALL, *itertools.chain.from_iterable(map(_registries_of, attributes))]
            dicts += self._guards.flat_dicts([*attributes, *names_of(objects)])
            self._versions = _compat.DictVersions.of([*modules, *objects], dicts)
            others = self._outer_values.dicts_of_constants()
            self._versions_of_all = (
                None if others is None else _compat.DictVersions.of([*modules, *objects], [*dicts, *others])
            )
        return self._versions is not None

    def still_hold(self) -> bool:
        """Whether the guards surely hold since `watch`. It is rarely False for guards that hold."""
        if self._gone or self._versions is None:
            return False
        try:
            if self._versions_of_all is not None and self._versions_of_all.holds():
                is_same = self._outer_values.definitions_hold()
            else:
                is_same = self._versions.holds() and self._outer_values.hold()
            return is_same and (not self._deep or self._guards.deep_ones_hold(self._deep_namespaces()))
        except _CHANGED:
            return False

    def _deep_namespaces(self) -> dict[int, dict[str, Any]]:
        return dict(zip(self._guards.deep_in, names_of(map(call, self._deep)), strict=True))

    def _owned(self, modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The dicts of modules and plain objects. Raises LookupError if one is gone or has another class."""
        objects = list(map(call, self._objects))
        if self._gone or list(map(type, itertools.chain(modules, objects))) != self._kinds:
            raise LookupError
        return [*attributes, *names_of(objects)]

    def _names_hold(
        self, owned: Sequence[dict[str, Any]], attributes: Sequence[dict[str, Any]], children: Sequence[int] | None
    ) -> bool:
        """The guards that cannot fail while no dict has changed."""
        owned = [*map(dict.copy, attributes), *owned[len(attributes) :]]
        return (
            list(map(_count, owned)) == self._counts
            and _hooks_of(attributes) == self._hooks
            and (children_of(attributes) if children is None else children) == self._children
            and self._guards.names_hold(owned)
        )

    def difference(self, modules: Sequence[nn.Module]) -> str:
        """The guard that failed, in words."""
        try:
            return self._difference(modules) or "a function, an object or a part"
        except (AttributeError, IndexError, TypeError, ValueError):
            return "an object or a part, which is gone,"

    def _difference(self, modules: Sequence[nn.Module]) -> str | None:
        objects, attributes = list(map(call, self._objects)), list(map(attributes_of, modules))
        kinds = [kind.__name__ for kind in self._kinds]
        for owner, kind in zip([*modules, *objects], self._kinds, strict=False):
            if type(owner) is not kind:
                return f"the class of a {kind.__name__}, now {type(owner).__name__},"
        if len(modules) != len(self.flags) or children_of(attributes) != self._children:
            return "a part"
        owned = [*attributes, *names_of(objects)]
        place = self._guards.difference(owned)
        if place is not None:
            return f"the attribute '{place[1]}' of {kinds[place[0]]}"
        if _hooks_of(attributes) != self._hooks:
            return "a hook"
        counts = zip(kinds, owned, self._counts, strict=True)
        changed = [f"the number of attributes of {kind}" for kind, now, before in counts if _count(now) != before]
        return changed[0] if changed else self._outer_values.difference()


def _count(names: dict[str, Any]) -> int:
    return len(names_but_handlers(names))


def _hooks_of(modules: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The identifiers of the hooks of the modules, if there are any; torch never uses an identifier twice."""
    registries = itertools.chain(map(_pre_hooks, modules), map(_forward_hooks, modules), _HOOKS_OF_ALL)
    return list(map(tuple, filter(None, registries)))


def _numbers_of(owned: Sequence[dict[str, Any]], modules: Sequence[dict[str, Any]]) -> list[int] | None:
    """Torch's change counters of these dicts, and of those of the modules' members and hooks; None if it has none.

    Most of these dicts are empty and have no counter. No two dicts have the same counter.
    """
    registries = itertools.chain(_HOOKS_OF_ALL, *map(_registries_of, modules))
    return _compat.contents([*owned, *filter(None, registries)])


#: Errors of comparing a value that no longer exists, or has become a tensor or an array.
_CHANGED = AttributeError, LookupError, RuntimeError, TypeError, ValueError
_pre_hooks, _forward_hooks = operator.itemgetter("_forward_pre_hooks"), operator.itemgetter("_forward_hooks")
_registries_of = operator.itemgetter("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
_HOOKS_OF_ALL = all_modules._global_forward_pre_hooks, all_modules._global_forward_hooks


def _plain_objects(modules: Sequence[nn.Module]) -> list[Any]:
    """The plain objects that modules refer to, also through containers and other such objects.

    Includes modules that are not registered as submodules.
    """
    known, objects = set(map(id, modules)), []
    owners: Sequence[Any] = modules
    for _ in range(OBJECT_DEPTH):
        owners = list({id(item): item for owner in owners for item in _objects_of(owner)}.values())
        owners = [item for item in owners if id(item) not in known]
        known.update(map(id, owners))
        objects += owners
    return objects


def _objects_of(owner: Any) -> Iterator[Any]:
    for name, value in list(vars(owner).items()):
        if name not in OF_EVERY_MODULE:
            for item in items_of(value):
                if isinstance(item, nn.Module) or (has_attributes(item) and is_referred_to(item)):
                    yield item


def _is_guarded(name: str, value: Any) -> bool:
    return is_comparable(value) if name in OF_EVERY_MODULE else is_guarded(value)
