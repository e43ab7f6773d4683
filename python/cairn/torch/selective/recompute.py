"""Recomputes single saved tensors of a block, when the backward reads them.

An option has a letter for each saved tensor: keep, drop, or keep as a mask. The letters, and the order in which the
backward reads the tensors, are compiled once into straight-line code (`recompute_code.py`). It has one *segment* for
each tensor that is not kept: the operations that the tensor needs and that no earlier segment has run, in their
recorded order. So each operation runs at most once in a backward, and operations that nothing needs do not run.

A segment loads its inputs when it runs: arguments, parameters, buffers and kept tensors. A kept tensor that segments
read is held until the last of them has run, because autograd frees its own reference earlier.

If the backward reads tensors in another order (a second backward, an inner gradient), each is recomputed by code of its
own. If an input is gone, the result is None, and the whole block is recomputed.
"""

from __future__ import annotations

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
from .block_options import MASK, is_always_resident, masks, saved_values
from .recompute_code import MASK as KEPT_MASK
from .recompute_code import PACK, Code, Kept, Missing, Recomputed, RecomputeGenerator, Source, write
from .saved_tensors import Meta
from .submodule_calls import Calls


class Sources(Protocol):
    """The inputs of recomputed tensors that a `TensorRecompute` does not hold itself."""

    def argument(self, index: int) -> torch.Tensor:
        """A tensor among the block's arguments."""

    def parameter(self, index: int) -> torch.Tensor:
        """A parameter of the block."""

    def buffer(self, index: int) -> torch.Tensor:
        """A buffer of the block."""


class Item:
    """A saved tensor that is not simply kept.

    Attributes
    ----------
    decision
        The letter of the option: keep, drop, or keep as a mask.
    sample
        How a few bytes are compared; None where it is kept, or not on the CPU.
    is_held
        The tensor, or its mask, is held to recompute others.
    takes_state
        The random state is recorded after it.
    meta
        Shape, dtype and device.
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
        """Whether a saved tensor of another run can be this one."""
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
    """An option, compiled for a recorded block.

    Attributes
    ----------
    order
        The tensors that are not kept, in the order in which the backward reads them.
    code
        Recomputes them in that order.
    held
        The saved tensors that are held for the code, as they are or as a mask.
    states
        When the random state is recorded: after so many saved tensors.
    samples
        By saved tensor, how a few bytes are compared; None where it is kept, or not on the CPU.
    calls
        The calls of submodules in which saved-tensor hooks must be active; None: in the whole block.
    wanted
        The same by the identities of submodules, once they are known.
    items
        What to do with each saved tensor that the hooks see, in order. A bool stands for a tensor that is simply kept:
        whether it is kept with its `grad_fn`, as PyTorch does. It is not where it may be an output of the node that
        saves it, because that would be a cycle.
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
        """The cost of the hooks, as a number of saved tensors."""
        return len(self.items) + submodule_calls.CALL_COST * sum(map(len, (self.calls or {}).values()))

    def alone(self, pack: int) -> Code:
        """The code that recomputes one tensor by itself."""
        if pack not in self._alone:
            self._alone[pack] = self.compiler.code([pack], again=True)
        return self._alone[pack]


def compile_recipe(graph: BlockGraph, decisions: str, read_order: Sequence[int], name: str = "a block") -> Recipe:
    """Compiles an option. `read_order`: the order in which a backward read the saved tensors; `name`: for messages.

    Raises ValueError if a tensor that is not kept cannot be recomputed from those that are.
    """
    if len(decisions) != len(graph.packs):
        raise ValueError(f"{len(decisions)} decisions for {len(graph.packs)} saved tensors")
    compiler = Compiler(graph, decisions, name)
    absent = {i for i, letter in enumerate(decisions) if letter != KEEP}
    order = [i for i in read_order if i in absent]  # a function may ask twice
    order += sorted(absent.difference(order), reverse=True)
    code = compiler.code(order)
    items = [Item(i, pack, decisions[i], code) for i, pack in enumerate(graph.packs)]
    samples = [item.sample for item in items]
    calls, hooked = _hooked(graph, [item.index for item in items if not item.is_just_kept])
    seen = [_has_history(graph, items[i].index) if items[i].is_just_kept else items[i] for i in hooked]
    return Recipe(graph, decisions, order, code, samples, calls, seen, compiler)


def _has_history(graph: BlockGraph, index: int) -> bool:
    """Whether a saved tensor that is simply kept is kept with its `grad_fn`."""
    pack = graph.packs[index]
    value = graph.values[pack.use.value] if pack.use is not None else None
    return not (pack.cyclic or value is None or value.overwritten or value.storage in graph.returned)


