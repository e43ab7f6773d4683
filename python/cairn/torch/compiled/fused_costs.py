"""Costs of calls in the kernels of a fusing compiler: the bytes that they move, divided by the memory's bandwidth.

Pointwise operators and reductions share a kernel with their producers and readers, and values between them stay in
registers. Such a call moves the storages that it reads from memory, and its own result if another kernel reads it.
Matrix products, convolutions, attention and all others are kernels of their own, whose time is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..base import _compat, _compat_compile, clock
from . import kernel_costs
from .joint_graph import JointGraph
from .problem import Costs

_PROBE_BYTES = 64 << 20
_POINTWISE, _REDUCTION = (getattr(torch.Tag, name, None) for name in ("pointwise", "reduction"))
_REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all", "argmax", "argmin")
_CREATIONS = ("full", "iota", "scalar_tensor", "empty", "zeros", "ones", "arange", "inductor_seeds", "clone")
#: Operators that read only some elements of their arguments, one for each element of their result.
_GATHERS = (
    *("embedding", "index", "_unsafe_index", "index_select", "gather", "slice_scatter", "select_scatter", "repeat"),
    *("constant_pad_nd", "avg_pool2d", "avg_pool2d_backward", "upsample_nearest2d", "_to_copy"),
)


def estimated(joint: JointGraph, device: torch.device) -> Costs:
    """Times and workspaces of all calls that make results."""
    own = [call for call in joint.calls() if call.op == "call_function" and not fuses(call)]
    costs = kernel_costs.measured(joint, device, own, _channels_last)
    rate = bandwidth(device)
    fused = {call: not _reduces(call) for call in joint.calls() if call.op == "call_function" and fuses(call)}
    moved = {call: int(_moved_bytes(joint, call) * 1e9 / rate) for call in fused}
    return Costs({**costs.ns, **moved}, costs.workspace_bytes, fused, _copies_bytes(joint, own))


def _channels_last(call: fx.Node, value: Any) -> Any:
    """The layout of images and filters that inductor passes to convolutions."""
    if not _name(call).startswith("convolution") or not isinstance(value, torch.Tensor) or value.dim() != 4:
        return value
    return value.contiguous(memory_format=torch.channels_last)


def _copies_bytes(joint: JointGraph, calls: Sequence[fx.Node]) -> int:
    """Copies of the graph's inputs that convolutions read in another layout; the backward holds the copies as well."""
    read = [(call, source, joint.values[source]) for call in calls for source in call.all_input_nodes
            if source.op == "placeholder" and isinstance(joint.values[source], torch.Tensor)]  # fmt: skip
    copied = {source: _bytes(value) for call, source, value in read
              if _channels_last(call, value).stride() != value.stride()}  # fmt: skip
    return sum(copied.values())


def fuses(call: fx.Node) -> bool:
    """Whether the compiler fuses a call with its neighbours."""
    target = call.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if _POINTWISE in target.tags or _REDUCTION in target.tags or target.namespace in ("prims", "inductor_prims"):
        return True
    return _name(call) in (*_REDUCTIONS, *_CREATIONS, *_GATHERS)


def _name(call: fx.Node) -> str:
    target = call.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _reduces(call: fx.Node) -> bool:
    target: Any = call.target
    return _name(call) in _REDUCTIONS or _REDUCTION in target.tags


def _moved_bytes(joint: JointGraph, call: fx.Node) -> int:
    read = 0
    for source in call.all_input_nodes:
        index = joint.base.get(source)
        maker = None if index is None else joint.results[index].call
        if maker is None or maker.op != "call_function" or not fuses(maker):
            size = _bytes(joint.values.get(source))
            read += min(size, _bytes(joint.values[call])) if _name(call) in _GATHERS else size
    written = sum(joint.results[index].nbytes for index in joint.members(call) if _leaves_kernel(joint, index))
    return read + written


def _leaves_kernel(joint: JointGraph, index: int) -> bool:
    """Whether a call outside of the fused kernel reads a result."""
    readers = joint.readers(index)
    return not readers or not all(fuses(reader) for reader in readers)


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return _compat_compile.size_hint(value.numel()) * value.element_size()


@functools.lru_cache(maxsize=8)
def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    with _compat.without_dispatch_modes(), torch.no_grad():
        source = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        best = None
        for _ in range(5):
            clock.wait_for(device)
            began = clock.read()
            target.copy_(source)
            clock.wait_for(device)
            taken = clock.read() - began
            best = taken if best is None else min(best, taken)
    return 2 * _PROBE_BYTES * 1e9 / max(best or 1, 1)
