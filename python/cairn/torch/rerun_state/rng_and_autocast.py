"""Random state, autocast and grad mode of a block's call: recorded in the forward, restored for a recomputation.

Backend flags are recorded in the model's call (`backend_flags.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..base import _compat

# -- random state --------------------------------------------------------------------------------------------


_generator = torch.default_generator


class RandomState:
    """The state of the default generators of the CPU and of some devices."""

    __slots__ = ("_address", "_cpu", "_devices")

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cpu = _generator.get_state()
        self._address = self._cpu.data_ptr()
        self._devices = _states_of(devices) if devices else []

    @property
    def cpu_bytes(self) -> int:
        """The size of the state of the CPU's generator."""
        return _STATE_BYTES

    def equals(self, other: RandomState) -> bool:
        """Whether two records have the same generators in the same states."""
        if _differ(self._address, other._address, _STATE_BYTES) or len(self._devices) != len(other._devices):
            return False
        if not self._devices:
            return True
        pairs = zip(self._devices, other._devices, strict=True)
        return all(here == there and torch.equal(one, another) for (here, one), (there, another) in pairs)

    def restore(self) -> None:
        """Set the state of the generators."""
        _generator.set_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)

    def exchange(self) -> RandomState:
        """Set the state of the generators, and return their state before."""
        current = RandomState([device for device, _ in self._devices])
        self.restore()
        return current


def _states_of(devices: Iterable[torch.device]) -> list[tuple[torch.device, torch.Tensor]]:
    return [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]


_differ = _compat.compare_memory
_STATE_BYTES = _generator.get_state().nbytes  # of the CPU's generator, always


def with_generator(device: torch.device) -> bool:
    """Whether a device other than the CPU has a default generator of its own."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "get_rng_state")


# -- autocast and grad mode ----------------------------------------------------------------------------------


_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled


class Modes(NamedTuple):
    """Autocast and grad mode; `autocast` has an entry for each type of device."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype | None], ...]
    cache: bool

    @classmethod
    def current(cls, device_types: tuple[str, ...]) -> Modes:
        """The modes in force in this thread."""
        autocast = tuple(_autocast(device_type) for device_type in device_types)
        cache = any(enabled for _, enabled, _ in autocast) and torch.is_autocast_cache_enabled()
        return cls(torch.is_grad_enabled(), autocast, cache)

    def are_in_force(self) -> bool:
        """Whether these modes are in force in this thread now."""
        if _is_grad_enabled() != self.grad:
            return False
        for device_type, enabled, dtype in self.autocast:
            if _is_autocast_enabled(device_type) != enabled:
                return False
            if enabled and (torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()) != (
                dtype,
                self.cache,
            ):
                return False
        return True

    def enter(self, surroundings: contextlib.ExitStack) -> None:
        """Brings these modes into force for as long as `surroundings` are open."""
        if torch.is_grad_enabled() != self.grad:
            surroundings.enter_context(torch.enable_grad() if self.grad else torch.no_grad())
        for device_type, enabled, dtype in self.autocast:
            if _autocast(device_type) != (device_type, enabled, dtype):
                surroundings.enter_context(
                    torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=self.cache)
                )


@contextlib.contextmanager
def no_autocast(device_types: Iterable[str]) -> Iterator[None]:
    """Run the body without autocast."""
    with contextlib.ExitStack() as surroundings:
        for device_type in filter(torch.is_autocast_enabled, device_types):
            surroundings.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _autocast(device_type: str) -> tuple[str, bool, torch.dtype | None]:
    enabled = torch.is_autocast_enabled(device_type)
    return device_type, enabled, torch.get_autocast_dtype(device_type) if enabled else None
