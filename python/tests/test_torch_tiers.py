"""Tiers: host budgets, files on disk, and limits of the system."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import cairn.torch as ct
import pytest
from cairn.torch.base import budgets
from cairn.torch.base.cgroups import memory_limits
from cairn.torch.offloading.tiers import open_tier
from transfers_support import (
    MIB,
    TIERS,
    count_own_threads_fixture,  # noqa: F401
    where,
)


@pytest.mark.parametrize("kind", TIERS)
def test_host_budget(kind: str, tmp_path: Path) -> None:
    open_tier(where(kind, tmp_path), 1000, host_budget=1000).close()
    with pytest.raises(ct.TierUnavailable, match=r"needs 1001 B \(1001 bytes\).*host_budget leaves 1000 B"):
        open_tier(where(kind, tmp_path), 1001, host_budget=1000)
    tier = open_tier(where(kind, tmp_path), 0, host_budget="1KiB")
    tier.grow(1024)
    with pytest.raises(ct.TierUnavailable, match="host_budget"):
        tier.grow(1025)
    assert tier.capacity_bytes == 1024
    assert open_tier(where(kind, tmp_path), 0, host_budget=0).capacity_bytes == 0


def test_more_host_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 5000)
    tier = open_tier("host", 3000)
    with pytest.raises(ct.TierUnavailable, match=r"5001 bytes.*5000 bytes\) are available.*tier='file:PATH'"):
        tier.grow(8001)
    tier.grow(8000)
    assert tier.capacity_bytes == 8000


def test_limits_of_control_groups(tmp_path: Path) -> None:
    files = {
        "self": "4:cpu:/a\n3:blkio,memory:/box/inner\n0::/work\n",
        "memory/box/inner/memory.limit_in_bytes": "5000\n",
        "memory/box/inner/memory.usage_in_bytes": "4000\n",
        "memory/box/inner/memory.stat": "cache 7\ninactive_file 1\ntotal_inactive_file 1500\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "9000\n",
        "work/memory.max": "8000\n",
        "work/memory.current": "100\n",
        "memory.max": "max\n",
        "memory.current": "1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limits(tmp_path / "self", tmp_path) == [(5000, 2500), (8000, 100)]
    assert memory_limits(tmp_path / "none", tmp_path) == []


def test_a_file_is_as_large_as_it_was_asked_for_and_leaves_nothing(tmp_path: Path) -> None:
    tier = open_tier(f"file:{tmp_path / 'slab'}", 3 * MIB + 17)
    descriptors = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    (found,) = [d for d in descriptors if d.is_symlink() and str(tmp_path) in os.readlink(d)]
    assert found.stat().st_size == 3 * MIB + 17
    assert found.stat().st_blocks * 512 >= 3 * MIB + 17  # really there
    assert list(tmp_path.iterdir()) == []
    tier.close()
    tier.close()
    assert not found.exists()


def test_a_folder_is_a_place_for_a_file(tmp_path: Path) -> None:
    assert open_tier(f"file:{tmp_path}", 100).capacity_bytes == 100


def test_no_place_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ct.TierUnavailable, match=f"{tmp_path}/no/slab.*No such file") as caught:
        open_tier(f"file:{tmp_path}/no/slab", 100)
    assert caught.value.file == f"{tmp_path}/no/slab"
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("text", ["disk", "file:", "file", ""])
def test_no_such_tier(text: str) -> None:
    with pytest.raises(ct.Unsupported, match="'host' or 'file:PATH'"):
        open_tier(text, 100)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(tmp_path), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"a small disk cannot be mounted: {os.strerror(ctypes.get_errno())}")
    yield tmp_path
    libc.umount2(bytes(tmp_path), 2)  # MNT_DETACH: a file may still be open


def test_a_full_disk_is_an_error_when_the_tier_is_opened(small_disk: Path) -> None:
    with pytest.raises(ct.TierUnavailable) as caught:
        open_tier(f"file:{small_disk}/slab", MIB + 1)
    for part in ("1048577 bytes", f"{small_disk}/slab", "1048576 bytes) are free", "No space left on device"):
        assert part in str(caught.value)
    tier = open_tier(f"file:{small_disk}/slab", MIB // 2)  # all of the disk is free again
    with pytest.raises(ct.TierUnavailable):
        tier.grow(2 * MIB)
    assert tier.capacity_bytes == MIB // 2
    tier.grow(MIB)


def test_a_file_larger_than_the_system_allows(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(ct.TierUnavailable, match="File too large"):
            open_tier(f"file:{tmp_path}/slab", MIB + 1)
        open_tier(f"file:{tmp_path}/slab", MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
