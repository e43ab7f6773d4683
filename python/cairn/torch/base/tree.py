"""Arguments and results as trees: their tensors are extracted in a fixed order, and can be replaced.

Tuples, lists, dicts, named tuples, dataclasses and subclasses of these (a Hugging Face `ModelOutput`) are traversed.
Other objects are leaves; `tensors_inside` returns the tensors in such an object.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from .errors import Unsupported

#: Classes of values that hold no others.
ATOMS = frozenset(
    (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        slice,
        type(Ellipsis),
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.memory_format,
        torch.Generator,
        types.FunctionType,
        types.MethodType,
        types.BuiltinFunctionType,
        type,
        types.ModuleType,
    )
)
_SEARCH_DEPTH = 4


class Slot:
    """Where a tensor was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return type(other) is Slot and self.index == other.index

    def __hash__(self) -> int:
        return hash(self.index)


#: Classes of values that are equal only if they mean the same. Numbers are not among them: 1, 1.0 and True are equal.
PLAIN = frozenset(
    (Slot, type(None), bool, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format,
     type)
)  # fmt: skip

_SLOTS = [Slot(index) for index in range(64)]  # shared by all trees, so that equal shapes are compared by identity


@dataclasses.dataclass
class Tree:
    """A value with its tensors taken out, each tensor once however often it appears."""

    shape: Any
    leaves: list[torch.Tensor]
    opaque: list[Any]  # objects that were not opened
    is_plain: bool = False  # of a call: what is passed beside tensors is equal only to what says the same

    @classmethod
    def of(cls, value: Any) -> Tree:
        """Takes a value apart; the value itself is left as it is."""
        tree = cls(None, [], [])
        try:
            tree.shape = tree._take(value, {})
        except RecursionError:
            raise _holds_itself() from None
        return tree

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
        """`of((args, kwargs))`, in short."""
        tree = cls(None, [], [])
        seen: dict[int, Slot] = {}
        try:
            shapes = [value if type(value) in ATOMS else tree._take(value, seen) for value in args]
            options = {name: tree._take(value, seen) for name, value in kwargs.items()}
        except RecursionError:
            raise _holds_itself() from None
        tree.shape = tuple(shapes), options
        tree.is_plain = PLAIN.issuperset(map(type, shapes)) and PLAIN.issuperset(map(type, options.values()))
        return tree

    def _take(self, value: Any, seen: dict[int, Slot]) -> Any:
        cls = type(value)
        if cls in ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            slot = seen.get(id(value))
            if slot is None:
                index = len(self.leaves)
                slot = seen[id(value)] = _SLOTS[index] if index < len(_SLOTS) else Slot(index)
                self.leaves.append(value)
            return slot
        if cls is tuple:
            return tuple([self._take(item, seen) for item in value])
        if cls is dict:
            return {key: self._take(item, seen) for key, item in value.items()}
        if cls is list:
            return [self._take(item, seen) for item in value]
        items = children(value)
        if items is None:
            self.opaque.append(value)
            return value
        return _replaced(value, items, [self._take(item, seen) for _, item in items])

    def build(self, leaves: list[torch.Tensor]) -> Any:
        """The value again, with other tensors."""
        return _put(self.shape, leaves)

    def path(self, index: int) -> str:
        """Where a tensor is, as a person would write it."""
        return next(_paths(self.shape, index, ""), f"tensor {index}")


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a container with their keys; None for a value that is no container."""
    cls = type(value)
    if cls is tuple or cls is list:
        return list(enumerate(value))
    if cls is dict:
        return list(value.items())
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]  # some may be set later
    return None


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    """A container of the same class with other parts."""
    cls = type(value)
    if cls is tuple or cls is list:
        return cls(items.values())
    if cls is dict:
        return items
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(items.values())
    if isinstance(value, (tuple, list)):
        return cls(items.values())
    other = copy.copy(value)
    for key, item in items.items():
        if isinstance(value, Mapping):
            other[key] = item
        else:
            object.__setattr__(other, key, item)
    return other


def fill(container: Any, items: list[tuple[Any, Any]]) -> None:
    """Gives a list, a mapping or a dataclass other parts, in place."""
    if isinstance(container, list):
        container[:] = [item for _, item in items]
    elif isinstance(container, MutableMapping):
        for key in container.keys() - dict(items).keys():
            del container[key]
        for key, item in items:
            container[key] = item
    else:
        for key, item in items:
            object.__setattr__(container, key, item)


def _put(shape: Any, leaves: list[torch.Tensor]) -> Any:
    cls = type(shape)
    if cls is Slot:
        return leaves[shape.index]
    if cls in ATOMS:
        return shape
    if cls is tuple:
        return tuple([_put(item, leaves) for item in shape])
    if cls is dict:
        return {key: _put(item, leaves) for key, item in shape.items()}
    if cls is list:
        return [_put(item, leaves) for item in shape]
    items = children(shape)
    return shape if items is None else _replaced(shape, items, [_put(item, leaves) for _, item in items])


def _replaced(value: Any, items: list[tuple[Any, Any]], parts: list[Any]) -> Any:
    """The container with its parts replaced; itself where none is another."""
    if all(part is item for part, (_, item) in zip(parts, items, strict=True)):
        return value
    return _with_items(value, {key: part for part, (key, _) in zip(parts, items, strict=True)})


def _paths(shape: Any, index: int, prefix: str) -> Iterator[str]:
    if type(shape) is Slot:
        if shape.index == index:
            yield prefix
        return
    for key, item in children(shape) or ():
        yield from _paths(item, index, f"{prefix}[{key!r}]" if prefix else str(key))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers, in a fixed order, as often as it appears."""
    try:
        yield from _tensors_in(value)
    except RecursionError:
        raise _holds_itself() from None


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) not in ATOMS:
        for _, item in children(value) or ():
            yield from _tensors_in(item)


def _holds_itself() -> Unsupported:
    return Unsupported(
        "something that is passed, or returned, holds itself, directly or through others: pass what is needed of it"
    )


def unique_tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers, once, in the order of `tensors_in`; containers may hold themselves."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: dict[int, torch.Tensor] = {}
    _collect(value, tensors, set())
    return list(tensors.values())


def _collect(value: Any, tensors: dict[int, torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        tensors[id(value)] = value
    elif type(value) not in ATOMS and id(value) not in seen:
        seen.add(id(value))
        for _, item in children(value) or ():
            _collect(item, tensors, seen)


def tensors_inside(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an object holds in its attributes, with their names; modules are not searched."""
    yield from _search(value, type(value).__name__, set(), _SEARCH_DEPTH)


def _search(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == 0 or type(value) in ATOMS or id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    items = children(value)
    if items is not None:
        for key, item in items:
            yield from _search(item, f"{name}[{key!r}]", seen, depth - 1)
    else:
        for key, item in [*getattr(value, "__dict__", {}).items(), *fields_in_slots(value)]:
            yield from _search(item, f"{name}.{key}", seen, depth - 1)


def fields_in_slots(value: Any) -> Iterator[tuple[str, Any]]:
    """The values of an object's `__slots__`, by name."""
    for cls in type(value).__mro__:
        for name, place in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(place, types.MemberDescriptorType):
                try:
                    yield name, place.__get__(value)
                except AttributeError:  # nothing is in it
                    continue
