"""Measures how fast values are copied to a tier and back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import cairn
import torch

from ..base import clock
from .tiers import open_tier
from .transfers import TensorGroup, Transfers

_SMALL, _LARGE = 64 << 10, 16 << 20  # bytes
_LARGE_PINNED = 128 << 20  # which takes milliseconds between a device and pinned memory
_ROUNDS = 7
_WIDTH, _PRODUCTS, _TURNS = 512, 16, 5  # matrix products that run beside copies: some 10 ms at a time


@dataclass(frozen=True)
class Link:
    """The speed of copies between a device and a tier, as measured.

    Attributes
    ----------
    to_host_bytes_per_s
        Rate of copies out.
    to_device_bytes_per_s
        Rate of copies in, with the time to allocate the pages of new tensors.
    latency_ns
        The time of a copy of no bytes.
    is_shared
        Copies out and in share the bandwidth: true on the CPU, where both go through its memory.
    slowdown
        How much slower computations are while something is copied: 1.0 means twice as long. On the CPU, copies take a
        core, or a share of the memory bandwidth. A machine file has no such number, but the times of plans count it.
    """

    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    latency_ns: int
    is_shared: bool
    slowdown: float = 0.0

    def machine(self, host_bytes: int) -> cairn.Machine:
        """The machine of a problem in which values are offloaded over this link.

        Parameters
        ----------
        host_bytes : int
            How much may be offloaded at a time.
        """
        return cairn.Machine(
            host_bytes=host_bytes,
            to_host_bytes_per_s=self.to_host_bytes_per_s,
            to_device_bytes_per_s=self.to_device_bytes_per_s,
            shared_link=self.is_shared,
            latency_ns=self.latency_ns,
        )


def measure_link(device: torch.device | str = "cpu", tier: str = "host", *, cached: bool = True) -> Link:
    """Measure the link between a device and a tier: medians of a few copies of two sizes.

    It takes some tenths of a second and 16 MiB on either side (128 between CUDA and host). On the CPU, large copies run
    at the same time as a computation, with as many threads as torch has, as in a step.

    Parameters
    ----------
    device : torch.device or str
        The device of the values.
    tier : str
        "host" or "file:PATH".
    cached : bool
        True measures a file with the kernel's page cache, as for a slab that the kernel can write back in time.
        False counts a copy out until it is on the disk, and reads from the disk.

    Returns
    -------
    Link
        Rates in bytes per second, and the latency in nanoseconds.

    Examples
    --------
    >>> plan = ct.plan(profile, "8GiB", host_budget="64GiB", link=ct.measure_link("cuda"))
    """
    most = _LARGE_PINNED if tier == "host" and torch.device(device).type == "cuda" else _LARGE
    transfers = Transfers(open_tier(tier, most, device), device)
    try:
        small, large = (_times(transfers, count, cached) for count in (_SMALL, most))
        loaded = _loaded(transfers) if transfers.device.type == "cpu" else None
    finally:
        transfers.close()
    if loaded is not None and cached:
        large = loaded.out_seconds, loaded.back_seconds
    out, back = (_rate(small[i], large[i], most) for i in range(2))
    latency = max(0, int(statistics.median((small[0] - _SMALL / out, small[1] - _SMALL / back)) * 1e9))
    slowdown = 0.0 if loaded is None else loaded.slowdown
    return Link(int(out), int(back), latency, is_shared=transfers.device.type == "cpu", slowdown=slowdown)


def _rate(small: float, large: float, most: int) -> float:
    """Bytes per second, without the latency; at least 1."""
    seconds = large - small if large > small else large
    return max(1.0, (most - _SMALL if large > small else most) / max(seconds, 1e-9))


def _times(transfers: Transfers, count: int, cached: bool) -> tuple[float, float]:
    """Median seconds of a copy out and of a copy in."""
    source = torch.zeros(count, dtype=torch.uint8, device=transfers.device)
    taken = [_round_trip(transfers, source, cached) for _ in range(_ROUNDS + 1)][1:]  # the first meets new pages
    return statistics.median(each[0] for each in taken), statistics.median(each[1] for each in taken)


def _round_trip(transfers: Transfers, source: torch.Tensor, cached: bool) -> tuple[float, float]:
    began = _now(transfers.device)
    group = transfers.offload("measured", [source], 0)
    group.wait_out()
    if not cached:
        transfers.tier.settle()
    halfway = _now(transfers.device)
    _return(group)
    return halfway - began, _now(transfers.device) - halfway


def _return(group: TensorGroup) -> None:
    group.prefetch()
    group.tensors()


def _now(device: torch.device) -> float:
    clock.wait_for(device)
    return time.perf_counter()


# -- beside a computation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded:
    """Copies during a computation: their seconds, and the slowdown of the computation."""

    out_seconds: float
    back_seconds: float
    slowdown: float


def _loaded(transfers: Transfers) -> _Loaded:
    """Times a computation alone and during copies, in turns."""
    factor = torch.randn(_WIDTH, _WIDTH, device="cpu")
    trips: list[tuple[float, float]] = []
    slowdowns = []
    for _ in range(_TURNS):
        alone = _computing(factor)
        with _copying(transfers, trips):
            beside = _computing(factor)
        slowdowns.append(beside / max(alone, 1e-9) - 1)
    out, back = (statistics.median(times) for times in zip(*trips, strict=True))
    return _Loaded(out, back, min(max(0.0, statistics.median(slowdowns)), 1.0))  # one thread takes half of a core


def _computing(factor: torch.Tensor) -> float:
    """Seconds for a fixed amount of work."""
    began = time.perf_counter()
    for _ in range(_PRODUCTS):
        torch.mm(factor, factor)
    return time.perf_counter() - began


@contextlib.contextmanager
def _copying(transfers: Transfers, trips: list[tuple[float, float]]) -> Iterator[None]:
    """Copies go on, one after the other; at least one is made. Adds what each took."""
    source = torch.zeros(_LARGE, dtype=torch.uint8, device="cpu")
    ending = threading.Event()

    def copy() -> None:
        while True:
            trips.append(_round_trip(transfers, source, cached=True))
            if ending.is_set():
                return

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy)
        try:
            yield
        finally:
            ending.set()
        copying.result()
