"""Side outputs: tensors that a block stores for the loss elsewhere than in its result.

Routers store a loss of their own in an attribute, hooks collect features of modules inside of blocks, and transformers
collects their results. If the loss reads such a tensor, its gradient exists from the loss to the block's backward,
which begins with this gradient as well.
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
from ..rerun_state.hook_closures import CONTAINERS, objects_of_hooks, own_names
from ..rerun_state.module_state import LARGE_BYTES, OF_EVERY_MODULE
from ..rerun_state.parametrized import cached_weights
from . import isolated_block


class SideOutputs:
    """The side outputs of a run of modules that is about to begin."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._since = _compat.history_mark()
        self._there = self._storages()
        self._owners = {place: id(names) for place, names in self._named()}

    def tensors(self, result: Any) -> list[torch.Tensor]:
        """The tensors with a backward, each once, that the run made and `result` does not contain."""
        returned = {id(t) for t in tensors_in(result)}
        left = (tensor for tensor in self._tensors() if _compat.is_made_since(tensor, self._since))
        return [tensor for tensor in left if id(tensor) not in returned]

    def storages(self, others: Iterable[int]) -> dict[int, _compat.StorageRef]:
        """The large storages of all side outputs, with a backward or without, except the given ones."""
        known = self._there.keys() | set(others)
        left = self._storages().items()
        return {key: ref for key, ref in left if ref.nbytes > LARGE_BYTES and key not in known}

    def added(self) -> list[_compat.StorageRef]:
        """The storages of side outputs under names that did not exist before the run.

        A recomputation adds its own next to them, and both exist until its end.
        """
        there = (names for place, names in self._named() if self._owners.get(place) == id(names))
        replaced = [value for names in there for value in names.values() if isinstance(value, torch.Tensor)]
        known = self._there.keys() | memory.storages(replaced).keys()
        return [ref for key, ref in self._storages().items() if key not in known]

    def _storages(self) -> dict[int, _compat.StorageRef]:
        """The storages of the present values."""
        refs = map(_compat.StorageRef, filter(memory.has_storage, self._tensors()))
        return {ref.key: ref for ref in refs}

    def _named(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The attributes of modules and of objects in them, and the dicts among them, each by its place."""
        seen: set[int] = set()
        for part in self._parts:
            yield from _names_in(vars(part), (id(part),), seen, _IGNORED)
        for module, name, value in objects_of_hooks(self._parts):
            names = vars(value) if isinstance(value, nn.Module) else {name: value}
            yield from _names_in(names, (id(module), "at hand"), seen)

    def _tensors(self) -> list[torch.Tensor]:
        at_hand = (value for _, _, value in objects_of_hooks(self._parts))
        attributes = [value for part in self._parts for _, value in _items_of(vars(part), _IGNORED)]
        weights = list(cached_weights(self._parts).values())
        tensors = unique_tensors_in(
            [*attributes, *map(own_names, attributes), *map(_filled, at_hand), _collected(), weights]
        )
        retained = [tensor.grad for tensor in tensors if tensor.retains_grad]
        return unique_tensors_in([*tensors, *retained]) if retained else tensors

    def root(self, result: Any, known: Layouts) -> tuple[list[torch.Tensor], list[Layout | None]]:
        """The tensors with which a backward of the block begins, and the layouts of their gradients; None for none.

        known: the known layouts of gradients, of the result and then of side outputs. Without known layouts, all of the
        result gets gradients of its own layout, and side outputs get none.
        """
        returned, others = isolated_block.differentiable(result), self.tensors(result)
        if len(known) == len(returned) + len(others):
            return returned + others, list(known)
        return returned + others, [*layouts_of(returned), *(None for _ in others)]


#: The attributes of modules that have no tensors.
_IGNORED = OF_EVERY_MODULE - {"_parameters", "_buffers"}


def _names_in(
    names: dict[Any, Any], place: tuple[Any, ...], seen: set[int], ignored: frozenset[str] = frozenset()
) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The names at a place, and those of dicts and objects among their values, each once; without ignored ones."""
    yield place, names
    seen.add(id(names))
    for name, value in _items_of(names, ignored) if len(place) <= NESTED and len(names) <= MANY else ():
        inner = value if isinstance(value, dict) else own_names(value)
        if isinstance(inner, dict) and id(inner) not in seen:
            yield from _names_in(inner, (*place, name), seen)


def _items_of(names: dict[Any, Any], ignored: frozenset[str]) -> list[tuple[Any, Any]]:
    """The values that may contain a tensor, which are few."""
    return [(name, value) for name, value in list(names.items()) if type(value) not in ATOMS and name not in ignored]


def _filled(value: Any) -> Any:
    if isinstance(value, CONTAINERS):
        return list(value.values() if isinstance(value, dict) else value)
    return getattr(value, "__dict__", None)


class ArrivingLayouts:
    """The layouts of the gradients of tensors when they arrive in a backward."""

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
def hidden_from_collectors() -> Iterator[None]:
    """Hide the body's module calls from code that collects results of modules, such as `output_hidden_states`."""
    collector, collected = _collector(), _collected()
    if collected is None:
        yield
        return
    token = collector.set({key: list(value) if isinstance(value, list) else value for key, value in collected.items()})
    try:
        yield
    finally:
        collector.reset(token)
