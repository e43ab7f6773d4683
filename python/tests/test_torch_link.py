"""Bandwidth and latency of the link to a tier are measured."""

from __future__ import annotations

import os
from pathlib import Path

import cairn
import cairn.torch as ct
import pytest
from cairn.torch.offloading.link import _Loaded, measure_link
from cairn.torch.offloading.tiers import open_tier
from transfers_support import (
    TIERS,
    count_own_threads_fixture,  # noqa: F401
    threads,
    where,
)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", TIERS)
def test_the_link_is_measured(kind: str, cached: bool, tmp_path: Path) -> None:
    link = measure_link("cpu", where(kind, tmp_path), cached=cached)
    assert 0 <= link.slowdown <= 1
    assert 1e6 < link.to_host_bytes_per_s < 1e12 and 1e6 < link.to_device_bytes_per_s < 1e12
    assert 0 <= link.latency_ns < 1e9
    assert link.machine(1 << 30) == cairn.Machine(
        1 << 30, link.to_host_bytes_per_s, link.to_device_bytes_per_s, True, link.latency_ns
    )
    assert threads() == []


def test_slow_and_fast_copies_tell_rate_and_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {64 << 10: 0.5, 16 << 20: 4.5}
    monkeypatch.setattr("cairn.torch.offloading.link._times", lambda _, count, __: (seconds[count], 2 * seconds[count]))
    link = measure_link(cached=False)
    rate = ((16 << 20) - (64 << 10)) / 4
    assert (link.to_host_bytes_per_s, link.to_device_bytes_per_s) == (int(rate), int(rate / 2))
    assert link.latency_ns == pytest.approx((0.5 - 65536 / rate + 1 - 65536 / (rate / 2)) / 2 * 1e9, abs=2)


def test_copies_beside_a_computation_count_where_the_cache_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.torch.offloading.link._times", lambda _, count, __: (count / 1e9, count / 1e9))
    loaded = _Loaded((64 << 10) / 1e9 + (255 << 16) / 5e8, (64 << 10) / 1e9 + (255 << 16) / 2.5e8, 0.25)
    monkeypatch.setattr("cairn.torch.offloading.link._loaded", lambda _: loaded)
    beside = measure_link()
    assert beside.to_host_bytes_per_s == pytest.approx(5e8, rel=1e-6)
    assert beside.to_device_bytes_per_s == pytest.approx(2.5e8, rel=1e-6)
    assert measure_link(cached=False).to_host_bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert beside.slowdown == 0.25


def test_what_is_measured_without_the_cache_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy out is followed by one flush and one advice to forget, before the copy in."""
    done: list[str] = []
    plainly = os.preadv
    monkeypatch.setattr("os.fdatasync", lambda file: done.append("flush"))
    monkeypatch.setattr("os.posix_fadvise", lambda *_: done.append("forget"))
    monkeypatch.setattr("os.preadv", lambda *args: done.append("read") or plainly(*args))
    measure_link("cpu", f"file:{tmp_path}", cached=False)
    first = done[: done.index("read")]
    assert first == ["flush", "forget"]
    assert done.count("flush") == done.count("forget") == 16  # two sizes, the median of seven, and one before
    done.clear()
    measure_link("cpu", f"file:{tmp_path}")
    assert set(done) == {"read"}


def test_a_folder_that_is_not_there_is_no_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ct.TierUnavailable, match="no folder"):
        open_tier(f"file:{tmp_path}/none/", 4096, host_budget=None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    open_tier("file:~", 4096, host_budget=None).close()
