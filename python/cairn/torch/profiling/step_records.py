"""Records of the step that is measured: moments, segments outside blocks, and runs of blocks.

A *side output* of a block is a tensor that its forward leaves elsewhere than in its result: a loss in an attribute, a
feature that a hook collects.
"""

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
from .parameter_users import UsedByModel
from .sample import Sample

LOSS_BYTES = 4
#: The layouts of the gradients that a block gets, for its outputs and side outputs, by its name and number of the call.
Arriving = Mapping[tuple[str, int], Layouts]


@dataclasses.dataclass
class StepMeasure:
    """All stages in order, and the resident memory that belongs to none of them."""

    stages: list[StageMeasure]
    pinned: dict[str, int]  # resident to the end of the step, by name: outputs that are read or held later, ...
    blocks: list[StageMeasure]  # the stages that are blocks
    input_grad_bytes: int  # gradients of the step's input
    surroundings: list[StageMeasure | None]  # the segments before each block and after the last; None: no stage
    arriving: Arriving
    is_settled: bool  # the blocks were measured with these `arriving` and `used_by_model`: no other pass is needed
    used_by_model: UsedByModel
    excess: float = 0.0  # of the meter
    end_bytes: int = 0  # what the step had allocated and not freed when its backward ended
    is_rehearsed: bool = True  # there was memory to recompute each block once after the forward


@dataclasses.dataclass
class MemoryMark:
    """A mark of the meter, with the block outputs and the gradients that exist there."""

    mark: int
    outputs: dict[int, int]  # bytes of blocks' outputs, by storage
    grads_bytes: int = 0  # gradients that blocks get or return
    replaced_bytes: int = 0  # tensors in attributes from before the step that segments have replaced

    @property
    def outputs_bytes(self) -> int:
        return sum(self.outputs.values())


@dataclasses.dataclass
class Segment:
    """The code outside blocks: before the first block, between two blocks, or after the last."""

    begin: MemoryMark
    end: MemoryMark | None = None
    backward_begin: MemoryMark | None = None
    backward_end: MemoryMark | None = None
    returned: MemoryMark | None = None  # in the last segment: when the model's forward has returned
    saved_bytes: int = 0  # what it makes and its backward frees, or is taken to free
    freed_bytes: int = 0  # by how much its forward frees more than it makes
    replacing: dict[int, int] = dataclasses.field(default_factory=dict)  # `_replaced_attributes` at its end


class InAttribute(NamedTuple):
    """A tensor in a module's attribute that is no parameter or buffer, such as a weight that a hook computes."""

    names: dict[str, Any]  # the module's attributes
    name: str
    tensor: weakref.ref[torch.Tensor]
    storage: int  # identity of its storage; 0 if it has none
    nbytes: int

    def is_there(self) -> bool:
        """Whether the attribute still has this tensor."""
        return self.names.get(self.name) is self.tensor()

    def now(self) -> Iterator[InAttribute]:
        """The tensor that the attribute has now, if any."""
        yield from _of_attribute(self.names, self.name)


@dataclasses.dataclass
class BlockRun:
    """One call of a block. Sets and dicts of ints name storages, unless said otherwise."""

    stage: StageMeasure
    block_meter: BlockMeter
    inputs: dict[int, int]  # bytes of the inputs that require a gradient
    chained: bool  # it reads exactly what the block before it returned
    main: dict[int, int] = dataclasses.field(default_factory=dict)  # the inputs that no other block reads
    chained_to: bool = False  # the next block reads exactly what this one returned
    is_held: bool = False  # the segment after it may hold its output
    viewed: set[int] = dataclasses.field(default_factory=set)  # outputs that the next block reads through views
    outputs: list[_compat.StorageRef] = dataclasses.field(default_factory=list)
    new_outputs: set[int] = dataclasses.field(default_factory=set)  # outputs that are new, not arguments handed on
    tensors: list[tuple[weakref.ref[torch.Tensor], tuple[Any, ...], int]] = dataclasses.field(default_factory=list)
    pinned: set[int] = dataclasses.field(default_factory=set)  # outputs resident to the end of the step
    accumulated_change: int = 0  # change of the gradients that wait for others, where gradients exist already
    left_bytes: int = 0  # of its side outputs that no block returned
    reducing_bytes: int = 0  # whole gradients of sharded parameters, copied to be reduced until the next block's are
    replaced_bytes: int = 0  # tensors in attributes that it saved, and that were replaced there after it ran
    unused: set[int] = dataclasses.field(default_factory=set)  # its parameters that it does not use, by identity
    unread: set[int] = dataclasses.field(default_factory=set)  # outputs that the next block does not read
    saved_outputs: set[int] = dataclasses.field(default_factory=set)  # outputs that autograd saves
    held_outputs: set[int] = dataclasses.field(default_factory=set)  # outputs that anything holds for the block
    alive: dict[int, int] = dataclasses.field(default_factory=dict)  # outputs of earlier blocks, while this one runs
    arguments: list[torch.Tensor] = dataclasses.field(default_factory=list)  # resident as long as a backward reads them
    read: list[_compat.WriteDetector] = dataclasses.field(default_factory=list)  # its arguments and large buffers
    computed: list[InAttribute] = dataclasses.field(default_factory=list)  # in attributes when it began, and after
    input_grad_layouts: list[tuple[int, Layout]] = dataclasses.field(
        default_factory=list
    )  # gradients of inputs, as they lie
    arrived: MemoryMark | None = None  # when the gradients of its outputs have arrived
    arriving: Layouts = ()

    def returned(self, tensor: torch.Tensor) -> bool:
        """Whether this run returned the tensor, and it was not written since."""
        identity = isolated_block.identity(tensor)
        return any(identity == known and tensor._version == version for _, known, version in self.tensors)


def is_settled(run: BlockRun) -> bool:
    """Whether the block was measured alone with gradients of the layouts that arrived in the step."""
    return len(run.block_meter.arriving) != len(run.arriving) or list(run.block_meter.arriving) == list(run.arriving)


def large_buffers(block: Block, stage: StageMeasure) -> list[torch.Tensor]:
    """The large buffers that the block does not write itself. Small ones are copied for a recomputation."""
    named = (
        (name, buffer) for part in block.all_modules() for name, buffer in part._buffers.items() if buffer is not None
    )
    return [b for name, b in named if memory.storage_bytes(b) > LARGE_BYTES and name not in stage.writes_buffers]


def in_attributes(module: nn.Module) -> Iterator[InAttribute]:
    """The tensors that are attributes of a module themselves (none in containers), parameters and buffers left out."""
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
    """The bytes of a block's outputs that lie in these storages."""
    return sum(ref.nbytes for ref in run.outputs if ref.key in keys)


def stored(model: nn.Module) -> list[torch.Tensor]:
    """Tensors in attributes of modules, and of objects in these, detached: left by earlier steps."""
    values = [value for m in model.modules() for name, value in vars(m).items() if name not in OF_EVERY_MODULE]
    return [tensor.detach() for value in values for _, tensor in tensors_inside(value)]


def static_storages(sample: Sample) -> list[_compat.StorageRef]:
    """The storages that are resident during the whole step: parameters, buffers, and tensors of the sample."""
    tensors = [*sample.model.parameters(), *sample.model.buffers(), *sample.static_tensors()]
    return [_compat.StorageRef(tensor) for tensor in tensors if memory.has_storage(tensor)]
