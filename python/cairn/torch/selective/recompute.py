"""Rebuilding the saved tensors of a block that were not kept, just in time.

A choice (a letter for each saved tensor: keep, drop, keep as a mask) and the order in which the backward asks for the
tensors are turned, once, into straight-line code with one *segment* for each tensor that is not kept: the operations
that it needs and that no earlier segment ran, in their recorded order (`recompute_code.py`). So each operation runs at
most once in a backward, dead parts not at all. What a segment reads of the block's arguments, parameters, buffers and
kept tensors is loaded when the segment runs. A kept tensor that segments read is held until the last of them has run,
for autograd lets go of its own earlier.

If tensors are asked for in another order (a second backward, an inner gradient), each is rebuilt by code of its own. A
tensor whose sources are gone is not rebuilt: None says so, and the block is run again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from ..base import _compat
from ..base._compat import PLAIN_CLASSES
from ..base.stage_measure import KEEP
from ..base.tensor_fingerprints import fingerprint
from ..rerun_state.rng_and_autocast import RandomState
from . import bit_masks, submodule_calls
from .block_graph import BlockGraph, Pack
from .block_options import MASK, is_always_there, masks, sources
from .recompute_code import MASK as KEPT_MASK
from .recompute_code import PACK, Code, Kept, Made, Missing, Running, Source, write
from .saved_tensors import Meta
from .submodule_calls import Calls


class Sources(Protocol):
    """Where a rebuild finds what it does not hold itself."""

    def argument(self, index: int) -> torch.Tensor:
        """A tensor among the block's arguments."""

    def parameter(self, index: int) -> torch.Tensor:
        """A parameter of the block."""

    def buffer(self, index: int) -> torch.Tensor:
        """A buffer of the block."""


