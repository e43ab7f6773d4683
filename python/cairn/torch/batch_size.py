"""`max_batch`: the largest batch, or the longest input, whose step keeps to a budget and to an extra time.

A profile of one batch predicts which larger or smaller batch fits. That batch is profiled next, and its own profile
decides whether it fits. The search ends when the next larger batch does not fit by its own profile. Then a step of the
largest batch that fits is measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from cairn import ProgressCallback, format_budget, format_bytes
from torch import nn

from .._budget import Budget
from .base import budgets, ranks
from .base.choices import ACCUMULATED
from .base.errors import BudgetExceeded, InfeasibleBudget, Unsupported, is_out_of_memory
from .base.progress import reported_progress
from .planning import arguments
from .planning.estimates import power_of_growth, scaled
from .planning.offload_plans import Destination, destination
from .planning.plan import Plan
from .planning.shapes import Growth
from .planning.step_profile import Profile
from .planning.task import Task
from .resizing import Resizing, Steps

PREDICTED = 5  # batches that are profiled because they are predicted; then also those halfway between the bounds
PROFILED = 16  # batches that are profiled at most
LEAP = 8  # times the largest batch that was profiled, at most, for the next: predictions may be wrong
PROVED = 4  # steps that are measured at most
BUDGETS_TRIED = 33  # for one that a batch of 1 needs to be fast enough
EXACT_UP_TO = 100  # batches; of larger ones, the answer is exact to this part

BUDGET, EXTRA_TIME = "budget", "extra_time"


@dataclasses.dataclass(frozen=True)
class MaxBatch:
    """The result of `max_batch`. Sizes in bytes.

    Attributes
    ----------
    batch
        The largest size at `dim`.
    dim
        The dimension that was resized: 0 for the batch.
    plan
        The plan of its step, for `apply`.
    measured_peak_bytes
        The peak of a step with this plan, measured.
    limit
        The limit that a larger batch exceeds: "budget" or "extra_time".
    """

    batch: int
    dim: int
    plan: Plan = dataclasses.field(repr=False)
    measured_peak_bytes: int
    limit: str

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak of this step, as planned."""
        return self.plan.peak_bytes

    @property
    def extra_time(self) -> float:
        """Predicted extra time, as a share of the plain step's."""
        return self.plan.overhead

    def __str__(self) -> str:
        what = "batch" if self.dim == 0 else f"dimension {self.dim}:"
        reached = "the budget" if self.limit == BUDGET else "the extra time"
        return (
            f"{what} {self.batch}: peak {format_bytes(self.measured_peak_bytes)} measured, "
            f"{format_bytes(self.predicted_peak_bytes)} predicted, of {format_bytes(self.plan.budget_bytes)}; "
            f"{100 * self.extra_time:.1f} % extra time; {reached} refuses more"
        )


def max_batch(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Any = "auto",
    extra_time: float | None = None,
    dim: int = 0,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Any = None,
    progress: ProgressCallback | Literal[False] | None = None,
    **options: Any,
) -> MaxBatch:
    """The largest batch that trains within a budget, predicted from profiles and proved by a measured step.

    The model is restored afterwards. Each tried batch needs one profile, with about the memory of its plan.

    Parameters
    ----------
    model, args, kwargs
        As for `profile`. The sample's batch is the size at `dim` of the first tensor that has this dimension. Every
        tensor of the same size there is resized: its rows are repeated or cut off.
    budget
        As for `plan`. "auto" and shares of the device are resolved once, with the sample.
    extra_time
        The largest extra time of a plan, as a share of the plain step's time: 0.3 is 30 %. None sets no limit.
    dim
        The dimension to resize: 0 for the batch, 1 for the length of batch-first sequences.
    loss_fn
        Computes the loss of the model's output, `loss_fn(output)`; with `targets`, `loss_fn(output, targets)`.
    targets
        The second argument of `loss_fn`: tensors, or containers of them. They are resized like the sample.
    progress
        As for `profile`.
    options
        Those of `profile` and of `plan`.

    Returns
    -------
    MaxBatch
        Exact for batches up to 100, and to a hundredth above.

    Raises
    ------
    InfeasibleBudget
        Not even a batch of 1 fits; the error names the least budget for that batch.
    ValueError
        The step cannot be run with another batch, for example because targets keep the sample's.
    BudgetExceeded
        Measured steps repeatedly exceed their predictions.
    """
    _check(model, args, kwargs, budget, extra_time, loss_fn, targets, options)
    resizing = Resizing(arguments.positional(args), dict(kwargs or {}), targets, dim)
    with reported_progress(progress, f"max_batch of {type(model).__name__}") as reporter:
        search = _Search(Steps(model, resizing, loss_fn, reporter, options), budget, extra_time)
        return search.proved()


