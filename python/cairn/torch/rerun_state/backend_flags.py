"""Torch's flags that choose kernels: recorded in a model's call, restored when its blocks are recomputed.

A backward usually runs outside the contexts of the forward (`sdpa_kernel`, deterministic algorithms, default device and
dtype, precision of float32 and of sums), and another kernel gives other bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..base import _compat
from ..base.errors import Unsupported


def refuse_chosen_kernels(modules: Iterable[torch.nn.Module]) -> None:
    """Raise Unsupported if cuDNN chooses the kernels of these modules' convolutions by benchmarking, on CUDA.

    Each thread benchmarks by itself, and autograd runs the backward in a thread of its own. A recomputation there could
    get another kernel than the forward, with other bits and a larger workspace than measured.
    """
    if not (_cudnn.enabled and _cudnn.benchmark):
        return
    for module in modules:
        if _convolves(module):
            raise Unsupported(
                f"torch.backends.cudnn.benchmark is on, and a {type(module).__name__} is to be recomputed: cuDNN may "
                "take another kernel then, with other bits; set torch.backends.cudnn.benchmark = False"
            )


def _convolves(module: torch.nn.Module) -> bool:
    """Whether a module is a convolution with a weight on CUDA."""
    is_known = _compat.is_convolution(module)
    return any(p.is_cuda and (is_known or p.dim() > 3) for p in module._parameters.values() if p is not None)


class BackendFlag(NamedTuple):
    """A flag: its name, how to read it, and how to set it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


_cuda, _cudnn, _mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _attribute(owner: Any, name: str) -> BackendFlag:
    read = _compat.attribute_reader(owner, name)
    kind = getattr(owner, "__name__", type(owner).__module__)
    return BackendFlag(f"{kind}.{name}", read, lambda value: setattr(owner, name, value))


def _attention(kind: str) -> BackendFlag:
    read = getattr(_cuda, f"{kind}_sdp_enabled")
    write = getattr(_cuda, f"enable_{kind}_sdp")
    return BackendFlag(f"{kind} of sdpa_kernel", _compat.reader(f"_get_{kind}_sdp_enabled", read), write)


def _library(kind: str) -> BackendFlag:
    prefer = getattr(_cuda, f"preferred_{kind}_library")
    name = f"torch.backends.cuda.preferred_{kind}_library"
    return BackendFlag(name, _compat.reader(f"_get_{kind}_preferred_backend", prefer), prefer)


def _known() -> Iterator[BackendFlag]:
    yield from map(_attention, ("flash", "mem_efficient", "math", "cudnn"))
    if hasattr(_cuda, "fp16_bf16_reduction_math_sdp_allowed"):
        allow = _cuda.allow_fp16_bf16_reduction_math_sdp
        name = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp"
        yield BackendFlag(name, _cuda.fp16_bf16_reduction_math_sdp_allowed, allow)
    yield BackendFlag(
        "torch.use_deterministic_algorithms", torch.are_deterministic_algorithms_enabled, _set_deterministic
    )
    yield BackendFlag("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield from map(_library, ("blas", "linalg"))
    for owner, name in ((_cudnn, "enabled"), (_cudnn, "benchmark"), (_cudnn, "deterministic"), (_mkldnn, "enabled")):
        yield _attribute(owner, name)
    for name, read, write in _compat.kernel_flags():
        yield BackendFlag(name, read, write)


_FLAGS = tuple(_known())
_READERS = [flag.read for flag in _FLAGS]


def _known_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """An equal earlier value if there is one: comparing an object with itself takes no time."""
    global _latest
    latest = _latest  # another thread may replace it
    if key != latest:
        latest = _latest = key
    return latest


_latest: tuple[Any, ...] = ()


class BackendFlags:
    """The backend flags as they are now."""

    __slots__ = ("_device", "_values", "key")

    def __init__(self) -> None:
        self._values = tuple([read() for read in _READERS])
        self._device = _compat.default_device()
        self.key = _known_key((*self._values, self._device))  # the same object while the same flags are set

    def are_in_force(self) -> bool:
        """Whether the flags have these values now."""
        return self._values == tuple([read() for read in _READERS]) and self._device == _compat.default_device()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Run the body with these flags, and restore them after it."""
        changed = []
        for (_, read, write), wanted in zip(_FLAGS, self._values, strict=True):
            current = read()
            if current != wanted:
                changed.append((write, current))
                write(wanted)
        try:
            if _compat.default_device() == self._device:
                yield
            else:
                with self._device:
                    yield
        finally:
            for write, value in changed:
                write(value)


MOST_NAMED = 3  # flags in one sentence


def named_values() -> dict[str, str]:
    """All flags by their names, as they are now, in words."""
    return {name: str(read()) for name, read, _ in _FLAGS}


def changes_since(then: Mapping[str, str]) -> str:
    """The flags that have changed, as text for a message; empty if none has."""
    now = named_values()
    changed = [name for name, value in then.items() if now.get(name, value) != value]
    listed = [f"{name} is {now[name]} and was {then[name]}" for name in changed[:MOST_NAMED]]
    return "; ".join([*listed, *([f"{len(changed) - MOST_NAMED} more differ"] if changed[MOST_NAMED:] else [])])
