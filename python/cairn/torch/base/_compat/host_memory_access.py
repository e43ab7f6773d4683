"""Host memory read and written at an address, by functions of C that ctypes finds."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def memory_at(address: int, count: int) -> memoryview:
    """A writable view of `count` bytes at an address. It does not keep the memory alive."""
    return _memory_at(address, count, _WRITABLE)


#: `copy_memory(target, source, count)` copies bytes between two addresses, without the interpreter lock.
copy_memory: Callable[[int, int, int], Any] = ctypes.memmove

#: `bytes_at(address, count)` copies bytes at an address into a Python object.
bytes_at: Callable[[int, int], bytes] = ctypes.string_at


def reader_of(count: int) -> Callable[[int], Any]:
    """A function that takes an address and returns a buffer of the `count` bytes there; its `raw` copies them."""
    return (ctypes.c_char * count).from_address


#: Whether `count` bytes at two addresses differ: 0 if not. `torch.equal` takes several times as long, even if the first
#: byte differs.
compare_memory: Callable[[int, int, int], int] = ctypes.PyDLL(None).memcmp
compare_memory.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t  # type: ignore[attr-defined]


class OwnedNumber(ctypes.c_int64):
    """A number of 8 bytes that torch can take as the memory of a tensor. Instances of subclasses have attributes."""


def trim_heap() -> None:
    """Returns freed memory to the system, if the C library can (glibc's `malloc_trim`)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
