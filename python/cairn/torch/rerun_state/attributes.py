"""Restores attributes that a run of a block has changed.

Blocks store losses of their own, counts and statistics in attributes of their modules, in lists, dicts and other
containers there, and in small tensors that are no buffers. An extra run (a measurement or a recomputation) must not
leave such changes: the model would count it twice, or run a backward into a graph that is freed. Changes by sample
steps are undone by comparing several of them (`step_attributes.py`).

A block whose runs change state that this file does not restore is not recomputed (`side_effects.py`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base import _compat, memory
from ..base.errors import RecomputationError
from . import generators
from .hook_closures import has_attributes, objects_of_hooks
from .module_state import LARGE_BYTES, OF_EVERY_MODULE, same_numbers
from .parametrized import CachedWeights

NESTED = 4  # so deep are containers looked into
MANY = 1000  # items of containers that are looked into; what an attribute stands for is copied whatever its size

_HOOKS = sorted(name for name in OF_EVERY_MODULE if "forward" in name and "hooks" in name)
_NO_NAMES: frozenset[str] = frozenset()
NUMBERS = frozenset((bool, int, float, complex, str, bytes))
_SMALL = NUMBERS | {type(None), tuple}
SEQUENCES = (list, collections.deque)
DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
CONTAINERS = frozenset((*SEQUENCES, *DICTS, set))
ATOMS = NUMBERS | {type(None), nn.Parameter, torch.dtype, torch.device, types.FunctionType, types.MethodType}

Place = tuple[nn.Module, str]  # a module, and the name of its attribute


class Contents(NamedTuple):
    """A container, and its contents before the run."""

    container: Any
    before: Any  # what is restored of it
    size: int  # how much there was in it
    names: frozenset[Any]  # all that it had, of attributes and dicts; else none
    place: Place  # whose attribute it is, or is in; without a name the attributes of a module
    are_names: bool  # the attributes of a module or of an object

    def items(self) -> Iterable[Any]:
        """Its items before the run; of a namespace those that are restored."""
        return self.before.values() if isinstance(self.before, dict) else self.before

    @property
    def ignored(self) -> frozenset[str]:
        """Names in it that are not restored."""
        return _NO_NAMES if self.place[1] else OF_EVERY_MODULE


class Attributes:
    """A record of the attributes of modules, of objects and containers in them, and of objects that hooks may change.

    Large tensors directly in attributes are not recorded, because holding those that a run replaces takes memory. They
    are recorded if they have retained gradients, or on demand (`with_large`, which includes hooks of the modules).
    """

    __slots__ = ("_copies", "_contents", "_generators", "_hooks", "_room", "_since", "_weights", "_with_large")

    def __init__(self, modules: Iterable[nn.Module], with_large: bool = False) -> None:
        self._with_large, self._room = with_large, MANY
        self._since = _compat.history_mark()
        self._contents: dict[int, Contents] = {}  # by the identity of the container
        self._copies: list[tuple[torch.Tensor, torch.Tensor, Place]] = []  # of tensors that may be written
        self._generators: list[Callable[[], None]] = []  # what puts them back, and small arrays
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []  # registries, and their contents before
        modules = list(modules)
        self._weights = CachedWeights(modules)
        for module in modules:
            if with_large:
                self._hooks += [(vars(module)[name], dict(vars(module)[name])) for name in _HOOKS]
            for name, value in self._note(vars(module), (module, ""), are_names=True).items():
                if type(value) not in ATOMS:
                    self._record_parts(value, (module, name), NESTED)
        for module, name, value in objects_of_hooks(modules):
            self._reach(value, (module, name))

    def _reach(self, value: Any, place: Place) -> None:
        """Record an object that hooks may change: a container, or an object's attributes and the containers in them."""
        if type(value) in CONTAINERS:
            self._record_parts(value, place, NESTED - 1)
            return
        is_module = isinstance(value, nn.Module)
        if (is_module or has_attributes(value)) and (names := self._unrecorded(value)) is not None:
            noted = self._note(names, (value, "") if is_module else place, are_names=True)
            for name, item in noted.items():
                if type(item) in CONTAINERS:
                    self._record_parts(item, (value, name) if is_module else place, NESTED - 1)

    def _unrecorded(self, value: Any) -> dict[str, Any] | None:
        """The attributes of an object, unless they are recorded already."""
        names = object.__getattribute__(value, "__dict__")
        return names if type(names) is dict and id(names) not in self._contents else None

    def _note(self, container: Any, place: Place, are_names: bool) -> Any:
        if isinstance(container, dict):
            ignored = _NO_NAMES if place[1] else OF_EVERY_MODULE
            before: Any = _own(container, ignored, self._with_large)
        else:
            before = container.copy()
        names = frozenset(container) if isinstance(container, dict) else _NO_NAMES
        self._contents[id(container)] = Contents(container, before, len(container), names, place, are_names)
        return before

    def _record_parts(self, value: Any, place: Place, depth: int) -> None:
        """Record the parts of a value that can change in place; of objects only those directly in attributes."""
        kind = type(value)
        if kind is torch.Tensor:
            if is_small(value):
                self._copies.append((value, value.detach().clone(), place))
        elif kind in CONTAINERS or kind is tuple:
            if id(value) not in self._contents and (depth == NESTED or len(value) <= self._room):
                items = value if kind is tuple else self._note(value, place, are_names=False)
                self._record_parts_of_all(items.values() if kind in DICTS else items, place, depth)
        elif _is_small_array(value):
            self._generators.append(functools.partial(operator.setitem, value, ..., value.copy()))
        elif (put_back := generators.restorer_of(value)) is not None:
            self._generators.append(put_back)
        elif depth == NESTED and has_attributes(value) and (names := self._unrecorded(value)) is not None:
            items = self._note(names, place, are_names=True)
            if not is_of_torch(kind):
                self._record_parts_of_all(items.values(), place, depth)

    def _record_parts_of_all(self, items: Collection[Any], place: Place, depth: int) -> None:
        if depth > 0 and len(items) <= self._room:
            self._room -= len(items)
            for item in items:
                if type(item) not in ATOMS:
                    self._record_parts(item, place, depth - 1)

    def are_filled(self) -> bool:
        """Whether a run since has changed what is in containers, objects or small tensors of the CPU."""
        containers = (contents for contents in self._contents.values() if contents.place[1] or not contents.are_names)
        return any(map(_is_changed, containers)) or not all(
            same_numbers(tensor, copy) for tensor, copy, _ in self._copies if tensor.is_cpu
        )

    def restore(self) -> None:
        """Restore everything but large tensors in attributes.

        A large tensor that a run assigned stays, without its autograd graph, which would keep the run's saved tensors.
        """
        for contents in self._contents.values():
            if isinstance(contents.container, dict):
                others = contents.size - len(contents.before)  # ignored names, and large tensors
                is_whole = others <= len(contents.ignored & contents.names) and len(contents.container) == contents.size
                if not is_whole or not _holds(contents.container, contents.before):
                    self._restore_names(contents)
            elif isinstance(contents.container, set):
                if contents.container != contents.before:
                    contents.container.clear()
                    contents.container.update(contents.before)
            else:
                refill(contents.container, contents.before)
        for registry, before in self._hooks:
            if registry.keys() != before.keys():
                registry.clear()
                registry.update(before)
        self._restore_inside()
        self._weights.restore()

    def _restore_names(self, contents: Contents) -> None:
        names, before = contents.container, contents.before
        for name, value in [(name, value) for name, value in list(names.items()) if name not in contents.ignored]:
            has_history = self._has_history(value)
            stays = _is_large(value) and not self._with_large and contents.are_names and not has_history
            if name in before:
                if not stays:
                    names[name] = before[name]  # one by one: `update` of a Counter adds
            elif name not in contents.names:
                if not stays:
                    del names[name]
            elif has_history:
                names[name] = without_history(value)
        for name, value in before.items():
            names.setdefault(name, value)

    def _restore_inside(self, but_of: Container[int] = ()) -> None:
        """Restore objects in place: states of generators, and values of tensors, except those of some modules."""
        for put_back in self._generators:
            put_back()
        for tensor, copy, place in self._copies:
            is_wanted = id(place[0]) not in but_of and tensor.shape == copy.shape
            if is_wanted and not (tensor.is_cpu and same_numbers(tensor, copy)):  # the host's memory may be read-only
                tensor.data.copy_(copy)  # not counted: a graph whose backward is to come may have saved it

    def filled(self) -> Iterator[tuple[Place, Any]]:
        """The containers that were empty and no longer are, with their places."""
        for contents in self._contents.values():
            if contents.size == 0 and contents.container and not contents.are_names:
                yield contents.place, contents.container

    def lost_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a run since has removed one of these objects from its place."""
        wanted = set(map(id, tensors))

        def there(items: Iterable[Any]) -> set[int]:
            return wanted.intersection(map(id, items))

        return any(
            there(contents.items()) - there(_items_in(contents.container)) for contents in self._contents.values()
        )

    def have_history(self) -> bool:
        """Whether a run since has stored a tensor with an autograd graph in some attribute."""
        names = (contents for contents in self._contents.values() if isinstance(contents.container, dict))
        values = (
            value for contents in names for name, value in contents.container.items() if name not in contents.ignored
        )
        return any(map(self._has_history, values))

    def detach(self) -> None:
        """Detach tensors that a run whose backward is over has stored since, and remove those that it appended.

        The next run appends its own.
        """
        for contents in self._contents.values():
            container = contents.container
            if isinstance(container, dict):
                for name in [name for name in container if name not in contents.ignored]:
                    container[name] = self._detached(container[name])
            elif not isinstance(container, set):
                there = len(contents.before)
                items = (item for i, item in enumerate(container) if i < there or not self._has_history(item))
                refill(container, list(map(self._detached, items)))
        self._weights.restore()

    def _has_history(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and _compat.is_made_since(value, self._since)

    def _detached(self, value: Any, depth: int = NESTED) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach() if self._has_history(value) else value
        if depth == 0 or type(value) not in (list, dict) or id(value) in self._contents:
            return value
        items = value.items() if type(value) is dict else enumerate(value)
        without = {key: self._detached(item, depth - 1) for key, item in items}
        if all(map(operator.is_, without.values(), value.values() if type(value) is dict else value)):
            return value
        return without if type(value) is dict else list(without.values())


def _items_in(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def plain_tensors(model: nn.Module) -> list[tuple[torch.Tensor, nn.Module]]:
    """The unregistered tensors in attributes of a model's modules and in containers there, with their places."""
    contents = Attributes(model.modules(), with_large=True)._contents.values()
    tensors = ((value, each.place[0]) for each in contents for value in each.items() if type(value) is torch.Tensor)
    return list({id(tensor): (tensor, module) for tensor, module in tensors}.values())