class Item:
    """A saved tensor of which more has to be known than that it is kept.

    Attributes
    ----------
    decision
        What is done with it.
    sample
        How a few bytes are compared; None where it is kept, or not on the CPU.
    is_held
        Something is kept of it to rebuild others.
    takes_state
        The state of the generators is taken down after it.
    meta
        What it looks like.
    """

    __slots__ = ("_dtype", "_maker", "_place", "_shape", "decision", "index", "is_held", "meta", "sample",
                 "takes_state")  # fmt: skip

    def __init__(self, index: int, pack: Pack, decision: str, code: Code) -> None:
        self.index, self.decision = index, decision
        self.sample = sample_of(pack) if decision != KEEP else None
        self.is_held, self.takes_state = index in code.held, index + 1 in code.states
        self.meta: Meta = pack.shape, pack.dtype, pack.device
        self._shape, self._dtype, self._maker = pack.shape, pack.dtype, pack.maker
        self._place = pack.use.view[1:] if pack.use is not None else None

    @property
    def is_just_kept(self) -> bool:
        return self.decision == KEEP and not self.is_held and not self.takes_state

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that another run saves may be this one."""
        return (
            type(tensor) in PLAIN_CLASSES
            and tensor.shape == self._shape
            and tensor.dtype is self._dtype
            and (self._maker is None or type(tensor.grad_fn) is self._maker)
            and (self._place is None or (tensor.stride(), tensor.storage_offset()) == self._place)
        )


# -- recipes --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Recipe:
    """A choice, ready to be carried out.

    Attributes
    ----------
    order
        Of the tensors that are not kept, as the backward asks for them.
    code
        Rebuilds them in that order.
    held
        The saved tensors of which something is kept for it.
    states
        When random state is taken down: after so many saved tensors.
    samples
        By saved tensor, how a few bytes are compared; None where it is kept, or not on the CPU.
    calls
        Of the block's parts, in which hooks have to be in force; None: in all of the block.
    wanted
        The same by the identities of parts, once they are known.
    items
        What to do when autograd saves one tensor after the other where hooks are in force. Of one that is just
        kept, and that nothing is rebuilt from: whether it is kept with its history, as torch itself does; not if it
        may come from the node that saves it, which would be a cycle.
    """

    graph: BlockGraph
    decisions: str
    order: list[int]
    code: Code
    samples: list[Sample | None]
    calls: Calls | None
    items: list[Item | bool]
    compiler: Compiler
    wanted: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    _alone: dict[int, Code] = dataclasses.field(default_factory=dict)

    @property
    def held(self) -> frozenset[int]:
        return self.code.held

    @property
    def states(self) -> frozenset[int]:
        return self.code.states

    @property
    def hooks_cost(self) -> int:
        """Of the hooks, as so many saved tensors."""
        return len(self.items) + submodule_calls.CALL_COST * sum(map(len, (self.calls or {}).values()))

    def alone(self, pack: int) -> Code:
        """What rebuilds one tensor from what is kept."""
        if pack not in self._alone:
            self._alone[pack] = self.compiler.code([pack], again=True)
        return self._alone[pack]


def compile_recipe(graph: BlockGraph, decisions: str, asked: Sequence[int], name: str = "a block") -> Recipe:
    """Prepares a choice; `asked` is the order in which a backward asked for the saved tensors, `name` for people.

    Raises ValueError where a tensor that is not kept cannot be rebuilt from what is.
    """
    if len(decisions) != len(graph.packs):
        raise ValueError(f"{len(decisions)} decisions for {len(graph.packs)} saved tensors")
    compiler = Compiler(graph, decisions, name)
    absent = {i for i, letter in enumerate(decisions) if letter != KEEP}
    order = [i for i in asked if i in absent]  # a function may ask twice
    order += sorted(absent.difference(order), reverse=True)
    code = compiler.code(order)
    items = [Item(i, pack, decisions[i], code) for i, pack in enumerate(graph.packs)]
    samples = [item.sample for item in items]
    calls, hooked = _hooked(graph, [item.index for item in items if not item.is_just_kept])
    seen = [_has_history(graph, items[i].index) if items[i].is_just_kept else items[i] for i in hooked]
    return Recipe(graph, decisions, order, code, samples, calls, seen, compiler)


def _has_history(graph: BlockGraph, index: int) -> bool:
    """Whether a saved tensor that is just kept is kept with its history."""
    pack = graph.packs[index]
    value = graph.values[pack.use.value] if pack.use is not None else None
    return not (pack.cyclic or value is None or value.overwritten or value.storage in graph.returned)


def _hooked(graph: BlockGraph, wanted: Sequence[int]) -> tuple[Calls | None, list[int]]:
    """The calls in which hooks are in force so that they see these saved tensors, and all that they see.

    Off the CPU no bytes of what is rebuilt are compared, so there hooks see how many tensors all of the block saves.
    """
    count = len(graph.packs)
    is_compared = all(pack.device.type == "cpu" for pack in graph.packs)
    found = submodule_calls.covering(graph.calls, wanted, count) if is_compared and wanted else None
    if found is None:
        return None, list(range(count))
    calls: Calls = {}
    for call in found:
        calls[call.part] = (*calls.get(call.part, ()), call.number)
    return calls, [index for call in found for index in range(call.first, call.end)]


class Compiler:
    """Finds, for each tensor that is not kept, the operations that it needs."""

    def __init__(self, graph: BlockGraph, decisions: str, name: str) -> None:
        self._graph, self._name = graph, name
        self._kept: dict[int, Source] = {}
        self._drawn: dict[int, Source] = {}  # by drawing operation: the mask that is kept
        for index, pack in enumerate(graph.packs):
            if pack.use is not None and decisions[index] == KEEP and not is_always_there(graph, pack.use.value):
                self._kept.setdefault(pack.use.value, (PACK, index))
        marked = {first: value for value, first in sources(graph).items() if decisions[first] == MASK}
        drawn = {value: op for op, value in reversed(masks(graph).items())} if marked else {}
        for first, value in marked.items():
            if value not in drawn:
                raise ValueError(f"saved tensor {first} is no dropout mask")
            self._drawn[drawn[value]] = (KEPT_MASK, first)

    def code(self, order: Sequence[int], again: bool = False) -> Code:
        """What rebuilds these tensors in this order; with `again`, what it reads may be asked for once more."""
        present: set[int] = set()
        needed = []
        for pack in order:
            use = self._graph.packs[pack].use
            assert use is not None
            chosen = self._needed(use.value, present)
            needed.append(chosen)
            for index in chosen:
                present.update(self._graph.operations[index].values)
        return write(self._name, self._graph, self._kept, self._drawn, order, needed, again)

    def _needed(self, wanted: int, present: set[int]) -> list[int]:
        """The operations without which a value is not there, in their recorded order."""
        chosen: set[int] = set()
        missing = [wanted]
        while missing:
            value = missing.pop()
            if value in present or value in self._kept or is_always_there(self._graph, value):
                continue
            index = self._graph.values[value].operation
            if index in chosen:
                continue
            if index < 0 or (self._graph.operations[index].reason and index not in self._drawn):
                raise ValueError(f"value {value} can neither be kept nor rebuilt")
            chosen.add(index)
            if index not in self._drawn:
                missing += [use.value for use in self._graph.operations[index].operands]
        return sorted(chosen)


def mask_of(noise: torch.Tensor) -> torch.Tensor:
    """The mask of a scaled noise, where it is not zero; on the CPU as bits."""
    if bit_masks.can_pack(noise):
        return bit_masks.pack(noise)
    with torch.no_grad():
        return noise.ne(0)


# -- running -------------------------------------------------------------------------------------------------


class Rebuild:
    """What one run of a block keeps for rebuilding what it did not keep."""

    __slots__ = ("_kept", "_made", "_position", "_running", "_samples", "_states", "prints", "recipe", "was_wrong")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._kept: Kept = {}
        self._states: dict[int, RandomState] = {}
        self._samples: dict[int, tuple[bytes, bytes]] = {}
        self._made: Made = []  # what the code has just rebuilt
        self._running: Running | None = None
        self._position = 0  # in the recipe's order: the tensor that the code rebuilds next
        self.was_wrong = False  # a tensor came out otherwise than it was saved
        self.prints: dict[int, Any] | None = None  # fingerprints of what was not kept, where a recipe is on trial

    def take_state(self, packs: int, state: RandomState) -> None:
        """The state of the generators after so many tensors were saved."""
        self._states[packs] = state

    def saved(self, index: int, tensor: torch.Tensor) -> bool:
        """Takes note of a tensor that autograd saves; says whether it is to be kept."""
        recipe = self.recipe
        letter = recipe.decisions[index]
        if letter != KEEP:
            sample = recipe.samples[index]
            if sample is not None:
                self.note(index, sample.of(tensor))
        if index in recipe.code.held:
            self.hold(index, tensor.detach() if letter == KEEP else mask_of(tensor))
        return letter == KEEP

    def note(self, index: int, sample: tuple[bytes, bytes]) -> None:
        """What the bytes of a tensor are that is not kept."""
        self._samples[index] = sample

    def hold(self, index: int, tensor: torch.Tensor, is_written: bool = False) -> None:
        """Keeps a tensor, or a mask, that the code reads; one that was written since it was saved is of no use."""
        self._kept[index] = tensor, -1 if is_written else _compat.saved_version(tensor)

    def held(self) -> dict[int, torch.Tensor]:
        """What is kept for the code, by saved tensor."""
        return {index: tensor for index, (tensor, _) in self._kept.items()}

    def is_written(self, index: int) -> bool:
        """Whether what is kept was modified in place since it was saved."""
        tensor, version = self._kept[index]
        return _compat.saved_version(tensor) != version

    def is_as_noted(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was not kept has the bytes that were noted of it."""
        sample = self.recipe.samples[index]
        return sample is None or index not in self._samples or sample.of(tensor) == self._samples[index]

    def let_go(self, indices: Iterable[int]) -> None:
        """Of some of what is kept, until it is held again."""
        for index in indices:
            self._kept.pop(index, None)

    def tensor(self, index: int, where: Sources) -> torch.Tensor | None:
        """A tensor that was not kept; None if it cannot be had. Autocast must be off."""
        recipe, position, running = self.recipe, self._position, self._running
        if running is None or position >= len(recipe.order) or recipe.order[position] != index:
            running = self._begin(index)
        else:
            self._position = position + 1
        try:
            running.send(where)
        except Missing:
            self._stop()
            return None
        except BaseException:
            self._stop()
            raise
        tensor = self._made.pop()
        if tensor is None:  # the operation left it out
            self.was_wrong = True
        elif self.prints is not None:
            self.was_wrong = self.prints.get(index) != fingerprint(tensor)
        else:
            sample = recipe.samples[index]
            self.was_wrong = sample is not None and sample.of(tensor) != self._samples.get(index)
        return None if self.was_wrong else tensor

    def _begin(self, index: int) -> Running:
        """Begins the code for all tensors if the first is asked for first, else that for one alone."""
        recipe = self.recipe
        in_order = self._position == 0 and recipe.order[:1] == [index]
        code, self._position = (recipe.code, 1) if in_order else (recipe.alone(index), len(recipe.order))
        self._running = code.begin(self._kept, self._states, self._made)
        next(self._running)
        return self._running

    def _stop(self) -> None:
        self._running, self._position = None, len(self.recipe.order)


