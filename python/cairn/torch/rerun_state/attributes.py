"""What runs of a block leave in attributes, taken away again.

Blocks leave losses of their own, counts and statistics in attributes of their modules, in lists, dicts and the like
there, and in small tensors that are no buffers. A run that the model did not ask for (one that measures a block, or has
its saved tensors once more) must not leave any: the model would count it twice, or run a backward into a graph that is
gone. What sample steps leave is taken away by what was seen of it in several of them (`step_attributes.py`).

What a run changes past what is put back here keeps a block from being recomputed (`side_effects.py`).
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
from .hook_closures import has_attributes, reached
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


class Found(NamedTuple):
    """A container, and how it was found."""

    container: Any
    before: Any  # what is put back of it
    size: int  # how much there was in it
    names: frozenset[Any]  # all that it had, of attributes and dicts; else none
    place: Place  # whose attribute it is, or is in; without a name the attributes of a module
    are_names: bool  # the attributes of a module or of an object

    def items(self) -> Iterable[Any]:
        """What was in it, of names what is put back."""
        return self.before.values() if isinstance(self.before, dict) else self.before

    @property
    def hidden(self) -> frozenset[str]:
        """Names in it that are left as they are."""
        return _NO_NAMES if self.place[1] else OF_EVERY_MODULE


class Attributes:
    """The attributes of modules and of objects among them, what is in containers there, and what hooks may fill.

    Large tensors that have a name are left as they are, unless someone waits for their gradients, or they are wanted
    (`with_large`, and then hooks of the modules, too): to hold those that a run replaces takes memory.
    """

    __slots__ = ("_copies", "_found", "_generators", "_hooks", "_room", "_since", "_weights", "_with_large")

    def __init__(self, modules: Iterable[nn.Module], with_large: bool = False) -> None:
        self._with_large, self._room = with_large, MANY
        self._since = _compat.history_mark()
        self._found: dict[int, Found] = {}  # by the identity of the container
        self._copies: list[tuple[torch.Tensor, torch.Tensor, Place]] = []  # of tensors that may be written
        self._generators: list[Callable[[], None]] = []  # what puts them back, and small arrays
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []  # registries, with what was in them
        modules = list(modules)
        self._weights = CachedWeights(modules)
        for module in modules:
            if with_large:
                self._hooks += [(vars(module)[name], dict(vars(module)[name])) for name in _HOOKS]
            for name, value in self._note(vars(module), (module, ""), are_names=True).items():
                if type(value) not in ATOMS:
                    self._look_into(value, (module, name), NESTED)
        for module, name, value in reached(modules):
            self._reach(value, (module, name))

    def _reach(self, value: Any, place: Place) -> None:
        """Notes what hooks may fill: a container, or the attributes of something, with the containers among them."""
        if type(value) in CONTAINERS:
            self._look_into(value, place, NESTED - 1)
            return
        is_module = isinstance(value, nn.Module)
        if (is_module or has_attributes(value)) and (names := self._unnoted(value)) is not None:
            noted = self._note(names, (value, "") if is_module else place, are_names=True)
            for name, item in noted.items():
                if type(item) in CONTAINERS:
                    self._look_into(item, (value, name) if is_module else place, NESTED - 1)

    def _unnoted(self, value: Any) -> dict[str, Any] | None:
        """The attributes of something, unless they were noted."""
        names = object.__getattribute__(value, "__dict__")
        return names if type(names) is dict and id(names) not in self._found else None

    def _note(self, container: Any, place: Place, are_names: bool) -> Any:
        if isinstance(container, dict):
            hidden = _NO_NAMES if place[1] else OF_EVERY_MODULE
            before: Any = _own(container, hidden, self._with_large)
        else:
            before = container.copy()
        names = frozenset(container) if isinstance(container, dict) else _NO_NAMES
        self._found[id(container)] = Found(container, before, len(container), names, place, are_names)
        return before

    def _look_into(self, value: Any, place: Place, depth: int) -> None:
        """Notes what of a value can change while its name stands for it; objects are opened in attributes alone."""
        kind = type(value)
        if kind is torch.Tensor:
            if is_small(value):
                self._copies.append((value, value.detach().clone(), place))
        elif kind in CONTAINERS or kind is tuple:
            if id(value) not in self._found and (depth == NESTED or len(value) <= self._room):
                items = value if kind is tuple else self._note(value, place, are_names=False)
                self._look_into_all(items.values() if kind in DICTS else items, place, depth)
        elif _is_small_array(value):
            self._generators.append(functools.partial(operator.setitem, value, ..., value.copy()))
        elif (put_back := generators.putting_back(value)) is not None:
            self._generators.append(put_back)
        elif depth == NESTED and has_attributes(value) and (names := self._unnoted(value)) is not None:
            items = self._note(names, place, are_names=True)
            if not is_of_torch(kind):
                self._look_into_all(items.values(), place, depth)

    def _look_into_all(self, items: Collection[Any], place: Place, depth: int) -> None:
        if depth > 0 and len(items) <= self._room:
            self._room -= len(items)
            for item in items:
                if type(item) not in ATOMS:
                    self._look_into(item, place, depth - 1)

    def are_filled(self) -> bool:
        """Whether a run since has changed what is in containers, objects or small tensors of the CPU."""
        containers = (found for found in self._found.values() if found.place[1] or not found.are_names)
        return any(map(_is_changed, containers)) or not all(
            same_numbers(tensor, copy) for tensor, copy, _ in self._copies if tensor.is_cpu
        )

    def restore(self) -> None:
        """Makes all be as it was, but for large tensors with a name: those that a run has left in the place of others
        lose its graph, which would keep what the run saved.
        """
        for found in self._found.values():
            if isinstance(found.container, dict):
                others = found.size - len(found.before)  # hidden names, and large tensors
                is_whole = others <= len(found.hidden) and len(found.container) == found.size
                if not is_whole or not _holds(found.container, found.before):
                    self._restore_names(found)
            elif isinstance(found.container, set):
                if found.container != found.before:
                    found.container.clear()
                    found.container.update(found.before)
            else:
                refill(found.container, found.before)
        for registry, before in self._hooks:
            if registry.keys() != before.keys():
                registry.clear()
                registry.update(before)
        self._restore_inside()
        self._weights.restore()

    def _restore_names(self, found: Found) -> None:
        names, before = found.container, found.before
        for name, value in [(name, value) for name, value in list(names.items()) if name not in found.hidden]:
            has_history = self._has_history(value)
            stays = _is_large(value) and not self._with_large and found.are_names and not has_history
            if name in before:
                if not stays:
                    names[name] = before[name]  # one by one: counters add what they are updated with
            elif name not in found.names:
                if not stays:
                    del names[name]
            elif has_history:
                names[name] = without_history(value)
        for name, value in before.items():
            names.setdefault(name, value)

    def _restore_inside(self, but_of: Container[int] = ()) -> None:
        """What is there under the same names: states of generators, and values of tensors but those of some modules."""
        for put_back in self._generators:
            put_back()
        for tensor, copy, place in self._copies:
            is_wanted = id(place[0]) not in but_of and tensor.shape == copy.shape
            if is_wanted and not (tensor.is_cpu and same_numbers(tensor, copy)):  # the host's memory may be read-only
                tensor.data.copy_(copy)  # not counted: a graph whose backward is to come may have saved it

    def filled(self) -> Iterator[tuple[Place, Any]]:
        """What was empty and no longer is, with its place."""
        for found in self._found.values():
            if found.size == 0 and found.container and not found.are_names:
                yield found.place, found.container

    def lack(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a run since has taken one of these out of where it was."""
        wanted = set(map(id, tensors))

        def there(items: Iterable[Any]) -> set[int]:
            return wanted.intersection(map(id, items))

        return any(there(found.items()) - there(_items_in(found.container)) for found in self._found.values())

    def have_history(self) -> bool:
        """Whether a run since left a tensor under some name that gradients could go through."""
        names = (found for found in self._found.values() if isinstance(found.container, dict))
        values = (value for found in names for name, value in found.container.items() if name not in found.hidden)
        return any(map(self._has_history, values))

    def detach(self) -> None:
        """Takes the history from tensors that were made since: that of a run whose backward is over; and out of
        sequences what was added of them, which the next run adds again.
        """
        for found in self._found.values():
            container = found.container
            if isinstance(container, dict):
                for name in [name for name in container if name not in found.hidden]:
                    container[name] = self._detached(container[name])
            elif not isinstance(container, set):
                there = len(found.before)
                items = (item for i, item in enumerate(container) if i < there or not self._has_history(item))
                refill(container, list(map(self._detached, items)))
        self._weights.restore()

    def _has_history(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and _compat.is_made_since(value, self._since)

    def _detached(self, value: Any, depth: int = NESTED) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach() if self._has_history(value) else value
        if depth == 0 or type(value) not in (list, dict) or id(value) in self._found:
            return value
        items = value.items() if type(value) is dict else enumerate(value)
        without = {key: self._detached(item, depth - 1) for key, item in items}
        if all(map(operator.is_, without.values(), value.values() if type(value) is dict else value)):
            return value
        return without if type(value) is dict else list(without.values())


def _items_in(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def plain_tensors(model: nn.Module) -> list[tuple[torch.Tensor, nn.Module]]:
    """The tensors in attributes of a model's modules, and in containers there, that nobody registered; and where."""
    found = Attributes(model.modules(), with_large=True)._found.values()
    tensors = ((value, each.place[0]) for each in found for value in each.items() if type(value) is torch.Tensor)
    return list({id(tensor): (tensor, module) for tensor, module in tensors}.values())


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """The body leaves what a model's modules have in attributes as it was, large tensors included. Comparing them is
    no operation of the body: it may lie in a block whose operations are recorded.
    """
    with _compat.without_dispatch_modes():
        attributes = Attributes(model.modules(), with_large=True)
    try:
        yield
    finally:
        with _compat.without_dispatch_modes():
            attributes.restore()


def without_history(value: torch.Tensor) -> torch.Tensor:
    """What a later run has left in the place of a tensor, which no gradient can go through without being lost."""
    value = value.detach().requires_grad_()
    _compat.hook_gradient(value, _refuse_gradient)
    return value


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise RecomputationError(
        "a gradient has come to a tensor that a block left in an attribute, or a hook in a dict: it was recomputed "
        "since, and the tensor is what that run left, without the way to the parameters. Use it in one backward with "
        "the rest of the step, or give a budget that keeps the block"
    )


def refill(sequence: Any, items: list[Any]) -> None:
    """Gives a list or a deque these items, in place."""
    if isinstance(sequence, list):
        sequence[:] = items
    elif len(sequence) != len(items) or not all(map(operator.is_, sequence, items)):
        sequence.clear()
        sequence.extend(items)


def _holds(names: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether all that was there is there, and the same."""
    return before.keys() <= names.keys() and all(map(operator.is_, map(names.__getitem__, before), before.values()))


def _is_changed(found: Found) -> bool:
    """Whether something else is in a container, large tensors that have names aside."""
    container, before = found.container, found.before
    if isinstance(container, dict):
        return len(container) != found.size or not _holds(container, before)
    if isinstance(container, set):
        return bool(container != before)
    return len(container) != len(before) or not all(map(operator.is_, container, before))


def _own(names: dict[Any, Any], hidden: frozenset[str], with_large: bool) -> dict[Any, Any]:
    """What is put back of something with names."""
    return {
        name: value
        for name, value in list(names.items())
        if name not in hidden and (with_large or type(value) in _SMALL or not _is_large(value))
    }


def _is_large(value: Any) -> bool:
    """Whether what a tensor is seen in takes much: a loss may be a single number in the storage of all its terms."""
    if not isinstance(value, torch.Tensor) or memory.storage_bytes(value) <= LARGE_BYTES:
        return False
    return not value.retains_grad


def _is_small_array(value: Any) -> bool:
    """Whether it is one of NumPy's that can be noted and put back."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return bool(value.flags.writeable) and value.nbytes <= LARGE_BYTES


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's value can be noted and put back: one that is written in place, and no result of a step."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference() or 0 in tensor.stride():
        return False
    return tensor.nbytes <= LARGE_BYTES and not tensor.requires_grad and not tensor.is_meta


def is_of_torch(kind: type) -> bool:
    """Whether objects of a class are torch's own."""
    return str(kind.__module__).partition(".")[0] == "torch"