def _check(
    model: Any, args: Any, kwargs: Any, budget: Any, extra_time: Any, loss_fn: Any, targets: Any, options: Any
) -> None:
    """Raises for arguments that `max_batch` does not take."""
    with_targets = targets is not None and callable(loss_fn)
    arguments.check_call(model, kwargs, None if with_targets else loss_fn, args)
    if targets is not None:
        arguments.check_takes_targets(loss_fn)
    to_profile, to_plan, other = arguments.sorted_options(options)
    arguments.check_names(
        [*other, *(name for name in to_profile if name in ("loss_fn", "progress"))],
        [*arguments.PROFILE_OPTIONS, *arguments.PLAN_OPTIONS, *arguments.solver_options(), "extra_time", "dim"],
        "max_batch",
    )
    arguments.check_budget(budget)
    arguments.check_profile_options(to_profile)
    host_budget = arguments.host_budget_of(budget, to_plan.get("host_budget"))
    arguments.check_plan_options({**to_plan, "host_budget": host_budget})
    if extra_time is not None:
        arguments.check_extra_time(extra_time)
    if ranks.several():
        raise Unsupported(
            "max_batch in distributed training: each rank would try other batches, and ranks would wait for each "
            "other: find the batch in a process of its own, and give it to all ranks"
        )


# -- the search ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Judged:
    """A batch that was profiled: its plan, or why there is none."""

    profile: Profile | None
    plan: Plan | None
    limit: str = ""
    error: Exception | None = None


