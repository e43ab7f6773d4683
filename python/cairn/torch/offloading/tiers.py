"""The tiers to which values are offloaded: a slab of host memory, or a file.

A tier allocates all its bytes when it is opened: pages of host memory that are touched, or reserved blocks of a disk.
So too little memory is an error when the tier is opened, not in the middle of a step. A caller that does not know the
size beforehand lets the tier grow.

*Host memory.* If a CUDA device copies to the pages, they are pinned. They are registered as they are, because torch
rounds pinned allocations up to powers of two.

*File.* The file has no name: it is unlinked as soon as it is open. So nothing is left behind however the process ends,
and processes that were given the same path do not share a file. It is read and written in place, not mapped, so that
its contents are not memory of the process. The kernel caches it while there is memory to spare.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cairn
import torch
from cairn import format_bytes

from ..base import _compat, budgets
from ..base.errors import TierUnavailable, Unsupported

CHUNK_BYTES = 8 << 20  # copied at a time; a copy can be cancelled only between two chunks
_FILE = "file:"


class Tier:
    """A slab of memory to which values are offloaded: bytes 0 to `capacity_bytes`.

    `write` and `read` copy between the slab and an address in host memory. They release the interpreter lock meanwhile.
    """

    name: str
    capacity_bytes = 0

    def __init__(self, name: str, host_budget: int | None) -> None:
        self.name = name
        self._host_budget = host_budget

    def grow(self, capacity_bytes: int) -> None:
        """Grows the slab to at least `capacity_bytes`. Its contents stay.

        Raises TierUnavailable if there is not as much; the error says how much there is. The tier is then unchanged.
        """
        if capacity_bytes <= self.capacity_bytes:
            return
        if self._host_budget is not None and capacity_bytes > self._host_budget:
            raise TierUnavailable(
                f"offloading needs {format_bytes(capacity_bytes)} ({capacity_bytes} bytes) of the offload tier "
                f"({self.name}), but host_budget leaves {format_bytes(self._host_budget)} ({self._host_budget} bytes)"
            )
        self._extend(capacity_bytes)
        self.capacity_bytes = capacity_bytes

    def write(self, offset: int, address: int, count: int) -> None:
        """Copies `count` bytes at a host address into the slab."""
        raise NotImplementedError

    def read(self, offset: int, address: int, count: int) -> None:
        """Copies `count` bytes of the slab to a host address."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until all writes have left any cache and are in the tier itself."""

    def close(self) -> None:
        """Frees the memory. May be called again."""
        raise NotImplementedError

    def _extend(self, capacity_bytes: int) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        self.close()


# -- host memory ---------------------------------------------------------------------------------------------


class HostTier(Tier):
    """Host memory outside torch's allocators: one piece, and another each time that it grew."""

    def __init__(self, device: torch.device, host_budget: int | None) -> None:
        self._pieces: list[tuple[int, torch.Tensor]] = []  # offset of the first byte, the bytes
        self._device, self._process = device, os.getpid()
        super().__init__("host", host_budget)

    def write(self, offset: int, address: int, count: int) -> None:
        for piece in self.spans(offset, count):
            _compat.copy_memory(piece.data_ptr(), address, piece.numel())
            address += piece.numel()

    def read(self, offset: int, address: int, count: int) -> None:
        for piece in self.spans(offset, count):
            _compat.copy_memory(address, piece.data_ptr(), piece.numel())
            address += piece.numel()

    def spans(self, offset: int, count: int) -> Iterator[torch.Tensor]:
        """A range of the slab, as tensors of bytes: one for each piece that it touches."""
        for start, piece in self._pieces:
            first, end = max(offset - start, 0), min(offset + count - start, piece.numel())
            if first < end:
                yield piece[first:end]

    def close(self) -> None:
        while self._pieces:
            _, piece = self._pieces.pop()
            if self._is_pinned and os.getpid() == self._process:
                with torch.cuda.device(self._device):
                    torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
        self.capacity_bytes = 0

    @property
    def _is_pinned(self) -> bool:
        return self._device.type == "cuda"

    def _extend(self, capacity_bytes: int) -> None:
        count = capacity_bytes - self.capacity_bytes
        free = budgets.free_bytes(torch.device("cpu"))
        if count > free:
            raise TierUnavailable(
                f"offloading needs {format_bytes(count)} ({count} bytes) of host memory, but {format_bytes(free)} "
                f"({free} bytes) are available; a file is another place for it: tier='file:PATH'"
            )
        piece = _host_memory(count)
        if self._is_pinned:
            _pin(piece, self._device)
        self._pieces.append((self.capacity_bytes, piece))


