"""Steps that run under other switches of torch's than their profile was made under."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.monitor.watch import Watch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.usefixtures("seeded")
Region = Callable[[], contextlib.AbstractContextManager[Any]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.enter(self.norm(x))[:, None].chunk(3, -1)
        return x + functional.gelu(self.leave(functional.scaled_dot_product_attention(query, key, value)[:, 0]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@contextlib.contextmanager
def medium_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


REGIONS: list[tuple[Region, str]] = [
    (lambda: sdpa_kernel(SDPBackend.MATH), "sdpa_kernel is False and was True"),
    (medium_precision, "torch.set_float32_matmul_precision is medium and was highest"),
    (without_mkldnn, "torch.backends.mkldnn.enabled is False and was True"),
    (deterministic, "torch.use_deterministic_algorithms is True and was False"),
]


@pytest.mark.parametrize(("region", "named"), REGIONS)
def test_the_first_step_under_other_switches_names_them(region: Region, named: str) -> None:
    model, x = Model(), torch.randn(4, 16, 32)
    profile = ct.profile(model, x, passes=1, inside=False)
    plan = ct.Plan.from_json(ct.plan(profile, 2**40).to_json())
    with ct.apply(model, plan), region(), pytest.warns(UserWarning, match=named) as told:
        for _ in range(3):
            model(x).backward()
    assert len(told) == 1


@pytest.mark.parametrize(("region", "named"), REGIONS)
def test_steps_in_the_region_that_was_profiled_warn_of_nothing(region: Region, named: str) -> None:
    model, x = Model(), torch.randn(4, 16, 32)
    with region(), warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = ct.profile(model, x, passes=1, inside=False)
        with ct.apply(model, ct.plan(profile, 2**40)):
            model(x).backward()


def test_switches_are_named_as_the_cause_of_a_step_that_takes_more() -> None:
    """Attention by the operations that it is made of saves what its kernel does not."""
    model, x = Model(), torch.randn(16, 128, 32)
    profile = ct.profile(model, x, passes=1, inside=False)
    top = ct.plan(profile, 2**40)
    with ct.apply(model, ct.plan(profile, top.plain_peak_bytes + top.reserve_bytes)) as planned:
        planned.shapes.watch(Watch(2))
        with pytest.warns(UserWarning, match="backend flags differ: .*sdpa_kernel"), sdpa_kernel(SDPBackend.MATH):
            for _ in range(3):
                model(x).backward()
