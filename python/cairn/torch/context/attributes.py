"""What runs of a block leave in attributes, taken away again.

Blocks leave losses of their own, counts and statistics in attributes of their modules, in lists, dicts and the like
there, and in small tensors that are no buffers. A run that the model did not ask for (one that measures a block, or has
its saved tensors once more) must not leave any: the model would count it twice, or run a backward into a graph that is
gone. Nor must sample steps leave losses in lists that the training loop empties, or be counted as steps of training.

What a run changes past what is put back here keeps a block from being run again (`lasting.py`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base import _compat, memory
from ..base.tree import children
from . import generators
from .reach import has_attributes, own_names, reached
from .state import same_numbers

LARGE_BYTES = 4096  # of a tensor that is no loss, nor a statistic
NESTED = 4  # so deep are containers looked into
MANY = 1000  # items of containers that are looked into; what an attribute stands for is copied whatever its size

#: What a module has before its class gives it anything; buffers are put back by `state.py`.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = sorted(name for name in OF_EVERY_MODULE if "forward" in name and "hooks" in name)
_NO_NAMES: frozenset[str] = frozenset()
_NUMBERS = frozenset((bool, int, float, complex, str, bytes))
_SMALL = _NUMBERS | {type(None), tuple}
_SEQUENCES = (list, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_CONTAINERS = frozenset((*_SEQUENCES, *_DICTS, set))
_ATOMS = _NUMBERS | {type(None), nn.Parameter, torch.dtype, torch.device, types.FunctionType, types.MethodType}

Place = tuple[nn.Module, str]  # a module, and the name of its attribute


class _Found(NamedTuple):
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

    __slots__ = ("_copies", "_extents", "_first", "_found", "_generators", "_hooks", "_of_steps", "_replaced", "_room",
                 "_seen", "_since", "_with_large", "_written")  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module], with_large: bool = False) -> None:
        self._with_large, self._room = with_large, MANY
        self._since = _compat.history_mark()
        self._found: dict[int, _Found] = {}  # by the identity of the container
        self._copies: list[tuple[torch.Tensor, torch.Tensor, Place]] = []  # of tensors that may be written
        self._generators: list[Callable[[], None]] = []  # what puts them back, and small arrays
        #: by container and name: what had tensors at the first look, and the first tensor of each at the latest one
        self._first: dict[tuple[int, Any], Any] | None = None
        self._seen: dict[tuple[int, Any], weakref.ref[torch.Tensor]] = {}
        self._replaced: set[tuple[int, Any]] = set()
        self._of_steps: set[tuple[int, Any]] = set()  # what had tensors that gradients could go through
        self._extents: dict[tuple[int, Any], Any] = {}  # of containers with a new name, as they were first seen
        self._written: set[tuple[int, Any]] = set()  # those of them in which every forward writes something down
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []  # registries, with what was in them
        modules = list(modules)
        for module in modules:
            if with_large:
                self._hooks += [(vars(module)[name], dict(vars(module)[name])) for name in _HOOKS]
            for name, value in self._note(vars(module), (module, ""), are_names=True).items():
                if type(value) not in _ATOMS:
                    self._look_into(value, (module, name), NESTED)
        for module, name, value in reached(modules):
            self._reach(value, (module, name))

    def _reach(self, value: Any, place: Place) -> None:
        """Notes what hooks may fill: a container, or the attributes of something, with the containers among them."""
        if type(value) in _CONTAINERS:
            self._look_into(value, place, NESTED - 1)
            return
        is_module = isinstance(value, nn.Module)
        if (is_module or has_attributes(value)) and (names := self._unnoted(value)) is not None:
            noted = self._note(names, (value, "") if is_module else place, are_names=True)
            for name, item in noted.items():
                if type(item) in _CONTAINERS:
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
        self._found[id(container)] = _Found(container, before, len(container), names, place, are_names)
        return before

    def _look_into(self, value: Any, place: Place, depth: int) -> None:
        """Notes what of a value can change while its name stands for it; objects are opened in attributes alone."""
        kind = type(value)
        if kind is torch.Tensor:
            if is_small(value):
                self._copies.append((value, value.detach().clone(), place))
        elif kind in _CONTAINERS or kind is tuple:
            if id(value) not in self._found and (depth == NESTED or len(value) <= self._room):
                items = value if kind is tuple else self._note(value, place, are_names=False)
                self._look_into_all(items.values() if kind in _DICTS else items, place, depth)
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
                if type(item) not in _ATOMS:
                    self._look_into(item, place, depth - 1)

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
                _refill(found.container, found.before)
        for registry, before in self._hooks:
            if registry.keys() != before.keys():
                registry.clear()
                registry.update(before)
        self._restore_inside()

    def _restore_names(self, found: _Found) -> None:
        names, before = found.container, found.before
        for name, value in [(name, value) for name, value in names.items() if name not in found.hidden]:
            has_history = self._has_history(value)
            stays = _is_large(value) and not self._with_large and found.are_names and not has_history
            if name in before:
                if not stays:
                    names[name] = before[name]  # one by one: counters add what they are updated with
            elif name not in found.names:
                if not stays:
                    del names[name]
            elif has_history:
                names[name] = value.detach().requires_grad_()
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

    def sequences(self) -> Iterator[Any]:
        """The lists and deques."""
        return (found.container for found in self._found.values() if isinstance(found.container, _SEQUENCES))

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
                _refill(container, list(map(self._detached, items)))

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

    def restore_numbers(self) -> None:
        """Puts back numbers, names, states of generators and values of small tensors, such as counts of steps. What was
        made meanwhile, as caches are, may stay, and in the modules that made such what belongs to it.
        """
        stays = self.made_something()
        for found in self._found.values():
            container, before = found.container, found.before
            if isinstance(container, dict):
                for name, value in before.items():
                    if type(value) in _NUMBERS:
                        container[name] = value
                is_filled = not found.are_names and id(found.place[0]) not in stays
                new = [name for name in container if name not in before] if is_filled else []
                if all(type(container[name]) in _NUMBERS for name in new):
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
            if isinstance(container, _SEQUENCES):
                is_out = _is_tensor if id(found.place[0]) in stays else _is_record
                pairs = zip(container, before, strict=False)
                kept = [was if item is not was and is_out(item) else item for item, was in pairs]
                added = [item for item in itertools.islice(container, len(before), None) if not is_out(item)]
                _refill(container, [*kept, *added])

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
            if isinstance(found.container, _SEQUENCES) and id(found.place[0]) not in made:
                _refill(found.container, found.before)


def plain_tensors(model: nn.Module) -> list[tuple[torch.Tensor, nn.Module]]:
    """The tensors in attributes of a model's modules, and in containers there, that nobody registered; and where."""
    found = Attributes(model.modules(), with_large=True)._found.values()
    tensors = ((value, each.place[0]) for each in found for value in each.items() if type(value) is torch.Tensor)
    return list({id(tensor): (tensor, module) for tensor, module in tensors}.values())


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """The body leaves what a model's modules have in attributes as it was, large tensors included."""
    attributes = Attributes(model.modules(), with_large=True)
    try:
        yield
    finally:
        attributes.restore()


