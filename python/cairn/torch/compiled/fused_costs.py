"""Costs of calls as a compiler runs them that fuses: the bytes that they move, over the memory's bandwidth.

Pointwise operators and reductions become one kernel with what they read and what reads them. Values between them are in
registers. Such a call costs the storages that it reads from memory, and its own result where something outside of the
kernel reads it. Products, convolutions, attention and the rest are kernels of their own and are measured.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from ..base import _compat, clock
from . import kernel_costs
from .joint_graph import JointGraph
from .problem import Costs

_PROBE_BYTES = 64 << 20
_TAGS = [getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name)]
_REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all", "argmax", "argmin")
_CREATIONS = ("full", "iota", "scalar_tensor", "empty", "zeros", "ones", "arange", "inductor_seeds", "clone")


def estimated(joint: JointGraph, device: torch.device) -> Costs:
    """Times and workspaces of all calls that make results."""
    own = [call for call in joint.calls() if call.op == "call_function" and not fuses(call)]
    costs = kernel_costs.measured(joint, device, own)
    rate = bandwidth(device)
    ns = dict(costs.ns)
    for call in joint.calls():
        if call.op == "call_function" and fuses(call):
            ns[call] = int(_moved_bytes(joint, call) * 1e9 / rate)
    return Costs(ns, costs.workspace_bytes)


def fuses(call: fx.Node) -> bool:
    """Whether a compiler makes one kernel of a call and its neighbours."""
    target = call.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if any(tag in target.tags for tag in _TAGS):
        return True
    name = target._schema.name.partition("::")[2]
    return name in _REDUCTIONS or name in _CREATIONS or target.namespace in ("prims", "inductor_prims")


def _moved_bytes(joint: JointGraph, call: fx.Node) -> int:
    read = 0
    for source in call.all_input_nodes:
        index = joint.base.get(source)
        maker = None if index is None else joint.results[index].call
        if maker is None or maker.op != "call_function" or not fuses(maker):
            read += _bytes(joint.values.get(source))
    written = sum(joint.results[index].nbytes for index in joint.members(call) if _leaves_kernel(joint, index))
    return read + written


def _leaves_kernel(joint: JointGraph, index: int) -> bool:
    """Whether something outside of a fused kernel reads a result."""
    readers = joint.readers(index)
    return not readers or not all(fuses(reader) for reader in readers)


def _bytes(value: Any) -> int:
    return int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


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
