"""What a block leaves for the loss beside its result.

Some blocks put a loss of their own into an attribute (routers do), hooks collect features of modules inside of blocks,
and transformers what these return. Where the loss reads such a tensor, its gradient waits from the loss until the
block's backward, which then begins with it, too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.layouts import Layout, Layouts, layouts_of
from ..base.tree import ATOMS, tensors_in, unique_tensors_in
from ..rerun_state.attributes import MANY, NESTED
from ..rerun_state.hook_closures import CONTAINERS, own_names, reached
from ..rerun_state.module_state import LARGE_BYTES, OF_EVERY_MODULE
from ..rerun_state.parametrized import cached_weights
from . import isolated_block


class SideOutputs:
    """Finds what a run of modules that is about to begin leaves beside its result."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._since = _compat.history_mark()
        self._there = self._storages()
        self._owners = {place: id(names) for place, names in self._named()}

    def tensors(self, result: Any) -> list[torch.Tensor]:
        """Those with a backward, each once, that the run made and `result` does not have."""
        returned = {id(t) for t in tensors_in(result)}
        left = (tensor for tensor in self._tensors() if _compat.is_made_since(tensor, self._since))
        return [tensor for tensor in left if id(tensor) not in returned]

    def storages(self, others: Iterable[int]) -> dict[int, _compat.StorageRef]:
        """The large storages behind all that the run left, with a backward or without, but for those of others."""
        known = self._there.keys() | set(others)
        left = self._storages().items()
        return {key: ref for key, ref in left if ref.nbytes > LARGE_BYTES and key not in known}

    def added(self) -> list[_compat.StorageRef]:
        """The storages of what the run left elsewhere than under names that were there before it: a run again puts its
        own beside them, and holds both until its end.
        """
        there = (names for place, names in self._named() if self._owners.get(place) == id(names))
        replaced = [value for names in there for value in names.values() if isinstance(value, torch.Tensor)]
        known = self._there.keys() | memory.storages(replaced).keys()
        return [ref for key, ref in self._storages().items() if key not in known]

    def _storages(self) -> dict[int, _compat.StorageRef]:
        """The storages of what is there now."""
        refs = map(_compat.StorageRef, filter(memory.has_storage, self._tensors()))
        return {ref.key: ref for ref in refs}

    def _named(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The attributes of parts and of objects there, and the dicts among them, each by its place."""
        seen: set[int] = set()
        for part in self._parts:
            yield from _names_in(vars(part), (id(part),), seen, _HIDDEN)
        for module, name, value in reached(self._parts):
            names = vars(value) if isinstance(value, nn.Module) else {name: value}
            yield from _names_in(names, (id(module), "at hand"), seen)

    def _tensors(self) -> list[torch.Tensor]:
        at_hand = (value for _, _, value in reached(self._parts))
        attributes = [value for part in self._parts for _, value in _items_of(vars(part), _HIDDEN)]
        weights = list(cached_weights(self._parts).values())
        found = unique_tensors_in(
            [*attributes, *map(own_names, attributes), *map(_filled, at_hand), _collected(), weights]
        )
        retained = [tensor.grad for tensor in found if tensor.retains_grad]
        return unique_tensors_in([*found, *retained]) if retained else found

    def root(self, result: Any, known: Layouts) -> tuple[list[torch.Tensor], list[Layout | None]]:
        """What a backward of the block begins with, and how the gradients lie, None where there is none.

        `known` is what is known of the gradients of the result, and then of what is left beside it. As long as nothing
        is, all of the result gets gradients, which lie as it does, and the rest gets none.
        """
        returned, others = isolated_block.differentiable(result), self.tensors(result)
        if len(known) == len(returned) + len(others):
            return returned + others, list(known)
        return returned + others, [*layouts_of(returned), *(None for _ in others)]


#: The attributes of modules that have no tensors.
_HIDDEN = OF_EVERY_MODULE - {"_parameters", "_buffers"}


def _names_in(
    names: dict[Any, Any], place: tuple[Any, ...], seen: set[int], hidden: frozenset[str] = frozenset()
) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The names at a place, and those of dicts and objects among them, each once; those under hidden names left out."""
    yield place, names
    seen.add(id(names))
    for name, value in _items_of(names, hidden) if len(place) <= NESTED and len(names) <= MANY else ():
        inner = value if isinstance(value, dict) else own_names(value)
        if isinstance(inner, dict) and id(inner) not in seen:
            yield from _names_in(inner, (*place, name), seen)


def _items_of(names: dict[Any, Any], hidden: frozenset[str]) -> list[tuple[Any, Any]]:
    """Those that may have to do with a tensor; they are a few of many."""
    return [(name, value) for name, value in list(names.items()) if type(value) not in ATOMS and name not in hidden]


def _filled(value: Any) -> Any:
    if isinstance(value, CONTAINERS):
        return list(value.values() if isinstance(value, dict) else value)
    return getattr(value, "__dict__", None)


class Arrivals:
    """How the gradients of tensors lie when a backward brings them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.layouts: list[Layout | None] = [None] * len(tensors)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(lambda grad, index=index: self._note(index, grad))

    def _note(self, index: int, grad: torch.Tensor) -> None:
        self.layouts[index] = Layout(grad)


# -- what transformers collects ------------------------------------------------------------------------------


def _collector() -> Any:
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def _collected() -> Any:
    collector = _collector()
    return collector.get() if collector is not None else None


@contextlib.contextmanager
def collecting_apart() -> Iterator[None]:
    """What blocks run for is not seen by who collects what modules return (`output_hidden_states` and the like)."""
    collector, collected = _collector(), _collected()
    if collected is None:
        yield
        return
    token = collector.set({key: list(value) if isinstance(value, list) else value for key, value in collected.items()})
    try:
        yield
    finally:
        collector.reset(token)
