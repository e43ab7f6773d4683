"""`apply`: puts a plan to work on a model, and takes it off again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from .executor import Executor

if TYPE_CHECKING:
    from .plan import Plan
    from .report import Report

_handles: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()


class Handle:
    """A plan at work on a model; made by `apply`. As a context manager, it removes the plan at the end."""

    def __init__(self, model: nn.Module, plan: Plan, executor: Executor) -> None:
        self.plan = plan
        self.executor = executor
        self._model = weakref.ref(model)

    @property
    def is_applied(self) -> bool:
        """False once the plan was removed."""
        return self.executor.is_attached

    def remove(self) -> None:
        """Restores the model exactly; steps whose forward has run can still be finished. May be called twice."""
        self.executor.detach()
        model = self._model()
        if model is not None and _handles.get(model) is self:
            del _handles[model]

    def report(self) -> Report:
        """What is planned, and what was measured of it; as `cairn.torch.report(model)`."""
        from .front import report

        model = self._model()
        if model is None or not self.is_applied:
            raise ValueError("this plan is no longer applied to a model")
        return report(model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        model = self._model()
        state = "applied" if self.is_applied else "removed"
        return f"<plan for {self.plan.model_name if model is None else type(model).__name__}, {state}>"


def apply(
    model: nn.Module, plan: Plan, *, preserve_rng_state: bool = True, determinism_check: str = "default", **options: Any
) -> Handle:
    """From now on, the model's training steps follow the plan. In place; nothing is renamed or wrapped.

    Loss, gradients, buffers and random state are bit for bit those of plain training. Copies and pickles of the model
    are without the plan. Calls without gradients, and in evaluation mode if the plan is for training, run as ever.

    preserve_rng_state, determinism_check: as in `torch.utils.checkpoint`; determinism_check "values" compares the
        values of what a block saves in its runs, too (slow, for finding out what differs).
    options: on_larger(expected, actual) is called, instead of raising PlanMismatch, where a step's inputs are larger
        than the plan's.

    Raises PlanMismatch if the plan is for another model, Unsupported if the model cannot follow a plan.
    """
    if model in _handles:
        raise ValueError(f"a plan is applied to this {type(model).__name__} already; remove it first")
    plan.check_fits(model)
    executor = Executor(
        model,
        plan.stages,
        plan.verified.schedule.ops,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        expected=plan.fingerprint["inputs"],
        in_eval=not plan.fingerprint["training"],
        **options,
    )
    executor.attach()
    made = _handles[model] = Handle(model, plan, executor)
    return made


def handle(model: nn.Module) -> Handle | None:
    """The handle of the plan that is at work on a model; None if there is none."""
    return _handles.get(model)


@contextlib.contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Without the plan that is at work on a model, if there is one, for the body of a with statement."""
    applied = _handles.get(model)
    if applied is None or not applied.is_applied:
        yield
        return
    applied.executor.detach()
    del _handles[model]
    try:
        yield
    finally:
        applied.executor.attach()
        _handles[model] = applied
