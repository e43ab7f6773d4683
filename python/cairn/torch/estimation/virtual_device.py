"""A device that does not exist: it counts what operators on fake tensors would allocate, and how long they would take.

A step on fake tensors calls the operators that it calls on real ones. Each result has a storage, which lives as long as
that of a real one; so its size counts from the operator that makes it until the storage is freed. A clock advances by
what the model of a device (`Rates`) says that each operator takes. Comparisons of fake tensors find them equal: what a
step computes twice, it computes alike, or a profile on real tensors finds out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..base import _compat, clock, memory
from . import known_numbers

_DEVICE_OF, _EQUAL = torch.ops.prim.device.default, torch.ops.aten.equal.default


class VirtualDevice(_compat.DispatchMode):
    """Counts the operators that run within it.

    takes_ns: says of a call (operator, arguments, result) how long it takes.
    workspace: says how much memory it takes beside its result, while it runs.
    """

    def __init__(self, takes_ns: Callable[..., float], workspace: Callable[..., int]) -> None:
        super().__init__()
        self._takes_ns, self._workspace = takes_ns, workspace
        self._sizes: dict[int, int] = {}  # by storage
        self.level = self.peak = 0
        self.elapsed_ns = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE_OF and _compat.is_fake(args[0]):  # asked for very often
            return args[0].fake_device
        kwargs = kwargs or {}
        if function is _EQUAL:
            return _equal(*args)
        try:
            result = function(*args, **kwargs)
        except _compat.NEEDS_NUMBERS:
            known = known_numbers.computed(function, args, kwargs)
            if known is None:
                raise
            return self._faked(known)
        known_numbers.follow(function, args, kwargs, result)
        if torch.Tag.nondeterministic_seeded in function.tags:
            _draw()
        self._count(function, args, kwargs, result)
        self.elapsed_ns += self._takes_ns(function, args, kwargs, result)
        return result

    def _faked(self, known: Any) -> Any:
        """A fake of what only its numbers could tell the shape of; a number stays itself."""
        if not isinstance(known, torch.Tensor):
            return known
        fake = self.mode.from_tensor(known)
        known_numbers.give(fake, known)
        return fake

    def _count(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        workspace = self._workspace(function, args, kwargs, result)
        if workspace:
            self.peak = max(self.peak, self.level + workspace)
        given: set[int] | None = None
        for tensor in _stored((result,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            if given is None:
                given = {_compat.storage_id(t) for t in _stored((*args, *kwargs.values()))}
            if key in given:  # of a tensor that was there before, or is real
                continue
            self._allocate(storage, key, function, args)
        self.peak = max(self.peak, self.level + workspace)

    def _allocate(self, storage: torch.UntypedStorage, key: int, function: Any, args: Any) -> None:
        size = storage.nbytes()
        self._sizes[key] = size
        weakref.finalize(storage, self._free, key).atexit = False
        if _compat.accumulates(function):  # which writes into the first, where nobody else has it
            self._hand_over(args[0], size)
        self.level += size

    def _hand_over(self, tensor: torch.Tensor, size: int) -> None:
        key = _compat.storage_id(tensor)
        if self._sizes.get(key) == size:
            self._sizes[key] = 0
            self.level -= size

    def _free(self, key: int) -> None:
        self.level -= self._sizes.pop(key, 0)

    def now_ns(self) -> int:
        """What the operators so far have taken."""
        return int(self.elapsed_ns)

    @contextlib.contextmanager
    def runs(self) -> Iterator[None]:
        """What the body does runs on this device: meters read its memory, and the clock its time."""
        read, token = clock.read, memory.fake_meter.set(lambda: VirtualMeter(self))
        clock.read = self.now_ns
        try:
            with _compat.FakeMode() as self.mode, self:
                yield
        finally:
            clock.read = read
            memory.fake_meter.reset(token)


class VirtualMeter(memory.Meter):
    """Levels and peaks of a virtual device."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device

    def __enter__(self) -> VirtualMeter:
        self._levels, self._peaks, self._start = [], [], self._device.level
        return self

    def mark(self) -> int:
        self._end_section()
        self._levels.append(self._device.level - self._start)
        return len(self._levels) - 1

    def _end_section(self) -> None:
        if self._levels:
            self._peaks.append(self._device.peak - self._start)
        self._device.peak = self._device.level

    def __exit__(self, *exc: object) -> None:
        self._end_section()


def _stored(values: Any) -> Iterator[torch.Tensor]:
    """The fake tensors among values that have one storage of their own."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _stored(value)
        elif isinstance(value, torch.Tensor) and _compat.is_fake(value) and not value.is_sparse:
            yield value


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if _compat.is_fake(first) or _compat.is_fake(second):
        return first.shape == second.shape and first.dtype == second.dtype
    with _compat.without_dispatch_modes():
        return torch.equal(first, second)


def _draw() -> None:
    """Lets the generator's state change, by which a profile sees that random numbers were drawn."""
    with _compat.without_dispatch_modes():
        torch.rand(())
