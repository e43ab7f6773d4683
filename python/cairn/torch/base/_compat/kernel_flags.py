"""Flags that say which kernels run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FLOAT32_OF = [
    ("generic", "all"),  # what others inherit from comes first
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
]
_PRECISIONS = {  # those that torch has under other names than the rest
    ("generic", "all"): "torch.backends.fp32_precision",
    ("cuda", "all"): "torch.backends.cuda.fp32_precision",
    ("mkldnn", "all"): "torch.backends.mkldnn.fp32_precision",
    ("cuda", "conv"): "torch.backends.cudnn.conv.fp32_precision",
    ("cuda", "rnn"): "torch.backends.cudnn.rnn.fp32_precision",
}


def reader(name: str, public: Callable[[], Any]) -> Callable[[], Any]:
    """A function that reads a flag: torch's private one if it exists, because the public one does more."""
    function: Callable[[], Any] = getattr(torch._C, name, public)
    return function


def attribute_reader(owner: Any, name: str) -> Callable[[], Any]:
    """A function that reads an attribute of one of torch's backends."""
    read = getattr(vars(type(owner)).get(name), "getter", None)
    return read if callable(read) else lambda: getattr(owner, name)


def kernel_flags() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Flags of kernels: name, reader and writer of each.

    These are the precision of float32, for many operations at once and then, if torch has such flags, for each kind;
    the precision of sums in cuBLAS; and the order in which attention kernels are tried.
    """
    cudnn = torch.backends.cudnn
    precision = reader("_get_float32_matmul_precision", torch.get_float32_matmul_precision)
    yield ("torch.set_float32_matmul_precision", *_unless_mixed(precision, torch.set_float32_matmul_precision))
    allow_tf32 = attribute_reader(cudnn, "allow_tf32")
    tf32 = _unless_mixed(allow_tf32, lambda value: setattr(cudnn, "allow_tf32", value))
    yield ("torch.backends.cudnn.allow_tf32", *tf32)
    get, set_ = (getattr(torch._C, f"_{verb}_fp32_precision_{verb}ter", None) for verb in ("get", "set"))
    if get is not None and set_ is not None:
        for which in _FLOAT32_OF:
            backend, operation = which
            name = f"torch.backends.{backend}.{operation}.fp32_precision"
            yield _PRECISIONS.get(which, name), functools.partial(get, *which), functools.partial(set_, *which)
    for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation"):
        get, set_ = (getattr(torch._C, f"_{verb}_cublas_allow_{name}", None) for verb in ("get", "set"))
        if get is not None and set_ is not None:
            yield f"torch.backends.cuda.matmul.allow_{name}", get, functools.partial(_set_parts, set_)
    order, reorder = (getattr(torch._C, f"_{verb}_sdp_priority_order", None) for verb in ("get", "set"))
    if order is not None and reorder is not None:
        yield "sdpa_kernel(set_priority=True)", lambda: tuple(order()), lambda value: reorder(list(value))


def _unless_mixed(
    read: Callable[[], Any], write: Callable[[Any], Any]
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """A flag that is left alone if torch refuses to read it, because its parts were set one by one."""

    def known() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    def restore(value: Any) -> None:
        if value is not None:
            write(value)

    return known, restore


def _set_parts(write: Callable[..., Any], value: Any) -> None:
    """Sets a flag that has one part or several."""
    write(*(value if isinstance(value, tuple) else (value,)))
