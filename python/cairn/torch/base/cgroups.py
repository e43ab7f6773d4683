"""The memory limits of this process by control groups, versions 1 and 2, in containers and outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 has a number for it


def memory_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """Limit and use in bytes of every group that limits this process; file cache that was not used lately is no use."""
    limits = []
    for folder, limit_name, used_name in _groups(membership, root):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_name).read_text())
            used = int((folder / used_name).read_text()) - _cached(folder)
            if limit < _UNLIMITED:
                limits.append((limit, max(0, used)))
    return limits


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    """The folders of the process's group and of those above it, with the names of the files in them."""
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, names = root, ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            folder = base / path.lstrip("/")
            while folder.is_relative_to(base):  # inside of a container, `base` may be the group itself
                yield (folder, *names)
                folder = folder.parent


def _cached(folder: Path) -> int:
    """Cache of files that were not used lately."""
    with contextlib.suppress(OSError):
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return 0
