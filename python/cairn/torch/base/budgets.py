"""Converts a user's budget into bytes on a device."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
import resource
from pathlib import Path
from typing import Any

import torch

from ... import _units
from ..._budget import Budget
from .cgroups import memory_limits

MOST_BYTES = 2**63 - 1
AUTO_RESERVE = 0.05  # of the free memory: the allocator's fragments, and what else the process will want

_RATIO_HINT = (
    "a budget is bytes or a size such as '8GiB', not a ratio; torch's own activation_memory_budget is a ratio of saved "
    "activations. For a share of the device's memory write '{percent:g}%'"
)


def resolve(budget: Any, device: torch.device, resident_bytes: int = 0, name: str = "budget") -> int:
    """The total in bytes. resident_bytes: for "auto", the bytes of the step that are on the device already.

    Raises TypeError for what is not a size, ValueError for a size that makes no sense.
    """
    value = budget.total if isinstance(budget, Budget) else budget
    if isinstance(value, str):
        return _from_text(value, device, resident_bytes, name)
    if isinstance(value, float) and 0 < value <= 1:
        raise TypeError(f"{name}={value}: " + _RATIO_HINT.format(percent=100 * value))
    return size_bytes(value, name)


def size_bytes(value: Any, name: str) -> int:
    """Bytes from an int or a size such as "8GiB"."""
    if isinstance(value, float):
        return _from_float(value, name)
    size = _units.size_bytes(value, name) if isinstance(value, str) else _whole(value, name)
    if size <= 0:
        raise ValueError(f"{name} must be positive, not {size}")
    if size > MOST_BYTES:
        raise ValueError(f"{name}={size} is more than any device has: sizes end at 2**63 - 1 bytes")
    return size


def _whole(value: Any, name: str) -> int:
    """An int, or what is one, as NumPy's are."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)
    raise TypeError(f"{name} must be bytes or a size such as '8GiB', not {type(value).__name__}")


def _from_float(value: float, name: str) -> int:
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} must be positive, not {value}")
    if 0 < value <= 1:
        raise TypeError(f"{name}={value}: bytes or a size such as '8GiB' are wanted, not a ratio")
    if math.isinf(value) or value != int(value):
        raise TypeError(f"{name}={value}: bytes are a whole number")
    return size_bytes(int(value), name)


def _from_text(text: str, device: torch.device, resident_bytes: int, name: str) -> int:
    if text == "auto":
        free = free_bytes(device)
        return int(free * (1 - AUTO_RESERVE)) + resident_bytes
    if text.endswith("%"):
        if not re.fullmatch(r"\d+(\.\d*)?%", text):
            raise ValueError(f"{name} {text!r} is no share of the device's memory, such as '80%'")
        share = float(text[:-1])
        if not 0 < share <= 100:
            raise ValueError(f"{name} {text!r}: a share of the device's memory lies above 0% and up to 100%")
        return int(total_bytes(device) * share / 100)
    return size_bytes(text, name)


# -- what a device has ---------------------------------------------------------------------------------------


def total_bytes(device: torch.device) -> int:
    """Memory of the device, within the limits that are set for this process."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * _process_share(device))
    limits = [limit for limit, _ in (*_process_limits(), *memory_limits())]
    return min([_physical_bytes(), *limits])


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - allocated
        return max(0, min(int(free + cached), total_bytes(device) - allocated))
    room = [_status("/proc/meminfo", "MemAvailable") or _physical_bytes()]
    room += [limit - used for limit, used in memory_limits()]
    room += [limit - (_status("/proc/self/status", field) or 0) for limit, field in _process_limits()]
    return max(0, min(room))


def _process_share(device: torch.device) -> float:
    """The share of a CUDA device that torch allows this process; all of it if torch has no limit."""
    share = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if share is None else float(share(device))


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _status(path: str, field: str) -> int | None:
    """A field of one of the kernel's tables, given there in KiB."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def _process_limits() -> list[tuple[int, str]]:
    """Limits set for this process, each with the field of memory use that counts against it."""
    limits = [(resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")]
    soft = [(resource.getrlimit(what)[0], field) for what, field in limits]
    return [(limit, field) for limit, field in soft if limit != resource.RLIM_INFINITY]
