"""Captured inputs: tensors with an autograd graph that a block reads although they are not arguments.

Examples are keys and values shared across layers, a hypernetwork's weights in an attribute, skips in a list, cached
weights. When a block runs alone, it must be detached from their graphs, or its backward would run on into the rest of
the step. One run records the arguments of every function, which shows the captured inputs. From then on they are
treated as arguments: functions get fresh leaf tensors instead of them, and the block's gradients end there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base import _compat
from ..base.errors import Unsupported
from ..base.tree import Tree, tensors_inside
from ..rerun_state.globals_and_closures import values_read
from ..rerun_state.hook_closures import is_own_object, objects_of_hooks
from ..rerun_state.module_state import OF_EVERY_MODULE
from ..rerun_state.parametrized import cached_weights


def has_earlier_nodes(tensors: Iterable[torch.Tensor], since: int) -> bool:
    """Whether a backward from these outputs reaches functions that ran before a mark, leaves not counted."""
    functions = (node for node in _compat.nodes_behind(tensors) if not _compat.is_end_of_graph(node))
    return not all(_compat.ran_since(node, since) for node in functions)


def leaves_behind(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The identities of the leaves that receive gradients in a backward from these outputs."""
    return {id(node.variable) for node in _compat.nodes_behind(tensors) if _compat.is_end_of_graph(node)}


class _ArgumentMode(TorchFunctionMode):
    """Intercepts the arguments of functions, those of `torch.autograd.Function` included."""

    def __enter__(self) -> Any:
        self._entered = _compat.intercepted_arguments(self.of_arguments)
        self._entered.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._entered.__exit__(*exc)

    def of_arguments(self, arguments: Any) -> Any:
        """The arguments to pass to a function that is called with (args, kwargs)."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.of_arguments((args, kwargs or {}))
        return func(*args, **kwargs)


class InputFinder(_ArgumentMode):
    """Records the tensors with a graph from before a mark that functions get, in order, each once."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self._since = since
        self._tensors: dict[int, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._tensors.values())

    def of_arguments(self, value: Any) -> Any:
        """Records such tensors in a value, and returns the value unchanged."""
        for tensor in Tree.of(value).leaves:
            if tensor.grad_fn is not None and not _compat.is_made_since(tensor, self._since):
                self._tensors.setdefault(id(tensor), tensor)
        return value


class Replacing(_ArgumentMode):
    """Replaces some tensors in the arguments of functions."""

    def __init__(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._others = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
        self._alive = list(tensors)  # so that no other gets the identity of one
        self._versions = _compat.versions(others)

    def of_arguments(self, value: Any) -> Any:
        """A value with its tensors replaced."""
        tree = Tree.of(value)
        if not any(id(leaf) in self._others for leaf in tree.leaves):
            return value
        return tree.build([self._others.get(id(leaf), leaf) for leaf in tree.leaves])

    def wrote(self) -> bool:
        """Whether one of the replacements was written in place."""
        return _compat.versions(self._others.values()) != self._versions


def places_of(tensors: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> list[str]:
    """The places from which code of modules reads each captured tensor, in words."""
    named = {id(tensor): where for tensor, where in _named(modules)}
    return [named.get(id(tensor), "a variable of its code") for tensor in tensors]


def _named(modules: Sequence[nn.Module]) -> Iterable[tuple[torch.Tensor, str]]:
    """The tensors that code of modules may read, with their places."""
    read = values_read(modules, _may_hold)()
    places: list[tuple[str, Any]] = [(name, value) for name, value in read]
    places += [(f"'{name}', which it has at hand,", value) for _, name, value in objects_of_hooks(modules)]
    for module in modules:
        for name, value in list(vars(module).items()):
            if name not in OF_EVERY_MODULE:
                places.append((f"the attribute '{name}' of {type(module).__name__}", value))
    for where, value in places:
        inside = itertools.islice(_tensors_of(value), _MANY)
        yield from ((tensor, where) for tensor in inside)
    yield from ((weight, "a weight in parametrize.cached()") for weight in cached_weights(modules).values())


_MANY = 1000


def _may_hold(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, dict, list, tuple)) or is_own_object(value)


def _tensors_of(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, nn.Module):
        return (t for name, held in vars(value).items() if name not in OF_EVERY_MODULE for t in _tensors_of(held))
    return (tensor for _, tensor in tensors_inside(value))


def refuse(name: str, tensors: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> None:
    """Raise Unsupported: the captured inputs of the block of this name cannot be detached."""
    places = places_of(tensors, modules)
    places += [where for tensor, where in _named(modules) if tensor.grad_fn is not None]  # written in place since
    raise Unsupported(
        f"'{name}' reads a value with gradients that it is not passed ({', '.join(dict.fromkeys(places))}), and writes "
        "it in place, or hands it to compiled code: pass it to the block as an argument, and return what is made of it"
    )