@contextlib.contextmanager
def restored_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of a model's modules after the body, large tensors included.

    The comparison is not recorded as an operation, although it may run inside a block that is being recorded.
    """
    with _compat.without_dispatch_modes():
        attributes = Attributes(model.modules(), with_large=True)
    try:
        yield
    finally:
        with _compat.without_dispatch_modes():
            attributes.restore()


def without_history(value: torch.Tensor) -> torch.Tensor:
    """The tensor that a recomputation has assigned, detached from its graph; a gradient that reaches it is an error."""
    value = value.detach().requires_grad_()
    _compat.hook_gradient(value, _refuse_gradient)
    return value


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise RecomputationError(
        "a gradient reached a tensor that a block stored in an attribute, or a hook in a dict. The block was "
        "recomputed since, so the tensor has no autograd graph to the parameters. Use it in one backward with the "
        "rest of the step, or give a budget that keeps the block"
    )


def refill(sequence: Any, items: list[Any]) -> None:
    """Gives a list or a deque these items, in place."""
    if isinstance(sequence, list):
        sequence[:] = items
    elif len(sequence) != len(items) or not all(map(operator.is_, sequence, items)):
        sequence.clear()
        sequence.extend(items)


def _holds(names: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether all recorded items are in the container, and are the same objects."""
    return before.keys() <= names.keys() and all(map(operator.is_, map(names.__getitem__, before), before.values()))


