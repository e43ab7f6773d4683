"""Blocks that keep a part of what they save: how a step carries out an option of a stage other than "keep".

A plan says, for each stage that is opened, what to do with every saved tensor under each option, in which order a
backward asks for them, and a digest of the operations that this was found on (`Inside`). It does not say how tensors
are rebuilt: that is recorded here, in the first step that runs the block with arguments of some shapes and types, modes
and attributes, and holds as long as these are the same. In that step every rebuilt tensor is compared in full with what
was dropped; in later ones, on the CPU, a few bytes are.

When in doubt, run it again. If a block turns out to do something else than it did while profiling, if a tensor does not
come out as it was, or what it is rebuilt from is gone, the block is run again as a whole for its backward, as blocks
are that keep nothing, and the step's notes say so. That needs more memory than planned, and is as exact.
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
from .matching_runs import Called, Entry, Finding, Key, Latest
from .recompute import Rebuild, Recipe, compile_recipe, mask_of
from .saved_tensors import FirstRun, LaterRun
from .submodule_hooks import Handlers, by_module


@dataclasses.dataclass(frozen=True)
class Inside:
    """What a plan says about one opened stage."""

    digest: str  # of the recorded operations
    asked: tuple[int, ...]  # the order in which a backward asked for the saved tensors
    draws: tuple[int, ...]  # random operations come after so many saved tensors
    options: tuple[str, ...]  # decisions, by option; the first keeps everything

    def to_json(self) -> dict[str, Any]:
        fields = {"asked": list(self.asked), "draws": list(self.draws), "options": list(self.options)}
        return {"digest": self.digest, **fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Inside:
        return cls(str(data["digest"]), tuple(data["asked"]), tuple(data["draws"]), tuple(data["options"]))


class OpenedBlock:
    """A block of a plan with options other than keeping everything."""

    def __init__(self, inside: Inside, state: BlockState, name: str, handlers: Handlers) -> None:
        self.inside, self.state, self._name, self._handlers = inside, state, name, handlers
        self._latest: Latest | None = None
        self._numbers: list[int] | None = None  # of what its modules held in the run before
        modules = state.modules()
        known = _recorded.setdefault(modules[0], {}) if modules else {}
        self._entries: dict[Any, Entry] = known.setdefault((inside, len(modules)), {})
        for oldest in list(known)[:-_PLANS_KEPT]:
            known.pop(oldest, None)  # another thread may be here as well

    def find(self, tree: Tree, modes: Modes, switches: Any) -> Finding:
        """What a run finds, to be called before it; mostly what the latest one found."""
        latest = self._latest  # another thread may replace it
        if latest is not None:
            before = latest.before(tree, modes, switches)
            if before is not None:
                return Finding(before, latest.key, latest.entry, is_settled=True)
        before, seen = self.state.before(), matching_runs.seen(tree, modes, switches)
        finding = Finding(before, Key((*seen, matching_runs.looks_of([*before.parameters, *before.buffers]))))
        entry = self._entries.get(finding.key)
        if entry is not None and entry.constants.hold(before.modules, before.attributes, before.children):
            finding.entry, numbers = entry, entry.constants.numbers
            is_steady = numbers is not None and numbers == self._numbers and self.state.is_steady
            self._latest = Latest.of(finding, Called.of(tree, modes, switches), latest) if is_steady else None
            self._numbers = numbers
        return finding

    def following(self, option: int, finding: Finding) -> Recipe | None:
        """What a run that keeps a part can follow. None: it has to be recorded first, or the block cannot be opened."""
        entry = finding.entry
        if entry is None:
            return None
        recipe = entry.recipes.get(option) or self._recipe(entry, option)
        if recipe is not None and recipe.calls is not None and not (finding.is_settled and recipe.wanted):
            modules = self.state.modules()
            recipe.wanted = by_module(modules, recipe.calls)
            self._handlers.hold(modules[part] for part in recipe.calls)  # when settled, they are there
        return recipe

    def saving(self, option: int, key: Any, devices: Sequence[torch.device]) -> Saving:
        """Prepares a run of the block that saves by an option."""
        entry = self._entries.get(key)
        if entry is None:
            return _Recording(self, option, key, devices)
        modules, attributes = self.state.modules(), self.state.attributes()
        if not entry.constants.hold(modules, attributes):
            return _Recording(self, option, key, devices, entry.constants.difference(modules))
        recipe = self._recipe(entry, option)
        return _Following(self, option, devices, recipe, entry.reason)

    def _recipe(self, entry: Entry, option: int) -> Recipe | None:
        """The recipe of an option; None: there is none, for a reason that the entry says."""
        if entry.graph is None:
            return None
        if option not in entry.recipes:
            decisions, asked = self.inside.options[option], self.inside.asked
            try:
                entry.recipes[option] = compile_recipe(entry.graph, decisions, asked, self._name)
            except ValueError as error:
                entry.graph, entry.reason = None, str(error)
                return None
        return entry.recipes[option]

    def learn(self, key: Any, graph: BlockGraph, constants: Constants) -> None:
        """Takes in a recorded run. What it changed of what it found may be changed once, as None to a loss: a next run
        that finds that is recorded, too.
        """
        reason, before = graph.closed, self._entries.get(key)
        changed = not constants.hold(self.state.modules(), self.state.attributes())
        if not reason and changed and before is not None and before.changed:
            reason = f"changes {constants.difference(self.state.modules())} in every run"
        if not reason and (graph.digest() != self.inside.digest or len(graph.packs) != len(self.inside.options[0])):
            reason = "does something else than while it was profiled"
        self._entries[key] = Entry(None if reason else graph, reason, constants, changed)
        for oldest in list(self._entries)[:-_ENTRIES_KEPT]:
            self._entries.pop(oldest, None)  # another thread may be here as well

    def recipe(self, key: Any, option: int) -> tuple[Recipe | None, str]:
        """The recipe of an option, or why there is none."""
        entry = self._entries[key]
        return self._recipe(entry, option), entry.reason

    def distrust(self, key: Any, reason: str) -> None:
        """From now on, the block is run again instead."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.graph, entry.reason = None, reason
            entry.recipes.clear()


