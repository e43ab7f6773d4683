"""The clock that profiles are taken by."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

#: Nanoseconds. Benchmarks on a busy machine, with one thread, take time.thread_time_ns.
read: Callable[[], int] = time.perf_counter_ns


def wait_for(device: torch.device) -> None:
    """Returns when a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> int:
    """The time at which a device has done all that it was given, in ns."""
    wait_for(device)
    return read()


def far_apart(predicted_ns: int, measured_ns: int, if_less: str, if_more: str) -> list[str]:
    """A sentence if two times differ more than twofold, with the reason for a measured time that is less or more."""
    less, more = sorted((max(predicted_ns, 1), max(measured_ns, 1)))
    if more <= 2 * less:
        return []
    why = if_less if measured_ns < predicted_ns else if_more
    return [f"predicted and measured times differ by a factor of {more / less:.3g}: {why}"]