class _Search:
    """The profiled batches, and predictions for others from them."""

    def __init__(self, steps: Steps, budget: Any, extra_time: float | None) -> None:
        self._steps, self._extra_time = steps, extra_time
        self._budget = budget if isinstance(budget, Budget) else Budget(total=budget)
        self._options = arguments.sorted_options(steps.options)[1]
        self._options["host_budget"] = arguments.host_budget_of(budget, self._options.get("host_budget"))
        self._to: Destination | None = None
        self._judged: dict[int, _Judged] = {}
        self._miss_bytes = 0  # by how much a measured step passed its prediction
        self._limit = BUDGET  # by which a prediction refused last

    def proved(self) -> MaxBatch:
        """The largest batch of which a measured step keeps to the budget."""
        missed: list[str] = []
        while len(missed) < PROVED:
            batch = self._largest()
            entry = self._judged[batch]
            assert entry.plan is not None
            peak = self._measured_peak(batch, entry.plan)
            if peak is not None and peak <= entry.plan.budget_bytes:
                high = self._bounds()[1]
                limit = self._limit if high is None else self._judged[high].limit
                return MaxBatch(batch, self._steps.resizing.dim, entry.plan, peak, limit)
            if peak is not None:
                self._correct(peak - entry.plan.peak_bytes)
            took = "ran out of memory" if peak is None else f"took {format_bytes(peak)}"
            missed.append(f"a batch of {batch} {took}, and {format_bytes(entry.plan.peak_bytes)} were predicted")
        raise BudgetExceeded(
            f"measured steps keep passing the budget of {self._budget.total} bytes: {'; '.join(missed)}. Leave room "
            "for that by cairn.Budget(reserve=)"
        )

    def _measured_peak(self, batch: int, plan: Plan) -> int | None:
        """The measured peak of a step with this plan. If memory runs out, None, and the batch counts as refused."""
        try:
            return self._steps.measured(batch, plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._judged[batch] = _Judged(None, None, BUDGET, error.with_traceback(None))
            return None

    def _correct(self, miss_bytes: int) -> None:
        """Judge all profiled batches again. A measured step took `miss_bytes` more than predicted."""
        self._miss_bytes = max(self._miss_bytes, miss_bytes)
        for batch, entry in list(self._judged.items()):
            if entry.profile is not None:
                self._judged[batch] = self._verdict(entry.profile.corrected(self._miss_bytes))

    def _largest(self) -> int:
        """Find the largest batch with a plan. Raises if not even a batch of 1 has one."""
        if not self._judged:
            self._judge(self._steps.resizing.batch)
        for _ in range(PROFILED):
            low, high = self._bounds()
            step = 1 + low // EXACT_UP_TO
            if high is not None and high <= low + step:
                break
            batch = max(self._predicted(low, high), low + step)
            if high is not None and len(self._judged) > PREDICTED and len(self._judged) % 2:
                batch = max(math.isqrt(max(low, 1) * high), low + step)
            self._judge(batch)
        low, _ = self._bounds()
        if low == 0:
            if 1 not in self._judged:
                self._judge(1)
            self._raise_unless_planned(self._judged[1])
        return max(low, 1)

    def _bounds(self) -> tuple[int, int | None]:
        """The largest batch with a plan below the least refused one, or 0; and that least refused batch, or None."""
        high = min((batch for batch, entry in self._judged.items() if entry.plan is None), default=None)
        planned = [b for b, entry in self._judged.items() if entry.plan is not None and (high is None or b < high)]
        return max(planned, default=0), high

    def _judge(self, batch: int) -> None:
        try:
            profile = self._steps.profiled(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._judged[batch] = _Judged(None, None, BUDGET, error.with_traceback(None))
            return
        if all(entry.profile is None for entry in self._judged.values()):
            self._resolve(profile)
        self._steps.reporter.begin(f"batch {batch}: planning")
        self._judged[batch] = self._verdict(profile.corrected(self._miss_bytes))

    def _resolve(self, sample: Profile) -> None:
        """Turns the budget into bytes and measures the link to the tier, once for all batches."""
        device = torch.device(sample.device)
        present = sample.present_bytes if self._options.get("scope", "step") == "step" else 0
        total = budgets.resolve(self._budget, device, present)
        self._budget = dataclasses.replace(self._budget, total=total)
        way = self._options["host_budget"], self._options.get("tier", "host"), self._options.get("link")
        self._to = destination(*way, device)

    def _task(self, of: Profile) -> Task:
        options = {name: value for name, value in self._options.items() if name not in arguments.PLAN_OPTIONS}
        allowed = arguments.allowed(self._options.get("allow"), self._options["host_budget"])
        usable = of if "inside" in allowed else of.without_options()
        scope, gradients = self._options.get("scope", "step"), self._options.get("gradients", ACCUMULATED)
        return Task(usable, scope, gradients, self._options.get("solver", "auto"), options, self._to)

    def _verdict(self, of: Profile) -> _Judged:
        task = self._task(of)
        try:
            plan = task.plan(self._budget)
        except InfeasibleBudget as error:
            return _Judged(of, None, BUDGET, error.with_traceback(None))
        if self._extra_time is None or plan.overhead <= self._extra_time:
            return _Judged(of, plan)
        return _Judged(of, None, EXTRA_TIME)

    # -- predicting ------------------------------------------------------------------------------------------

    def _predicted(self, low: int, high: int | None) -> int:
        """The largest batch below `high` that has a plan by the nearest profile; `low` if there is none."""
        known = {batch: entry.profile for batch, entry in self._judged.items() if entry.profile is not None}
        base = low or min(known, default=0)
        if not base:
            return low
        power, leap = self._power(known, base), LEAP * base + 1
        high = leap if high is None else min(high, leap)

        def fits(batch: int) -> bool:
            self._steps.reporter.begin(f"predicting batch {batch}")
            by = batch / base
            growth = Growth(by ** (2 - power), by ** (power - 1))  # all together, by and by**power
            tried = self._verdict(scaled(known[base], growth, known[base].fingerprint["inputs"]))
            self._limit = tried.limit or self._limit
            return tried.plan is not None

        top, step = low, 1 + low // EXACT_UP_TO
        while top + step < high and fits(top + step):
            top, step = top + step, 2 * step
        over = min(top + step, high)
        while over - top > 1 + top // EXACT_UP_TO:
            middle = (top + over) // 2
            top, over = (middle, over) if fits(middle) else (top, middle)
        return top

    def _power(self, known: Mapping[int, Profile], base: int) -> float:
        """The power of the batch with which saved tensors grow, by the two nearest profiles.

        With a single profile it is 1 for batches, and 2 for other dimensions, because of attention.
        """
        nearest = min((b for b in known if b != base), key=lambda batch: abs(math.log(batch / base)), default=None)
        if nearest is None:
            return 1.0 if self._steps.resizing.dim == 0 else 2.0
        return power_of_growth(known[base], known[nearest], base / nearest)

    def _raise_unless_planned(self, least: _Judged) -> None:
        """Raises if a batch of 1 has no plan; says what it needs."""
        if isinstance(least.error, InfeasibleBudget):
            raise least.error.for_sample("not even a batch of 1 fits")
        if least.error is not None:
            raise least.error
        if least.plan is None and least.profile is not None:
            raise self._too_slow(self._task(least.profile))

    def _too_slow(self, task: Task) -> InfeasibleBudget:
        """A batch of 1 fits, but takes more extra time than it may; the error names a budget that works."""
        plan, limit = task.plan(self._budget), self._extra_time or 0.0
        plans: Sequence[Any] = task.plans(task.even_budgets(BUDGETS_TRIED))
        fast = [each.budget_bytes for each in plans if isinstance(each, Plan) and each.overhead <= limit]
        works = min(fast, default=plan.plain_peak_bytes + plan.reserve_bytes)
        at = plan.peak_moment()
        parts = {part.name: part.bytes for part in at.parts}
        error = InfeasibleBudget(
            f"a batch of 1 fits in {format_bytes(plan.budget_bytes)} with {100 * plan.overhead:.1f} % extra time, and "
            f"extra_time={limit} allows less; {format_budget(works)} ({works} bytes) do",
            budget_bytes=plan.budget_bytes,
            least_bytes=works,
        )
        error.reserve_bytes, error.composition = plan.reserve_bytes, parts
        error.peak_at, error.blocking = at.text, at.text
        return error
