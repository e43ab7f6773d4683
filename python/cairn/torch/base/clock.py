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
