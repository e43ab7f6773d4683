"""Carries out a schedule on a model: takes over the forward of the model and of its blocks, and begins a `Run` a step.

Every call of the model with gradients on is a step of its own, so several forwards before a backward, and gradient
accumulation, need nothing special. Calls without gradients, in evaluation mode, or inside a block are passed on.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import _compat
from .ambient import with_generator
from .blocks import Block, resolve
from .caches import with_own_caches
from .errors import PlanMismatch, Unsupported
from .program import Program, compile_program
from .replay import DETERMINISM_CHECKS, Run, Settings, Site, Trace
from .stages import StageRef
from .state import BlockState
from .takeover import Handler, Takeover
from .tree import tensors_in


def described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Type and shape of every tensor in a model's arguments, as in a plan's fingerprint: "float32[8, 3, 32, 32]"."""
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors_in((args, kwargs))]


class Executor:
    """Replays the operations of a chain schedule on every training step of a model.

    stages, ops: what each stage of the chain is in the model, and the schedule's list. The schedule must have been
        verified: sizes and budgets are not looked at here.
    preserve_rng_state, determinism_check: as in `torch.utils.checkpoint`; "values" also compares the values that a
        block saves in its runs.
    expected: the `described` arguments that the plan was made for. A step with larger ones goes to
        on_larger(expected, actual), which raises, or returns for the plan to be used all the same.
    in_eval: carries out the schedule in evaluation mode, too.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[StageRef],
        ops: Sequence[Sequence[Any]],
        *,
        preserve_rng_state: bool = True,
        determinism_check: str = "default",
        expected: Sequence[str] | None = None,
        on_larger: Callable[[Sequence[str], Sequence[str]], None] | None = None,
        in_eval: bool = False,
    ) -> None:
        if determinism_check not in DETERMINISM_CHECKS:
            raise ValueError(f"determinism_check is one of {', '.join(DETERMINISM_CHECKS)}, not {determinism_check!r}")
        self._model = weakref.ref(model)
        self._program = program = compile_program(stages, ops)
        devices = sorted({t.device for t in (*model.parameters(), *model.buffers())}, key=str)
        self._settings = Settings(
            program,
            preserve_rng_state,
            determinism_check,
            tuple(d for d in devices if with_generator(d)),
            tuple(dict.fromkeys(("cpu", *(d.type for d in devices if d.type != "meta")))),
        )
        self._stage_of = {(ref.name, ref.call): i for i, ref in enumerate(program.stages, 1) if ref.is_block}
        self._sites = _sites(model, program)
        self._expected, self._on_larger, self._in_eval = expected, on_larger or _refuse_larger, in_eval
        self._thread = threading.local()
        self._takeovers: list[Takeover] = []
        self._trace = Trace()

    @property
    def trace(self) -> list[tuple[str, int]]:
        """The runs of blocks in the latest step so far, in order: (operation, stage)."""
        return self._trace.runs

    @property
    def notes(self) -> list[str]:
        """What was not as planned in the latest step."""
        return self._trace.notes

    @property
    def is_attached(self) -> bool:
        """Whether the schedule is carried out."""
        return bool(self._takeovers)

    def attach(self) -> None:
        """From now on, training steps of the model follow the schedule."""
        if self._takeovers:
            raise RuntimeError("the executor is attached already")
        model = self._model()
        if model is None:
            raise RuntimeError("the executor's model is gone")
        handlers = list(self._handlers(model))
        for module, _ in handlers:
            if getattr(module, "_compiled_call_impl", None) is not None:
                raise Unsupported(
                    f"a {type(module).__name__} of the plan was compiled in place (Module.compile), around what the "
                    "plan has to do; put torch.compile(module) in the module's place instead, and plan then"
                )
        for module, handler in handlers:
            self._takeovers.append(Takeover(module, handler))

    def detach(self) -> None:
        """Restores the model exactly. Steps whose forward has run can still be finished."""
        while self._takeovers:
            self._takeovers.pop().remove()

    # -- what runs instead of a forward ----------------------------------------------------------------------

    def _handlers(self, model: nn.Module) -> Iterator[tuple[nn.Module, Handler]]:
        """Blocks first, so that the model's own comes around a block that is the whole model."""
        parts: dict[int, tuple[nn.Sequential, list[Block]]] = {}
        for name in dict.fromkeys(ref.name for ref in self._program.stages if ref.is_block):
            block = resolve(model, name)
            if block.container is None:
                yield block.modules[0], functools.partial(self._run_block, name)
            else:
                parts.setdefault(id(block.container), (block.container, []))[1].append(block)
        for container, blocks in parts.values():
            bounds = {block.start: (block.stop, block.name) for block in blocks}
            yield container, functools.partial(self._run_sequential, weakref.ref(container), bounds)
        yield model, self._run_model

    def _run_model(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_active():
            return forward(*args, **kwargs)
        self._refuse_surroundings()
        if self._expected is not None:
            actual = described(args, kwargs)
            if not _is_covered(actual, self._expected):
                self._on_larger(self._expected, actual)
        self._trace = Trace()
        run = self._thread.run = Run(self._settings, self._sites, self._trace)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._thread.run = None
        run.forward_ended()
        return output

    def _run_block(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run: Run | None = getattr(self._thread, "run", None)
        if run is None or run.is_inside_block:
            return forward(*args, **kwargs)
        call = run.next_call(name)
        stage = self._stage_of.get((name, call))
        forward = with_own_caches(forward, args, kwargs)
        if stage is None:
            self._trace.notes.append(f"'{name}' ran more often than planned, and was kept")
            return forward(*args, **kwargs)
        return run.block(stage, forward, args, kwargs)

    def _run_sequential(
        self,
        container_ref: weakref.ref[nn.Sequential],
        bounds: dict[int, tuple[int, str]],
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A Sequential whose children form blocks of several."""
        container = container_ref()
        if container is None or len(args) != 1 or kwargs or getattr(self._thread, "run", None) is None:
            return forward(*args, **kwargs)
        children, value, position = list(container), args[0], 0
        del args
        while position < len(children):
            if position not in bounds:
                value = children[position](value)
                position += 1
                continue
            stop, name = bounds[position]
            held, value = (value,), None
            value = self._run_block(name, functools.partial(_chain, children[position:stop]), held, {})
            del held
            position = stop
        return value

    def _is_active(self) -> bool:
        model = self._model()
        return (
            model is not None
            and torch.is_grad_enabled()
            and (model.training or self._in_eval)
            and getattr(self._thread, "run", None) is None
        )

    def _refuse_surroundings(self) -> None:
        if _compat.saved_tensor_hooks_are_active():
            raise Unsupported(
                "saved-tensor hooks (save_on_cpu, torch.utils.checkpoint around the model, ...) are active where "
                "a planned model runs; the plan has hooks of its own, and only the innermost are called: remove "
                "one of the two"
            )
        if self._settings.devices and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Unsupported("a planned model cannot be captured in a CUDA graph")


def _sites(model: nn.Module, program: Program) -> dict[int, Site]:
    states: dict[str, BlockState] = {}
    sites = {}
    for stage, ref in enumerate(program.stages, 1):
        if ref.is_block:
            if ref.name not in states:
                try:
                    states[ref.name] = BlockState(resolve(model, ref.name).modules)
                except AttributeError as error:
                    raise PlanMismatch(
                        f"the plan has a block '{ref.name}', this {type(model).__name__} has not"
                    ) from error
            sites[stage] = Site(str(ref), states[ref.name])
    return sites


def _chain(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _is_covered(actual: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether no tensor is larger than its counterpart; counterparts are found by size, for keywords have no order."""
    if list(actual) == list(expected):
        return True
    ours, theirs = sorted(map(_parsed, actual)), sorted(map(_parsed, expected))
    return len(ours) == len(theirs) and all(
        mine[:2] == other[:2] and all(a <= b for a, b in zip(mine[2], other[2], strict=True))
        for mine, other in zip(ours, theirs, strict=True)
    )


def _parsed(text: str) -> tuple[str, int, list[int]]:
    dtype, _, shape = text.rstrip("]").partition("[")
    sizes = [int(size) for size in shape.split(",") if size.strip()]
    return dtype, len(sizes), sizes


def _refuse_larger(expected: Sequence[str], actual: Sequence[str]) -> None:
    raise PlanMismatch(
        f"the plan was made for inputs {', '.join(expected)}; this step has {', '.join(actual)}, which may need "
        "more memory: plan for the largest step that you train with"
    )
