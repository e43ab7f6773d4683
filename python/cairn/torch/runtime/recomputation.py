"""Recomputes blocks of a training step, from the state that was recorded in the forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import _compat
from ..base.errors import RecomputationError, is_out_of_memory
from ..base.layouts import ByteView, first_byte
from ..base.tensor_fingerprints import fingerprint, spread
from ..base.tree import Tree, unique_tensors_in
from ..rerun_state import parametrized
from ..rerun_state.attributes import Attributes
from ..rerun_state.backend_flags import BackendFlags
from ..rerun_state.context_variables import Variables
from ..rerun_state.globals_and_closures import begin_step
from ..rerun_state.module_state import Record
from ..rerun_state.rng_and_autocast import Modes, RandomState, no_autocast, with_generator
from ..rerun_state.sharded import gather
from ..schedule.program import FORWARD_KEEP, FORWARD_SAVE, Op
from ..selective.block_options import SEED_BYTES
from ..selective.block_runs import Saving
from ..selective.pack_hooks import RecomputePack, active, hooks
from ..selective.recompute import TensorRecompute
from ..selective.saved_tensors import Lease, View, geometry
from ..selective.submodule_hooks import SubmoduleHooks, by_module, handlers_in
from .block_records import Argument, BlockRun, tensors_in_objects
from .recompute_check import Checks, Fingerprints, StepCheck
from .step_settings import PlannedBlock, Settings, Trace
from .step_transfers import StepTransfers
from .step_values import StepValues


class Recomputation(StepValues):
    """A step that can recompute its blocks. The schedule says when, and from which values."""

    def __init__(
        self,
        settings: Settings,
        planned_blocks: dict[int, PlannedBlock],
        trace: Trace,
        step_transfers: StepTransfers | None = None,
        checks: Checks | None = None,
    ) -> None:
        super().__init__(settings, trace, step_transfers)
        self._planned_blocks = planned_blocks
        self._check = None if checks is None else StepCheck(checks, settings.program)
        self._backend_flags = BackendFlags()
        self._flags_differ = False  # the backend flags of the backward that was compared last
        self._autocast_is_on = False  # in that backward
        self._compared_backward = -1  # the number of that backward
        self._in_forward = True
        self._modes: Modes | None = None  # of the last block whose forward ran
        self._last_state: RandomState | None = None  # random state before that block

    def in_backward(self) -> int:
        """Compares the backend flags with the forward's, once in each backward. Returns the backward's number."""
        backward = _compat.backward_id()
        if backward < 0 or backward != self._compared_backward:
            begin_step()
            self._compared_backward, self._flags_differ = backward, not self._backend_flags.are_in_force()
            self._autocast_is_on = any(map(torch.is_autocast_enabled, self._settings.device_types))
        return backward

    def record_of(self, stage: int) -> Record:
        """The parameters and buffers that were recorded when the block ran in the forward."""
        block = self._blocks.get(stage)
        if block is None or block.state is None:
            raise RecomputationError(f"the recorded state of '{self.name(stage)}' no longer exists")
        return block.state

    def refuse_changed(self, stage: int, record: Record) -> None:
        """Raises if a block's parameters or buffers were written since its forward, or its training flags changed."""
        difference = record.difference()
        if difference is not None:
            raise RecomputationError(f"'{self.name(stage)}' cannot be recomputed: {difference} after the forward")

    # -- before and after a run ------------------------------------------------------------------------------

    def _record_run(
        self, stage: int, forward: Callable[..., Any], tree: Tree, arguments: list[Argument] | None = None
    ) -> BlockRun:
        """The record from which the block can be recomputed, made before it runs in the forward.

        arguments: where a recomputation finds them; None to look for them among the outputs of the stage before.
        """
        if self._modes is None or not self._modes.are_in_force():
            self._modes = Modes.current(self._settings.device_types)
        in_objects = tensors_in_objects(tree.opaque, self._planned_blocks[stage].name) if tree.opaque else []
        if arguments is None:
            arguments = self._arguments(stage, tree.leaves)
        variables = Variables(self._planned_blocks[stage].state.restores_attributes)
        return BlockRun(forward, tree, arguments, in_objects, self._modes, self._random_state(tree.leaves), variables)

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

    def new_fingerprints(self) -> Fingerprints | None:
        """Fingerprints of a forward's values, where recomputations are compared on the device; else None."""
        return None if self._check is None else self._check.new_fingerprints()

    def _saving(self, op: Op, block: BlockRun) -> Saving | None:
        """Prepares a run under selective recomputation; None if all saved tensors are kept, or none."""
        selective = self._planned_blocks[op.stage].selective
        if op.kind != FORWARD_SAVE or not op.option or block.recompute_state is None or selective is None:
            return None
        return selective.saving(op.option, block.recompute_state.key, self._settings.devices)

    def _record_saved(self, stage: int, block: BlockRun, saving: Saving | None, output: Any) -> None:
        """Stores, after a run, the recipe that recomputes the saved tensors that it did not keep."""
        if block.recompute_state is None:
            return
        block.recompute_state.recompute = None
        if saving is not None:
            block.recompute_state.recompute = saving.finish(output, block.random_state)
            if saving.difference:
                change = f"{saving.difference} has changed"
                self._trace.notes.append(f"'{self.name(stage)}' was recorded again, which takes time: {change}")
            if block.recompute_state.recompute is None:
                self._note_not_selective(stage, saving.reason)

    def _note_not_selective(self, stage: int, reason: str) -> None:
        self._trace.notes.append(f"'{self.name(stage)}' is recomputed as a whole: it {reason}")

    def record_returned(self, block: BlockRun, output: Any) -> None:
        """Records fingerprints of the tensors that a block returned, to compare its recomputation with them."""
        assert block.state is not None
        block.samples = self._samples(output, block.state)
        if block.fingerprints is not None:
            block.fingerprints.returned(output)

    def _samples(self, output: Any, state: Record) -> list[Any]:
        """Fingerprints of the tensors that a block returned: of some of their numbers, or of all."""
        in_full = state.is_in_doubt or self._settings.determinism_check == "values"
        return [fingerprint(tensor) if in_full else spread(tensor) for tensor in unique_tensors_in(output)]

    def refuse_other_values(self, stage: int) -> None:
        """Raises if a recomputation gave other values, unless `determinism_check` accepts that."""
        if self._settings.determinism_check != "none" and self._settings.preserve_rng_state:
            error = RecomputationError(
                f"'{self.name(stage)}' computed other values when it was recomputed: a parameter's data, an attribute "
                "or something else that it reads was changed after the forward, or its operations do not repeat; keep "
                "this block, or accept it with determinism_check='none'"
            )
            error.difference = "it returns other values"
            raise error

    # -- selective recomputation -----------------------------------------------------------------------------

    def recompute_tensor(self, recompute: TensorRecompute, index: int, where: Lease) -> torch.Tensor | None:
        """Recomputes one saved tensor under the forward's backend flags; None if that fails. Needs `in_backward`."""
        if self._flags_differ or self._autocast_is_on:
            with self._backend_flags.in_force(), no_autocast(self._settings.device_types):
                return recompute.tensor(index, where)
        return recompute.tensor(index, where)

    def view_of(self, tensor: torch.Tensor, view: View | ByteView | None) -> torch.Tensor:
        """A tensor, or a view of one."""
        if view is None or view == geometry(tensor):
            return tensor
        if isinstance(view, ByteView):
            return view.tensor_in(tensor, first_byte(tensor))
        with torch.no_grad():
            return tensor.as_strided(*view)

    def note_whole_recompute(self, stage: int) -> None:
        """Notes that a saved tensor could not be recomputed alone, and the whole block was recomputed."""
        self._trace.notes.append(
            f"'{self.name(stage)}' was recomputed as a whole: a tensor could not be recomputed alone"
        )

    # -- recomputing a block as a whole ----------------------------------------------------------------------

    def recompute_block(self, op: Op, block: BlockRun) -> Any:
        """Recomputes a block and returns its output. A saving operation fills the block's holders."""
        written = block.variables.written()
        if written is not None:
            raise RecomputationError(
                f"'{self.name(op.stage)}' cannot be recomputed: {written} was modified in place after the forward"
            )
        return block.variables.run(self._recompute_block, op, block)

    def _recompute_block(self, op: Op, block: BlockRun) -> Any:
        planned, first, state = self._planned_blocks[op.stage], block.first, block.state
        assert first is not None and state is not None
        self.refuse_changed(op.stage, state)
        self.in_backward()
        saving = self._saving(op, block)
        checks_metadata = self._settings.determinism_check != "none"
        fingerprints = (
            None
            if self._check is None or block.fingerprints is None
            else self._check.new_fingerprints(block.fingerprints)
        )
        recorder = RecomputePack(planned.name, first, op.kind == FORWARD_SAVE, checks_metadata, saving, fingerprints)
        self._trace.runs.append((op.kind, op.stage))
        with _compat.restoring_modes_on_failure(), contextlib.ExitStack() as surroundings:
            modules = planned.state.modules()
            gather(modules, surroundings, stays=op.kind == FORWARD_SAVE)
            surroundings.enter_context(parametrized.restored_cache(block.weights))
            # while the forward runs, attributes that the block left are still to be read: keep large ones, too
            attributes = Attributes(modules, with_large=self._in_forward)
            surroundings.callback(attributes.restore)
            self._restore(block, surroundings, op.kind == FORWARD_SAVE)
            args, kwargs = self._build(op.stage, block)
            if block.calls is None:
                surroundings.enter_context(active(recorder))
                run = block.forward
            else:
                surroundings.enter_context(handlers_in(modules[part] for part in block.calls))
                run = functools.partial(
                    SubmoduleHooks(by_module(modules, block.calls), *hooks(recorder)).run, block.forward
                )
            recording = contextlib.nullcontext() if saving is None else saving.running(Tree.of((args, kwargs)).leaves)
            with recording:  # records only what the block does
                output = run(*args, **kwargs)
            recorder.finish()
            planned.state.fills = planned.state.fills or attributes.are_filled()
        if block.samples is not None and self._samples(output, state) != block.samples:
            planned.state.copy_all_buffers()
            self.refuse_other_values(op.stage)
        if fingerprints is not None and block.fingerprints is not None and self._check is not None:
            fingerprints.returned(output)
            self._check.compare(op.stage, block.fingerprints, fingerprints)
        if op.kind == FORWARD_SAVE:
            self._record_saved(op.stage, block, saving, output)
        return output

    def rehearse(self) -> dict[int, Exception]:
        """Recomputes each block of the step once, the last first. Returns, by stage, the error of a block that differs.

        Called after the forward, for schedules that keep the inputs of blocks.
        """
        errors = {}
        for stage in sorted(self._blocks, reverse=True):
            try:
                self.recompute_block(Op(FORWARD_KEEP, stage), self._blocks[stage])
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                errors[stage] = error.with_traceback(None)
        return errors

    def _restore(self, block: BlockRun, surroundings: contextlib.ExitStack, saves: bool) -> None:
        """Restores the state that the forward of the block read, until `surroundings` is closed.

        saves: whether the recomputation saves tensors.
        """
        if self._flags_differ:
            surroundings.enter_context(self._backend_flags.in_force())
        block.modes.enter(surroundings)
        if block.attributes_after is not None:
            surroundings.enter_context(block.attributes_after.in_force())
        if block.attributes_before is not None:
            block.attributes_before.restore()
        if block.state is not None:
            copies = surroundings.enter_context(block.state.in_force())
            if saves:
                block.copies = frozenset(map(_compat.storage_key, copies))
        if block.random_state is not None:
            surroundings.callback(block.random_state.exchange().restore)

    def _build(self, stage: int, block: BlockRun) -> Any:
        """The block's (args, kwargs) for a recomputation: detached tensors that require gradients as in the forward."""
        for name, tensor, version in block.in_objects:
            if _compat.version(tensor) != version:
                raise RecomputationError(
                    f"'{self.name(stage)}' cannot be recomputed: {name}, in an object passed to it, was "
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


def _fresh(tensor: torch.Tensor, requires_grad: bool, casting: bool) -> torch.Tensor:
    """A detached tensor. Under autocast it is no leaf: autocast caches copies of leaves that require gradients."""
    fresh = tensor.detach().requires_grad_(requires_grad)
    return fresh.view_as(fresh) if casting and requires_grad else fresh


def digest(tensor: torch.Tensor) -> int:
    """The fingerprint of a saved tensor; 0 for a possible seed, which kernels that draw nothing leave unwritten."""
    is_seed = tensor.dtype is torch.uint64 or (tensor.dtype is torch.int64 and tensor.dim() == 0)  # no list of indices
    return 0 if is_seed and tensor.nbytes <= SEED_BYTES else fingerprint(tensor)