def _hooked(graph: BlockGraph, wanted: Sequence[int]) -> tuple[Calls | None, list[int]]:
    """The calls of submodules in which hooks must be active to see these saved tensors, and all tensors that they see.

    Not on the CPU: there no bytes of recomputed tensors are compared, so the hooks see all of the block, to count.
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
    """Finds the operations that each tensor needs which is not kept."""

    def __init__(self, graph: BlockGraph, decisions: str, name: str) -> None:
        self._graph, self._name = graph, name
        self._kept: dict[int, Source] = {}
        self._drawn: dict[int, Source] = {}  # by drawing operation: the mask that is kept
        for index, pack in enumerate(graph.packs):
            if pack.use is not None and decisions[index] == KEEP and not is_always_resident(graph, pack.use.value):
                self._kept.setdefault(pack.use.value, (PACK, index))
        marked = {first: value for value, first in saved_values(graph).items() if decisions[first] == MASK}
        drawn = {value: op for op, value in reversed(masks(graph).items())} if marked else {}
        for first, value in marked.items():
            if value not in drawn:
                raise ValueError(f"saved tensor {first} is no dropout mask")
            self._drawn[drawn[value]] = (KEPT_MASK, first)

    def code(self, order: Sequence[int], again: bool = False) -> Code:
        """The code that recomputes these tensors in this order. again: its inputs may be read once more later."""
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
        """The operations that a value needs, in their recorded order."""
        chosen: set[int] = set()
        missing = [wanted]
        while missing:
            value = missing.pop()
            if value in present or value in self._kept or is_always_resident(self._graph, value):
                continue
            index = self._graph.values[value].operation
            if index in chosen:
                continue
            if index < 0 or (self._graph.operations[index].reason and index not in self._drawn):
                raise ValueError(f"value {value} can neither be kept nor recomputed")
            chosen.add(index)
            if index not in self._drawn:
                missing += [use.value for use in self._graph.operations[index].operands]
        return sorted(chosen)


def mask_of(noise: torch.Tensor) -> torch.Tensor:
    """The mask of a dropout's scaled noise: where it is not zero. Packed into bits on the CPU."""
    if bit_masks.can_pack(noise):
        return bit_masks.pack(noise)
    with torch.no_grad():
        return noise.ne(0)


# -- running -------------------------------------------------------------------------------------------------


class TensorRecompute:
    """The values from which one run of a block recomputes the saved tensors that it did not keep."""

    __slots__ = (
        "_kept",
        "_made",
        "_position",
        "_running",
        "_samples",
        "_states",
        "fingerprints",
        "recipe",
        "was_wrong",
    )

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._kept: Kept = {}
        self._states: dict[int, RandomState] = {}
        self._samples: dict[int, tuple[bytes, bytes]] = {}
        self._made: Recomputed = []  # the tensor that the code has just recomputed
        self._running: RecomputeGenerator | None = None
        self._position = 0  # in the recipe's order: the tensor that the code recomputes next
        self.was_wrong = False  # a recomputed tensor differs from the saved one
        self.fingerprints: dict[int, Any] | None = (
            None  # fingerprints of tensors that were not kept, in the recorded step
        )

    def take_state(self, packs: int, state: RandomState) -> None:
        """Records the random state after `packs` saved tensors."""
        self._states[packs] = state

    def saved(self, index: int, tensor: torch.Tensor) -> bool:
        """Records a saved tensor, and says whether it is kept."""
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
        """Records some bytes of a tensor that is not kept."""
        self._samples[index] = sample

    def hold(self, index: int, tensor: torch.Tensor, is_written: bool = False) -> None:
        """Holds a tensor or a mask that the code reads. is_written: it was changed since, and is invalid."""
        self._kept[index] = tensor, -1 if is_written else _compat.saved_version(tensor)

    def held(self) -> dict[int, torch.Tensor]:
        """The tensors and masks that are held for the code, by saved tensor."""
        return {index: tensor for index, (tensor, _) in self._kept.items()}

    def is_written(self, index: int) -> bool:
        """Whether a held tensor was modified in place since it was saved."""
        tensor, version = self._kept[index]
        return _compat.saved_version(tensor) != version

    def has_recorded_bytes(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was not kept has the bytes that were recorded."""
        sample = self.recipe.samples[index]
        return sample is None or index not in self._samples or sample.of(tensor) == self._samples[index]

    def release(self, indices: Iterable[int]) -> None:
        """Drops held tensors, until `hold` is called for them again."""
        for index in indices:
            self._kept.pop(index, None)

    def tensor(self, index: int, where: Sources) -> torch.Tensor | None:
        """Recomputes a tensor that was not kept; None if it cannot be, or is wrong. Autocast must be off."""
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
        if tensor is None:  # the operation did not return it
            self.was_wrong = True
        elif self.fingerprints is not None:
            self.was_wrong = self.fingerprints.get(index) != fingerprint(tensor)
        else:
            sample = recipe.samples[index]
            self.was_wrong = sample is not None and sample.of(tensor) != self._samples.get(index)
        return None if self.was_wrong else tensor

    def _begin(self, index: int) -> RecomputeGenerator:
        """Begins the code for all tensors if the first of them is read first; else the code for this one alone."""
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
    """Reads some bytes of a CPU tensor at two places: a very cheap check whether it has changed."""

    __slots__ = ("_first", "_read", "_second")

    def __init__(self, first: int, second: int, length: int) -> None:
        self._first, self._second = first, second
        self._read = _compat.reader_of(length)

    def of(self, tensor: torch.Tensor) -> tuple[bytes, bytes]:
        start = tensor.data_ptr()
        return self._read(start + self._first).raw, self._read(start + self._second).raw


_SAMPLED_BYTES = 32  # at each place, if as many lie side by side


def sample_of(pack: Pack) -> Sample | None:
    """The bytes of a saved tensor that are compared; None where that would cost time, or there are none."""
    if pack.device.type != "cpu" or _compat.is_faked() or pack.use is None or 0 in pack.shape:
        return None
    size, stride, _ = pack.use.view
    return _sample_at(tuple(size), tuple(stride), pack.dtype.itemsize)


@functools.lru_cache(maxsize=256)
def _sample_at(size: tuple[int, ...], stride: tuple[int, ...], width: int) -> Sample:
    """The sample of a tensor of this size and stride, with elements of `width` bytes."""
    dense = [d for d, step in enumerate(stride) if step == 1 and size[d] > 1]
    count = min(size[dense[0]], max(1, _SAMPLED_BYTES // width)) if dense else 1  # of numbers, along that dimension

    def place(part: int) -> int:
        indices = [extent * part // 7 for extent in size]
        if dense:
            indices[dense[0]] = min(indices[dense[0]], size[dense[0]] - count)
        return sum(index * step for index, step in zip(indices, stride, strict=True)) * width

    return Sample(place(2), place(5), count * width)
