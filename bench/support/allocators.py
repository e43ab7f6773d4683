"""How the CPU's allocator treats freed memory, which decides how many page faults a step takes."""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys

#: Environments by name: memory is kept, as glibc does, every tensor is faulted in, another allocator.
ALLOCATORS = {
    "keeping": {"MALLOC_MMAP_THRESHOLD_": str(4 * 2**30), "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30)},
    "default": {},
    "mmap": {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)},
    "jemalloc": {"LD_PRELOAD": ctypes.util.find_library("jemalloc") or ""},
}


def restart_under(name: str, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Begin the program anew where its environment does not ask for the allocator.

    Parameters
    ----------
    name
        One of ALLOCATORS.
    parser
        Says what is not installed.

    Returns
    -------
    dict of str to str
        The environment that asks for it.
    """
    wanted = ALLOCATORS[name]
    if not all(wanted.values()):
        parser.error(f"{name} is not installed")
    if any(os.environ.get(variable) != value for variable, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    return wanted
