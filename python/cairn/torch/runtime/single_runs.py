"""Blocks of which a part is kept, as most runs of them are: once, and nothing is taken away before the backward.

Problem. What a block costs beside its operations counts in every step, and a block of which a part is kept has little
to gain from the machinery that carries out any schedule: no list has to be followed for it, no output of another
block to be found.

So such a run looks after itself. Autograd's graph has, for a tensor that is kept, the tensor and its version, and
for one that is not, an `Absent`, which asks its `Part` for it. The part recomputes it (`selective/recompute.py`). If
that does not come out as it was, it recomputes the block as a whole, from what was noted in the forward: arguments,
parameters and buffers with their versions, random state, modes.

The graph owns the absent tensors, these own the part; the part knows them by weak references.
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
from ..selective.recompute import Item, Rebuild, Recipe, mask_of
from ..selective.saved_tensors import Holder, Lease, Packed, written
from ..selective.submodule_hooks import PartHooks
from .block_records import BlockRun, RecomputingStep

#: Stands for a tensor that stays until its backward: with its version, and whose it is.
Staying = tuple[torch.Tensor, int, str]


class Absent(Holder):
    """Stands for a saved tensor that was not kept; `lease` is the part that rebuilds it."""

    __slots__ = ("index",)
    lease: Part

    def __init__(self, part: Part, index: int) -> None:
        self.lease, self.tensor, self.version, self.index = part, None, 0, index

    def unpack(self) -> torch.Tensor:
        return self.lease.rebuilt(self) if self.tensor is None else super().unpack()


class Part(Lease):
    """One run of a block."""

    __slots__ = ("_absent", "_backward", "_block", "_coming", "_devices", "_extra", "_hooks", "_is_running", "_name",
                 "_recipe", "_rebuild", "versions")  # fmt: skip
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
        self._rebuild: Rebuild | None = Rebuild(recipe)
        self._coming = iter(recipe.items)
        self._extra = 0  # tensors that it saved beside those
        self._absent: dict[int, weakref.ref[Absent]] = {}
        self._hooks: PartHooks | None = None  # None: they were in force in all of the block
        self._is_running = True
        self._backward: int | None = None  # the first that asked for a tensor

    # -- the forward -----------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the block under hooks; its output."""
        packing = self._packing()
        next(packing)
        forward, recipe = self._block.forward, self._recipe
        try:
            if recipe.calls is None:
                with saved_tensors_hooks(packing.send, _unpack):
                    return forward(*args, **kwargs)
            self._hooks = PartHooks(recipe.wanted, packing.send, _unpack)
            return self._hooks.run(forward, *args, **kwargs)
        finally:
            packing.close()  # autograd's graph has it, and it may have a tensor with that graph

    def _packing(self) -> Generator[Staying | Absent | None, torch.Tensor, None]:
        """What stands in autograd's graph for one saved tensor after the other; a loop takes less than calls do."""
        name = self._name
        tensor = yield None
        for item in itertools.chain(self._coming, itertools.repeat(None)):
            if item is True:
                tensor = yield tensor, saved_version(tensor), name
                continue
            stays = tensor.detach() if item is False else self._take(item, tensor)
            if isinstance(stays, Absent):
                del tensor  # which is to be gone before the next one comes
                tensor = yield stays
            else:
                tensor = yield stays, saved_version(stays), name

    def _take(self, item: Item | None, tensor: torch.Tensor) -> torch.Tensor | Absent:
        """Takes note of a tensor that is not just kept, or (without an item) that was not expected; what stands for it,
        if it is kept without its history.
        """
        rebuild = self._rebuild
        if item is None or rebuild is None or not item.is_of(tensor):
            self._rebuild = None  # from here on, all is kept
            self._extra += item is None
            return tensor.detach()
        index = item.index
        if item.takes_state:
            rebuild.take_state(index + 1, RandomState(self._devices))
        if item.decision == KEEP:
            kept = tensor.detach()
            if item.is_held:
                rebuild.hold(index, kept)
            return kept
        if item.is_held:
            rebuild.hold(index, mask_of(tensor))
        if item.sample is not None:
            rebuild.note(index, item.sample.of(tensor))
        absent = Absent(self, index)
        self._absent[index] = weakref.ref(absent)
        return absent

    def finish(self) -> str:
        """To be called after the run. Says why the block will have to be run again as a whole; mostly it has not."""
        self._is_running = False
        if self._rebuild is None:
            return "did something else than before"
        if operator.length_hint(self._coming):
            self._rebuild = None
            return "saved another number of tensors than before"
        state = self._block.random_state
        if state is not None and 0 in self._recipe.states:
            self._rebuild.take_state(0, state)
        return ""

    # -- the backward ----------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """What the run found."""
        assert self._block.found is not None
        return self._block.found

    def argument(self, index: int) -> torch.Tensor:
        return self.run.find(self.stage, self._block, index)

    def rebuilt(self, absent: Absent) -> torch.Tensor:
        """A tensor that was not kept."""
        backward = _compat.backward_id()
        if backward < 0 or backward != self._backward:
            self._enter(backward)
        rebuild = self._rebuild
        if rebuild is not None:
            tensor = self.run.rebuild(rebuild, absent.index, self)
            if tensor is not None:
                return tensor
            self._rebuild = None
            self.run.note_again(self.stage)
        self._run_again()
        if absent.tensor is None:
            raise RecomputationError(f"a tensor that '{self._name}' saved is not there, although it ran again")
        if rebuild is not None and not rebuild.is_as_noted(absent.index, absent.tensor):
            self.run.refuse_other_values(self.stage)
        return absent.tensor

    def _enter(self, backward: int) -> None:
        """In another backward than before; a number below 0 does not say."""
        if self._is_running:
            raise Unsupported(f"'{self._name}' computes gradients inside its own forward; keep this block")
        if self._backward is None or backward < 0:
            self._backward = self.run.in_backward()
        else:
            self._rebuild = None  # the first one has let go of what it would read

    def _run_again(self) -> None:
        """Runs the block again as a whole, which brings every tensor that somebody still waits for."""
        items = self._recipe.items
        packed = [*items[: len(items) - operator.length_hint(self._coming)], *itertools.repeat(True, self._extra)]
        absent = [self._absent.get(item.index) if isinstance(item, Item) else None for item in packed]
        metas = [item.meta if isinstance(item, Item) and item.index in self._absent else None for item in packed]
        self._block.first = Packed([found or _nobody for found in absent], metas)
        calls = self._recipe.calls
        self._block.calls = None if self._hooks is None or calls is None else self._hooks.entered(calls)
        self.run.again(Op(FORWARD_SAVE, self.stage), self._block)


def _nobody() -> None:
    """In place of a reference, for a tensor that was kept."""


def _unpack(saved: Staying | Absent) -> torch.Tensor:
    if isinstance(saved, Absent):
        return saved.unpack()
    tensor, version, name = saved
    if saved_version(tensor) != version:
        raise written(tensor, name)
    return tensor
