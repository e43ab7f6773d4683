"""A model and its sample as fake tensors, whether they lie on `meta` or hold numbers.

Modules keep their parameters and buffers under the same names; fakes replace the tensors for the duration of a profile.
Tensors that share a storage share it as fakes, and one tensor has one fake. All fakes claim to lie on the CPU, because
builds of torch without CUDA have no autograd for CUDA tensors, not even for fake ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..base import _compat
from ..base.errors import Unsupported
from . import known_numbers

#: The device that fake tensors claim.
REPORTED_DEVICE = torch.device("cpu")


class Fakes:
    """Makes fakes, one for each tensor, while a virtual device runs."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: the tensor, and its fake
        self._storages: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._new(tensor)
        return self._made[id(tensor)][1]

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
            raise Unsupported(
                f"a {type(tensor).__name__} of layout {tensor.layout} cannot be estimated: give the model before it is "
                "sharded, quantized or wrapped (shard= counts what FSDP2 shards)"
            )
        with torch.no_grad():
            lies_in = self._storage(tensor)
            shown = lies_in.view(tensor.dtype) if lies_in.dtype != tensor.dtype else lies_in
            fake = shown.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        known_numbers.give(fake, tensor)
        return fake.requires_grad_(tensor.requires_grad)

    def _storage(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = _compat.storage_id(tensor)
        if key not in self._storages:
            count = storage.nbytes() // tensor.element_size()
            self._storages[key] = torch.empty(count, dtype=tensor.dtype, device=REPORTED_DEVICE)
        return self._storages[key]

    def with_fakes(self, values: Any) -> Any:
        """Values with fakes in the place of their tensors."""
        return _compat.tree_map_only(torch.Tensor, self.of, values)

    @contextlib.contextmanager
    def replacing_parameters(self, model: nn.Module) -> Iterator[None]:
        """Puts fakes in the places of a model's parameters and buffers while the body runs."""
        places = [
            (registry, name, tensor)
            for module in model.modules()
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
            if tensor is not None
        ]
        try:
            for registry, name, tensor in places:
                registry[name] = self.of(tensor)  # type: ignore[assignment]
            yield
        finally:
            for registry, name, tensor in places:
                registry[name] = tensor  # type: ignore[assignment]
