"""A virtual device: it counts the memory that operators on fake tensors would allocate, and the time they would take.

A step on fake tensors calls the same operators as on real ones. Each result has a storage that lives as long as a real
one, so its size counts from the operator that makes it until the storage is freed. A clock advances by each operator's
time in the model of the device. Fake tensors of one shape and type compare equal: the estimate assumes that a
recomputation gives the same numbers, which only a profile on real tensors can check.
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

    takes_ns: returns the time of a call, given its operator, arguments and result.
    workspace: returns the bytes that a call allocates while it runs, its result not counted.
    is_cpu: whether it is a CPU.
    """

    def __init__(self, takes_ns: Callable[..., float], workspace: Callable[..., int], is_cpu: bool = False) -> None:
        super().__init__()
        self._takes_ns, self._workspace, self.is_cpu = takes_ns, workspace, is_cpu
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
        if torch.Tag.nondeterministic_seeded in function.tags and not _drops_nothing(function, args, kwargs):
            _draw()
        self._count(function, args, kwargs, result)
        self.elapsed_ns += self._takes_ns(function, args, kwargs, result)
        return result

    def _faked(self, known: Any) -> Any:
        """A fake of a result whose shape depends on known numbers; a number stays itself."""
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
            key = _compat.storage_id(tensor)
            if key in self._sizes:
                continue
            if given is None:
                given = {_compat.storage_id(t) for t in _stored((*args, *kwargs.values()))}
            if key in given:  # the storage of an argument: allocated before, or real
                continue
            self._allocate(storage, key, function, args)
        self.peak = max(self.peak, self.level + workspace)

    def _allocate(self, storage: torch.UntypedStorage, key: int, function: Any, args: Any) -> None:
        size = storage.nbytes()
        self._sizes[key] = size
        weakref.finalize(storage, self._free, key).atexit = False
        if _compat.accumulates(function):  # it writes into its first argument, if nobody else holds that
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
        """The time of the operators so far."""
        return int(self.elapsed_ns)

    @contextlib.contextmanager
    def runs(self) -> Iterator[None]:
        """Run the body on this device: meters read its memory, and the clock reads its time."""
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
        self.is_of_cpu = device.is_cpu

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


def _drops_nothing(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator that may drop values drops none, as attention without dropout, and so draws no numbers."""
    arguments = _compat.schema_of(function).arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    return {**defaults, **given, **kwargs}.get("dropout_p") == 0


def _draw() -> None:
    """Advance the generator's state, by which a profile sees that random numbers were drawn."""
    with _compat.without_dispatch_modes():
        torch.rand(())
