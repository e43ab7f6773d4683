"""Costs of calls in inductor's fused kernels: the bytes that they read and write, divided by the memory's bandwidth.

Pointwise operators and reductions share a kernel with their producers and readers, and values between them stay in
registers. Such a call reads the storages of unfused producers, and writes its own result if another kernel reads it.
Matrix products, convolutions, attention and all others are kernels of their own, whose time is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..base import _compat, clock
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
    """Times and workspaces of all calls that produce results: of fused calls estimated, of others measured."""
    unfused = [call for call in joint.calls() if call.op == "call_function" and not is_fused(call)]
    costs = kernel_costs.measured(joint, device, unfused, _channels_last)
    bytes_per_s = bandwidth(device)
    fused = {call: not _is_reduction(call) for call in joint.calls() if call.op == "call_function" and is_fused(call)}
    ns = {call: int(_moved_bytes(joint, call) * 1e9 / bytes_per_s) for call in fused}
    merged = {product: total for total in fused for product in _product_in(joint, total, device)}
    for total in merged.values():
        del fused[total]
    return Costs({**costs.ns, **ns}, costs.workspace_bytes, fused, merged, _copies_bytes(joint, unfused))


def _product_in(joint: JointGraph, total: fx.Node, device: torch.device) -> list[fx.Node]:
    """The matrix product that inductor computes together with a sum (addmm); none where it does not.

    On a GPU it does not if all readers of the sum are pointwise.
    """
    if total.target is not torch.ops.aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return []
    if device.type != "cpu" and all(is_fused(reader) and not _is_reduction(reader) for reader in total.users):
        return []
    for product, other in (total.args[::-1], total.args):
        if not isinstance(product, fx.Node) or not isinstance(other, fx.Node):
            continue
        if product.target is not torch.ops.aten.mm.default:
            continue
        if len(product.users) == 1 and _expands_to(joint.values.get(other), joint.values[product]):
            return [product]
    return []


def _expands_to(value: Any, product: torch.Tensor) -> bool:
    """Whether a value is a tensor of the product's dtype that can be expanded to its shape."""
    if not isinstance(value, torch.Tensor) or value.dtype != product.dtype or value.dim() > product.dim():
        return False
    return all(size in (1, full) for size, full in zip(value.shape[::-1], product.shape[::-1], strict=False))


def _channels_last(call: fx.Node, value: Any) -> Any:
    """The argument that inductor passes to a call for a value: convolutions get channels-last images and filters."""
    if not _name(call).startswith("convolution") or not isinstance(value, torch.Tensor) or value.dim() != 4:
        return value
    return value.contiguous(memory_format=torch.channels_last)


def _copies_bytes(joint: JointGraph, calls: Sequence[fx.Node]) -> int:
    """Bytes of the copies of graph inputs that convolutions read in another layout. The backward holds them, too."""
    inputs_read = [(call, source, joint.values[source]) for call in calls for source in call.all_input_nodes
                   if source.op == "placeholder" and isinstance(joint.values[source], torch.Tensor)]  # fmt: skip
    copied = {source: _bytes(value) for call, source, value in inputs_read
              if _channels_last(call, value).stride() != value.stride()}  # fmt: skip
    return sum(copied.values())


def is_fused(call: fx.Node) -> bool:
    """Whether inductor fuses a call with its neighbours."""
    target = call.target
    if not isinstance(target, _compat.OpOverload):
        return False
    if _POINTWISE in target.tags or _REDUCTION in target.tags or target.namespace in ("prims", "inductor_prims"):
        return True
    return _name(call) in (*_REDUCTIONS, *_CREATIONS, *_GATHERS)


def _name(call: fx.Node) -> str:
    target = call.target
    return _compat.schema_of(target).name.partition("::")[2] if isinstance(target, _compat.OpOverload) else ""


def _is_reduction(call: fx.Node) -> bool:
    target: Any = call.target
    return _name(call) in _REDUCTIONS or _REDUCTION in target.tags


def _moved_bytes(joint: JointGraph, call: fx.Node) -> int:
    read = 0
    for source in call.all_input_nodes:
        index = joint.base.get(source)
        producer = None if index is None else joint.results[index].call
        if producer is None or producer.op != "call_function" or not is_fused(producer):
            size = _bytes(joint.values.get(source))
            read += min(size, _bytes(joint.values[call])) if _name(call) in _GATHERS else size
    written = sum(joint.results[index].nbytes for index in joint.members(call) if _is_stored(joint, index))
    return read + written


def _is_stored(joint: JointGraph, index: int) -> bool:
    """Whether a fused kernel writes a result to memory: it is returned, or an unfused call reads it."""
    readers = joint.readers(index)
    return not readers or not all(is_fused(reader) for reader in readers)


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return _compat.size_hint(value.numel()) * value.element_size()


@functools.lru_cache(maxsize=8)
def bandwidth(device: torch.device) -> float:
    """The memory bandwidth of a device: bytes that a copy reads and writes in a second."""
    with _compat.without_dispatch_modes(), torch.no_grad():
        source = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        least_ns = None
        for _ in range(5):
            began = clock.now(device)
            target.copy_(source)
            elapsed_ns = clock.now(device) - began
            least_ns = elapsed_ns if least_ns is None else min(least_ns, elapsed_ns)
    return 2 * _PROBE_BYTES * 1e9 / max(least_ns or 1, 1)