# -- comparing -----------------------------------------------------------------------------------------------


class Sample:
    """Some bytes of a tensor on the CPU, from two places: whether it is what it was, at almost no cost."""

    __slots__ = ("_first", "_read", "_second")

    def __init__(self, first: int, second: int, length: int) -> None:
        self._first, self._second = first, second
        self._read = (ctypes.c_char * length).from_address

    def of(self, tensor: torch.Tensor) -> tuple[bytes, bytes]:
        start = tensor.data_ptr()
        return self._read(start + self._first).raw, self._read(start + self._second).raw


_SAMPLED_BYTES = 32  # at each place, where so many lie side by side


def sample_of(pack: Pack) -> Sample | None:
    """What is compared of a saved tensor; None where nothing can be at no cost."""
    if pack.device.type != "cpu" or pack.use is None or 0 in pack.shape:
        return None
    size, stride, _ = pack.use.view
    return _sample_at(tuple(size), tuple(stride), pack.dtype.itemsize)


@functools.lru_cache(maxsize=256)
def _sample_at(size: tuple[int, ...], stride: tuple[int, ...], width: int) -> Sample:
    """Of a tensor that looks like this, with numbers of so many bytes."""
    dense = [d for d, step in enumerate(stride) if step == 1 and size[d] > 1]
    count = min(size[dense[0]], max(1, _SAMPLED_BYTES // width)) if dense else 1  # of numbers, along that dimension

    def place(part: int) -> int:
        indices = [extent * part // 7 for extent in size]
        if dense:
            indices[dense[0]] = min(indices[dense[0]], size[dense[0]] - count)
        return sum(index * step for index, step in zip(indices, stride, strict=True)) * width

    return Sample(place(2), place(5), count * width)
