"""Selective recomputation of a block without the schedule's list: the common case, with little overhead.

Problem. The overhead of a block counts in every step. A block that runs once, and none of whose values the schedule
drops or offloads, does not need the list of operations, nor outputs of other blocks.

So such a run (`SelectiveRun`) works alone. The autograd graph has one object for each saved tensor: the tensor and its
version if it is kept, otherwise a `DroppedHolder`, which asks its run for the tensor. The run recomputes that tensor
(`selective/recompute.py`). If this fails or gives other values, the run recomputes the whole block from the state that
was recorded in the forward: arguments, parameters and buffers with their versions, random state, modes.

Ownership: the graph owns the `DroppedHolder`s, and these own the run. The run has only weak references to them.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..base import _compat
from ..base._compat import saved_version
from ..base.errors import RecomputationError, Unsupported
from ..base.stage_measure import KEEP
from ..rerun_state.module_state import Record
from ..rerun_state.rng_and_autocast import RandomState
from ..schedule.program import FORWARD_SAVE, Op
from ..selective.pack_hooks import Packed
from ..selective.recompute import Item, Recipe, TensorRecompute, mask_of
from ..selective.saved_tensors import Holder, Lease, written
from ..selective.submodule_hooks import SubmoduleHooks
from .block_records import BlockRun, RecomputingStep

#: A saved tensor that is kept: the tensor, its version, and the name of its block.
Kept = tuple[torch.Tensor, int, str]


class DroppedHolder(Holder):
    """A saved tensor that was not kept. `lease` is the run that recomputes it."""

    __slots__ = ("index",)
    lease: SelectiveRun

    def __init__(self, part: SelectiveRun, index: int) -> None:
        self.lease, self.tensor, self.version, self.index = part, None, 0, index

    def unpack(self) -> torch.Tensor:
        return self.lease.recomputed(self) if self.tensor is None else super().unpack()


class SelectiveRun(Lease):
    """One run of a block under selective recomputation; see the top of this file."""

    __slots__ = ("_dropped", "_backward", "_block", "_devices", "_extra", "_hooks", "_is_running", "_name",
                 "_next_items", "_recipe", "_tensor_recompute", "versions")  # fmt: skip
    run: RecomputingStep

    def __init__(
        self,
        run: RecomputingStep,
        name: str,
        stage: int,
        block: BlockRun,
        recipe: Recipe,
        devices: Sequence[torch.device],
    ) -> None:
        self.run, self._name, self.stage = run, name, stage
        self._block, self._recipe, self._devices = block, recipe, devices
        self.versions = [argument.version for argument in block.arguments]
        self._tensor_recompute: TensorRecompute | None = TensorRecompute(recipe)
        self._next_items = iter(recipe.items)
        self._extra = 0  # saved tensors that the recipe does not have
        self._dropped: dict[int, weakref.ref[DroppedHolder]] = {}
        self._hooks: SubmoduleHooks | None = None  # None: the hooks were active in the whole block
        self._is_running = True
        self._backward: int | None = None  # number of the first backward that read a saved tensor

    # -- the forward -----------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the block under saved-tensor hooks, and returns its output."""
        packing = self._packing()
        next(packing)
        forward, recipe = self._block.forward, self._recipe
        try:
            if recipe.calls is None:
                with saved_tensors_hooks(packing.send, _unpack):
                    return forward(*args, **kwargs)
            self._hooks = SubmoduleHooks(recipe.wanted, packing.send, _unpack)
            return self._hooks.run(forward, *args, **kwargs)
        finally:
            packing.close()  # the graph refers to the generator, and its frame may refer to a tensor with that graph

    def _packing(self) -> Generator[Kept | DroppedHolder | None, torch.Tensor, None]:
        """The pack hook as a generator, because a loop is faster than calls.

        It is sent each saved tensor, and yields the object that the graph keeps for it.
        """
        name = self._name
        tensor = yield None
        for item in itertools.chain(self._next_items, itertools.repeat(None)):
            if item is True:
                tensor = yield tensor, saved_version(tensor), name
                continue
            kept = tensor.detach() if item is False else self._pack_item(item, tensor)
            if isinstance(kept, DroppedHolder):
                del tensor  # it must be freed before the next one comes
                tensor = yield kept
            else:
                tensor = yield kept, saved_version(kept), name

    def _pack_item(self, item: Item | None, tensor: torch.Tensor) -> torch.Tensor | DroppedHolder:
        """Packs a tensor that the recipe does not simply keep, or does not have (item is None).

        Returns its `DroppedHolder`, or the detached tensor if it is kept.
        """
        recompute = self._tensor_recompute
        if item is None or recompute is None or not item.is_of(tensor):
            self._tensor_recompute = None  # from here on, all saved tensors are kept
            self._extra += item is None
            return tensor.detach()
        index = item.index
        if item.takes_state:
            recompute.take_state(index + 1, RandomState(self._devices))
        if item.decision == KEEP:
            kept = tensor.detach()
            if item.is_held:
                recompute.hold(index, kept)
            return kept
        if item.is_held:
            recompute.hold(index, mask_of(tensor))
        if item.sample is not None:
            recompute.note(index, item.sample.of(tensor))
        holder = DroppedHolder(self, index)
        self._dropped[index] = weakref.ref(holder)
        return holder

    def finish(self) -> str:
        """Called after the run. Returns why the whole block must be recomputed; "" if it need not be."""
        self._is_running = False
        if self._tensor_recompute is None:
            return "did something else than before"
        if operator.length_hint(self._next_items):
            self._tensor_recompute = None
            return "saved another number of tensors than before"
        state = self._block.random_state
        if state is not None and 0 in self._recipe.states:
            self._tensor_recompute.take_state(0, state)
        return ""

    # -- the backward ----------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """The parameters and buffers that were recorded when the block ran."""
        assert self._block.state is not None
        return self._block.state

    def argument(self, index: int) -> torch.Tensor:
        return self.run.find(self.stage, self._block, index)

    def recomputed(self, holder: DroppedHolder) -> torch.Tensor:
        """Recomputes a saved tensor that was not kept."""
        backward = _compat.backward_id()
        if backward < 0 or backward != self._backward:
            self._enter(backward)
        recompute = self._tensor_recompute
        if recompute is not None:
            tensor = self.run.recompute_tensor(recompute, holder.index, self)
            if tensor is not None:
                return tensor
            self._tensor_recompute = None
            self.run.note_whole_recompute(self.stage)
        self._recompute_block()
        if holder.tensor is None:
            raise RecomputationError(f"a tensor that '{self._name}' saved is not there, although it was recomputed")
        if recompute is not None and not recompute.has_recorded_bytes(holder.index, holder.tensor):
            self.run.refuse_other_values(self.stage)
        return holder.tensor

    def _enter(self, backward: int) -> None:
        """Called when another backward reads a saved tensor first. backward: its number; < 0 if it is unknown."""
        if self._is_running:
            raise Unsupported(f"'{self._name}' computes gradients inside its own forward; keep this block")
        if self._backward is None or backward < 0:
            self._backward = self.run.in_backward()
        else:
            self._tensor_recompute = None  # the first backward has freed the inputs of the recipe

    def _recompute_block(self) -> None:
        """Recomputes the whole block, which fills every `DroppedHolder` that the graph still has."""
        items = self._recipe.items
        packed = [*items[: len(items) - operator.length_hint(self._next_items)], *itertools.repeat(True, self._extra)]
        holders = [self._dropped.get(item.index) if isinstance(item, Item) else None for item in packed]
        metas = [item.meta if isinstance(item, Item) and item.index in self._dropped else None for item in packed]
        self._block.first = Packed([holder or _no_holder for holder in holders], metas)
        calls = self._recipe.calls
        self._block.calls = None if self._hooks is None or calls is None else self._hooks.entered(calls)
        self.run.recompute_block(Op(FORWARD_SAVE, self.stage), self._block)


def _no_holder() -> None:
    """Stands in for the weak reference to a holder, where the tensor was kept."""


def _unpack(saved: Kept | DroppedHolder) -> torch.Tensor:
    if isinstance(saved, DroppedHolder):
        return saved.unpack()
    tensor, version, name = saved
    if saved_version(tensor) != version:
        raise written(tensor, name)
    return tensor
