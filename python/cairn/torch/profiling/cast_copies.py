"""Which parameters autocast copies in a training step, and which of the copies autograd saves.

Autocast casts a parameter once within the outermost region. Its cache holds the copy until the region ends, and the
autograd graphs that save the copy hold it until their backwards. A recomputation has a region of its own, and casts
again. So the stage that counts a copy depends on the schedule (`dependent_counts.py`); this file determines which stage
makes which copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..base import _compat, memory
from ..base.blocks import Block, intercepted
from ..base.layouts import Layout
from .sample import Sample


@dataclasses.dataclass
class Copies:
    """The copies of one stage.

    By name of the parameter, the bytes of all copies in autocast's cache after the stage, if it were the first of its
    region. For each saved tensor, the name of the parameter that it is a copy of, or "".
    """

    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    saved: list[str] = dataclasses.field(default_factory=list)

    @property
    def unsaved_bytes(self) -> int:
        """Bytes of the copies that are freed with the cache."""
        return sum(size for name, size in self.sizes.items() if name not in self.saved)


class _Casts(_compat.DispatchMode):
    """Records which tensors are copies of parameters."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.copies: dict[int, tuple[str, _compat.StorageRef]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and id(args[0]) in self._names and memory.has_storage(result):
            ref = _compat.StorageRef(result)
            self.copies[ref.key] = self._names[id(args[0])], ref
        return result


class CopyPass:
    """One forward that saves nothing; autocast's cache is emptied at the end of each stage."""

    def __init__(self, sample: Sample, blocks: Sequence[Block]) -> None:
        self._sample, self._blocks = sample, blocks
        self._casts = _Casts({id(p): name for name, p in sample.model.named_parameters()})
        self._saved: list[str] = []
        self._copies: list[Copies] = []

    def run(self) -> list[Copies]:
        """The copies of each stage: the code before the first block, that block, the code after it, and so on."""
        torch.clear_autocast_cache()
        hooks = _compat.saved_tensors_hooks(self._pack, Layout.tensor)
        with hooks, self._casts, intercepted(self._blocks, self._handle, self._sample.replaced.during_block):
            left = self._sample.forward()
            self._end_stage()
        del left
        return self._copies

    def _handle(self, block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._end_stage()
        with _compat.InnerHooks(
            lambda pack, unpack: (self._pack, Layout.tensor) if block.has_own_hooks else (pack, unpack)
        ):
            result = function(*args, **kwargs)
        self._end_stage()
        return result

    def _pack(self, tensor: torch.Tensor) -> Layout:
        known = self._casts.copies.get(_compat.storage_id(tensor)) if memory.has_storage(tensor) else None
        self._saved.append("" if known is None else known[0])
        return Layout(tensor)

    def _end_stage(self) -> None:
        there = [(name, ref) for name, ref in self._casts.copies.values() if ref.alive()]
        torch.clear_autocast_cache()
        freed = {name: ref.nbytes for name, ref in there if not ref.alive()}
        self._copies.append(Copies(freed, [name if name in freed else "" for name in self._saved]))
        self._casts.copies, self._saved = {}, []
