"""One training step under a schedule: from the model's forward to the end of its backward.

A `Run` is made when the model's forward begins. It performs the operations of the schedule (`Program.ops`, below *the
list*) once, in order. Its values (records of blocks, outputs, copies in host memory) are in `step_values.py`.
Recomputation is in `recomputation.py`.

* *Forward.* Each planned block calls `block`. That performs the operations before the block's first forward. Then the
  block runs, in the model's own forward, under pack hooks that keep or drop its saved tensors. Drops that follow in
  the list are performed at once.
* *Backward.* A tensor hook on a block's outputs calls `boundary` when their gradients are ready. That performs the
  operations up to the block's backward. Autograd then runs this backward itself. One hook call is enough for a block
  with several outputs: autograd runs nodes in the reverse order of their creation. So when the first node of the block
  is about to run, everything above the block has run, and the gradients of all its outputs exist.
* *Recomputation.* A block is recomputed from detached inputs, under pack hooks that fill the holders of the original
  graph (`selective/pack_hooks.py`). The temporary graph is freed. Autograd differentiates its original graph, so
  gradients add up in the order of plain training.
* *Selective recomputation.* A block may keep some of its saved tensors, while the schedule drops and offloads none of
  its values. Such a block needs no list: it recomputes its other saved tensors by itself (`single_runs.py`).
* *Transfers* are issued where the list has them (`step_transfers.py`). A value may be dropped while it is still being
  copied out. It is then freed when an operation waits for that copy. A prefetched value is taken when something reads
  it.

The same list serves unusual steps. Some backwards may not come: the loss does not use an output, blocks are frozen, or
`autograd.grad` takes a part. They are skipped, and so are recomputations that only they need (`Program.needed`). A
backward may come a second time (`retain_graph`, two losses, double backward). Then the list starts over: values that
are not resident are recomputed from those that are, and nothing is offloaded. Nothing is offloaded, either, in a step
that begins while another step has copies in the tier.

Ownership. The autograd graph owns holders and hooks, these own the `Run`, and the `Run` owns detached tensors. Nothing
points back, so there are no cycles, and freeing the graph frees everything. When the last holder of a block is gone,
all that was kept to recompute the block is freed, wherever the list is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..base import _compat
from ..base.errors import RecomputationError, Unsupported
from ..base.layouts import ByteView
from ..base.tree import Tree, tensors_in, unique_tensors_in
from ..rerun_state import parametrized
from ..rerun_state.attributes import Attributes
from ..rerun_state.attributes_and_hooks import AttributesAndHooks
from ..rerun_state.globals_and_closures import begin_step
from ..rerun_state.module_state import StateBefore
from ..schedule.program import BACKWARD, FORWARD_DROP, FORWARD_SAVE, ON_VALUES, OUTPUT, PREFETCH, SAVED, Op
from ..selective.matching_runs import RunInputs
from ..selective.pack_hooks import FirstRunPack, active
from ..selective.recompute import TensorRecompute
from ..selective.saved_tensors import Holder, Lease, RecomputableHolder, RecomputeState, View
from .block_records import Argument, BlockRun, Returned
from .recomputation import Recomputation, digest
from .recompute_check import Checks
from .single_runs import SelectiveRun
from .step_settings import PlannedBlock, Settings, Trace
from .step_transfers import StepTransfers
from .unplanned_runs import UnplannedRun

_NOTHING = contextlib.nullcontext()


class Run(Recomputation):
    """One step; see the top of this file."""

    def __init__(
        self,
        settings: Settings,
        planned_blocks: dict[int, PlannedBlock],
        trace: Trace,
        step_transfers: StepTransfers | None = None,
        checks: Checks | None = None,
    ) -> None:
        super().__init__(settings, planned_blocks, trace, step_transfers, checks)
        self._position = 0  # index of the next operation in the list
        self._backward_stage = 0  # the stage whose backward may run now; 0: none
        self.running = 0  # the block whose forward is running; 0: none
        self._needed: frozenset[int] | None = None  # positions of the recomputations to perform; None: all
        self._failure = ""  # message of the error that ended a backward; an exception would keep the graph alive
        self._ran: set[int] = set()  # the blocks that the model's forward has run
        self.without_gradients: set[str] = set()  # names of blocks that ran without gradients, so not as stages
        self.left_out: list[str] = []  # planned blocks that did not run; filled when the forward has ended
        self._idle: dict[int, Lease] = {}  # leases of blocks that saved no tensor, so no holder owns them
        self._watched: list[int] = []  # stages whose outputs have hooks, ascending
        self._pending: list[int] = []  # watched stages whose backward is still to come
        self._some_will_not_come = False  # some backwards in the list will not come
        self._calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._lock = threading.RLock()
        begin_step()
        self._perform_due()

    def next_call(self, name: str) -> int:
        """The number of this call of a block within the step, from 0."""
        return next(self._calls[name])

    # -- forward ---------------------------------------------------------------------------------------------

    def block(self, stage: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a planned block in the model's forward, and returns its output."""
        position = self._program.first_forward[stage]
        self._ran.add(stage)
        if position < self._position:
            return self.unplanned(stage, "after blocks that the plan has behind it", forward, args, kwargs)
        if position > self._position:
            self._advance(position)
        if self._step_transfers is not None:
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
        self._perform_due()
        return output

    def unplanned(
        self, stage: int, how: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call of a block that the plan does not have at this place, and returns its output.

        It keeps its inputs alone and is recomputed in its backward, unless the block must not be recomputed. how: why
        the call is unplanned, for the notes of the step.
        """
        planned = self._planned_blocks[stage]
        if planned.is_kept:
            self._trace.notes.append(f"'{self.name(stage)}' ran {how}, and was kept")
            return forward(*args, **kwargs)
        self._trace.notes.append(f"'{self.name(stage)}' ran {how}, kept its inputs alone, and is recomputed")
        tree = Tree.of_call(args, kwargs)
        self.running = stage
        try:
            block = self._record_run(stage, forward, tree, list(map(Argument.kept, tree.leaves)))
            return UnplannedRun(self, stage, block).forward(planned.state, args, kwargs)
        finally:
            self.running = 0

    def forward_ended(self) -> None:
        """Called when the model's forward has returned."""
        self._returned.clear()
        self._in_forward = False
        self._perform_due()
        if self._step_transfers is not None:
            self._step_transfers.forward_ended()
        self._pending = list(self._watched)
        watched = set(self._watched)
        self._some_will_not_come = any(self._program.executed[s] and s not in watched for s in self._planned_blocks)
        for stage in list(self._idle):
            self._release_idle(stage)
        not_run = [stage for stage in self._planned_blocks if stage not in self._ran]
        self.left_out = [
            self.name(stage) for stage in not_run if self._program.ref(stage).name not in self.without_gradients
        ]
        if self.left_out:
            self._trace.notes.append(f"planned blocks did not run: {', '.join(self.left_out)}")

    def _first_run(self, op: Op, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a block in the forward under saved-tensor hooks. Records all that its recomputation needs."""
        stage, planned = op.stage, self._planned_blocks[op.stage]
        tree = Tree.of_call(args, kwargs)
        block = self._record_run(stage, forward, tree)
        if planned.selective is None:
            inputs, selective = RunInputs(planned.state.before()), None
        else:
            inputs = planned.selective.find(tree, block.modes, self._backend_flags.key)
            selective = self._selective_run(op, planned, inputs, block)
        if _compat.weights_are_cached():
            block.weights = parametrized.ForwardWeights(planned.state.modules())
        if planned.state.fills or planned.state.restores_attributes:
            block.attributes_before = Attributes(planned.state.modules())
        if selective is None:
            output = self._run_recorded(op, block, inputs, args, kwargs)
        else:
            output = self._run_selectively(selective, block, inputs.before, args, kwargs)
        if planned.state.restores_attributes:
            block.attributes_after = AttributesAndHooks(planned.state.modules())
        passed, tree.leaves, tree.opaque = tree.leaves, [], []
        if not self._program.quiet[stage]:
            self._returns(op, output, passed)
        return output

    def _selective_run(self, op: Op, planned: PlannedBlock, inputs: RunInputs, block: BlockRun) -> SelectiveRun | None:
        """A run under selective recomputation that does not need the list (`single_runs.py`).

        None if the block needs the list, or has no recipe for this call yet.
        """
        stage, settings = op.stage, self._settings
        if planned.selective is None or not op.option or not self._program.autograd_only[stage]:
            return None
        recipe = planned.selective.following(op.option, inputs) if settings.determinism_check != "values" else None
        return None if recipe is None else SelectiveRun(self, planned.name, stage, block, recipe, settings.devices)

    def _run_selectively(
        self, run: SelectiveRun, block: BlockRun, before: StateBefore, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        output = run.forward(args, kwargs)
        tree = block.tree
        if tree.opaque or _compat.versions(tree.leaves) != run.versions:
            block.refuse_written(self.name(run.stage), run.versions)
        block.state = self._planned_blocks[run.stage].state.after(before)
        reason = run.finish()
        if reason:
            self._note_not_selective(run.stage, reason)
        return output

    def _run_recorded(
        self, op: Op, block: BlockRun, inputs: RunInputs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a block under pack hooks. The schedule then empties and fills the holders of its saved tensors."""
        stage, planned = op.stage, self._planned_blocks[op.stage]
        lease, self._blocks[stage] = self._lease(stage), block
        block.recompute_state = None if inputs.key is None else RecomputeState(inputs.key)
        saving = self._saving(op, block)
        leaves, digest_if_compared = block.tree.leaves, digest if self._settings.determinism_check == "values" else None
        fingerprints = block.fingerprints = self.new_fingerprints()
        first = block.first = FirstRunPack(
            lease, leaves, op.kind == FORWARD_SAVE, digest_if_compared, block.recompute_state, saving, fingerprints
        )
        try:
            with active(first), _NOTHING if saving is None else saving.running(leaves):
                output = block.forward(*args, **kwargs)
            block.refuse_written(planned.name, first.versions)
        except BaseException:
            self._free_block(stage)
            raise
        block.state = planned.state.after(inputs.before)
        self.record_returned(block, output)
        self._record_saved(stage, block, saving, output)
        if first.close():
            self._idle[stage] = lease
        return output

    def _lease(self, stage: int) -> Lease:
        lease = Lease(self, stage)
        self._leases[stage] = weakref.ref(lease, functools.partial(_lease_ended, weakref.ref(self), stage))
        return lease

    def _returns(self, op: Op, output: Any, arguments: Iterable[torch.Tensor]) -> None:
        """Called after a block's forward: keeps its output if the schedule does, and hooks its gradients.

        arguments: the tensors among the block's arguments.
        """
        stage = op.stage
        returned = unique_tensors_in(output)
        arguments = list(arguments) if self._step_transfers is not None or self._program.watched[stage] else ()
        if self._program.executed[stage + 1]:
            self._returned[stage] = [Returned(weakref.ref(t), _compat.version(t), t.requires_grad) for t in returned]
            if self._step_transfers is not None:
                argument_keys = {_compat.storage_key(tensor) for tensor in arguments} - {0}
                self._passed_through[stage] = frozenset(
                    i for i, t in enumerate(returned) if _compat.storage_key(t) in argument_keys
                )
            self._produce(op, output)
        self._after(self._program.first_forward[stage])
        if not self._program.watched[stage]:
            return
        argument_ids = set(map(id, arguments))
        for tensor in returned:
            if not tensor.is_leaf and id(tensor) not in argument_ids:
                _compat.hook_gradient(tensor, functools.partial(_gradient_ready, self, stage))
                if stage not in self._watched[-1:]:
                    self._watched.append(stage)

    # -- the list --------------------------------------------------------------------------------------------

    def _perform_due(self) -> None:
        """Performs the drops and transfers that come next in the list, up to the next block.

        Stages outside blocks do not stop it: the model and autograd run them by themselves. But a prefetch behind such
        a stage is not started before the stage has run. While the forward runs, a backward stops it: otherwise the
        forward would wait for the copies that this backward waits for.
        """
        ops, crossed_segment = self._program.ops, False
        while self._position < len(ops):
            op = ops[self._position]
            if op.kind in ON_VALUES and not (crossed_segment and op.kind == PREFETCH):
                self._perform(self._position)
            elif op.kind == PREFETCH or self._program.is_block[op.stage] or self._is_to_come(op):
                return
            else:
                crossed_segment = True
                self._wait(self._position)
            self._position += 1

    def _is_to_come(self, op: Op) -> bool:
        """Whether the operation is a backward, and the model's forward is still running."""
        return op.kind == BACKWARD and self._in_forward

    def _advance(self, position: int) -> None:
        while self._position < position:
            self._perform(self._position)
            self._position += 1

    def _perform(self, position: int) -> None:
        op = self._program.ops[position]
        self._wait(position)
        if op.kind in ON_VALUES:
            self._perform_on_value(position, op)
        elif op.kind == BACKWARD:
            self._end_backward(op.stage)
        elif not op.is_idle and (self._needed is None or position in self._needed):
            self._perform_recompute(op)
        self._after(position)

    def _perform_recompute(self, op: Op) -> None:
        block = self._blocks.get(op.stage)
        if block is None:
            return  # it did not run as planned, or its backward is over and its graph freed
        self._produce(op, self.recompute_block(op, block))

    def _after(self, position: int) -> None:
        """Releases the values that no operation reads after this one."""
        op = self._program.ops[position]
        if op.kind == FORWARD_DROP:
            self._drop((OUTPUT, op.stage - 1))
        for value in self._program.releases[position]:
            self._release(value)

    def _end_backward(self, stage: int) -> None:
        self._free((SAVED, stage))
        self._free((OUTPUT, stage - 1))

    def _free_block(self, stage: int) -> None:
        """Frees all that is kept to recompute a block. Called when its last holder is freed, or its run failed."""
        self._blocks.pop(stage, None)
        self._leases.pop(stage, None)
        if self._step_transfers is not None or self._not_offloaded:
            self._drop_host_copy((SAVED, stage))
            self._drop_host_copy((OUTPUT, stage - 1))
        self._release_idle(stage - 1)
        self._outputs.pop((OUTPUT, stage - 1), None)
        self._outputs.pop((SAVED, stage - 1), None)

    def _release_idle(self, stage: int) -> None:
        """Ends the lease of a block that saved no tensor, once neither its backward nor the next stage needs it."""
        due = stage in self._watched and self._program.backward[stage] >= self._position
        if not due and not self._is_leased(stage + 1):
            self._idle.pop(stage, None)

    # -- backward --------------------------------------------------------------------------------------------

    def boundary(self, stage: int) -> None:
        """Called when the backward of a block is about to run: performs the operations before it in the list."""
        with self._lock:
            if self._backward_stage == stage:
                return
            if self._in_forward:
                raise Unsupported(
                    f"gradients through '{self.name(stage)}' are taken inside the model's forward, before all blocks "
                    "of the plan have run: plan a part of the model, whose own forward does not do that"
                )
            position = self._program.backward[stage]
            is_repeated = position < self._position
            if is_repeated and not self._is_leased(stage):
                return  # its graph is freed; autograd's own error is clearer
            if self._failure:
                raise RecomputationError(
                    f"an earlier backward of this step failed ({self._failure}); run the forward again"
                )
            if self._backward_stage:
                self._end_backward(self._backward_stage)
                self._backward_stage = 0
            self._choose_recomputations(stage, is_repeated)
            try:
                self._advance(position)
                self._wait(position)
                self._complete_prefetch((SAVED, stage))
                self._outputs_before(stage)
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                self.abandon()
                raise
            self._position = position + 1
            self._backward_stage = stage
            self._release_idle(stage)

    def _choose_recomputations(self, stage: int, is_repeated: bool) -> None:
        """Chooses the recomputations to perform before a backward: all, unless some backwards will not come.

        is_repeated: whether this backward has run before; the list then starts over.
        """
        if is_repeated:
            self._restart()
        skipped = is_repeated
        while self._pending and self._pending[-1] > stage:
            self._pending.pop()
            skipped = True
        if skipped or (self._some_will_not_come and self._needed is None):
            wanted = {stage, *self._pending}
            self._needed = self._program.needed(self._position, wanted, self._step_transfers is not None)
        if self._pending[-1:] == [stage]:
            self._pending.pop()

    def _restart(self) -> None:
        self.abandon()
        self._not_offloaded.clear()
        self._position, self._pending = 0, list(self._watched)
        for stage in range(1, self._program.stage_count + 1):
            if self._program.executed[stage]:
                self._free((SAVED, stage))
            self._free((OUTPUT, stage))

    def missing(self, holder: Holder) -> None:
        """Fills an empty holder: performs the list up to the block's backward.

        The hook on the outputs did not run if the loss uses only an inner tensor of the block. Then this is the begin
        of the block's backward.
        """
        stage = holder.lease.stage
        self._refuse_inner_gradients(stage)
        self.boundary(stage)
        if holder.is_empty and isinstance(holder, RecomputableHolder) and self._program.selective[stage]:
            self._perform_recompute(Op(FORWARD_SAVE, stage))
        if holder.is_empty:
            raise RecomputationError(
                f"a tensor that '{self.name(stage)}' saved for its backward is not there, although the "
                "schedule was followed up to its backward"
            )

    def recomputed(self, holder: RecomputableHolder) -> torch.Tensor | None:
        """Recomputes one saved tensor under selective recomputation; None if the whole block must be recomputed."""
        stage = holder.lease.stage
        self._refuse_inner_gradients(stage)
        if self._backward_stage != stage:
            self.boundary(stage)
        recompute_state, block = holder.recompute_state, self._blocks.get(stage)
        if recompute_state.recompute is None or block is None:
            return None
        self.in_backward()
        tensor = self.recompute_tensor(recompute_state.recompute, holder.index, holder.lease)
        if tensor is None:
            self._give_up(stage, recompute_state)
        return tensor

    def _refuse_inner_gradients(self, stage: int) -> None:
        if self.running == stage:
            raise Unsupported(f"'{self.name(stage)}' computes gradients inside its own forward; keep this block")

    def _give_up(self, stage: int, recompute_state: RecomputeState) -> None:
        """Ends selective recomputation of this run: a recomputed tensor differed, or one of its inputs is freed."""
        recompute: TensorRecompute | None = recompute_state.recompute
        recompute_state.recompute = None
        selective = self._planned_blocks[stage].selective
        if (
            selective is not None
            and recompute is not None
            and recompute.fingerprints is not None
            and recompute.was_wrong
        ):
            selective.distrust(recompute_state.key, "did not give the same tensors again")
        self.note_whole_recompute(stage)

    def argument_of(self, stage: int, index: int, view: View | ByteView | None) -> torch.Tensor:
        """A saved tensor that is one of the block's arguments, or a view of one."""
        block = self._blocks.get(stage)
        if block is None:
            raise RecomputationError(f"the arguments of '{self.name(stage)}' are gone")
        if self.running != stage and block.arguments[index].output >= 0 and self._outputs_before(stage) is None:
            self.boundary(stage)
        return self.view_of(self.find(stage, block, index), view)


def _gradient_ready(run: Run, stage: int, gradient: torch.Tensor) -> None:
    run.boundary(stage)


def _lease_ended(run_ref: weakref.ref[Run], stage: int, _: weakref.ref[Lease]) -> None:
    run = run_ref()
    if run is not None:
        run._free_block(stage)
