"""Executes a schedule on a model: replaces the forward of the model and of its blocks, and starts a `Run` in each step.

Every call of the model with gradients on is a step of its own, so several forwards before a backward, and gradient
accumulation, need nothing special. Calls without gradients, in evaluation mode, or inside a block run unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..base import _compat
from ..base.blocks import Block, checkpointing_switch, resolve, takes_gradients
from ..base.choices import DETERMINISM_CHECKS
from ..base.errors import PlanMismatch, Unsupported, warn
from ..base.patched_forward import Handler, PatchedForward
from ..base.stages import StageRef
from ..base.tree import tensors_in
from ..head.replacements import Replaced, Replacements
from ..rerun_state.backend_flags import refuse_chosen_kernels
from ..rerun_state.kv_caches import mark_caches, refuse_incomplete_caches, with_own_caches
from ..rerun_state.module_state import BlockState
from ..rerun_state.rng_and_autocast import with_generator
from ..rerun_state.sharded import is_any, refuse_sharded_modules
from ..schedule.program import Program, compile_program
from ..schedule.transfer_plan import TransferPlan, has_transfers
from ..selective.block_runs import SelectiveBlock, SelectiveOptions
from ..selective.submodule_hooks import Handlers
from .recompute_check import checks_for
from .step_run import Run
from .step_settings import PlannedBlock, Settings, Trace
from .step_transfers import PlanTier, StepTransfers

COPIES_OF_ANOTHER = "another step, whose backward has not ended, has copies in the offload tier: this one keeps its own"

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Prepared:
    """A schedule that is ready to be executed on a model's blocks.

    Attributes
    ----------
    settings
        The compiled schedule, and the settings of all its steps.
    planned_blocks
        The planned blocks by stage.
    stage_of
        The stage of a block's call: by the block's name and the number of the call in the step, from 0.
    transfer_plan
        The times of transfers; None if the schedule has none.
    """

    settings: Settings
    planned_blocks: dict[int, PlannedBlock]
    stage_of: dict[tuple[str, int], int]
    transfer_plan: TransferPlan | None = None


class Guide(Protocol):
    """Chooses the schedule of each step, and observes its end."""

    def begin(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """The schedule for a step with these arguments, made by `Executor.prepare`. Raises if there is none."""

    def forward_ended(self, output: Any, missing: Sequence[str], notes: Sequence[str]) -> None:
        """Called when the step's forward has returned `output`.

        missing: planned blocks that did not run. notes: other deviations from the plan; the backward appends to this
        list.
        """


class _Thread(threading.local):
    """The run of one thread, and its schedule."""

    run: Run | None = None
    stage_of: Mapping[tuple[str, int], int] = types.MappingProxyType({})


class Executor:
    """Executes the operations of a chain schedule in every training step of a model.

    It has a weak reference to the model. While it is attached, the model owns it.

    Parameters
    ----------
    stages, ops
        The stages of the chain, and the operations of the schedule. The schedule must have been verified: sizes and
        budgets are not checked here.
    preserve_rng_state, determinism_check
        As in `torch.utils.checkpoint`. "values" also compares the values of saved tensors, except seeds of kernels.
    guide
        Chooses the schedule of each step; None: the given schedule.
    in_eval
        Whether the schedule is executed in evaluation mode, too.
    selective
        The options of selective recomputation, by stage.
    transfer_plan, plan_tier
        The times and the tier of transfers. `ops` is then the transfer plan's list.
    replacements
        The modules outside blocks that are replaced during a step.
    restored_blocks
        Names of blocks whose attributes and hooks are restored for recomputation, because others change them later.
    kept
        Names of blocks that must not be recomputed, not even in unplanned calls.
    forward_returned
        Called with each step once the model's forward has returned.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[StageRef],
        ops: Sequence[Sequence[Any]],
        *,
        preserve_rng_state: bool = True,
        determinism_check: str = "default",
        guide: Guide | None = None,
        in_eval: bool = False,
        selective: Mapping[int, SelectiveOptions] | None = None,
        transfer_plan: TransferPlan | None = None,
        plan_tier: PlanTier | None = None,
        replacements: Replacements | None = None,
        forward_returned: Callable[[Run], None] | None = None,
        kept: Collection[str] = (),
        restored_blocks: Iterable[str] = (),
    ) -> None:
        if determinism_check not in DETERMINISM_CHECKS:
            raise ValueError(f"determinism_check is one of {', '.join(DETERMINISM_CHECKS)}, not {determinism_check!r}")
        self._model = weakref.ref(model)
        self._preserve_rng_state, self._determinism_check = preserve_rng_state, determinism_check
        self._states: dict[str, BlockState] = {}
        self._kept, self._restored_blocks = frozenset(kept), frozenset(restored_blocks)
        self._submodule_handlers = Handlers()
        self._names: set[str] = set()
        self.plan_tier = plan_tier
        self.first = self.prepare(stages, ops, selective, transfer_plan)
        self._names = {name for name, _ in self.first.stage_of}
        self._guide, self._in_eval = guide, in_eval
        self._forward_returned = forward_returned
        self._replaced = Replaced(model, replacements or Replacements())
        self._thread = _Thread()
        self._patches: list[weakref.ref[PatchedForward]] = []  # owned by the modules
        self._trace = Trace()
        self._has_warned = self._has_warned_of_blocks = self._has_warned_of_mode = False
        devices = self.first.settings.devices if preserve_rng_state else ()
        self._checks = checks_for(next(iter(devices), None), determinism_check)

    def prepare(
        self,
        stages: Sequence[StageRef],
        ops: Sequence[Sequence[Any]],
        selective: Mapping[int, SelectiveOptions] | None = None,
        transfer_plan: TransferPlan | None = None,
    ) -> Prepared:
        """Compile a schedule for the executor's blocks. Raises PlanMismatch if the schedule has other blocks."""
        selective = selective or {}
        model = self._model()
        if model is None:
            raise RuntimeError("the executor's model is gone")
        if transfer_plan is None and has_transfers(ops):
            raise Unsupported("a schedule with transfers needs a transfer plan, which says when they take place")
        waits = transfer_plan.waits if transfer_plan is not None else ()
        program = compile_program(
            stages, ops, {stage: len(block.decisions) for stage, block in selective.items()}, waits
        )
        stage_of = {(ref.name, ref.call): i for i, ref in enumerate(program.stages, 1) if ref.is_block}
        if self._names and self._names != {name for name, _ in stage_of}:
            raise PlanMismatch("the schedule has other blocks than the one that is carried out")
        devices = sorted({t.device for t in (*model.parameters(), *model.buffers())}, key=str)
        settings = Settings(
            program,
            self._preserve_rng_state,
            self._determinism_check,
            tuple(d for d in devices if with_generator(d)),
            tuple(dict.fromkeys(("cpu", *(d.type for d in devices if d.type != "meta")))),
            functools.partial(_resident_storages, self._model),
        )
        planned_blocks = _planned_blocks(model, program, self._states, selective, self._submodule_handlers, self._kept)
        for name in self._restored_blocks & self._states.keys():
            self._states[name].restores_attributes = True
        return Prepared(settings, planned_blocks, stage_of, transfer_plan)

    @property
    def trace(self) -> list[tuple[str, int]]:
        """The runs of blocks in the latest step so far, in order: (operation, stage)."""
        return self._trace.runs

    @property
    def notes(self) -> list[str]:
        """Deviations from the plan in the latest step."""
        return self._trace.notes

    @property
    def is_attached(self) -> bool:
        """Whether the executor is installed in the model."""
        return bool(self._patches)

    def attach(self, owner: object = None) -> None:
        """Make training steps of the model follow the schedule. The model has a reference to `owner` until `detach`."""
        if self._patches:
            raise RuntimeError("the executor is attached already")
        model = self._model()
        if model is None:
            raise RuntimeError("the executor's model is gone")
        handlers = list(self._handlers(model))
        for module, _ in handlers:
            if _compat.is_compiled_in_place(module):
                raise Unsupported(
                    f"a {type(module).__name__} of the plan was compiled in place (Module.compile), around what the "
                    "plan has to do; put torch.compile(module) in the module's place instead, and plan then"
                )
        self._submodule_handlers.open()
        for module, handler in handlers:
            self._patches.append(weakref.ref(PatchedForward(module, handler, owner if module is model else None)))

    def detach(self) -> None:
        """Restore the model exactly. The backward of a step whose forward has run still works."""
        while self._patches:
            patch = self._patches.pop()()
            if patch is not None:
                patch.remove()
        self._submodule_handlers.release()
        if self.plan_tier is not None:
            self.plan_tier.retire()

    def check_recomputations(self, wait: bool = True) -> None:
        """Raises RecomputationError if recomputations of earlier steps gave other values on an accelerator.

        wait: whether to wait for recomputations that the device has not done yet.
        """
        if self._checks is not None:
            self._checks.raise_differing(wait)

    # -- what runs instead of a forward ----------------------------------------------------------------------

    def _handlers(self, model: nn.Module) -> Iterator[tuple[nn.Module, Handler]]:
        """The modules whose forward is replaced, and the replacements.

        Blocks come first: the whole model may be a block, and the replacement for the model must be the outer one.
        """
        parts: dict[int, tuple[nn.Sequential, list[Block]]] = {}
        for name in dict.fromkeys(name for name, _ in self.first.stage_of):
            block = resolve(model, name)
            if block.container is None:
                yield block.modules[0], functools.partial(self._run_block, name)
            else:
                parts.setdefault(id(block.container), (block.container, []))[1].append(block)
        for container, blocks in parts.values():
            if "forward" in vars(container):
                raise PlanMismatch(
                    "the plan runs the children of a Sequential in order, whose forward was replaced on the instance: "
                    "plan again"
                )
            bounds = {block.start: (block.stop, block.name) for block in blocks}  # of the children in the container
            yield container, functools.partial(self._run_sequential, weakref.ref(container), bounds)
        for module in self._skipped(model):
            yield module, self._run_skipped
        yield model, self._run_model

    def _warn_of_own_checkpointing(self) -> None:
        """Warn once if gradient checkpointing was enabled after the model was planned."""
        first = self._patches[0]() if self._patches and not self._has_warned else None
        modules = () if first is None else (first.module, self._model())  # layers have it with transformers
        switch = next(filter(None, (checkpointing_switch(module) for module in modules if module is not None)), "")
        if switch:
            self._has_warned = True
            warn(
                "gradient checkpointing was enabled after the model was planned: every layer is recomputed once more "
                f"than the plan needs, and steps take longer for nothing; switch it off ({switch})",
            )

    def _warn_of_blocks_alone(self, run: Run | None) -> None:
        """Warn once if a block runs in training without a call of the model."""
        if run is None and not self._has_warned_of_blocks and self._is_active():
            self._has_warned_of_blocks = True
            warn(
                "blocks of a planned model run without a call of the model: a step that calls another of its methods, "
                "or its blocks themselves, follows no plan, and may take more than the budget; plan a module whose "
                "forward is the step",
            )

    def _notice_evaluation(self, output: Any, mark: int) -> None:
        """Warn once if a forward in evaluation mode, which follows no plan, gets a backward. mark: where it began."""
        model = self._model()
        if self._has_warned_of_mode or self._in_eval or model is None or model.training or _compat.is_traced():
            return
        for node in filter(None, {t.grad_fn for t in tensors_in(output) if _compat.is_made_since(t, mark)}):
            node.register_prehook(functools.partial(_warn_of_mode, weakref.ref(self), type(model).__name__))

    def _skipped(self, model: nn.Module) -> Iterator[nn.Module]:
        """Modules in the same lists as blocks that are not blocks: layers skipped at random in the sample step."""
        names = dict.fromkeys(name for name, _ in self.first.stage_of)
        for prefix in dict.fromkeys(name.rpartition(".")[0] for name in names):
            container = model.get_submodule(prefix)
            if isinstance(container, nn.ModuleList):
                for key, child in container.named_children():
                    if not any(f"{name}.".startswith(f"{prefix}.{key}.".lstrip(".")) for name in names):
                        yield child

    def _run_model(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_incomplete_caches((*args, *kwargs.values()))
        if not self._is_active():
            mark = _compat.history_mark()
            output = forward(*args, **kwargs)
            self._notice_evaluation(output, mark)
            return output
        self._refuse_surroundings()
        self._warn_of_own_checkpointing()
        self.check_recomputations(wait=False)
        prepared = self.first if self._guide is None else self._guide.begin(self, args, kwargs)
        self._trace = Trace()
        step_transfers = self._step_transfers(prepared)
        run = self._thread.run = Run(
            prepared.settings, prepared.planned_blocks, self._trace, step_transfers, self._checks
        )
        self._thread.stage_of = prepared.stage_of
        try:
            with (
                _compat.restoring_modes_on_failure(),
                self._replaced.during_forward() if self._replaced.anything else _NOTHING,
            ):
                output = forward(*args, **kwargs)
            self._thread.run = None
            run.forward_ended()
            self.check_recomputations(wait=True)
        except BaseException:
            run.abandon()
            raise
        finally:
            self._thread.run = None
        mark_caches((*args, *kwargs.values(), output))
        if self._guide is not None:
            self._guide.forward_ended(output, run.left_out, self._trace.notes)
        if self._forward_returned is not None:
            self._forward_returned(run)
        return output

    def _step_transfers(self, prepared: Prepared) -> StepTransfers | None:
        """The transfers of a step; None if its schedule has none, or while another step uses the tier."""
        if prepared.transfer_plan is None or self.plan_tier is None:
            return None
        step_transfers = self.plan_tier.lend(prepared.transfer_plan)
        if step_transfers is None:
            self._trace.notes.append(COPIES_OF_ANOTHER)
        return step_transfers

    def open_plan_tier(self) -> None:
        """Opens the tier now, so that no step has to wait for it."""
        if self.plan_tier is not None and self.first.transfer_plan is not None:
            self.plan_tier.open(self.first.transfer_plan)

    def _run_block(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run = self._thread.run
        if run is None or run.running:
            self._warn_of_blocks_alone(run)
            return forward(*args, **kwargs)
        if not takes_gradients((args, kwargs), self._states[name].parameters()):
            run.without_gradients.add(name)
            return forward(*args, **kwargs)
        stage = self._thread.stage_of.get((name, run.next_call(name)))
        forward = with_own_caches(forward, args, kwargs)
        with self._replaced.during_block() if self._replaced.anything else _NOTHING:
            if stage is None:
                first = self._thread.stage_of[name, 0]
                return run.unplanned(first, "more often than planned", forward, args, kwargs)
            return run.block(stage, forward, args, kwargs)

    def _run_skipped(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a skipped module with copies of caches, so that it adds nothing to a cache that blocks read."""
        run = self._thread.run
        if run is not None and not run.running:
            forward = with_own_caches(forward, args, kwargs)
        return forward(*args, **kwargs)

    def _run_sequential(
        self,
        container_ref: weakref.ref[nn.Sequential],
        bounds: dict[int, tuple[int, str]],
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a Sequential where several children form a block. bounds: end and name of a block by its begin."""
        container, run = container_ref(), self._thread.run
        if container is None or len(args) != 1 or kwargs or run is None:
            self._warn_of_blocks_alone(run)
            return forward(*args, **kwargs)
        children, value, position = list(container), args[0], 0
        del args
        while position < len(children):
            if position not in bounds:
                value = children[position](value)
                position += 1
                continue
            stop, name = bounds[position]
            arguments, value = (value,), None  # so that the block's input can be freed while the block runs
            value = self._run_block(name, functools.partial(_chain, children[position:stop]), arguments, {})
            del arguments
            position = stop
        return value

    def _is_active(self) -> bool:
        model = self._model()
        return (
            model is not None
            and torch.is_grad_enabled()
            and (model.training or self._in_eval)
            and self._thread.run is None
            and not _compat.is_traced()
        )

    def _refuse_surroundings(self) -> None:
        """Raise Unsupported where a step cannot be executed: under hooks, transforms, or capture of a CUDA graph."""
        if _compat.saved_tensor_hooks_are_active():
            raise Unsupported(
                "saved-tensor hooks (save_on_cpu, torch.utils.checkpoint around the model, ...) are active where "
                "a planned model runs; the plan has hooks of its own, and only the innermost are called: remove "
                "one of the two"
            )
        if _compat.transforms_are_active():
            raise Unsupported(
                "a planned model cannot run under transforms of torch.func (grad, vmap, jvp, ...) or forward-mode "
                "differentiation: what blocks would compute again is not transformed; remove the plan for these calls"
            )
        if self.first.settings.devices and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Unsupported("a planned model cannot be captured in a CUDA graph")
        model = self._model()
        if model is not None and is_any(model.modules()):
            refuse_sharded_modules(resolve(model, name) for name in self._names)
        native = self.first.settings.program.native
        recomputed = (planned for stage, planned in self.first.planned_blocks.items() if not native[stage])
        refuse_chosen_kernels(part for planned in recomputed for part in planned.state.modules())


def _resident_storages(model_ref: weakref.ref[nn.Module]) -> frozenset[int]:
    model = model_ref()
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    return frozenset(key for tensor in tensors if (key := _compat.storage_key(tensor)))


def _planned_blocks(
    model: nn.Module,
    program: Program,
    states: dict[str, BlockState],
    selective: Mapping[int, SelectiveOptions],
    handlers: Handlers,
    kept: Collection[str],
) -> dict[int, PlannedBlock]:
    planned_blocks = {}
    for stage, ref in enumerate(program.stages, 1):
        if ref.is_block:
            if ref.name not in states:
                try:
                    states[ref.name] = BlockState(resolve(model, ref.name).modules)
                except AttributeError as error:
                    raise PlanMismatch(
                        f"the plan has a block '{ref.name}', this {type(model).__name__} has not"
                    ) from error
            state = states[ref.name]
            block = SelectiveBlock(selective[stage], state, ref.name, handlers) if program.selective[stage] else None
            planned_blocks[stage] = PlannedBlock(str(ref), state, block, ref.name in kept)
    return planned_blocks


def _warn_of_mode(executor: weakref.ref[Executor], name: str, _: Any) -> None:
    """Warn once: the backward of a forward in evaluation mode begins."""
    of = executor()
    if of is not None and of.is_attached and not of._has_warned_of_mode:
        of._has_warned_of_mode = True
        warn(
            f"a step of the planned {name} runs in evaluation mode, and its plan is for training mode: this step "
            "follows no plan, and may take more than the budget. Call model.train() before the forward, or plan the "
            "model in evaluation mode",
        )


def _chain(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value
