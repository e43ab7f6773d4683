"""What is noted of a sample step while it is measured: its moments, what runs outside of blocks, and runs of blocks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base import _compat, memory
from ..base.blocks import Block
from ..base.layouts import Layout, Layouts
from ..base.stage_measure import StageMeasure
from ..base.tree import tensors_inside
from ..rerun_state.module_state import LARGE_BYTES, OF_EVERY_MODULE
from . import isolated_block
from .block_meter import BlockMeter
from .parameter_users import UsedOutside
from .sample import Sample

LOSS_BYTES = 4
#: How gradients lie of a block's outputs and of what it leaves beside them, by its name and the number of its call.
Arriving = Mapping[tuple[str, int], Layouts]


@dataclasses.dataclass
class StepMeasure:
    """All stages in order, and what is resident beside them."""

    stages: list[StageMeasure]
    pinned: dict[str, int]  # outputs of blocks that are read or held later on, by name
    blocks: list[StageMeasure]  # the stages that are blocks
    input_grad_bytes: int  # gradients of the step's input
    surroundings: list[StageMeasure | None]  # what runs before each block and after the last, where it is a stage
    arriving: Arriving
    is_settled: bool  # blocks were measured with what `arriving` and `used_outside` say
    used_outside: UsedOutside
    excess: float = 0.0  # of the meter
    is_rehearsed: bool = True  # there was memory to recompute each block once after the forward


@dataclasses.dataclass
class Moment:
    """A mark, with what blocks' outputs, by storage, and gradients handed to or by blocks take at it."""

    mark: int
    outputs: dict[int, int]
    grads_bytes: int = 0
    replaced_bytes: int = 0  # of what was found in attributes, and replaced since the step began, outside of blocks

    @property
    def outputs_bytes(self) -> int:
        return sum(self.outputs.values())


@dataclasses.dataclass
class Segment:
    """What runs outside blocks before the first, between two, or after the last of them."""

    begin: Moment
    end: Moment | None = None
    backward_begin: Moment | None = None
    backward_end: Moment | None = None
    returned: Moment | None = None  # of the last one: when the model's forward has returned
    saved_bytes: int = 0  # of what it made, what goes in the backward, or is taken to
    replacing: dict[int, int] = dataclasses.field(default_factory=dict)  # `_stand_for_found` when it has run


class InAttribute(NamedTuple):
    """A tensor that nobody registered, as it was found in an attribute: hooks compute weights there."""

    names: dict[str, Any]
    name: str
    tensor: weakref.ref[torch.Tensor]
    storage: int  # its identity, and its bytes; 0 of what has none
    nbytes: int

    def is_there(self) -> bool:
        """Whether the attribute still stands for it."""
        return self.names.get(self.name) is self.tensor()

    def now(self) -> Iterator[InAttribute]:
        """What the attribute has now, if that is a tensor."""
        yield from _of_attribute(self.names, self.name)


@dataclasses.dataclass
class BlockRun:
    """One call of a block."""

    stage: StageMeasure
    alone: BlockMeter
    inputs: dict[int, int]  # bytes by storage of the inputs that have a gradient
    chained: bool  # it reads exactly what the block before it returned
    main: dict[int, int] = dataclasses.field(default_factory=dict)  # of them, those on the chain
    chained_to: bool = False  # the next block reads exactly what this one returned
    is_held: bool = False  # what runs after it, outside of blocks, may hold its output
    viewed: set[int] = dataclasses.field(default_factory=set)  # outputs that the next block reads, by views of them
    outputs: list[_compat.StorageRef] = dataclasses.field(default_factory=list)
    made: set[int] = dataclasses.field(default_factory=set)  # those that are new, and no arguments that it hands on
    tensors: list[tuple[weakref.ref[torch.Tensor], tuple[Any, ...], int]] = dataclasses.field(default_factory=list)
    pinned: set[int] = dataclasses.field(default_factory=set)  # outputs resident to the end of the step
    accumulated_change: int = 0  # of what waits for gradients of others, where they are added to existing ones
    left_bytes: int = 0  # of what it left beside its result, and nobody else returned
    replaced_bytes: int = 0  # of what it found in attributes and saved, and has alone, for others stand there since
    unused: set[int] = dataclasses.field(default_factory=set)  # its parameters that it does not use, by identity
    unread: set[int] = dataclasses.field(default_factory=set)  # outputs that the next block does not read
    saved_outputs: set[int] = dataclasses.field(default_factory=set)  # outputs that autograd saves
    held_outputs: set[int] = dataclasses.field(default_factory=set)  # outputs that it holds itself, or anyone for it
    alive: dict[int, int] = dataclasses.field(default_factory=dict)  # outputs of earlier blocks, while this one runs
    arguments: list[torch.Tensor] = dataclasses.field(default_factory=list)  # resident as long as a backward reads them
    read: list[_compat.VersionWitness] = dataclasses.field(default_factory=list)  # what it was passed, and buffers
    computed: list[InAttribute] = dataclasses.field(default_factory=list)  # what it found in attributes, and left
    handed: list[tuple[int, Layout]] = dataclasses.field(default_factory=list)  # of inputs, by their storages
    arrived: Moment | None = None
    arriving: Layouts = ()

    def returned(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that this run returned and nobody changed."""
        identity = isolated_block.identity(tensor)
        return any(identity == known and tensor._version == version for _, known, version in self.tensors)


def is_settled(run: BlockRun) -> bool:
    """Whether the block was measured alone with gradients that lie as those that arrived."""
    return len(run.alone.arriving) != len(run.arriving) or list(run.alone.arriving) == list(run.arriving)


def large_buffers(block: Block, stage: StageMeasure) -> list[torch.Tensor]:
    """Those that the block does not write itself; of small ones every run has copies."""
    named = ((name, buffer) for part in block.parts() for name, buffer in part._buffers.items() if buffer is not None)
    return [b for name, b in named if memory.storage_bytes(b) > LARGE_BYTES and name not in stage.writes_buffers]


def in_attributes(module: nn.Module) -> Iterator[InAttribute]:
    """The tensors in attributes of a module, containers in them included."""
    names = vars(module)
    for name in names:
        yield from _of_attribute(names, name)


def _of_attribute(names: dict[str, Any], name: str) -> Iterator[InAttribute]:
    value = names.get(name)
    if type(value) is torch.Tensor:
        has_one = memory.has_storage(value)
        storage, size = (_compat.storage_id(value), memory.storage_bytes(value)) if has_one else (0, 0)
        yield InAttribute(names, name, weakref.ref(value), storage, size)


def bytes_in(run: BlockRun, keys: set[int]) -> int:
    """Bytes of a block's outputs in these storages."""
    return sum(ref.nbytes for ref in run.outputs if ref.key in keys)


def stored(model: nn.Module) -> list[torch.Tensor]:
    """What steps have left in attributes of modules, and of objects there; without its history."""
    values = [value for m in model.modules() for name, value in vars(m).items() if name not in OF_EVERY_MODULE]
    return [tensor.detach() for value in values for _, tensor in tensors_inside(value)]


def static_storages(sample: Sample) -> list[_compat.StorageRef]:
    """What is there during the whole step: parameters, buffers, and what the sample holds."""
    tensors = [*sample.model.parameters(), *sample.model.buffers(), *sample.static_tensors()]
    return [_compat.StorageRef(tensor) for tensor in tensors if memory.has_storage(tensor)]