def _is_changed(contents: Contents) -> bool:
    """Whether the items of a container have changed, apart from large tensors in attributes."""
    container, before = contents.container, contents.before
    if isinstance(container, dict):
        return len(container) != contents.size or not _holds(container, before)
    if isinstance(container, set):
        return bool(container != before)
    return len(container) != len(before) or not all(map(operator.is_, container, before))


def _own(names: dict[Any, Any], ignored: frozenset[str], with_large: bool) -> dict[Any, Any]:
    """The names and values of a namespace that are restored."""
    return {
        name: value
        for name, value in list(names.items())
        if name not in ignored and (with_large or type(value) in _SMALL or not _is_large(value))
    }


def _is_large(value: Any) -> bool:
    """Whether a tensor's storage is large: a loss may be one number in the storage of all its terms."""
    if not isinstance(value, torch.Tensor) or memory.storage_bytes(value) <= LARGE_BYTES:
        return False
    return not value.retains_grad


def _is_small_array(value: Any) -> bool:
    """Whether it is a NumPy array that can be copied and restored."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return bool(value.flags.writeable) and value.nbytes <= LARGE_BYTES


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's value can be copied and restored: it is written in place, and no result of a step."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference() or 0 in tensor.stride():
        return False
    return tensor.nbytes <= LARGE_BYTES and not tensor.requires_grad and not tensor.is_meta


def is_of_torch(kind: type) -> bool:
    """Whether objects of a class are torch's own."""
    return str(kind.__module__).partition(".")[0] == "torch"