_ENTRIES_KEPT = 8
_PLANS_KEPT = 8

#: What was recorded of blocks, by their first module; a plan that is applied anew finds it again.
_recorded: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[Any, Entry]]] = weakref.WeakKeyDictionary()


class Saving:
    """One run of a block that saves by an option."""

    reason = ""  # why nothing can be rebuilt
    difference = ""  # what is another than when the block was recorded before, so that it is recorded again

    def __init__(self, block: OpenedBlock, option: int, devices: Sequence[torch.device]) -> None:
        self.block, self.option = block, option
        self._decisions = block.inside.options[option]
        self._devices = tuple(devices)
        self._count = 0

    def running(self, arguments: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """The surroundings of the run."""
        return contextlib.nullcontext()

    def pack(self, recorder: FirstRun | LaterRun) -> Callable[[torch.Tensor], Any]:
        """The pack hook to be used."""
        return recorder.pack

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Takes note of a tensor that autograd saves; says whether it is kept."""
        raise NotImplementedError

    def finish(self, output: Any, state: RandomState | None) -> Rebuild | None:
        """After the run: what will rebuild the tensors that were not kept."""
        raise NotImplementedError


class _Following(Saving):
    """A run of which is known what it does."""

    def __init__(
        self,
        block: OpenedBlock,
        option: int,
        devices: Sequence[torch.device],
        recipe: Recipe | None,
        reason: str,
    ) -> None:
        super().__init__(block, option, devices)
        self.reason = reason
        self._rebuild = Rebuild(recipe) if recipe is not None else None

    def keeps(self, tensor: torch.Tensor) -> bool:
        index = self._count
        self._count = index + 1
        rebuild = self._rebuild
        if rebuild is None:
            return index >= len(self._decisions) or self._decisions[index] == KEEP
        recipe = rebuild.recipe
        if index >= len(recipe.graph.packs) or not recipe.graph.packs[index].matches(tensor):
            self._rebuild, self.reason = None, "did something else than before"
            return True
        keep = rebuild.saved(index, tensor)
        if index + 1 in recipe.states:
            rebuild.take_state(index + 1, RandomState(self._devices))
        return keep

    def finish(self, output: Any, state: RandomState | None) -> Rebuild | None:
        rebuild, self._rebuild = self._rebuild, None  # what it keeps can be dropped from now on
        if rebuild is None:
            return None
        if self._count != len(self._decisions):
            self.reason = "saved another number of tensors than before"
            return None
        if state is not None and 0 in rebuild.recipe.states:
            rebuild.take_state(0, state)
        return rebuild


class _Recording(Saving):
    """The first run of its kind: it is recorded, and its recipe is on trial."""

    def __init__(
        self, block: OpenedBlock, option: int, key: Any, devices: Sequence[torch.device], difference: str = ""
    ) -> None:
        super().__init__(block, option, devices)
        self.difference = difference
        self._key = key
        self._constants = Constants(block.state.modules())
        self._recorder: BlockRecorder | None = None
        self._kept: dict[int, torch.Tensor] = {}  # and masks
        self._states: dict[int, RandomState] = {}
        self._prints: dict[int, Any] = {}

    @contextlib.contextmanager
    def running(self, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        state = self.block.state
        buffers = [registry[key] for registry, key in state.buffers()]
        self._recorder = BlockRecorder(arguments, state.parameters(), buffers, state.modules())
        with self._recorder:
            yield

    def pack(self, recorder: FirstRun | LaterRun) -> Callable[[torch.Tensor], Any]:
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
            self._prints[index] = fingerprint(tensor)
        if letter == MASK:
            self._kept[index] = mask_of(tensor)
        elif letter == KEEP:
            self._kept[index] = tensor.detach()
        if self._count in self.block.inside.draws:
            self._states[self._count] = RandomState(self._devices)
        return letter == KEEP

    def finish(self, output: Any, state: RandomState | None) -> Rebuild | None:
        assert self._recorder is not None
        with torch.no_grad():
            self.block.learn(self._key, self._recorder.graph(output), self._constants)
        kept, states, self._recorder = self._kept, self._states, None
        self._kept, self._states = {}, {}  # autograd's graph keeps the hooks, and so this
        recipe, self.reason = self.block.recipe(self._key, self.option)
        if recipe is None:
            return None
        rebuild = Rebuild(recipe)
        rebuild.prints = self._prints
        for index in recipe.held:
            rebuild.hold(index, kept[index])
        for count in recipe.states:
            known = states.get(count) if count else state
            if known is not None:
                rebuild.take_state(count, known)
        return rebuild
