"""Costs of calls in unfused kernels: measured once for each operator with its shapes, strides and dtypes.

Synthetic inputs are allocated for one kind of call at a time. So measuring needs little more memory than the largest
call, even for a step that would not fit. Indices are zero and numbers lie between 0.1 and 1, so kernels take the same
path as in training. A call is timed a few times. The first time is left out, and the least of the others counts, since
other programs can only add to it. The processor's caches are overwritten before each time, because the inputs of a call
in a step were mostly written long before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..base import _compat, clock, memory
from .joint_graph import JointGraph, cost_key
from .problem import Costs
from .transfers import layout_of, spanned_elements

#: A call is repeated at most so often, and after four times only until it has taken so long in all.
MAX_NS, MAX_REPETITIONS = 20_000_000, 6
#: Bytes that are written before each timed call to overwrite the caches, by device type.
CACHES_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}

#: Time (ns) and workspace (bytes) of each kind of call, by device and number of threads. Kept until the process ends.
_CACHE: dict[tuple[torch.device, int], dict[str, tuple[int, int]]] = {}


def as_in_graph(_: fx.Node, value: Any) -> Any:
    """The argument of a call for a value, in the layout that the joint graph has."""
    return value


def measured(
    joint: JointGraph,
    device: torch.device,
    calls: Sequence[fx.Node] | None = None,
    argument_of: Callable[[fx.Node, Any], Any] = as_in_graph,
) -> Costs:
    """Measured times and workspaces of calls.

    Parameters
    ----------
    calls
        The calls to measure; None: all that produce results.
    argument_of
        Returns the argument that a call gets for a value that it reads, perhaps in another layout.
    """
    cache = _CACHE.setdefault((device, torch.get_num_threads()), {})
    measured_calls = [call for call in (joint.calls() if calls is None else calls) if call.op == "call_function"]
    kinds = {call: cost_key(call, _value_of(joint, call, argument_of)) for call in measured_calls}
    new_kinds = {kind: call for call, kind in kinds.items() if kind not in cache}
    if new_kinds:
        with _undisturbed(device):
            caches = torch.zeros(CACHES_BYTES.get(device.type, 0), dtype=torch.uint8, device=device)
            for kind, call in new_kinds.items():
                cache[kind] = _measure(joint, call, device, caches, argument_of) if _can_be_called(call) else (0, 0)
    ns = {call: cache[kind][0] for call, kind in kinds.items()}
    return Costs(ns, {call: cache[kind][1] for call, kind in kinds.items()})


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Run operators on real tensors, without modes that would change them. Restores the random state afterwards."""
    devices = [device] if device.type == "cuda" else []
    with (
        _compat.without_dispatch_modes(),
        memory.not_collecting(),
        torch.autocast(device.type, enabled=False),  # its casts are operators of the graph
        torch.random.fork_rng(devices=devices),
    ):
        yield


def _can_be_called(call: fx.Node) -> bool:
    """Whether a call can be measured alone. Collectives wait for other ranks; higher-order operators need a graph."""
    target = call.target
    if not isinstance(target, _compat.OpOverload):
        return False
    return target.namespace not in _compat.COLLECTIVE_NAMESPACES


def _value_of(joint: JointGraph, call: fx.Node, argument_of: Callable[[fx.Node, Any], Any]) -> Callable[[fx.Node], Any]:
    return lambda source: argument_of(call, joint.values[source])


def _measure(
    joint: JointGraph,
    call: fx.Node,
    device: torch.device,
    caches: torch.Tensor,
    argument_of: Callable[[fx.Node, Any], Any],
) -> tuple[int, int]:
    inputs: dict[fx.Node, Any] = {}
    for source in call.all_input_nodes:
        inputs[source] = _compat.tree_map(made_up, argument_of(call, joint.values[source]))
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), inputs.__getitem__)
    with torch.no_grad():
        try:
            workspace_bytes = workspace(call.target, args, kwargs, device)
        except RuntimeError:  # fake tensors have other types than real ones: the statistics of a mixed layer norm
            tensors = [value for value in _compat.tree_leaves(list(inputs.values())) if isinstance(value, torch.Tensor)]
            return sum(_time(torch.clone, [tensor], {}, device, caches) for tensor in tensors), 0
        return _time(call.target, args, kwargs, device, caches), workspace_bytes


def workspace(function: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> int:
    """Bytes that a call allocates and frees while it runs: its peak without its results."""
    meter = memory.meter_for(device)
    with meter:
        first = meter.mark()
        result = function(*args, **kwargs)
        last = meter.mark()
        del result
    peak_bytes, result_bytes = meter.rise(first, last), meter.level(last) - meter.level(first)
    return max(0, peak_bytes - result_bytes)


def _time(function: Any, args: Sequence[Any], kwargs: Any, device: torch.device, caches: torch.Tensor) -> int:
    """The least time of several calls, in ns. caches: the memory to overwrite before each."""
    times: list[int] = []
    while len(times) < MAX_REPETITIONS and (len(times) < 4 or sum(times) < MAX_NS):
        caches.add_(1)
        began = clock.now(device)
        function(*args, **kwargs)
        times.append(clock.now(device) - began)
    return min(times[1:])


def made_up(value: Any) -> Any:
    """A real tensor like a fake one, with contents that every kernel accepts; a symbolic size as a number."""
    if isinstance(value, torch.SymInt):
        return _compat.size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride, dtype, device = layout_of(value)
    flat = torch.empty(max(spanned_elements(value), 0), dtype=dtype, device=device)
    if value.dtype.is_floating_point:
        flat.uniform_(0.1, 1.0)
    else:
        flat.zero_()
    return flat.as_strided(shape, stride)
