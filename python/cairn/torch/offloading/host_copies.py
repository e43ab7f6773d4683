"""Copies of a program's values on the host, offloaded and prefetched during the computation.

A copy starts at its position in the list, and is waited for where its result is needed: an offload before the value is
dropped, a prefetch before something reads the value. So the device holds no more than the list says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .tiers import open_tier
from .transfers import TensorGroup, Transfers


class HostCopies:
    """Copies of values by their numbers; see the top of this file.

    A value is a list of results. Results that are not tensors on the device are not offloaded, such as the seeds of
    attention kernels, which are on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._transfers: Transfers | None = None  # None before something is sent
        self._groups: dict[int, TensorGroup] = {}
        self._leaving: set[int] = set()
        self._arriving: dict[int, TensorGroup] = {}
        self._staying: dict[int, dict[int, Any]] = {}  # by value: the results that are not offloaded
        self.peak_bytes = 0

    def offload(self, v: int, results: Sequence[Any]) -> None:
        """Starts to copy a value to the host."""
        if self._transfers is None:
            self._transfers = Transfers(open_tier("host", 0, self._device), self._device)
        staying = {i: each for i, each in enumerate(results) if not self._is_offloaded(each)}
        tensors = [each for i, each in enumerate(results) if i not in staying]
        self._staying[v] = staying
        self._groups[v] = self._transfers.offload_anywhere(v, tensors)
        self._leaving.add(v)
        self.peak_bytes = max(self.peak_bytes, sum(group.bytes for group in self._groups.values()))

    def wait_out(self, v: int) -> None:
        """Waits until the offload of a value has ended, if it is under way."""
        if v in self._leaving:
            self._leaving.remove(v)
            self._groups[v].wait_out()

    def prefetch(self, v: int) -> None:
        """Makes room for a value on the device and starts to copy it back."""
        self._arriving[v] = self._groups[v]
        self._arriving[v].prefetch()

    def is_arriving(self, v: int) -> bool:
        """Whether a value is being prefetched and was not taken yet."""
        return v in self._arriving

    def take(self, v: int) -> list[Any]:
        """The results of a prefetched value; waits until the copy has ended."""
        results: list[Any] = list(self._arriving.pop(v).tensors())
        for index, result in self._staying[v].items():
            results.insert(index, result)
        return results

    def _is_offloaded(self, result: Any) -> bool:
        return isinstance(result, torch.Tensor) and result.device == self._device

    def discard(self, v: int) -> None:
        """Releases the copy on the host."""
        self._leaving.discard(v)
        self._groups.pop(v).discard()

    def values(self) -> list[int]:
        """The values that have a copy on the host."""
        return list(self._groups)

    def close(self) -> None:
        """Ends the copying, and gives the host's memory back."""
        self._groups, self._arriving = {}, {}
        if self._transfers is not None:
            self._transfers.close()
