"""Costs of calls as kernels run them one by one: measured once for each operator, shapes, strides and types.

The inputs are made up for each kind of call, used and released, so that measuring takes little more memory than the
largest call: also of a step that would not fit. Indices are zero and numbers lie between 0.1 and 1, for which no kernel
takes another way than in training. A call is timed a few times; the first is left out, the median counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..base import _compat, _compat_compile, clock, memory
from .joint_graph import JointGraph, described
from .problem import Costs

#: A call is repeated until it has taken so long in all, or so often.
ENOUGH_NS, MOST_REPETITIONS = 20_000_000, 9


def measured(
    joint: JointGraph, device: torch.device, of_kind: dict[str, Any], calls: Sequence[fx.Node] | None = None
) -> Costs:
    """Times and workspaces of calls; of all that make results if none are named.

    of_kind: what is known, time and workspace by kind of call; added to.
    """
    ns: dict[fx.Node, int] = {}
    workspaces: dict[fx.Node, int] = {}
    devices = [device] if device.type == "cuda" else []
    with _compat.without_dispatch_modes(), memory.not_collecting(), torch.random.fork_rng(devices=devices):
        for call in joint.calls() if calls is None else calls:
            if call.op != "call_function":
                continue
            kind = described(call, joint.values.__getitem__)
            if kind not in of_kind:
                of_kind[kind] = _measured(joint, call, device) if _can_be_called(call) else (0, 0)
            ns[call], workspaces[call] = of_kind[kind]
    return Costs(ns, workspaces)


def _can_be_called(call: fx.Node) -> bool:
    """Not so collectives, which wait for others, and operators of functions."""
    target = call.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in _compat_compile.COLLECTIVE_NAMESPACES


def _measured(joint: JointGraph, call: fx.Node, device: torch.device) -> tuple[int, int]:
    inputs: dict[fx.Node, Any] = {}
    for source in call.all_input_nodes:
        inputs[source] = pytree.tree_map(made_up, joint.values[source])
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), inputs.__getitem__)
    with torch.no_grad():
        workspace = _workspace(call.target, args, kwargs, device)
        return _time(call.target, args, kwargs, device), workspace


def _workspace(function: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> int:
    """What a call takes beyond its results."""
    meter = memory.meter_for(device)
    with meter:
        first = meter.mark()
        result = function(*args, **kwargs)
        last = meter.mark()
        rise, left = 0, 0
        del result
    rise, left = meter.peak(first, last) - meter.level(first), meter.level(last) - meter.level(first)
    return max(0, rise - left)


def _time(function: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> int:
    times: list[int] = []
    while len(times) < MOST_REPETITIONS and (len(times) < 3 or sum(times) < ENOUGH_NS):
        clock.wait_for(device)
        began = clock.read()
        function(*args, **kwargs)
        clock.wait_for(device)
        times.append(clock.read() - began)
    return int(statistics.median(times[1:]))


def made_up(value: Any) -> Any:
    """A tensor like a fake one, with contents that any kernel takes; a size as a number."""
    if isinstance(value, torch.SymInt):
        return _compat_compile.size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_compat_compile.size_hint(size) for size in value.shape]
    stride = [_compat_compile.size_hint(step) for step in value.stride()]
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
    flat = torch.empty(max(extent, 0), dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        flat.uniform_(0.1, 1.0)
    else:
        flat.zero_()
    return flat.as_strided(shape, stride)
