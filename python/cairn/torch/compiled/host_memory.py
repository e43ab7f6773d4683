"""Transfers of a compiled step: the operators that its graphs call, and the host memory that they copy to.

A value of the graph is offloaded and fetched back by four calls:

    handle = offload(value)          # starts the copy to the host
    handle = wait_for(handle, value) # the copy has ended: the value's memory is free after its last reader
    arriving = prefetch(handle)      # allocates memory on the device, and starts the copy back
    value = arrived(arriving, last)  # waits for it; `last` frees the place on the host

A handle is a tensor of one number, so AOTAutograd saves it between the forward and the backward like any other tensor.
Its memory is that of a Python object which owns the copy (`_Ticket`). So a copy lives as long as the handle, and a step
whose backward never runs frees its host memory with its graph.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from ..base import _compat
from ..base.errors import Unsupported
from ..offloading.tiers import open_tier
from ..offloading.transfers import TensorGroup, Transfers
from ..planning.offload_plans import Destination

NAMESPACE = "cairn"
#: Inductor passes values with the strides that they were traced with.
_AS_TRACED = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_NUMBERS = itertools.count(1)
_MEMORIES: weakref.WeakValueDictionary[int, HostMemory] = weakref.WeakValueDictionary()
_TICKETS: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()


class HostMemory:
    """The tier of a compiled step. The first step that offloads opens it. It grows up to the host budget.

    Attributes
    ----------
    to
        The tier, the host budget, and the rates of the link.
    number
        The number by which graphs refer to it. They do not own it.
    transfers
        The open tier and its copies; None before the first step.
    """

    def __init__(self, to: Destination, device: torch.device) -> None:
        self.to, self.device = to, device
        self.number = next(_NUMBERS)
        self.transfers: Transfers | None = None  # None before the first step
        self._lock = threading.Lock()
        _MEMORIES[self.number] = self

    def begin(self, slab_bytes: int) -> None:
        """Begins the transfers of a step that needs a slab of this size, unless another step has copies on the host."""
        with self._lock:
            if self.transfers is None:
                tier = open_tier(self.to.tier, slab_bytes, self.device, host_budget=self.to.machine.host_bytes)
                self.transfers = Transfers(tier, self.device, self.to.machine.shared_link)
            self.transfers.tier.grow(slab_bytes)
            if self.transfers.has_failed or not self.transfers.used_spans():
                self.transfers.begin_step()

    def offload(self, name: str, value: torch.Tensor) -> TensorGroup:
        """Starts the copy of a value to the first free range of the slab."""
        assert self.transfers is not None
        return self.transfers.offload_anywhere(name, [value])


class _Ticket(_compat.OwnedNumber):
    """The memory of a handle: a number. It owns the copy on the host, and the `HostMemory` that the copy is in."""

    group: TensorGroup
    host: HostMemory


def handle_like(value: torch.Tensor) -> torch.Tensor:
    """A tensor like the handle of a value; a fake one if the value is fake."""
    return value.new_empty((1,), dtype=torch.int64, device="cpu")


def _handle(group: TensorGroup, host: HostMemory) -> torch.Tensor:
    ticket = _Ticket(next(_NUMBERS))
    ticket.group, ticket.host = group, host
    _TICKETS[ticket.value] = ticket
    return torch.frombuffer(ticket, dtype=torch.int64)  # the tensor owns the ticket


def _group(handle: torch.Tensor) -> TensorGroup:
    ticket = _TICKETS.get(int(handle.item()))
    if ticket is None:
        raise Unsupported(
            "a compiled step that offloads cannot have its saved tensors copied: saved-tensor hooks around it "
            "(save_on_cpu, cairn.torch.offload) are not supported"
        )
    return ticket.group


# -- the operators -------------------------------------------------------------------------------------------


def _offload(value: torch.Tensor, name: str, memory: int, slab_bytes: int) -> torch.Tensor:
    host = _MEMORIES[memory]
    if slab_bytes or host.transfers is None:
        host.begin(slab_bytes)
    return _handle(host.offload(name, value), host)


def _wait_for(handle: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    _group(handle).wait_out(is_free=True)
    return handle


def _prefetch(handle: torch.Tensor) -> torch.Tensor:
    _group(handle).prefetch()
    return handle


def _arrived(arriving: torch.Tensor, last: bool, *_: Any) -> torch.Tensor:
    group = _group(arriving)
    [value] = group.tensors()
    if last and not _compat.graph_is_kept():
        group.discard()
    return value


def _arrived_fake(
    arriving: torch.Tensor, last: bool, size: Any, stride: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _operator(schema: str, function: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_AS_TRACED)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


#: `slab_bytes` is the host memory that the step needs in the first offload of a step, and 0 in the others.
OFFLOAD = _operator(
    "offload(Tensor value, str name, int memory, int slab_bytes) -> Tensor",
    _offload,
    lambda value, *_: handle_like(value),
)
#: The value is an argument so that a compiler does not reuse its memory before the copy has ended.
WAIT_FOR = _operator("wait_for(Tensor(a) handle, Tensor value) -> Tensor(a)", _wait_for, lambda handle, _: handle)
PREFETCH = _operator("prefetch(Tensor(a) handle) -> Tensor(a)", _prefetch, lambda handle: handle)
#: The last four arguments are the layout of the value.
ARRIVED = _operator(
    "arrived(Tensor arriving, bool last, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor",
    _arrived,
    _arrived_fake,
)
TRANSFERS = (OFFLOAD, WAIT_FOR, PREFETCH, ARRIVED)