def _first_tensor(value: Any, depth: int = NESTED) -> torch.Tensor | None:
    """A tensor, or the first one in a container: among a limited number of items, as deep as containers are opened.
    Objects are opened in attributes alone.
    """
    if isinstance(value, torch.Tensor):
        return value
    if depth == 0 or type(value) in _ATOMS:
        return None
    inner = children(value)
    if inner is None and depth == NESTED and isinstance(names := own_names(value), dict):
        inner = list(names.items())
    items = (_first_tensor(item, depth - 1) for _, item in itertools.islice(inner or (), MANY))
    return next((tensor for tensor in items if tensor is not None), None)


def _is_record(value: Any, depth: int = NESTED) -> bool:
    """Whether it is what a step would write down: a tensor, a number, or what is filled with such."""
    if isinstance(value, torch.Tensor) or type(value) in _NUMBERS:
        return True
    if type(value) not in (tuple, list, dict) or depth == 0 or not value:
        return False
    return all(_is_record(item, depth - 1) for item in (value.values() if type(value) is dict else value))


def _differ_by_numbers(items: set[Any], before: set[Any]) -> bool:
    return all(type(item) in _NUMBERS for item in items ^ before)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _refill(sequence: Any, items: list[Any]) -> None:
    if isinstance(sequence, list):
        sequence[:] = items
    elif len(sequence) != len(items) or not all(map(operator.is_, sequence, items)):
        sequence.clear()
        sequence.extend(items)


def _holds(names: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether all that was there is there, and the same."""
    return before.keys() <= names.keys() and all(map(operator.is_, map(names.__getitem__, before), before.values()))


def _new_in(found: _Found) -> Iterator[tuple[int, Any, Any]]:
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


def _new_extents(found: _Found) -> Iterator[tuple[tuple[int, Any], Any]]:
    """The containers with a new name, by place, each with its extent."""
    for key, name, value in list(_new_in(found)) if isinstance(found.container, dict) else ():
        if type(value) in _CONTAINERS:
            yield (key, name), _extent(value)


def _extent(value: Any, depth: int = NESTED) -> Any:
    """What changes when something is written down: numbers, and how many items containers have."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value if kind in _NUMBERS else None
    if kind is set or depth == 0 or len(value) > MANY:
        return len(value)
    return tuple(_extent(item, depth - 1) for item in (value.values() if kind in _DICTS else value))


def _has_history(value: Any) -> bool:
    tensor = _first_tensor(value)
    return tensor is not None and tensor.grad_fn is not None


def _own(names: dict[Any, Any], hidden: frozenset[str], with_large: bool) -> dict[Any, Any]:
    """What is put back of something with names."""
    return {
        name: value
        for name, value in names.items()
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
