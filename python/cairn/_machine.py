"""The machine that a problem runs on, as Python and as C have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _structs
from ._units import flag, normalize, parse_duration, parse_rate, parse_size


@dataclass(frozen=True)
class Machine:
    """Host memory and the link to it, which offloading needs. Sizes and rates may be given as text, "12GB/s".

    Attributes
    ----------
    host_bytes
        Host memory that offloaded values may take, bytes.
    to_host_bytes_per_s
        Bandwidth from device to host, bytes per second, at least 1.
    to_device_bytes_per_s
        Bandwidth from host to device, bytes per second, at least 1.
    shared_link
        Both directions share one lane.
    latency_ns
        What every transfer takes before its first byte, nanoseconds.
    """

    host_bytes: int
    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    shared_link: bool = False
    latency_ns: int = 0

    def __post_init__(self) -> None:
        """Turns text into numbers and checks their ranges."""
        for field, parse in (
            ("host_bytes", parse_size),
            ("to_host_bytes_per_s", parse_rate),
            ("to_device_bytes_per_s", parse_rate),
            ("latency_ns", parse_duration),
        ):
            value = getattr(self, field)
            if isinstance(value, str):
                object.__setattr__(self, field, parse(value))
        normalize(self, host_bytes=0, to_host_bytes_per_s=1, to_device_bytes_per_s=1, latency_ns=0)
        object.__setattr__(self, "shared_link", flag(self.shared_link, "shared_link"))

    def _struct(self) -> _structs.Machine:
        return _structs.Machine(
            self.host_bytes,
            self.to_host_bytes_per_s,
            self.to_device_bytes_per_s,
            self.latency_ns,
            self.shared_link,
        )


def machine_of(pointer: Any) -> Machine | None:
    """The machine behind a const cairn_machine *."""
    if not pointer:
        return None
    struct = pointer.contents
    return Machine(
        struct.host_bytes,
        struct.to_host_bytes_per_s,
        struct.to_device_bytes_per_s,
        struct.shared_link,
        struct.latency_ns,
    )


def machine_struct(machine: Machine) -> _structs.Machine:
    """The machine as the C library takes it."""
    if not isinstance(machine, Machine):
        raise TypeError(f"machine must be a cairn.Machine or None, not {type(machine).__name__}")
    return machine._struct()
