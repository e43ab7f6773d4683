"""Selective recomputation of a block in a training step: runs the block under an option other than "keep everything".

For each stage under selective recomputation a plan has `SelectiveOptions`: what each option does with every saved
tensor, the order in which a backward reads the saved tensors, and a digest of the block's operations. The plan does not
say how tensors are recomputed. The first step that runs the block with arguments of certain shapes and dtypes, modes
and attributes records that. The recording is valid as long as its guards hold (`matching_runs.py`). The step that
records compares every recomputed tensor in full with the one that was dropped. Later steps compare a few bytes, on the
CPU.

In case of doubt the whole block is recomputed, as a block that keeps nothing: if it does something other than in the
profile, if a recomputed tensor is wrong, or if an input of it is gone. The step's notes say so. The result is as exact;
the step needs more memory than planned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base.stage_measure import KEEP
from ..base.tensor_fingerprints import fingerprint
from ..base.tree import Tree
from ..rerun_state.constant_guards import Constants
from ..rerun_state.module_state import BlockState
from ..rerun_state.rng_and_autocast import Modes, RandomState
from . import matching_runs
from .block_graph import BlockGraph
from .block_options import MASK
from .graph_recorder import BlockRecorder
from .matching_runs import CallGuards, Entry, Key, LatestRun, RunInputs
from .pack_hooks import FirstRunPack, RecomputePack
from .recompute import Recipe, TensorRecompute, compile_recipe, mask_of
from .submodule_hooks import Handlers, by_module


@dataclasses.dataclass(frozen=True)
class SelectiveOptions:
    """The options of one stage under selective recomputation, as a plan has them."""

    digest: str  # of the recorded operations
    asked: tuple[int, ...]  # the order in which a backward reads the saved tensors
    draws: tuple[int, ...]  # for each random operation: the number of tensors saved before it
    decisions: tuple[str, ...]  # a letter for each saved tensor, by option; the first keeps everything

    def to_json(self) -> dict[str, Any]:
        fields = {"asked": list(self.asked), "draws": list(self.draws), "decisions": list(self.decisions)}
        return {"digest": self.digest, **fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SelectiveOptions:
        return cls(str(data["digest"]), tuple(data["asked"]), tuple(data["draws"]), tuple(data["decisions"]))


class SelectiveBlock:
    """A block under selective recomputation: its recordings and their recipes."""

    def __init__(self, options: SelectiveOptions, state: BlockState, name: str, handlers: Handlers) -> None:
        self.options, self.state, self._name, self._handlers = options, state, name, handlers
        self._latest: LatestRun | None = None
        self._numbers: list[int] | None = None  # change counters of its modules in the run before
        modules = state.modules()
        known = _recorded.setdefault(modules[0], {}) if modules else {}
        self._entries: dict[Any, Entry] = known.setdefault((options, len(modules)), {})
        for oldest in list(known)[:-_PLANS_KEPT]:
            known.pop(oldest, None)  # another thread may be here as well

    def find(self, tree: Tree, modes: Modes, backend_flags: Any) -> RunInputs:
        """Called before a run: the state that it reads, and a recording whose guards hold, if any."""
        latest = self._latest  # another thread may replace it
        if latest is not None:
            before = latest.before(tree, modes, backend_flags)
            if before is not None:
                return RunInputs(before, latest.key, latest.entry, is_settled=True)
        before, seen = self.state.before(), matching_runs.call_key(tree, modes, backend_flags)
        inputs = RunInputs(before, Key((*seen, matching_runs.metadata_of([*before.parameters, *before.buffers]))))
        entry = self._entries.get(inputs.key)
        if entry is not None and entry.constants.hold(before.modules, before.attributes, before.children):
            inputs.entry, numbers = entry, entry.constants.numbers
            is_steady = numbers is not None and numbers == self._numbers and self.state.is_steady
            self._latest = (
                LatestRun.of(inputs, CallGuards.of(tree, modes, backend_flags), latest) if is_steady else None
            )
            self._numbers = numbers
        return inputs

    def following(self, option: int, inputs: RunInputs) -> Recipe | None:
        """The recipe that a run can follow. None if the run must be recorded first, or the block cannot be."""
        entry = inputs.entry
        if entry is None:
            return None
        recipe = entry.recipes.get(option) or self._recipe(entry, option)
        if recipe is not None and recipe.calls is not None and not (inputs.is_settled and recipe.wanted):
            modules = self.state.modules()
            recipe.wanted = by_module(modules, recipe.calls)
            self._handlers.hold(modules[part] for part in recipe.calls)  # when settled, they are there
        return recipe

    def saving(self, option: int, key: Any, devices: Sequence[torch.device]) -> Saving:
        """Prepares a run of the block under an option."""
        entry = self._entries.get(key)
        if entry is None:
            return _Recording(self, option, key, devices)
        modules, attributes = self.state.modules(), self.state.attributes()
        if not entry.constants.hold(modules, attributes):
            return _Recording(self, option, key, devices, entry.constants.difference(modules))
        recipe = self._recipe(entry, option)
        return _Following(self, option, devices, recipe, entry.reason)

    def _recipe(self, entry: Entry, option: int) -> Recipe | None:
        """The recipe of an option. None if there is none; `entry.reason` says why."""
        if entry.graph is None:
            return None
        if option not in entry.recipes:
            decisions, read_order = self.options.decisions[option], self.options.asked
            try:
                entry.recipes[option] = compile_recipe(entry.graph, decisions, read_order, self._name)
            except ValueError as error:
                entry.graph, entry.reason = None, str(error)
                return None
        return entry.recipes[option]

    def learn(self, key: Any, graph: BlockGraph, constants: Constants) -> None:
        """Stores a recording.

        A run may change the state that it reads once, as an attribute from None to a loss. Then the next is recorded.
        """
        reason, before = graph.refusal, self._entries.get(key)
        changed = not constants.hold(self.state.modules(), self.state.attributes())
        if not reason and changed and before is not None and before.changed:
            reason = f"changes {constants.difference(self.state.modules())} in every run"
        if not reason and (graph.digest() != self.options.digest or len(graph.packs) != len(self.options.decisions[0])):
            reason = "does something else than while it was profiled"
        self._entries[key] = Entry(None if reason else graph, reason, constants, changed)
        for oldest in list(self._entries)[:-_ENTRIES_KEPT]:
            self._entries.pop(oldest, None)  # another thread may be here as well

    def recipe(self, key: Any, option: int) -> tuple[Recipe | None, str]:
        """The recipe of an option, or why there is none."""
        entry = self._entries[key]
        return self._recipe(entry, option), entry.reason

    def distrust(self, key: Any, reason: str) -> None:
        """Ends selective recomputation of such runs: from now on the whole block is recomputed."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.graph, entry.reason = None, reason
            entry.recipes.clear()


