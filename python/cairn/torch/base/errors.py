"""The errors of `cairn.torch`, each with a remedy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import cairn
import torch
from cairn import format_budget, format_bytes

#: Batch-size finders (accelerate, Lightning, many scripts) know "out of memory" by words in an error's first argument.
_HINT_FOR_BATCH_FINDERS = (
    "A smaller batch helps, as it does against 'CUDA out of memory.' and 'DefaultCPUAllocator: can't allocate memory'."
)


#: What may lower the least budget of a plan of blocks.
FINER_BLOCKS = "blocks= that cut the model finer"


class TorchError(cairn.Error):
    """Base of the errors of `cairn.torch`."""


class Unsupported(TorchError, cairn.Unsupported):
    """The model or the step does something that cannot be made safe; the message names it."""


def out_of_time(time_limit: str) -> Unsupported:
    """The error for a search that ended before it found a schedule."""
    return Unsupported(
        f"no schedule of this step was found within time_limit={time_limit!r}: give the search more time"
    )


class _NeedsSmallerBatch(torch.OutOfMemoryError):
    """An error that batch-size finders take for out of memory: `args[0]` has their words, `str` only the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}. {_HINT_FOR_BATCH_FINDERS}")


class InfeasibleBudget(TorchError, cairn.InfeasibleBudget, _NeedsSmallerBatch):
    """No plan fits in the budget.

    It is a torch.OutOfMemoryError as well. So a search for the largest batch that fits (accelerate's
    find_executable_batch_size, for example) goes on with a smaller one.

    Attributes
    ----------
    budget_bytes
        The requested budget.
    least_bytes
        The least budget that works, the reserve included. For a compiled step that was measured, it is enough for that
        step, and less may do. For a step of other shapes that is only estimated, it is more than the least. The text
        says so.
    reserve_bytes
        The part of the budget that a plan leaves free.
    composition
        The tensors in memory at the peak of the least budget: bytes by name.
    peak_at
        When that peak is.
    blocking
        The first operation that does not fit in the requested budget.
    """

    reserve_bytes: int
    composition: Mapping[str, int]
    peak_at: str
    blocking: str

    @classmethod
    def make(
        cls,
        budget: int,
        least: int,
        reserve: int,
        parts: Mapping[str, int],
        peak_at: str,
        blocking: str,
        remedy: str = FINER_BLOCKS,
        is_estimate: bool = False,
    ) -> InfeasibleBudget:
        """The error with its text.

        remedy: arguments that may lower the least budget. is_estimate: whether the least budget is only estimated.
        """
        what = f"the least budget that works is {'estimated at ' if is_estimate else ''}{_with_reserve(least, reserve)}"
        stop = f". The first thing that does not fit is the {blocking}"
        text = f"no plan fits in {format_bytes(budget)}; {what}{_peak(peak_at, parts)}{stop}{_advice(remedy)}"
        return cls._of(text, budget, least, reserve, parts, peak_at, blocking)

    @classmethod
    def of_measured_step(
        cls,
        budget: int,
        measured: Sequence[int],
        reserve: int,
        parts: Mapping[str, int],
        peak_at: str,
        remedy: str,
    ) -> InfeasibleBudget:
        """The error for a compiled step that exceeds the budget.

        measured: the peaks of the steps that were measured; the last is that of the plan with these parts.
        """
        last, lowest = measured[-1], min(measured)
        least = last + reserve
        other = f": another plan was measured at {format_bytes(lowest)} ({lowest} bytes)" if lowest < last else ""
        text = (
            f"no plan was found that fits in {format_bytes(budget)}: the compiled step was measured at "
            f"{format_bytes(last)} ({last} bytes). A budget of {_with_reserve(least, reserve)} is enough for it; a "
            f"smaller one may work, too{other}"
            f"{_peak(peak_at, parts)}{_advice(remedy)}"
        )
        return cls._of(text, budget, least, reserve, parts, peak_at, "measured step")

    @classmethod
    def _of(
        cls,
        text: str,
        budget: int,
        least: int,
        reserve: int,
        parts: Mapping[str, int],
        peak_at: str,
        blocking: str,
    ) -> InfeasibleBudget:
        error = cls(f"out of memory: {text}", budget_bytes=budget, least_bytes=least)
        error.reserve_bytes, error.composition = reserve, dict(parts)
        error.peak_at, error.blocking = peak_at, blocking
        return error

    def for_shapes(self, shapes: Sequence[str], unmeasured: str = "") -> InfeasibleBudget:
        """The error for a step with other inputs than the planned ones. unmeasured: why the step was only estimated."""
        why = self.message
        if unmeasured:
            why = (
                f"out of memory: no plan is known that fits in {format_bytes(self.budget_bytes or 0)}. By an estimate "
                "from the shapes that were profiled, which is on the safe side, it takes "
                f"{format_budget(self.least_bytes or 0)}; "
                f"{unmeasured}. Profile and plan with a sample of these shapes, which may do with less"
            )
        return self._with(f"this step has inputs {', '.join(shapes)}, which no plan covers, and was not begun: {why}")

    def for_sample(self, of: str) -> InfeasibleBudget:
        """The error for another sample than the caller's; `of` names it."""
        return self._with(f"{of}: {self.message}")

    def _with(self, text: str) -> InfeasibleBudget:
        error = type(self)(text, budget_bytes=self.budget_bytes, least_bytes=self.least_bytes)
        error.reserve_bytes, error.composition = self.reserve_bytes, self.composition
        error.peak_at, error.blocking = self.peak_at, self.blocking
        return error


