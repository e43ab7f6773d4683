"""The clock that profiles are taken by."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Nanoseconds. Benchmarks on a busy machine, with one thread, take time.thread_time_ns.
read: Callable[[], int] = time.perf_counter_ns
