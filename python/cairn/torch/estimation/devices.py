"""Devices by their data sheets, and the time of an operator on a device (a roofline model).

A matrix product takes the longer of two times: its floating-point operations divided by the device's rate for its type,
and the bytes that it reads and writes divided by the memory's bandwidth. Every other operator takes the second time.
Real kernels reach neither rate, so times are lower bounds. Ratios of times, such as a plan's extra time, are closer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import cairn
import torch
from torch.utils.flop_counter import flop_registry

from ..base import _compat
from ..base.budgets import size_bytes

#: Without rates, time is counted in FLOPs, and each byte moved counts as this many.
FLOPS_A_BYTE = 100


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A device for `cairn.torch.estimate`: its memory and its rates.

    Attributes
    ----------
    name : str
        The name that reports print.
    type : str
        "cuda" or "cpu": which kernels the step uses.
    memory : int or str, optional
        Its memory, "80GB".
    flops : float or mapping, optional
        Floating-point operations a second in products: of all types, or by type, {"float32": 67e12}.
    bandwidth : float or str, optional
        Of its memory: bytes a second, or "3.35TB/s".

    Examples
    --------
    >>> ct.DeviceModel("RTX 4090", memory="24GB", flops={"float32": 82.6e12, "bfloat16": 165e12}, bandwidth="1008GB/s")
    """

    name: str
    type: str = "cuda"
    memory: int | str | None = None
    flops: float | Mapping[str, float] | None = None
    bandwidth: float | str | None = None

    def __post_init__(self) -> None:
        if self.type not in ("cuda", "cpu"):
            raise ValueError(f"DeviceModel type={self.type!r}: it is 'cuda' or 'cpu', whose kernels are known")
        if (self.flops is None) != (self.bandwidth is None):
            raise ValueError("a DeviceModel has flops= and bandwidth=, from which times follow, or neither")
        _ = self.memory_bytes, self.bytes_per_s  # these raise for wrong sizes and rates

    @property
    def memory_bytes(self) -> int | None:
        """Its memory in bytes."""
        return None if self.memory is None else size_bytes(self.memory, "memory")

    @property
    def bytes_per_s(self) -> float | None:
        """The bandwidth of its memory."""
        return float(cairn.parse_rate(self.bandwidth)) if isinstance(self.bandwidth, str) else self.bandwidth

    @property
    def has_times(self) -> bool:
        """Whether it has rates."""
        return self.flops is not None

    def flops_of(self, dtype: torch.dtype) -> float:
        """Floating-point operations a second in products of a type, or of the nearest type that has a rate."""
        if not isinstance(self.flops, Mapping):
            return float(self.flops or 0)
        name = str(dtype).removeprefix("torch.")
        same_width = [rate for other, rate in self.flops.items() if getattr(torch, other).itemsize == dtype.itemsize]
        return float(self.flops.get(name) or next(iter(same_width), min(self.flops.values())))

    @property
    def rates(self) -> str:
        """Its rates as text for a report; empty if it has none."""
        if self.flops is None or self.bytes_per_s is None:
            return ""
        if not isinstance(self.flops, Mapping):
            return f"{self.flops / 1e12:g} TFLOP/s, {self.bytes_per_s / 1e12:g} TB/s"
        by_rate: dict[float, list[str]] = {}
        for name, rate in self.flops.items():
            by_rate.setdefault(rate, []).append(name)
        flops = [f"{rate / 1e12:g} TFLOP/s in {' and '.join(names)}" for rate, names in by_rate.items()]
        return f"{', '.join(flops)}, {self.bytes_per_s / 1e12:g} TB/s"


def _published(name: str, memory: str, fp32: float, half: float, bandwidth: str) -> DeviceModel:
    flops = {"float32": fp32 * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}
    return DeviceModel(name, "cuda", memory, flops, bandwidth)


#: Dense rates, memory and bandwidth as the makers' data sheets print them; float32 without TF32.
DEVICES = {
    device.name: device
    for device in (
        _published("V100", "32GB", 15.7, 125, "900GB/s"),
        _published("T4", "16GB", 8.1, 65, "320GB/s"),
        _published("A10", "24GB", 31.2, 125, "600GB/s"),
        _published("A100-40GB", "40GB", 19.5, 312, "1555GB/s"),
        _published("A100", "80GB", 19.5, 312, "2039GB/s"),
        _published("L4", "24GB", 30.3, 121, "300GB/s"),
        _published("L40S", "48GB", 91.6, 362, "864GB/s"),
        _published("H100", "80GB", 67, 989, "3350GB/s"),
        _published("H200", "141GB", 67, 989, "4800GB/s"),
        _published("MI300X", "192GB", 163.4, 1307, "5300GB/s"),
    )
}


def device_model(device: Any) -> DeviceModel:
    """The model of a device given as "cuda", "cpu", a name of `DEVICES`, or a `DeviceModel`."""
    if isinstance(device, DeviceModel):
        return device
    name = str(device)
    if name in ("cuda", "cpu"):
        return DeviceModel(name, name)
    if name not in DEVICES:
        raise ValueError(
            f"device={name!r}: it is 'cuda', 'cpu', one of {', '.join(DEVICES)}, or a cairn.torch.DeviceModel with its "
            "memory and rates"
        )
    return DEVICES[name]


class OperatorTimes:
    """The time of an operator call on a device, in nanoseconds; without rates, in units of a billion FLOPs."""

    def __init__(self, device: DeviceModel) -> None:
        self._has_times, self._bytes_per_s = device.has_times, device.bytes_per_s or 1.0
        self._flops_of = functools.lru_cache(maxsize=None)(device.flops_of)

    def __call__(self, function: Any, args: Any, kwargs: Any, result: Any) -> float:
        if _is_view(function):
            return 0.0
        tensors = list(_tensors((*args, *kwargs.values(), result)))
        moved = sum(t.numel() * t.element_size() for t in tensors)
        formula: Any = flop_registry.get(getattr(function, "overloadpacket", None)) or _OTHERS.get(function)
        flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
        if not self._has_times:
            return max(flops, FLOPS_A_BYTE * moved)
        if not flops:
            return 1e9 * moved / self._bytes_per_s
        rate = self._flops_of(next((t.dtype for t in tensors if t.is_floating_point()), torch.float32))
        return 1e9 * max(flops / rate, moved / self._bytes_per_s)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


@functools.cache
def _is_view(function: Any) -> bool:
    schema = _compat.schema_of(function)
    if schema is None:
        return False
    aliases = [returned.alias_info for returned in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """FLOPs of attention: two matrix products over each pair of positions."""
    batch, heads, rows, width = query.shape
    return int(2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of attention's backward: five matrix products for the forward's two."""
    return _attention(query, key, value) * 5 // 2


_flash = "_scaled_dot_product_flash_attention_for_cpu"
_OTHERS = {
    _compat.operator_named(_flash): _attention,
    _compat.operator_named(f"{_flash}_backward"): _attention_backward,
}