def _with_reserve(budget: int, reserve: int) -> str:
    return f"{format_budget(budget)} ({budget} bytes, {format_bytes(reserve)} of them in reserve)"


def _peak(peak_at: str, parts: Mapping[str, int]) -> str:
    """When the peak is, and its largest parts."""
    largest = sorted(parts.items(), key=lambda part: -part[1])[:6]
    listed = ", ".join(f"{format_bytes(size)} {name}" for name, size in largest)
    return f". Its peak is during the {peak_at}: {listed}"


def _advice(remedy: str) -> str:
    return ". Smaller batches need less" + (f", and so may {remedy}" if remedy else "")


class BudgetExceeded(TorchError, _NeedsSmallerBatch):
    """A measured step took more memory than its plan's budget.

    As InfeasibleBudget, it is a torch.OutOfMemoryError too.
    """

    @classmethod
    def of_given_plan(cls, peak_bytes: int, budget_bytes: int) -> BudgetExceeded:
        """The error for a compiled step that follows a plan that was made before."""
        return cls(
            f"the compiled step took {format_bytes(peak_bytes)}, and its plan has a budget of "
            f"{format_bytes(budget_bytes)}: compile with a budget again"
        )


class PlanMismatch(TorchError):
    """A plan was made for something else: another model, other shapes, another version."""


class VerificationFailed(TorchError):
    """The planned step's result or peak is not what it must be."""


class RecomputationError(TorchError, RuntimeError):
    """A block cannot be recomputed as it ran first: a value that it read was changed, or it does not repeat itself.

    It is a RuntimeError, as what autograd raises where saved tensors were changed.

    Attributes
    ----------
    difference : str
        The difference between the recomputation and the first run; empty if the block was not recomputed.
    """

    difference = ""

    @classmethod
    def differs(cls, name: str, difference: str) -> RecomputationError:
        """The error for a block of this name that behaves differently when it is recomputed."""
        error = cls(
            f"block '{name}' does not do the same twice: {difference}; keep this block, or make what it depends on "
            "part of its arguments"
        )
        error.difference = difference
        return error


class TierUnavailable(TorchError, cairn.Io):
    """The memory for offloading cannot be had: it does not fit, or there is no place for it."""


class TransferFailed(TorchError, cairn.Io):
    """A copy to or from a tier failed, or was cancelled after one that did. The next step is sound.

    Attributes
    ----------
    what
        The name of the tensors that were being copied.
    nbytes : int
        Their bytes.
    """

    what: Any
    nbytes: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch has no class of its own for that on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def warn(text: str) -> None:
    """Warns at the line of the user's code that led here: the first one outside of torch and Cairn."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None and _package_of(frame.f_globals) in _SKIPPED_PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


_SKIPPED_PACKAGES = ("torch", __name__.partition(".")[0], "contextlib")


def _package_of(namespace: Mapping[str, Any]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]
