"""Tensors from outside that a traced step reads: parameters, buffers, inputs; and the check that they are unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.errors import PlanMismatch
from ..base.tree import Slot, Tree, children
from ..profiling.sample import Sample
from .graph_program import ExternalTensor
from .records import Geometry


class Surroundings:
    """The tensors from outside that have a name, in the order in which they are a program's first externals."""

    def __init__(self, sample: Sample) -> None:
        self._model = sample.model
        self._tree = Tree.of((sample.args, sample.kwargs))
        self.external_tensors = [ExternalTensor(name, tensor) for name, tensor in _named_in(sample.model)]
        self._first_input = len(self.external_tensors)
        for index, tensor in enumerate(self._tree.leaves):
            self.external_tensors.append(ExternalTensor(_input_name(self._tree, index), tensor))
        self.index = {outside.name: index for index, outside in enumerate(self.external_tensors)}
        self._modes = _modes(sample.model)
        self._kinds: list[tuple[Any, ...]] = []
        self._names: list[str] = []

    def differentiable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that get gradients, by name."""
        for outside in self.external_tensors:
            if outside.tensor.requires_grad:
                yield outside.name, outside.tensor

    def note(self, externals: Sequence[ExternalTensor]) -> None:
        """Remembers how all the externals of a program are."""
        self._names = [outside.name for outside in externals]
        self._kinds = [_kind(outside.tensor) for outside in externals]

    def replace_inputs(self, externals: list[torch.Tensor], args: Any, kwargs: Mapping[str, Any] | None) -> None:
        """Puts other inputs in the place of those that were traced."""
        arguments = tuple(args) if isinstance(args, (tuple, list)) else () if args is None else (args,)
        tree = Tree.of((arguments, dict(kwargs or {})))
        if list(_rest(tree.shape)) != list(_rest(self._tree.shape)) or _sharing(tree) != _sharing(self._tree):
            raise PlanMismatch(
                "these inputs are arranged in another way than those that were traced, or numbers and texts among "
                "them differ; trace the step again"
            )
        for index, tensor in enumerate(tree.leaves):
            externals[self._first_input + index] = tensor.detach()

    def check(self, externals: Sequence[torch.Tensor]) -> None:
        """Refuses a step that differs from the traced one."""
        present = list(_named_in(self._model))
        traced = self.external_tensors[: self._first_input]
        if [name for name, _ in present] != [outside.name for outside in traced]:
            raise PlanMismatch("the model has other parameters or buffers than when it was traced")
        for (name, tensor), outside in zip(present, traced, strict=True):
            if tensor is not outside.tensor:
                raise PlanMismatch(f"{name} was replaced by another tensor since the model was traced")
        if _modes(self._model) != self._modes:
            raise PlanMismatch("the model was traced in another mode; call model.train() or model.eval() as then")
        for name, tensor, kind in zip(self._names, externals, self._kinds, strict=True):
            if _kind(tensor) != kind:
                raise PlanMismatch(
                    f"{name} is {_text(_kind(tensor))} and was traced as {_text(kind)}; trace the step again"
                )


def _named_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _modes(model: nn.Module) -> list[tuple[bool, ...]]:
    grads = tuple(parameter.requires_grad for parameter in model.parameters())
    return [tuple(module.training for module in model.modules()), grads]


def _input_name(tree: Tree, index: int) -> str:
    path = tree.path(index)
    return f"{'args' if path[0] == '0' else 'kwargs'}{path[1:]}"


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return Geometry.of(tensor), tensor.device, memory.storage_bytes(tensor)


def _text(kind: tuple[Any, ...]) -> str:
    shows, device, size = kind
    return f"{shows.described()} on {device} ({size} bytes)"


def _sharing(tree: Tree) -> list[int]:
    """For each tensor the first one that shares its storage."""
    keys = [_compat.storage_id(tensor) if memory.has_storage(tensor) else id(tensor) for tensor in tree.leaves]
    return [keys.index(key) for key in keys]


def _rest(shape: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The parts of a value that are no tensors, and the places of its tensors."""
    if type(shape) is Slot:
        yield path, shape.index
        return
    items = children(shape)
    if items is None:
        yield path, shape
        return
    yield path, type(shape)
    for key, item in items:
        yield from _rest(item, f"{path}[{key!r}]")
