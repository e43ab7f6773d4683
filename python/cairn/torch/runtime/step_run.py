"""One training step under a schedule: from the model's forward to the end of its backward.

A `Run` is made when the model's forward begins and walks the list of operations once:

* *Forward.* Each planned block calls `block`. Operations before the block's first forward are performed, then the block
  itself runs, in the model's own forward, with pack hooks that keep or drop what autograd saves. Drops that follow are
  performed at once.
* *Backward.* A tensor hook on a block's outputs calls `boundary` when their gradients are ready: the operations up to
  the block's backward are performed; autograd then runs that backward by itself. A block with several outputs needs no
  more: autograd runs nodes in the reverse order of their creation, so when the first of the block's nodes is about to
  run, everything above the block has run, and the gradients of all its outputs are there.
* *Again.* A later run of a block works on detached inputs under recording hooks; its temporary graph is thrown away.
  Autograd's original graph stays the one that is differentiated, so gradients add up in the order of plain training.
* *Parts.* A block of which a part is kept, and that needs nothing of the list, looks after itself (`single_runs.py`).
* *Transfers* are issued where the list has them (`step_transfers.py`); what a drop removes while it is on its way out
  is freed when an operation waits for its room. A value that comes back is taken when something reads it.

What is out of the ordinary is handled by the same list. Backwards that do not come (an output that the loss does not
use, frozen blocks, `autograd.grad` of a part) are stepped over, and forwards that only they need are left out
(`Program.needed`). A backward that comes again (`retain_graph`, two losses, double backward) starts the list over:
what is not resident is computed from what is, and nothing travels. Nor does it in a step that begins while another one
has its copies in the slower memory.

Ownership. Autograd's graph owns holders and hooks, these own the `Run`, the `Run` owns detached tensors; nothing points
back, so there are no cycles, and a graph that is dropped takes everything with it. What a block's later runs need is
released when the last of the block's holders goes, without waiting for the list.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..base import _compat
from ..base.errors import RecomputationError, Unsupported, is_out_of_memory
from ..base.layouts import Look, first_byte
from ..base.tensor_fingerprints import fingerprint, spread
from ..base.tree import Tree, tensors_in, unique_tensors_in
from ..rerun_state import parametrized
from ..rerun_state.attributes import Attributes
from ..rerun_state.attributes_and_hooks import Standing
from ..rerun_state.backend_flags import Switches
from ..rerun_state.context_variables import Variables
from ..rerun_state.globals_and_closures import begin_step
from ..rerun_state.module_state import Before, BlockState, Record
from ..rerun_state.rng_and_autocast import Modes, RandomState, no_autocast, with_generator
from ..rerun_state.sharded import gather
from ..schedule.program import (
    BACKWARD,
    DISCARD,
    DROP,
    FORWARD_DROP,
    FORWARD_KEEP,
    FORWARD_SAVE,
    OFFLOAD,
    ON_VALUES,
    OUTPUT,
    PREFETCH,
    SAVED,
    Op,
    Program,
    Value,
)
from ..selective.block_options import SEED_BYTES
from ..selective.block_runs import OpenedBlock, Saving
from ..selective.matching_runs import Finding
from ..selective.recompute import Rebuild
from ..selective.saved_tensors import Box, FirstRun, Holder, LaterRun, Lease, RebuiltHolder, View, geometry, hooks
from ..selective.submodule_hooks import PartHooks, by_module, handlers_in
from .block_records import Argument, BlockRun, Outputs, Returned, hidden_in
from .offloaded_tensors import Cargo
from .recompute_check import Checks, Marks, StepCheck
from .single_runs import Part
from .step_transfers import Travel
from .unplanned_runs import Beyond

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Settings:
    """What all steps of an executor have in common."""

    program: Program
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    devices: tuple[torch.device, ...] = ()  # those with a generator of their own
    device_types: tuple[str, ...] = ("cpu",)
    resident: Callable[[], frozenset[int]] = frozenset  # storages that never travel: parameters and buffers


@dataclass
class Site:
    """A planned block as a step sees it."""

    name: str
    state: BlockState
    opened: OpenedBlock | None = None
    is_kept: bool = False  # it must not be recomputed


@dataclass
class Trace:
    """What a step did, in order: runs of blocks as (operation, stage), and what was not as planned."""

    runs: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Run:
    """One step; see the top of this file."""

    def __init__(
        self,
        settings: Settings,
        sites: dict[int, Site],
        trace: Trace,
        travel: Travel | None = None,
        checks: Checks | None = None,
    ) -> None:
        self._check = None if checks is None else StepCheck(checks, settings.program)
        self._settings, self._program, self._sites = settings, settings.program, sites
        self._trace = trace
        self._travel = travel
        self._cargo: dict[Value, Cargo] = {}  # of what is on the host
        self._staying: set[Value] = set()  # what would be on the host, and stays on the device instead
        self._switches = Switches()
        self._modes: Modes | None = None  # of the block that ran last
        self._last_state: RandomState | None = None  # before it ran
        self._switched = False  # they differ in the backward that was looked at last
        self._casting = False  # autocast is on in that backward
        self._compared_in = -1  # its number
        self._position = 0  # in the list of operations: the next one
        self._ready = 0  # the stage whose backward may run
        self.running = 0  # the block that the model is running; 0: none
        self._needed: frozenset[int] | None = None  # positions of the forwards to perform; None: all
        self._failure = ""  # in words: the error's traceback has the frames of those who have the graph
        self._blocks: dict[int, BlockRun] = {}
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self._ran: set[int] = set()  # the blocks that the model's forward has run
        self.without_gradients: set[str] = set()  # the names of blocks that it has run so, which are no stages then
        self.left_out: list[str] = []  # the stages that it has not run, once it has ended
        self._idle: dict[int, Lease] = {}  # of blocks that saved nothing: no holder has them
        self._outputs: dict[Value, Outputs] = {}
        self._wanted: dict[int, frozenset[int]] = {}  # which outputs of a stage the next one reads
        self._passed: dict[int, frozenset[int]] = {}  # and which lie in what the stage was passed
        self._returned: dict[int, list[Returned]] = {}
        self._watched: list[int] = []  # stages whose outputs have hooks, ascending
        self._coming: list[int] = []  # those of them whose backward is still to come
        self._in_forward = True
        self._partial = False  # some backwards that the list has will not come
        self._calls: dict[str, int] = {}
        self._lock = threading.RLock()
        begin_step()
        self._settle()

    def name(self, stage: int) -> str:
        """The name of a stage, for people."""
        return str(self._program.ref(stage))

    def next_call(self, name: str) -> int:
        """Counts the calls of a block."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    # -- forward ---------------------------------------------------------------------------------------------

    def block(self, stage: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a planned block for the first time, in the model's forward."""
        position = self._program.first_forward[stage]
        self._ran.add(stage)
        if position < self._position:
            return self.beyond(stage, "after blocks that the plan has behind it", forward, args, kwargs)
        if position > self._position:
            self._advance(position)
        if self._travel is not None:
            self._wait(position)
        op = self._program.ops[position]
        self.running = stage
        try:
            if self._program.native[stage]:
                output = forward(*args, **kwargs)
                if not self._program.quiet[stage]:
                    self._returns(op, output, tensors_in((args, kwargs)))
            else:
                output = self._first_run(op, forward, args, kwargs)
        finally:
            self.running = 0
        self._trace.runs.append((op.kind, stage))
        self._position = position + 1
        self._settle()
        return output

    def beyond(
        self, stage: int, how: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A run of a stage's block that the plan has not: it keeps its inputs alone, if it can be recomputed."""
        site = self._sites[stage]
        if site.is_kept:
            self._trace.notes.append(f"'{self.name(stage)}' ran {how}, and was kept")
            return forward(*args, **kwargs)
        self._trace.notes.append(f"'{self.name(stage)}' ran {how}, kept its inputs alone, and is recomputed")
        tree = Tree.of_call(args, kwargs)
        self.running = stage
        try:
            block = self._noted(stage, forward, tree, list(map(Argument.kept, tree.leaves)))
            return Beyond(self, stage, block).forward(site.state, args, kwargs)
        finally:
            self.running = 0

    def _noted(
        self, stage: int, forward: Callable[..., Any], tree: Tree, arguments: list[Argument] | None = None
    ) -> BlockRun:
        """What is noted before a block's first run. arguments: where they will be found, if that is known."""
        if self._modes is None or not self._modes.are_in_force():
            self._modes = Modes.current(self._settings.device_types)
        hidden = hidden_in(tree.opaque, self._sites[stage].name) if tree.opaque else []
        if arguments is None:
            arguments = self._arguments(stage, tree.leaves)
        variables = Variables(self._sites[stage].state.brings_back)
        return BlockRun(forward, tree, arguments, hidden, self._modes, self._random_state(tree.leaves), variables)

    def new_marks(self) -> Marks | None:
        """For what a first run computes, where that is compared on the device."""
        return None if self._check is None else self._check.marks()

    def note_returned(self, block: BlockRun, output: Any) -> None:
        """Notes after a first run what it returned, for its recomputation to be compared with."""
        assert block.found is not None
        block.samples = self._samples(output, block.found)
        if block.marks is not None:
            block.marks.returned(output)

    def abandon(self) -> None:
        """To be called when the step failed: gives the slower memory free for the next one."""
        if self._travel is not None:
            self._travel.close()
        self._travel, self._cargo = None, {}

    def forward_ended(self) -> None:
        """To be called when the model's forward has returned."""
        self._returned.clear()
        self._in_forward = False
        self._settle()
        if self._travel is not None:
            self._travel.forward_ended()
        self._coming = list(self._watched)
        watched = set(self._watched)
        self._partial = any(self._program.replayed[s] and s not in watched for s in self._sites)
        for stage in list(self._idle):
            self._release_idle(stage)
        not_run = [stage for stage in self._sites if stage not in self._ran]
        self.left_out = [
            self.name(stage) for stage in not_run if self._program.ref(stage).name not in self.without_gradients
        ]
        if self.left_out:
            self._trace.notes.append(f"planned blocks did not run: {', '.join(self.left_out)}")

    def _first_run(self, op: Op, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage, site = op.stage, self._sites[op.stage]
        tree = Tree.of_call(args, kwargs)
        block = self._noted(stage, forward, tree)
        if site.opened is None:
            finding, part = Finding(site.state.before()), None
        else:
            finding = site.opened.find(tree, block.modes, self._switches.key)
            part = self._part(op, site, finding, block)
        if _compat.weights_are_cached():
            block.weights = parametrized.FoundWeights(site.state.modules())
        if site.state.fills or site.state.brings_back:
            block.contents = Attributes(site.state.modules())
        if part is None:
            output = self._run_recorded(op, block, finding, args, kwargs)
        else:
            output = self._run_part(part, block, finding.before, args, kwargs)
        if site.state.brings_back:
            block.standing = Standing(site.state.modules())
        passed, tree.leaves, tree.opaque = tree.leaves, [], []
        if not self._program.quiet[stage]:
            self._returns(op, output, passed)
        return output

    def _part(self, op: Op, site: Site, finding: Finding, block: BlockRun) -> Part | None:
        """For a run that keeps a part, of which nothing is ever taken away; None if the list has to be followed for it,
        or it has to be recorded first.
        """
        stage, settings = op.stage, self._settings
        if site.opened is None or not op.option or not self._program.lasting[stage]:
            return None
        recipe = site.opened.following(op.option, finding) if settings.determinism_check != "values" else None
        return None if recipe is None else Part(self, site.name, stage, block, recipe, settings.devices)

    def _run_part(
        self, part: Part, block: BlockRun, before: Before, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        output = part.forward(args, kwargs)
        tree = block.tree
        if tree.opaque or _compat.versions(tree.leaves) != part.versions:
            block.refuse_written(self.name(part.stage), part.versions)
        block.found = self._sites[part.stage].state.after(before)
        reason = part.finish()
        if reason:
            self._note_reason(part.stage, reason)
        return output

    def _run_recorded(
        self, op: Op, block: BlockRun, finding: Finding, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A run whose holders the list empties and fills."""
        stage, site = op.stage, self._sites[op.stage]
        lease, self._blocks[stage] = self._lease(stage), block
        block.box = None if finding.key is None else Box(finding.key)
        saving = self._saving(op, block)
        leaves, digest = block.tree.leaves, _digest if self._settings.determinism_check == "values" else None
        marks = block.marks = self.new_marks()
        first = block.first = FirstRun(lease, leaves, op.kind == FORWARD_SAVE, digest, block.box, saving, marks)
        try:
            with saved_tensors_hooks(*hooks(first)), _NOTHING if saving is None else saving.running(leaves):
                output = block.forward(*args, **kwargs)
            block.refuse_written(site.name, first.versions)
        except BaseException:
            self._forget(stage)
            raise
        block.found = site.state.after(finding.before)
        self.note_returned(block, output)
        self._note_saved(stage, block, saving, output)
        if first.close():
            self._idle[stage] = lease
        return output

    def _saving(self, op: Op, block: BlockRun) -> Saving | None:
        """Prepares a run of an opened block that keeps a part; None if it keeps everything or nothing."""
        opened = self._sites[op.stage].opened
        if op.kind != FORWARD_SAVE or not op.option or block.box is None or opened is None:
            return None
        return opened.saving(op.option, block.box.key, self._settings.devices)

    def _note_saved(self, stage: int, block: BlockRun, saving: Saving | None, output: Any) -> None:
        """After a run: what rebuilds the tensors that it did not keep."""
        if block.box is None:
            return
        block.box.rebuild = None
        if saving is not None:
            block.box.rebuild = saving.finish(output, block.random_state)
            if saving.difference:
                change = f"{saving.difference} has changed"
                self._trace.notes.append(f"'{self.name(stage)}' was recorded again, which takes time: {change}")
            if block.box.rebuild is None:
                self._note_reason(stage, saving.reason)

    def _note_reason(self, stage: int, reason: str) -> None:
        self._trace.notes.append(f"'{self.name(stage)}' is run again as a whole: it {reason}")

    def _lease(self, stage: int) -> Lease:
        lease = Lease(self, stage)
        self._leases[stage] = weakref.ref(lease, functools.partial(_lease_ended, weakref.ref(self), stage))
        return lease

    def _random_state(self, leaves: Sequence[torch.Tensor]) -> RandomState | None:
        if not self._settings.preserve_rng_state:
            return None
        known = self._settings.devices
        for leaf in leaves:
            if not leaf.is_cpu:
                known = tuple(dict.fromkeys((*known, *filter(with_generator, [leaf.device]))))
        state = RandomState(known)
        if self._last_state is None or not self._last_state.equals(state):  # blocks between two draws share one
            self._last_state = state
        return self._last_state

    def _arguments(self, stage: int, leaves: Sequence[torch.Tensor]) -> list[Argument]:
        """Where each tensor argument of a block will be found when it runs again."""
        if not self._program.replayed[stage]:
            return list(map(Argument.kept, leaves))
        returned = self._returned.pop(stage - 1, [])
        outputs = self._outputs_before(stage)
        arguments = [Argument.found(leaf, returned, outputs) for leaf in leaves]
        self._wanted[stage - 1] = frozenset(a.output for a in arguments if a.output >= 0)
        for value in ((OUTPUT, stage - 1), (SAVED, stage - 1)):
            if value in self._outputs:
                self._outputs[value].keep_only(self._wanted[stage - 1])
            if value in self._cargo:
                self._cargo[value].keep_only(self._wanted[stage - 1])
        return arguments

    def _returns(self, op: Op, output: Any, passed: Iterable[torch.Tensor]) -> None:
        """Keeps a block's output where the schedule wants it, and sets hooks for the backward; `passed` are the tensors
        among the block's arguments.
        """
        stage = op.stage
        returned = unique_tensors_in(output)
        passed = list(passed) if self._travel is not None or self._program.watched[stage] else ()
        if self._program.replayed[stage + 1]:
            self._returned[stage] = [Returned(weakref.ref(t), _compat.version(t), t.requires_grad) for t in returned]
            if self._travel is not None:
                given = {_compat.storage_key(tensor) for tensor in passed} - {0}
                self._passed[stage] = frozenset(i for i, t in enumerate(returned) if _compat.storage_key(t) in given)
            self._produce(op, output)
        self._after(self._program.first_forward[stage])
        if not self._program.watched[stage]:
            return
        passed_through = set(map(id, passed))
        for tensor in returned:
            if not tensor.is_leaf and id(tensor) not in passed_through:
                _compat.hook_gradient(tensor, functools.partial(_gradient_ready, self, stage))
                if stage not in self._watched[-1:]:
                    self._watched.append(stage)

    # -- the list --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Performs the drops and transfers that come next, past what the model and autograd do by themselves.

        A prefetch that is behind something of that kind waits until that was done; and the forward that runs goes on
        beside copies for which only what comes after it has to wait.
        """
        ops, passed = self._program.ops, False
        while self._position < len(ops):
            op = ops[self._position]
            if op.kind in ON_VALUES and not (passed and op.kind == PREFETCH):
                self._perform(self._position)
            elif op.kind == PREFETCH or self._program.is_block[op.stage] or self._is_to_come(op):
                return
            else:
                passed = True
                self._wait(self._position)
            self._position += 1

    def _is_to_come(self, op: Op) -> bool:
        """Whether it is a backward, while the model's forward runs."""
        return op.kind == BACKWARD and self._in_forward

    def _advance(self, position: int) -> None:
        while self._position < position:
            self._perform(self._position)
            self._position += 1

    def _perform(self, position: int) -> None:
        op = self._program.ops[position]
        self._wait(position)
        if op.kind in ON_VALUES:
            self._move(position, op)
        elif op.kind == BACKWARD:
            self._end_backward(op.stage)
        elif not op.is_idle and (self._needed is None or position in self._needed):
            self._run_again(op)
        self._after(position)

    def _after(self, position: int) -> None:
        """Lets go of what an operation read last."""
        op = self._program.ops[position]
        if op.kind == FORWARD_DROP:
            self._drop((OUTPUT, op.stage - 1))
        for value in self._program.releases[position]:
            self._let_go(value)

    def _produce(self, op: Op, output: Any) -> None:
        product = op.product
        if product is not None and self._program.replayed[op.stage + 1]:
            passed = self._passed.get(op.stage, frozenset())
            self._outputs[product] = Outputs(output, self._wanted.get(op.stage), passed)

    def _drop(self, value: Value) -> None:
        """What the list removes from the device: nothing that stays there instead of on the host."""
        if value not in self._staying:
            self._take(value)
            if value in self._cargo:
                self._cargo[value].empty()
                self._let_go(value)
            else:
                self._remove(value)

    def _remove(self, value: Value) -> None:
        kind, stage = value
        if kind == SAVED and stage in self._blocks:
            first, box = self._blocks[stage].first, self._blocks[stage].box
            for holder in first.alive() if first is not None else ():
                holder.empty()
            if box is not None:
                box.rebuild = None
        self._let_go(value)

    def _let_go(self, value: Value) -> None:
        """Of an output; that of a native stage stays while the next stage may still ask for it."""
        kind, stage = value
        if kind == SAVED and not self._program.replayed[stage] and self._is_leased(stage + 1):
            return
        if value in self._staying:
            return
        if value in self._cargo and self._travel is not None and self._travel.is_arriving(value):
            self._cargo[value].has_readers = False
        self._outputs.pop(value, None)

    # -- transfers -------------------------------------------------------------------------------------------

    def _wait(self, position: int) -> None:
        if self._travel is not None:
            self._travel.wait(position)

    def _move(self, position: int, op: Op) -> None:
        value, travel = op.subject, self._travel
        if op.kind == DROP:
            self._drop(value)
        elif op.kind == OFFLOAD:
            self._offload(position, value)
        elif op.kind == DISCARD:
            self._discard(value)
        elif travel is not None and travel.holds(value):
            travel.prefetch(value)

    def _offload(self, position: int, value: Value) -> None:
        if self._travel is None:
            self._staying.add(value)
            return
        self._take(value)
        cargo = self._cargo_of(value, self._travel.device)
        if not cargo.tensors:
            if value in self._outputs and self._outputs[value].tensors:  # they stay, all of them
                self._staying.add(value)
            return  # else it was not made, or autograd is done with it
        if self._travel.offload(position, value, cargo.tensors):
            self._cargo[value] = cargo
            cargo.tensors = []
        else:
            self._staying.add(value)
            self._trace.notes.append(f"what '{self.name(value[1])}' made is larger than planned, and stays there")

    def _cargo_of(self, value: Value, device: torch.device) -> Cargo:
        kind, stage = value
        block = self._blocks.get(stage) if kind == SAVED else None
        if block is None:
            return Cargo(None, (), self._outputs.get(value), device)
        given = {_compat.storage_key(a.tensor) for a in block.arguments if a.tensor is not None}
        before = self._outputs_there(stage)
        found = {_compat.storage_key(tensor) for tensor in before.tensors.values()} if before else set()
        return Cargo(block, self._resident | block.copies | given | found, self._outputs.get(value), device)

    @functools.cached_property
    def _resident(self) -> frozenset[int]:
        return self._settings.resident()

    def _leave(self, value: Value) -> None:
        """Lets go of what travels: nobody asks for it any more."""
        self._staying.discard(value)
        self._cargo.pop(value, None)
        if self._travel is not None:
            self._travel.leave(value)

    def _discard(self, value: Value) -> None:
        self._staying.discard(value)
        if self._travel is not None and self._travel.holds(value):
            self._travel.discard(value)
        if self._travel is None or not self._travel.is_arriving(value):
            self._cargo.pop(value, None)

    def _take(self, value: Value) -> None:
        """Takes what was asked back, once it is there."""
        travel = self._travel
        if travel is None or not travel.is_arriving(value):
            return
        outputs = self._cargo[value].unpack(travel.take(value))
        if outputs is not None:
            self._outputs[value] = outputs
        if not travel.holds(value):
            del self._cargo[value]
        else:
            self._cargo[value].has_readers = True

    def _is_leased(self, stage: int) -> bool:
        lease = self._leases.get(stage)
        return lease is not None and lease() is not None

    def _end_backward(self, stage: int) -> None:
        self._remove((SAVED, stage))
        self._remove((OUTPUT, stage - 1))

    def _forget(self, stage: int) -> None:
        """Lets go of all that was kept for running a block again."""
        self._blocks.pop(stage, None)
        self._leases.pop(stage, None)
        if self._travel is not None or self._staying:
            self._leave((SAVED, stage))
            self._leave((OUTPUT, stage - 1))
        self._release_idle(stage - 1)
        self._outputs.pop((OUTPUT, stage - 1), None)
        self._outputs.pop((SAVED, stage - 1), None)

    def _release_idle(self, stage: int) -> None:
        """Lets go of a block that saved nothing, once neither the list nor the next stage asks for it."""
        due = stage in self._watched and self._program.backward[stage] >= self._position
        if not due and not self._is_leased(stage + 1):
            self._idle.pop(stage, None)

    # -- backward --------------------------------------------------------------------------------------------

    def boundary(self, stage: int) -> None:
        """Makes the backward of a block possible: performs the operations that the list has before it."""
        with self._lock:
            if self._ready == stage:
                return
            if self._in_forward:
                raise Unsupported(
                    f"gradients through '{self.name(stage)}' are taken inside the model's forward, before all blocks "
                    "of the plan have run: plan a part of the model, whose own forward does not do that"
                )
            position = self._program.backward[stage]
            again = position < self._position
            if again and not self._is_leased(stage):
                return  # its graph is freed; autograd says so better
            if self._failure:
                raise RecomputationError(
                    f"an earlier backward of this step failed ({self._failure}); run the forward again"
                )
            if self._ready:
                self._end_backward(self._ready)
                self._ready = 0
            self._choose(stage, again)
            try:
                self._advance(position)
                self._wait(position)
                self._take((SAVED, stage))
                self._outputs_before(stage)
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                self.abandon()
                raise
            self._position = position + 1
            self._ready = stage
            self._release_idle(stage)

    def _choose(self, stage: int, again: bool) -> None:
        """Decides which forwards are performed on the way to a backward: all, unless some backwards do not come."""
        if again:
            self._start_over()
        skipped = again
        while self._coming and self._coming[-1] > stage:
            self._coming.pop()
            skipped = True
        if skipped or (self._partial and self._needed is None):
            wanted = {stage, *self._coming}
            self._needed = self._program.needed(self._position, wanted, self._travel is not None)
        if self._coming[-1:] == [stage]:
            self._coming.pop()

    def _start_over(self) -> None:
        self.abandon()
        self._staying.clear()
        self._position, self._coming = 0, list(self._watched)
        for stage in range(1, self._program.stage_count + 1):
            if self._program.replayed[stage]:
                self._remove((SAVED, stage))
            self._remove((OUTPUT, stage))

    def missing(self, holder: Holder) -> torch.Tensor:
        """A tensor that a backward wants and that is not there.

        This is how the backward of a block begins of which only an inner tensor, not an output, was used outside.
        """
        stage = holder.lease.stage
        self._refuse_inside(stage)
        self.boundary(stage)
        if holder.tensor is None and isinstance(holder, RebuiltHolder) and self._program.opened[stage]:
            self._run_again(Op(FORWARD_SAVE, stage))
        if holder.tensor is None:
            raise RecomputationError(
                f"a tensor that '{self.name(stage)}' saved for its backward is not there, although the "
                "schedule was followed up to its backward"
            )
        return holder.tensor

    def rebuilt(self, holder: RebuiltHolder) -> torch.Tensor | None:
        """A tensor that an opened block did not keep; None if it cannot be rebuilt, and the block must be run again."""
        stage = holder.lease.stage
        self._refuse_inside(stage)
        if self._ready != stage:
            self.boundary(stage)
        box, block = holder.box, self._blocks.get(stage)
        if box.rebuild is None or block is None:
            return None
        self.in_backward()
        tensor = self.rebuild(box.rebuild, holder.index, holder.lease)
        if tensor is None:
            self._give_up(stage, box)
        return tensor

    def rebuild(self, rebuild: Rebuild, index: int, where: Lease) -> torch.Tensor | None:
        """A saved tensor, under the switches of the forward; None if it cannot be rebuilt. `in_backward` was called."""
        if self._switched or self._casting:
            with self._switches.in_force(), no_autocast(self._settings.device_types):
                return rebuild.tensor(index, where)
        return rebuild.tensor(index, where)

    def _refuse_inside(self, stage: int) -> None:
        if self.running == stage:
            raise Unsupported(f"'{self.name(stage)}' computes gradients inside its own forward; keep this block")

    def _give_up(self, stage: int, box: Box) -> None:
        """Tensors of an opened block do not come out right, or what they are rebuilt from is gone."""
        rebuild: Rebuild | None = box.rebuild
        box.rebuild = None
        opened = self._sites[stage].opened
        if opened is not None and rebuild is not None and rebuild.prints is not None and rebuild.was_wrong:
            opened.distrust(box.key, "did not give the same tensors again")
        self.note_again(stage)

    def note_again(self, stage: int) -> None:
        """Notes that a tensor could not be rebuilt."""
        self._trace.notes.append(f"'{self.name(stage)}' was run again as a whole: a tensor could not be rebuilt")

    def refuse_changed(self, stage: int, record: Record) -> None:
        """Raises if a block's parameters and buffers were written since its first run, or its flags are others."""
        difference = record.difference()
        if difference is not None:
            raise RecomputationError(f"'{self.name(stage)}' cannot be run again: {difference} after the forward")

    def refuse_other_values(self, stage: int) -> None:
        """Raises where a block that ran again computed something else, unless that was to be accepted."""
        if self._settings.determinism_check != "none" and self._settings.preserve_rng_state:
            error = RecomputationError(
                f"'{self.name(stage)}' computed other values when it was run again: a parameter's data, an attribute "
                "or something else that it reads was changed after the forward, or its operations do not repeat; keep "
                "this block, or accept it with determinism_check='none'"
            )
            error.difference = "it returns other values"
            raise error

    def in_backward(self) -> int:
        """Looks, once in a backward, under which switches it runs; a number for that backward."""
        backward = _compat.backward_id()
        if backward < 0 or backward != self._compared_in:
            begin_step()
            self._compared_in, self._switched = backward, not self._switches.are_in_force()
            self._casting = any(map(torch.is_autocast_enabled, self._settings.device_types))
        return backward

    def record_of(self, stage: int) -> Record:
        """What a block's first run found."""
        block = self._blocks.get(stage)
        if block is None or block.found is None:
            raise RecomputationError(f"what '{self.name(stage)}' found when it ran is gone")
        return block.found

    def argument_of(self, stage: int, index: int, view: View | Look | None) -> torch.Tensor:
        """A tensor that a block saved and that is one of its arguments, or a view of one."""
        block = self._blocks.get(stage)
        if block is None:
            raise RecomputationError(f"the arguments of '{self.name(stage)}' are gone")
        if self.running != stage and block.arguments[index].output >= 0 and self._outputs_before(stage) is None:
            self.boundary(stage)
        return self.seen(self.find(stage, block, index), view)

    def seen(self, tensor: torch.Tensor, view: View | Look | None) -> torch.Tensor:
        """A tensor, or a view of one."""
        if view is None or view == geometry(tensor):
            return tensor
        if isinstance(view, Look):
            return view.seen(tensor, first_byte(tensor))
        with torch.no_grad():
            return tensor.as_strided(*view)

    # -- later runs ------------------------------------------------------------------------------------------

    def _run_again(self, op: Op) -> None:
        block = self._blocks.get(op.stage)
        if block is None:
            return  # it did not run as planned, or autograd is done with it
        self._produce(op, self.again(op, block))

    def again(self, op: Op, block: BlockRun) -> Any:
        """Runs a block again, which fills its holders or not; its output."""
        written = block.variables.written()
        if written is not None:
            raise RecomputationError(
                f"'{self.name(op.stage)}' cannot be run again: {written} was modified in place after the forward"
            )
        return block.variables.run(self._again, op, block)

    def _again(self, op: Op, block: BlockRun) -> Any:
        site, first, found = self._sites[op.stage], block.first, block.found
        assert first is not None and found is not None
        self.refuse_changed(op.stage, found)
        self.in_backward()
        saving = self._saving(op, block)
        checking = self._settings.determinism_check != "none"
        marks = None if self._check is None or block.marks is None else self._check.marks(block.marks)
        later = LaterRun(site.name, first, op.kind == FORWARD_SAVE, checking, saving, marks)
        self._trace.runs.append((op.kind, op.stage))
        with _compat.modes_taken_back(), contextlib.ExitStack() as surroundings:
            modules = site.state.modules()
            gather(modules, surroundings, stays=op.kind == FORWARD_SAVE)
            surroundings.enter_context(parametrized.as_found(block.weights))
            # in the forward, whatever the first run left has yet to be read
            attributes = Attributes(modules, with_large=self._in_forward)
            surroundings.callback(attributes.restore)
            self._restore(block, surroundings, op.kind == FORWARD_SAVE)
            args, kwargs = self._build(op.stage, block)
            if block.calls is None:
                surroundings.enter_context(saved_tensors_hooks(*hooks(later)))
                run = block.forward
            else:
                surroundings.enter_context(handlers_in(modules[part] for part in block.calls))
                run = functools.partial(PartHooks(by_module(modules, block.calls), *hooks(later)).run, block.forward)
            recording = contextlib.nullcontext() if saving is None else saving.running(Tree.of((args, kwargs)).leaves)
            with recording:  # of what the block does, and nobody else
                output = run(*args, **kwargs)
            later.finish()
            site.state.fills = site.state.fills or attributes.are_filled()
        if block.samples is not None and self._samples(output, found) != block.samples:
            site.state.copy_all_buffers()
            self.refuse_other_values(op.stage)
        if marks is not None and block.marks is not None and self._check is not None:
            marks.returned(output)
            self._check.compare(op.stage, block.marks, marks)
        if op.kind == FORWARD_SAVE:
            self._note_saved(op.stage, block, saving, output)
        return output

    def _samples(self, output: Any, found: Record) -> list[Any]:
        """What tells the tensors that a block returned from others: some of their numbers, or all of them."""
        in_full = found.is_in_doubt or self._settings.determinism_check == "values"
        return [fingerprint(tensor) if in_full else spread(tensor) for tensor in unique_tensors_in(output)]

    def rehearse(self) -> dict[int, Exception]:
        """Recomputes each block of the step once, the last one first; by stage, the errors of those that differ.

        To be called after the forward, for schedules that keep the inputs of blocks.
        """
        found = {}
        for stage in sorted(self._blocks, reverse=True):
            try:
                self.again(Op(FORWARD_KEEP, stage), self._blocks[stage])
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                found[stage] = error.with_traceback(None)
        return found

    def _restore(self, block: BlockRun, surroundings: contextlib.ExitStack, saves: bool) -> None:
        """Brings back, for as long as `surroundings` are open, what the first run found beside its arguments."""
        if self._switched:
            surroundings.enter_context(self._switches.in_force())
        block.modes.enter(surroundings)
        if block.standing is not None:
            surroundings.enter_context(block.standing.in_force())
        if block.contents is not None:
            block.contents.restore()
        if block.found is not None:
            copies = surroundings.enter_context(block.found.in_force())
            if saves:
                block.copies = frozenset(map(_compat.storage_key, copies))
        if block.random_state is not None:
            surroundings.callback(block.random_state.exchange().restore)

    def _build(self, stage: int, block: BlockRun) -> Any:
        for name, tensor, version in block.hidden:
            if _compat.version(tensor) != version:
                raise RecomputationError(
                    f"'{self.name(stage)}' cannot be run again: {name}, in an object passed to it, was "
                    "modified in place after the forward"
                )
        casting = any(enabled for _, enabled, _ in block.modes.autocast)
        leaves = []
        for index, argument in enumerate(block.arguments):
            tensor = self.find(stage, block, index)
            if tensor.requires_grad != argument.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                tensor = _fresh(tensor, argument.requires_grad, casting)
            leaves.append(tensor)
        return block.tree.build(leaves)

    def find(self, stage: int, block: BlockRun, index: int) -> torch.Tensor:
        """A tensor argument of a block, as it is in memory now."""
        argument = block.arguments[index]
        if argument.tensor is not None:
            tensor, intact = argument.tensor, _compat.version(argument.tensor) == argument.version
        else:
            outputs = self._outputs_before(stage)
            if outputs is None:
                raise RecomputationError(
                    f"'{self.name(stage)}' needs the output of '{self.name(stage - 1)}', which can no longer be "
                    "computed: its graph was freed by an earlier backward without retain_graph=True"
                )
            tensor, intact = outputs.tensors[argument.output], outputs.is_intact(argument.output)
        if not intact:
            raise RecomputationError(
                f"argument {block.argument_name(index)} of '{self.name(stage)}' was modified in place "
                "after the forward, but its backward needs the old value"
            )
        if argument.view is None:
            return tensor
        with torch.no_grad():
            return tensor.as_strided(*argument.view)

    def _outputs_before(self, stage: int) -> Outputs | None:
        if self._travel is not None:
            self._take((OUTPUT, stage - 1))
            self._take((SAVED, stage - 1))
        return self._outputs_there(stage)

    def _outputs_there(self, stage: int) -> Outputs | None:
        """The same without what is on its way back."""
        return self._outputs.get((OUTPUT, stage - 1)) or self._outputs.get((SAVED, stage - 1))


def _fresh(tensor: torch.Tensor, requires_grad: bool, casting: bool) -> torch.Tensor:
    """A tensor without its history. Of a leaf with gradients autocast would keep a copy, as of a parameter."""
    fresh = tensor.detach().requires_grad_(requires_grad)
    return fresh.view_as(fresh) if casting and requires_grad else fresh


def _digest(tensor: torch.Tensor) -> int:
    """The fingerprint of a saved tensor; 0 of what may be a seed, which kernels that draw nothing do not write."""
    is_seed = tensor.dtype is torch.uint64 or (tensor.dtype is torch.int64 and tensor.dim() == 0)  # no list of indices
    return 0 if is_seed and tensor.nbytes <= SEED_BYTES else fingerprint(tensor)


def _gradient_ready(run: Run, stage: int, gradient: torch.Tensor) -> None:
    run.boundary(stage)


def _lease_ended(run_ref: weakref.ref[Run], stage: int, _: weakref.ref[Lease]) -> None:
    run = run_ref()
    if run is not None:
        run._forget(stage)