def _host_memory(count: int) -> torch.Tensor:
    """Page-aligned host memory, all pages of it touched. It lives as long as the tensor or a view of it.

    Huge pages are used where the system has them: they are touched ten times as fast, and pinned four times as fast.

    Forked processes, such as data loader workers, do not inherit the memory. Otherwise the kernel would copy pinned
    pages for each of them, and other pages here, whenever they are next written.
    """
    try:
        memory = mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)
    except OSError as error:
        raise TierUnavailable(
            f"the system does not give {format_bytes(count)} ({count} bytes) of host memory for offloading: {error}"
        ) from error
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    buffer[:: mmap.PAGESIZE].zero_()  # touches each page, so that the kernel allocates it
    return buffer


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    """Pins memory for all CUDA devices. The call may create a context on the current device: `device` is made that."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        with contextlib.suppress(RuntimeError):  # CUDA remembers the failure, and torch would raise it somewhere else
            torch.ones(1, device=device)
        raise TierUnavailable(
            f"{format_bytes(memory.numel())} of host memory cannot be pinned for the CUDA device (cudaHostRegister: "
            f"error {code}); the limit of locked memory may be too low (ulimit -l)"
        )


# -- a file --------------------------------------------------------------------------------------------------


class FileTier(Tier):
    """A file without a name, on the disk where its path is."""

    def __init__(self, path: str, host_budget: int | None) -> None:
        self._file = -1
        super().__init__(_FILE + path, host_budget)
        self._path = path
        self._file = _nameless_file(os.path.expanduser(path))

    def write(self, offset: int, address: int, count: int) -> None:
        source = _compat.memory_at(address, count)
        while source:
            done = os.pwrite(self._file, source[:CHUNK_BYTES], offset)
            self._require_progress(done, offset, "written")
            source, offset = source[done:], offset + done

    def read(self, offset: int, address: int, count: int) -> None:
        target = _compat.memory_at(address, count)
        while target:
            done = os.preadv(self._file, [target[:CHUNK_BYTES]], offset)
            self._require_progress(done, offset, "read")
            target, offset = target[done:], offset + done

    def settle(self) -> None:
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _require_progress(self, done: int, offset: int, verb: str) -> None:
        if done <= 0:
            raise OSError(errno.EIO, f"nothing could be {verb} at byte {offset} of {self.capacity_bytes}", self._path)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        self.capacity_bytes = 0

    def _extend(self, capacity_bytes: int) -> None:
        before = self.capacity_bytes
        try:
            os.posix_fallocate(self._file, before, capacity_bytes - before)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            raise TierUnavailable(
                f"offloading needs {format_bytes(capacity_bytes)} ({capacity_bytes} bytes) here, where "
                f"{_free_text(self._file)}: {error.strerror}; give a folder on another disk (tier='file:PATH'), or a "
                "smaller host_budget",
                file=self._path,
            ) from error


def _nameless_file(given: str) -> int:
    """The descriptor of a new file in a folder, or beside a path. The file has no name any more."""
    path = Path(given)
    is_folder = given.endswith("/") or path.is_dir()
    folder, prefix = (path, "cairn.") if is_folder else (path.parent, path.name + ".")
    if not folder.is_dir():
        raise TierUnavailable(f"there is no folder {folder} for offloading: {os.strerror(errno.ENOENT)}", file=given)
    try:
        file, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        os.unlink(name)
    except OSError as error:
        why = f"no file for offloading can be made in the folder {folder}: {error.strerror}"
        raise TierUnavailable(why, file=given) from error
    return file


def _free_text(file: int) -> str:
    state = os.fstatvfs(file)
    free = state.f_bavail * state.f_frsize
    return f"{format_bytes(free)} ({free} bytes) are free"


# -- which one -----------------------------------------------------------------------------------------------


def check_tier(where: Any) -> None:
    """Raises Unsupported if this names no tier."""
    if where != "host" and not (isinstance(where, str) and where.startswith(_FILE) and len(where) > len(_FILE)):
        raise Unsupported(f"tier={where!r}: the offload tier is 'host' or 'file:PATH'")


def check_tier_opens(where: str) -> None:
    """Raises TierUnavailable if this names a file that cannot be made, so that no first step finds out."""
    if where.startswith(_FILE):
        FileTier(where[len(_FILE) :], None).close()


def open_tier(
    where: str, capacity_bytes: int, device: torch.device | str = "cpu", *, host_budget: int | str | None = None
) -> Tier:
    """Opens a tier for values of a device.

    Parameters
    ----------
    where
        "host", or "file:PATH": a file beside that path (in it, if it is a folder).
    capacity_bytes
        The size; 0 for a tier that grows later.
    device
        The device whose values are offloaded. For a CUDA device host memory is pinned.
    host_budget
        The largest size, also when the tier grows: bytes, or a size such as "8GiB". None: all there is.

    Raises TierUnavailable if there is not as much memory.
    """
    device = torch.device(device)
    limit = None if host_budget is None else cairn.parse_size(host_budget)
    tier: Tier
    check_tier(where)
    tier = HostTier(device, limit) if where == "host" else FileTier(where[len(_FILE) :], limit)
    tier.grow(capacity_bytes)
    return tier
