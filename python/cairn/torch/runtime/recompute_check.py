"""Compares, on an accelerator, what blocks compute when they are recomputed; the host does not wait for it.

A block's forward computes a few numbers on the device: a sum of all bits of each returned tensor, and a sum of some
bits of each saved tensor. A recomputation computes the same numbers. Stages whose numbers differ are marked on the
device. The marks are copied to the host after the backward. They are read when the next step begins, if they have
arrived. Otherwise they are awaited when its forward has returned; the device executes that forward meanwhile, so it
does not idle. A mark raises an error that names the block, one step late. The marks of the last step are read when the
plan is removed, when a report is made, or when the program ends.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch

from ..base import memory
from ..base.errors import RecomputationError, warn
from ..base.tree import unique_tensors_in
from ..schedule.program import Program
from ..selective.block_options import SEED_BYTES

SOME_ELEMENTS = 4096  # of a saved tensor that are added up, about
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Event(Protocol):
    """An event on a device: it happens when all work submitted before it is done."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Fingerprints:
    """Numbers of one run of a block, in the order in which it saves and returns tensors.

    first: the numbers of the forward, which show which saved tensors have one; None in the forward itself.
    """

    __slots__ = ("_device", "_first", "_sums", "_taken", "numbers")

    def __init__(self, device: torch.device, first: Fingerprints | None = None) -> None:
        self._device, self._first = device, first
        self._sums: list[torch.Tensor] = []
        self._taken: list[bool] = []  # by saved tensor
        self.numbers = torch.empty(0, dtype=torch.int32, device=device)  # once the run has ended

    def saved(self, tensor: torch.Tensor, is_argument: bool = False) -> None:
        """Add the number of a saved tensor; arguments and parameters need none, because their versions are checked."""
        index = len(self._taken)
        if self._first is None:
            is_taken = not is_argument and not _is_parameter(tensor) and self._is_comparable(tensor)
        else:
            is_taken = self._first._taken[index : index + 1] == [True]
        self._taken.append(is_taken)
        if is_taken:
            self._sums.append(_sum(_some(_bits(tensor))))

    def returned(self, output: Any) -> None:
        """Add the numbers of the returned tensors, and finish."""
        self._sums += [_sum(_bits(tensor)) for tensor in unique_tensors_in(output) if self._is_comparable(tensor)]
        if self._sums:
            self.numbers, self._sums = torch.stack(self._sums), []

    def _is_comparable(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be compared: it is on the device, and its maker has written all of it."""
        is_opaque = tensor.dtype is torch.uint8 and tensor.dim() == 1  # what a library reserves for its backward
        is_seed = tensor.dtype in (torch.uint64, torch.int64) and tensor.nbytes <= SEED_BYTES
        is_here = tensor.device == self._device and memory.can_be_read(tensor)
        return is_here and tensor.numel() > 0 and not is_opaque and not is_seed


class StepCheck:
    """The comparison of the recomputations of one step."""

    def __init__(self, checks: Checks, program: Program) -> None:
        self._checks, self._program = checks, program
        self._differing: torch.Tensor | None = None  # by stage, on the device
        self._there: torch.Tensor | None = None  # the same on the host, once the event has happened
        self.event: Event | None = None

    def new_fingerprints(self, first: Fingerprints | None = None) -> Fingerprints:
        """Fingerprints for a forward, or for the recomputation of the forward that made `first`."""
        return Fingerprints(self._checks.device, first)

    @torch.no_grad()
    def compare(self, stage: int, first: Fingerprints, recomputed: Fingerprints) -> None:
        """Mark a stage if its recomputation differs from the forward. Does not wait for the device."""
        if first.numbers.shape == recomputed.numbers.shape:
            is_other = torch.ne(first.numbers, recomputed.numbers).any()
        else:
            is_other = torch.ones((), dtype=torch.bool, device=self._checks.device)
        with self._checks.lock:
            if self._differing is None:
                count = self._program.stage_count + 1
                self._differing = torch.zeros(count, dtype=torch.bool, device=self._checks.device)
                self._there = _host_room(count)
            assert self._there is not None
            self._differing[stage].logical_or_(is_other)
            is_new, self.event = self.event is None, copy_to_host(self._there, self._differing)
            if is_new:
                self._checks.pending.append(self)

    def names(self) -> list[str]:
        """The blocks that are marked, once the event has happened."""
        marks = [] if self._there is None else self._there.tolist()
        return [str(self._program.ref(stage)) for stage, mark in enumerate(marks) if mark]


class Checks:
    """The checks of an executor's steps that have not been read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: list[StepCheck] = []
        self.lock = threading.RLock()
        weakref.finalize(self, _warn_of_last, self.pending)

    def raise_differing(self, wait: bool) -> None:
        """Read the marks that have arrived, or wait for all. Raises RecomputationError that names the marked blocks."""
        with self.lock:
            names = _read(self.pending, wait)
        if names:
            raise RecomputationError(_message(names))


def checks_for(device: torch.device | None, determinism_check: str) -> Checks | None:
    """The checks for a model on this device; None if it has none, or recomputations are compared otherwise."""
    if device is None or determinism_check != "default":
        return None
    return Checks(device) if hasattr(torch.get_device_module(device), "current_stream") else None


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> Event:
    """Submit the copy from the device to the host; the event happens when it is done."""
    target.copy_(source, non_blocking=True)
    stream = torch.get_device_module(source.device).current_stream(source.device)
    event: Event = stream.record_event()
    return event


def _read(pending: list[StepCheck], wait: bool) -> list[str]:
    """The blocks that are marked in checks that are done, which are pending no longer."""
    names: dict[str, None] = {}
    for check in list(pending):
        assert check.event is not None
        if wait:
            check.event.synchronize()
        elif not check.event.query():
            continue
        pending.remove(check)
        check.event = None  # a further backward of the step begins anew
        names.update(dict.fromkeys(check.names()))
    return list(names)


def _message(names: list[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names)
    return (
        f"{listed} computed other values when recomputed in an earlier step: the gradients of that step are not those "
        "of plain training, and what the optimizer has made of them is to be undone. Something that the block reads "
        "was changed after the forward, or its operations do not repeat; keep this block (keep= of profile), or "
        "accept it with determinism_check='none'"
    )


def _warn_of_last(pending: list[StepCheck]) -> None:
    """Read the checks of the last step, when the executor or the program ends."""
    names = _read(pending, wait=True)
    if names:
        warn(_message(names))


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)


def _host_room(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.bool, pin_memory=torch.cuda.is_available())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as numbers, in the order in which they lie in memory."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    strides = tensor.stride()
    tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    if not tensor.is_contiguous():
        return tensor.view(_INTEGERS[tensor.element_size()])
    flat = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    is_even = flat.nbytes % 4 == 0 and flat.storage_offset() * flat.element_size() % 4 == 0
    return flat.view(torch.int32) if is_even else flat


def _some(bits: torch.Tensor) -> torch.Tensor:
    """Some of these numbers, from all over; of each row in memory, where there are gaps between them."""
    step = bits.numel() // SOME_ELEMENTS
    for dim in range(bits.dim() - 1, -1, -1):
        if step > 1:
            size = bits.size(dim)
            bits = bits[(slice(None),) * dim + (slice(None, None, min(step | 1, size)),)]
            step //= size
    return bits


def _sum(bits: torch.Tensor) -> torch.Tensor:
    """The sum of integers in their own type: a sum in another type would copy them first."""
    return bits.sum(dtype=bits.dtype).to(torch.int32)
