"""How fast values travel to the slower memory and back: what a plan needs to know of this machine."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import cairn
import torch

from .tiers import open_tier
from .transfers import Parcel, Transfers

_SMALL, _LARGE = 64 << 10, 16 << 20  # bytes
_ROUNDS = 7


@dataclass(frozen=True)
class Link:
    """The way between a device and a tier, as measured.

    Attributes:
        to_host_bytes_per_s: rate of copies out.
        to_device_bytes_per_s: rate of copies in, the pages of new tensors included.
        latency_ns: what a copy of no size takes.
        is_shared: copies out and in take from each other: true of the CPU, where both go through its memory.
    """

    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    latency_ns: int
    is_shared: bool

    def machine(self, host_bytes: int) -> cairn.Machine:
        """The machine of a problem whose values travel on this link."""
        return cairn.Machine(
            host_bytes=host_bytes,
            to_host_bytes_per_s=self.to_host_bytes_per_s,
            to_device_bytes_per_s=self.to_device_bytes_per_s,
            shared_link=self.is_shared,
            latency_ns=self.latency_ns,
        )


def measure_link(device: torch.device | str = "cpu", tier: str = "host") -> Link:
    """Measures the link between a device and the tier "host" or "file:PATH": medians of a few copies of two sizes.

    Takes some tenths of a second and 16 MiB on either side. A file is measured as training meets it, with the kernel's
    cache before the disk; a slab that does not fit in that cache is as slow as the disk.
    """
    transfers = Transfers(open_tier(tier, _LARGE, device), device)
    try:
        small, large = (_times(transfers, count) for count in (_SMALL, _LARGE))
    finally:
        transfers.close()
    out, back = (_rate(small[i], large[i]) for i in range(2))
    latency = max(0, int(statistics.median((small[0] - _SMALL / out, small[1] - _SMALL / back)) * 1e9))
    return Link(int(out), int(back), latency, is_shared=transfers.device.type == "cpu")


def _rate(small: float, large: float) -> float:
    """Bytes per second, what copies of any size take left out; at least 1."""
    seconds = large - small if large > small else large
    return max(1.0, (_LARGE - _SMALL if large > small else _LARGE) / max(seconds, 1e-9))


def _times(transfers: Transfers, count: int) -> tuple[float, float]:
    """Median seconds of a copy out and of a copy in."""
    source = torch.zeros(count, dtype=torch.uint8, device=transfers.device)
    taken = [_round_trip(transfers, source) for _ in range(_ROUNDS + 1)][1:]  # the first meets new pages, new threads
    return statistics.median(each[0] for each in taken), statistics.median(each[1] for each in taken)


def _round_trip(transfers: Transfers, source: torch.Tensor) -> tuple[float, float]:
    began = _now(transfers.device)
    parcel = transfers.offload("measured", [source], 0)
    parcel.wait_out()
    halfway = _now(transfers.device)
    _return(parcel)
    return halfway - began, _now(transfers.device) - halfway


def _return(parcel: Parcel) -> None:
    parcel.prefetch()
    parcel.tensors()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
