"""Compares, on an accelerator, what blocks compute when they are recomputed; the host does not wait for it.

A first run leaves a few numbers on the device: for each tensor that it returns a sum of all its bits, for each that it
saves a sum of some. A recomputation makes the same numbers, and what differs is marked on the device, by stage. The
marks are copied to the host behind the backward. They are read when the next step begins, if they are there by then,
and waited for when its forward has returned: the device has that forward to do meanwhile, so it does not run dry. A
mark is an error that names the block, one step late. Those of the last step are read when the plan is removed, when a
report is asked for, or when the program ends.
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
    """When what was submitted to a device before is done."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Fingerprints:
    """Numbers of one run of a block, in the order in which it saves and returns tensors.

    first: those of the first run, which says of which saved tensors there are any; None: this is the first run.
    """

    __slots__ = ("_device", "_first", "_sums", "_taken", "numbers")

    def __init__(self, device: torch.device, first: Fingerprints | None = None) -> None:
        self._device, self._first = device, first
        self._sums: list[torch.Tensor] = []
        self._taken: list[bool] = []  # by saved tensor
        self.numbers = torch.empty(0, dtype=torch.int32, device=device)  # once the run has ended

    def saved(self, tensor: torch.Tensor, is_argument: bool = False) -> None:
        """Takes the number of a tensor that autograd saves; of arguments and parameters, the versions tell."""
        index = len(self._taken)
        if self._first is None:
            is_taken = not is_argument and not _is_parameter(tensor) and self._is_told(tensor)
        else:
            is_taken = self._first._taken[index : index + 1] == [True]
        self._taken.append(is_taken)
        if is_taken:
            self._sums.append(_sum(_some(_bits(tensor))))

    def returned(self, output: Any) -> None:
        """Takes the numbers of what the run returned, after which there are no more."""
        self._sums += [_sum(_bits(tensor)) for tensor in unique_tensors_in(output) if self._is_told(tensor)]
        if self._sums:
            self.numbers, self._sums = torch.stack(self._sums), []

    def _is_told(self, tensor: torch.Tensor) -> bool:
        """Whether its numbers are those of the device, and written by whoever has made it."""
        is_opaque = tensor.dtype is torch.uint8 and tensor.dim() == 1  # what a library reserves for its backward
        is_seed = tensor.dtype in (torch.uint64, torch.int64) and tensor.nbytes <= SEED_BYTES
        is_here = tensor.device == self._device and memory.can_be_read(tensor)
        return is_here and tensor.numel() > 0 and not is_opaque and not is_seed


class StepCheck:
    """What differs in the recomputations of one step."""

    def __init__(self, checks: Checks, program: Program) -> None:
        self._checks, self._program = checks, program
        self._differing: torch.Tensor | None = None  # by stage, on the device
        self._there: torch.Tensor | None = None  # the same on the host, once the event has happened
        self.event: Event | None = None

    def marks(self, first: Fingerprints | None = None) -> Fingerprints:
        """For a first run, or for a recomputation of the block whose first run has made these."""
        return Fingerprints(self._checks.device, first)

    @torch.no_grad()
    def compare(self, stage: int, first: Fingerprints, again: Fingerprints) -> None:
        """Marks a stage if a recomputation was another than the first run. Does not wait for the device."""
        if first.numbers.shape == again.numbers.shape:
            is_other = torch.ne(first.numbers, again.numbers).any()
        else:
            is_other = torch.ones((), dtype=torch.bool, device=self._checks.device)
        with self._checks.lock:
            if self._differing is None:
                count = self._program.stage_count + 1
                self._differing = torch.zeros(count, dtype=torch.bool, device=self._checks.device)
                self._there = _host_room(count)
            assert self._there is not None
            self._differing[stage].logical_or_(is_other)
            is_new, self.event = self.event is None, sent(self._there, self._differing)
            if is_new:
                self._checks.pending.append(self)

    def names(self) -> list[str]:
        """The blocks that are marked, once the event has happened."""
        marks = [] if self._there is None else self._there.tolist()
        return [str(self._program.ref(stage)) for stage, mark in enumerate(marks) if mark]


class Checks:
    """The checks of an executor's steps that were not read yet."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: list[StepCheck] = []
        self.lock = threading.RLock()
        weakref.finalize(self, _warn_of_last, self.pending)

    def look(self, wait: bool) -> None:
        """Reads the marks that are there, or waits for all. Raises RecomputationError that names what is marked."""
        with self.lock:
            names = _read(self.pending, wait)
        if names:
            raise RecomputationError(_message(names))


def checks_for(device: torch.device | None, determinism_check: str) -> Checks | None:
    """For a model on this device; None: there is nothing to compare later."""
    if device is None or determinism_check != "default":
        return None
    return Checks(device) if hasattr(torch.get_device_module(device), "current_stream") else None


def sent(target: torch.Tensor, source: torch.Tensor) -> Event:
    """Copies from the device to the host behind what was submitted to it; the event happens when that is done."""
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
    """When nothing will read the checks of the last step any more."""
    names = _read(pending, wait=True)
    if names:
        warn(_message(names))


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is one, or a view of one."""
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
    """Of the kind of the numbers themselves: of another one they would be copied first."""
    return bits.sum(dtype=bits.dtype).to(torch.int32)
