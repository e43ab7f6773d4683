"""What the tests of the plug-in ask for by name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_imported = 0

#: The files that take longest, by measured seconds: they begin first, so that no worker waits for the last of them.
LONGEST = [
    "test_benchmarks", "test_torch_peaks", "test_torch_offloading_plans", "test_torch_plan",
    "test_torch_offloading_inside", "test_torch_regions", "test_torch_shapes", "test_documents", "test_torch_trace",
    "test_torch_executor_models", "test_torch_compile", "test_torch_trainer", "test_torch_sweep",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadfile --no-loadscope-reorder`, which gives files to workers in this order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


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


@pytest.fixture(scope="session")
def resnet_profile() -> Any:
    """The profile of a small ResNet with an optimizer."""
    import cairn.torch as ct
    import torch
    import torch_models

    torch.manual_seed(0)
    step = torch_models.resnet()
    return ct.profile(step.model, **step.sample, passes=1, optimizer=torch.optim.AdamW(step.model.parameters()))


@pytest.fixture
def never_run() -> Any:
    """A model that no check may run."""
    import torch

    class Untouchable(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it was run before its arguments were checked")

    return Untouchable(4, 4)