_ENTRIES_KEPT = 8
_PLANS_KEPT = 8

#: What was recorded of blocks, by their first module; a plan that is applied anew finds it again.
_recorded: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[Any, Entry]]] = weakref.WeakKeyDictionary()


class Saving:
    """One run of a block under an option."""

    reason = ""  # why no saved tensor can be recomputed alone
    difference = ""  # the guard that failed, so that the block is recorded again

    def __init__(self, block: SelectiveBlock, option: int, devices: Sequence[torch.device]) -> None:
        self.block, self.option = block, option
        self._decisions = block.options.decisions[option]
        self._devices = tuple(devices)
        self._count = 0

    def running(self, arguments: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """The context in which the block runs."""
        return contextlib.nullcontext()

    def pack(self, recorder: FirstRunPack | RecomputePack) -> Callable[[torch.Tensor], Any]:
        """The pack hook to use."""
        return recorder.pack

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Counts a saved tensor, and says whether the option keeps it."""
        raise NotImplementedError

    def finish(self, output: Any, state: RandomState | None) -> TensorRecompute | None:
        """Called after the run. Returns what recomputes the tensors that were not kept."""
        raise NotImplementedError


class _Following(Saving):
    """A run that follows a recording."""

    def __init__(
        self,
        block: SelectiveBlock,
        option: int,
        devices: Sequence[torch.device],
        recipe: Recipe | None,
        reason: str,
    ) -> None:
        super().__init__(block, option, devices)
        self.reason = reason
        self._tensor_recompute = TensorRecompute(recipe) if recipe is not None else None

    def keeps(self, tensor: torch.Tensor) -> bool:
        index = self._count
        self._count = index + 1
        recompute = self._tensor_recompute
        if recompute is None:
            return index >= len(self._decisions) or self._decisions[index] == KEEP
        recipe = recompute.recipe
        if index >= len(recipe.graph.packs) or not recipe.graph.packs[index].matches(tensor):
            self._tensor_recompute, self.reason = None, "did something else than before"
            return True
        keep = recompute.saved(index, tensor)
        if index + 1 in recipe.states:
            recompute.take_state(index + 1, RandomState(self._devices))
        return keep

    def finish(self, output: Any, state: RandomState | None) -> TensorRecompute | None:
        recompute, self._tensor_recompute = self._tensor_recompute, None  # what it keeps can be dropped from now on
        if recompute is None:
            return None
        if self._count != len(self._decisions):
            self.reason = "saved another number of tensors than before"
            return None
        if state is not None and 0 in recompute.recipe.states:
            recompute.take_state(0, state)
        return recompute


class _Recording(Saving):
    """A run that is recorded, and whose recomputed tensors are compared in full."""

    def __init__(
        self, block: SelectiveBlock, option: int, key: Any, devices: Sequence[torch.device], difference: str = ""
    ) -> None:
        super().__init__(block, option, devices)
        self.difference = difference
        self._key = key
        self._constants = Constants(block.state.modules())
        self._recorder: BlockRecorder | None = None
        self._kept: dict[int, torch.Tensor] = {}  # and masks
        self._states: dict[int, RandomState] = {}
        self._fingerprints: dict[int, Any] = {}

    @contextlib.contextmanager
    def running(self, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        state = self.block.state
        buffers = [registry[key] for registry, key in state.buffers()]
        self._recorder = BlockRecorder(arguments, state.parameters(), buffers, state.modules())
        with self._recorder:
            yield

    def pack(self, recorder: FirstRunPack | RecomputePack) -> Callable[[torch.Tensor], Any]:
        def pack(tensor: torch.Tensor) -> Any:
            assert self._recorder is not None
            with self._recorder.paused():
                return recorder.pack(tensor)

        return pack

    def keeps(self, tensor: torch.Tensor) -> bool:
        assert self._recorder is not None
        index = self._count
        self._count = index + 1
        self._recorder.pack(tensor)
        letter = self._decisions[index] if index < len(self._decisions) else KEEP
        if letter != KEEP:
            self._fingerprints[index] = fingerprint(tensor)
        if letter == MASK:
            self._kept[index] = mask_of(tensor)
        elif letter == KEEP:
            self._kept[index] = tensor.detach()
        if self._count in self.block.options.draws:
            self._states[self._count] = RandomState(self._devices)
        return letter == KEEP

    def finish(self, output: Any, state: RandomState | None) -> TensorRecompute | None:
        assert self._recorder is not None
        with torch.no_grad():
            self.block.learn(self._key, self._recorder.graph(output), self._constants)
        kept, states, self._recorder = self._kept, self._states, None
        self._kept, self._states = {}, {}  # autograd's graph keeps the hooks, and so this
        recipe, self.reason = self.block.recipe(self._key, self.option)
        if recipe is None:
            return None
        recompute = TensorRecompute(recipe)
        recompute.fingerprints = self._fingerprints
        for index in recipe.held:
            recompute.hold(index, kept[index])
        for count in recipe.states:
            known = states.get(count) if count else state
            if known is not None:
                recompute.take_state(count, known)
        return recompute
