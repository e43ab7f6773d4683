"""What the tests of the plug-in ask for by name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

_imported = 0


def pytest_runtest_setup() -> None:
    """What importing made stays: collections, of which measured steps begin with one each, need not look through it."""
    global _imported
    if len(sys.modules) > _imported:
        _imported = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture
def seeded() -> Iterator[None]:
    """One thread, and random numbers from the same seed."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
