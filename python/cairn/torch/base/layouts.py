"""Memory layouts without tensors: of gradients that a backward makes, and of tensors that are not saved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import _compat, memory
from .errors import Unsupported
from .operators import view_of_storage


@dataclasses.dataclass(frozen=True)
class ByteView:
    """The place and layout of a tensor in some bytes. It makes the same tensor from a copy of these bytes."""

    first: int  # its first byte in them
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, origin: int = 0) -> ByteView:
        """The view of a tensor in its storage, whose bytes count from byte `origin`."""
        first = first_byte(tensor) - origin if tensor.numel() > 0 else 0
        return cls(first, tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def tensor_in(self, storage_of: torch.Tensor, origin: int) -> torch.Tensor:
        """The tensor in the storage of another one, from byte `origin` on."""
        offset = (origin + self.first) // self.dtype.itemsize
        tensor = view_of_storage(storage_of, self.size, self.stride, offset, self.dtype)
        if self.is_conj:
            tensor = tensor.conj()
        return _compat.neg_view(tensor) if self.is_neg else tensor


def first_byte(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


class Layout:
    """Shape, strides, type and device of a tensor, without holding it; equal where a kernel sees no difference.

    `is_held_by_others` is set for a gradient if other code holds it, or its base, while a block's backward runs.
    `storage` is the number of its storage among those of a list, if others of the list lie in it, too; else it is 0.
    """

    __slots__ = ("_device", "_dtype", "_offset", "_shape", "_strides", "storage", "is_held_by_others")

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_nested and tensor.layout is torch.strided:
            raise Unsupported(
                "a nested tensor of torch.strided layout, which has no shape, goes through a block: make it with "
                "layout=torch.jagged, or name the modules around it with blocks="
            )
        self.is_held_by_others, self.storage, self._offset = False, 0, 0
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._strides = tensor.stride() if tensor.layout is torch.strided else None

    def tensor(self, storage: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor with this layout, in a storage of its own or in one that was made for several."""
        if self._strides is None:
            return torch.full(self._shape, 1e-3, dtype=self._dtype, device=self._device)
        storage = self.new_storage(self.nbytes) if storage is None else storage
        return storage.as_strided(self._shape, self._strides, self._offset)

    def new_storage(self, size: int) -> torch.Tensor:
        """A storage of `size` bytes. Its values are normal numbers, because denormal ones slow kernels down."""
        return torch.full((size // self._dtype.itemsize,), 1e-3, dtype=self._dtype, device=self._device)

    def place_in_storage(self, storage: int, offset: int) -> None:
        """Records that it shares a numbered storage with others, and begins `offset` elements after the first."""
        self.storage, self._offset = storage, offset

    def without_other_holders(self) -> Layout:
        """The layout for a gradient that nobody else holds."""
        changed = copy.copy(self)
        changed.is_held_by_others = False
        return changed

    @property
    def nbytes(self) -> int:
        """Bytes of its storage, up to the end of the tensor."""
        return (self._offset + self._extent()) * self._dtype.itemsize

    def _extent(self) -> int:
        """From the first element in memory to the last."""
        stored = self._stored_shape()
        if self._strides is None or 0 in stored:
            return stored.numel()
        return 1 + sum((size - 1) * stride for size, stride in zip(stored, self._strides, strict=True))

    def _stored_shape(self) -> torch.Size:
        """The tensor without the repeated elements of an expanded one."""
        strides = self._strides or (1,) * len(self._shape)
        return torch.Size(1 if stride == 0 else size for size, stride in zip(self._shape, strides, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]

    def _key(self) -> tuple[Any, ...]:
        strides = self._strides and tuple(
            0 if size == 1 else stride for size, stride in zip(self._shape, self._strides, strict=True)
        )
        return self._shape, strides, self._dtype, self._device, self.is_held_by_others, self.storage, self._offset


#: Of the gradients of several tensors in order; None where a tensor gets none.
Layouts = Sequence[Layout | None]


def without_other_holders(layouts: Layouts) -> list[Layout | None]:
    """These layouts for gradients that nobody else holds."""
    return [layout and layout.without_other_holders() for layout in layouts]


def layouts_of(tensors: Sequence[torch.Tensor], known: Layouts = ()) -> list[Layout | None]:
    """The known layouts, if there is one for each tensor; else the layouts of the tensors."""
    return list(known) if len(known) == len(tensors) else [Layout(tensor) for tensor in tensors]


def layouts_of_all(tensors: Sequence[torch.Tensor | None]) -> list[Layout | None]:
    """The layouts of gradients that exist at the same time, and may share a storage."""
    layouts = [None if tensor is None else Layout(tensor) for tensor in tensors]
    places: dict[Any, list[tuple[Layout, int]]] = {}
    for tensor, layout in zip(tensors, layouts, strict=True):
        if tensor is not None and layout is not None and memory.has_storage(tensor):
            lying = places.setdefault((_compat.storage_id(tensor), tensor.dtype), [])
            lying.append((layout, int(tensor.storage_offset())))
    for number, lying in enumerate((sharing for sharing in places.values() if len(sharing) > 1), 1):
        begin = min(offset for _, offset in lying)
        for layout, offset in lying:
            layout.place_in_storage(number, offset - begin)
    return layouts


def bytes_of(layouts: Layouts) -> int:
    """Bytes of new tensors with these layouts."""
    alone = sum(layout.nbytes for layout in layouts if layout is not None and not layout.storage)
    return alone + sum(_shared(layouts).values())


def _shared(layouts: Layouts) -> dict[int, int]:
    """Bytes of the storages in which several lie, by their numbers."""
    sizes: dict[int, int] = {}
    for layout in layouts:
        if layout is not None and layout.storage:
            sizes[layout.storage] = max(sizes.get(layout.storage, 0), layout.nbytes)
    return sizes


def new_tensors(layouts: Layouts) -> list[torch.Tensor | None]:
    """New tensors with these layouts; None where there is none."""
    sizes, one_of = _shared(layouts), {layout.storage: layout for layout in layouts if layout is not None}
    storages = {number: one_of[number].new_storage(size) for number, size in sizes.items()}
    return [None if layout is None else layout.tensor(storages.get(layout.storage)) for layout in layouts]


@contextlib.contextmanager
def saving_nothing(takes_gradients: bool = False, and_own: bool = False) -> Iterator[None]:
    """Runs a forward with gradients on, so that kernels are chosen as usual, but the graph keeps no tensors.

    A backward from a side output gets made-up tensors of the right kind.
    takes_gradients: the forward itself has backwards; tensors are kept until it has ended.
    and_own: saved-tensor hooks that the forward itself sets up are not called either.
    """
    dropping = (Layout, Layout.tensor)
    own = _compat.InnerHooks(lambda pack, unpack: dropping) if and_own else contextlib.nullcontext()
    with _keeping_inside() if takes_gradients else _compat.saved_tensors_hooks(*dropping), own:
        yield


@contextlib.contextmanager
def _keeping_inside() -> Iterator[None]:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> tuple[Layout, int]:
        kept.append(tensor.detach())
        return Layout(tensor), len(kept) - 1

    def unpack(packed: tuple[Layout, int]) -> torch.Tensor:
        layout, index = packed
        return kept[index] if kept else layout.tensor()

    try:
        with _compat.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        kept.clear()
