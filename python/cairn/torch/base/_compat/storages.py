"""Storages, versions and addresses of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .fake_tensors import is_faked

TORCH_VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


def storage_id(tensor: torch.Tensor) -> int:
    """A number that names the tensor's storage for as long as that storage lives."""
    return int(tensor.untyped_storage()._cdata)


class StorageRef:
    """A weak reference to a storage; while one exists, the storage's identity is not given to another."""

    __slots__ = ("_storage", "key", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key: int = int(storage._cdata)
        self.nbytes: int = int(storage.nbytes())
        self._storage = storage._weak_ref()

    def alive(self) -> bool:
        return not torch.UntypedStorage._expired(self._storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if it is alive; None also where torch cannot say."""
        strong = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)
        return strong(self._storage) if strong is not None else None

    def __del__(self) -> None:
        free = getattr(torch.UntypedStorage, "_free_weak_ref", None)
        if free is not None:  # absent while the interpreter shuts down
            free(self._storage)


def storage_uses(tensors: Iterable[torch.Tensor]) -> dict[int, float]:
    """The number of references to the storage of each tensor, by storage; infinite if torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", lambda key: float("inf"))
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {int(storage._cdata): float(count(storage._cdata)) for storage in storages}


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor with the sign reversed, as the imaginary part of a conjugate is."""
    return torch._neg_view(tensor)


class WriteDetector:
    """Shows whether a tensor was written in place since, without keeping its storage."""

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias: torch.Tensor | None = None
        if not tensor.is_inference():
            self._version = int(tensor._version)
            self._alias = tensor.detach()  # shares the count of writes,
            if tensor.layout is torch.strided:
                self._alias.data = tensor.new_empty(0)  # and keeps it when it gets another storage

    def has_changed(self) -> bool:
        return self._alias is not None and self._alias._version != self._version


def version(tensor: torch.Tensor) -> int:
    """The number of in-place writes to the tensor's storage; 0 if torch does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """`version` of many tensors at once; 0 for a missing one."""
    tensors = list(tensors)
    try:
        return list(map(_version_of, tensors))
    except (AttributeError, RuntimeError):  # one is missing, or an inference tensor
        return [0 if tensor is None else version(tensor) for tensor in tensors]


def addresses(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """The addresses of tensors in memory; 0 for a tensor without memory, or with an unknown address."""
    tensors = list(tensors)
    if is_faked():
        return [0] * len(tensors)
    try:
        return list(map(address, tensors))
    except (RuntimeError, TypeError):  # one is missing, or has none
        return list(map(_address_or_none, tensors))


def _address_or_none(tensor: torch.Tensor | None) -> int:
    try:
        return 0 if tensor is None else address(tensor)
    except RuntimeError:
        return 0


address: Callable[..., int] = torch.Tensor.data_ptr

_version_of: Callable[[Any], int] = operator.attrgetter("_version")

#: `version` of a tensor that autograd saves, which is never an inference tensor; called for every one of them
saved_version: Callable[[torch.Tensor], int] = _version_of


def default_device() -> torch.device:
    """Where new tensors are made."""
    if _function_modes is not None and _function_modes() == 0 and _device_set() is None:
        return _CPU  # which torch takes long to say
    try:
        return torch.get_default_device()
    except AttributeError:  # in torch 2.6, after set_default_device(None)
        return torch.empty(0).device


_CPU = torch.device("cpu")

_function_modes = getattr(torch._C, "_len_torch_function_stack", None)  # a default device is one of these


def _device_set() -> Any:
    """The device that `set_default_device` has set in this thread."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that identifies the storage of a tensor among all that exist at the same time; 0 without a storage."""
    if type(tensor) not in PLAIN_CLASSES or tensor.layout is not torch.strided:
        return 0
    storage = tensor.untyped_storage()
    return int(storage._cdata) if type(tensor) is FakeTensor else storage.data_ptr()


#: Classes of tensors that certainly are no wrappers of others; a fake tensor has all but numbers.
PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, FakeTensor)
