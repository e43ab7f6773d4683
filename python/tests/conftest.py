"""What the tests of the plug-in ask for by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def seeded() -> Iterator[None]:
    """One thread, and random numbers from the same seed."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
