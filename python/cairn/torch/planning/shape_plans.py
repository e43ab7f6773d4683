"""Plans by shape: chooses or makes the plan for a step whose inputs have other shapes than the sample.

A plan covers every step whose inputs are nowhere larger than those that it was made for. For a step that no plan
covers, a new one is made, in this order:

1. *By an estimate*, in milliseconds. The profile of the nearest shapes is scaled (`estimates.py`). Shapes are rounded
   up to an eighth of a power of two first, so that slowly growing inputs do not need a plan each. The plan is used if
   it fits the budget and is hardly slower. It is not used if a size of one has grown, because operations on a size of
   one omit copies.
2. *By measuring* the step's own inputs, in about the time of three steps, if that itself fits the budget. This is not
   done in distributed training, where an additional backward on one rank would disturb the others. Inputs with one
   tensor more or fewer than the sample's, or one of another type or rank, cannot be estimated and are always measured.
3. *By the estimate*, if it fits the budget at all.
4. Otherwise the step is refused before it runs: InfeasibleBudget.

A plan for larger inputs recomputes more than a smaller step has to. So shapes that are clearly smaller than those of
the plan that covers them, and that occur repeatedly, are measured once, too.

The first steps with a new plan are measured, as with the first plan, because an estimate may be wrong. Plans are kept
for the latest shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cairn import MemoryLimit, NoSchedule, format_bytes
from torch import nn

from ..base import memory
from ..base.blocks import resolve
from ..base.choices import POLICIES
from ..base.errors import InfeasibleBudget, PlanMismatch, TorchError, warn
from ..base.ranks import Ranks, is_distributed
from ..base.stages import StageRef
from ..rerun_state.backend_flags import changes_since
from ..rerun_state.sharded import ranks_of
from .estimates import profiling_bytes, scaled
from .rank_plans import refuse_other_plans
from .shapes import (
    Growth,
    count_of,
    described,
    grows_from_one,
    growth,
    is_covered,
    largest_of,
    names_of,
    numbers_grown,
    rounded_up,
    sized,
)

if TYPE_CHECKING:
    from ..runtime.executor import Executor, Prepared
    from .measured_step import Measured
    from .plan import Plan
    from .step_profile import Profile

KEPT = 8  # plans, and profiles
CLEARLY_SMALLER = 0.8  # as a share of the numbers in the inputs
STEPS_BEFORE_OWN_PLAN = 4  # of the same shapes, before they get a plan of their own, which is faster
SLOWER_BY_AT_MOST = 0.05  # an estimated plan that is slower than the one before by more is replaced by a measured one

_MISFITS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError)  # what code for other shapes raises
_OWN_LOSS = (
    "; where the loop computes the loss from them itself, leave them out of the sample and give loss_fn=, or give "
    "compute_loss_func= to trainer_callback"
)


class Watcher(Protocol):
    """Measures steps that follow plans."""

    def begin(self, module: nn.Module, plan: Plan) -> None:
        """A step begins that follows this plan."""

    def forward_ended(self, output: Any, missing: Sequence[str], notes: Sequence[str]) -> None:
        """The forward of the step has returned `output`. missing: blocks that did not run. notes: other deviations."""

    def measured(self, plan: Plan) -> Measured | None:
        """The worst step so far of those that followed this plan."""

    def remove(self) -> None:
        """Stops measuring."""


@dataclasses.dataclass
class ShapePlan:
    """A plan for some shapes.

    made: its origin. "given" with the model, by "estimate", or by "measurement". "nearest" is a plan that is used
    although it does not cover the step.
    """

    shapes: list[str]
    plan: Plan
    made: str
    profile: Profile | None = dataclasses.field(default=None, repr=False)
    prepared: Prepared | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass
class Source:
    """Makes profiles and plans for new shapes."""

    profile: Callable[..., Profile]  # with the arguments that were given in addition to the sample
    plan: Callable[[Profile], Plan]
    first: Profile


class ShapePlans:
    """The plans of one model; see the top of this file."""

    def __init__(self, model: nn.Module, plan: Plan, policy: str, source: Source | None) -> None:
        if policy not in POLICIES:
            raise ValueError(f"on_shape_change must be one of {', '.join(POLICIES)}, not {policy!r}")
        if policy == "replan" and source is None:
            raise ValueError(
                "on_shape_change='replan' needs a profile to make new plans from, which a plan alone has not: use "
                "cairn.torch.checkpoint or budget, or 'error' or 'nearest'"
            )
        self._model = weakref.ref(model)
        self._policy, self._source = policy, source
        first = ShapePlan(list(plan.fingerprint["inputs"]), plan, "given", None if source is None else source.first)
        self._plans = OrderedDict([(tuple(first.shapes), first)])
        self._profiles = OrderedDict() if source is None else OrderedDict([(tuple(first.shapes), source.first)])
        #: By types and sizes of the arguments of steps: their plan, and the number of these steps.
        self._chosen: OrderedDict[tuple[Any, ...], tuple[ShapePlan, int]] = OrderedDict()
        self._lock = threading.RLock()
        self._watch: Watcher | None = None
        self._frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        #: Sharded parameters count as wholes: those of the root are gathered when a step begins.
        self._parameter_bytes = memory.whole_bytes(model.parameters())
        self.current = first
        self._has_begun = False  # a step under one of the plans

    # -- accompanying steps ----------------------------------------------------------------------------------

    def begin(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """The schedule that a step follows. Raises InfeasibleBudget or PlanMismatch where there is none."""
        if self._frozen and self._policy != "nearest":
            self._refuse_unfrozen()
        self._warn_of_growth()
        chosen = self.choose(args, kwargs)
        if not self._has_begun:
            self._refuse_plans_of_other_ranks(chosen.plan)
            self._has_begun = True
            _warn_of_flags(chosen.plan)
        if chosen.prepared is None:
            plan = chosen.plan
            chosen.prepared = executor.prepare(
                plan.stages, plan.executed_ops, plan.selective_options, plan.transfer_plan
            )
        model = self._model()
        if self._watch is not None and model is not None:
            self._watch.begin(model, chosen.plan)
        return chosen.prepared

    def _refuse_plans_of_other_ranks(self, plan: Plan) -> None:
        """Raises PlanMismatch if ranks that share the model have come with different plans."""
        model = self._model()
        if model is not None:
            refuse_other_plans(type(model).__name__, plan, self._ranks)

    @functools.cached_property
    def _ranks(self) -> Ranks:
        """The ranks that share the model, of which none may make another plan alone."""
        model = self._model()
        return Ranks() if model is None else ranks_of(model)

    def _refuse_unfrozen(self) -> None:
        """Raises if parameters are trained that were frozen when the plan was made.

        Their blocks may be no stages of the plan. The saved tensors and gradients of such blocks are not counted.
        """
        model = self._model()
        parameters = () if model is None else model.named_parameters()
        trained = [name for name, parameter in parameters if parameter.requires_grad and name in self._frozen]
        if trained:
            others = f" and {len(trained) - 1} others" * (len(trained) > 1)
            raise PlanMismatch(
                f"requires_grad of {trained[0]}{others} was False when the plan was made and is True now, which needs "
                "more memory: call cairn.torch.checkpoint, or profile and plan, again"
            )

    def _warn_of_growth(self) -> None:
        """Warns if the parameters take more memory than when the plan was made."""
        model = self._model()
        now = 0 if model is None else memory.whole_bytes(model.parameters())
        if now > self._parameter_bytes:
            warn(
                f"the parameters of the planned {type(model).__name__} take {format_bytes(now)}, and "
                f"{format_bytes(self._parameter_bytes)} when the plan was made, which leaves out the rest: steps may "
                "take more than the budget; call cairn.torch.checkpoint, or profile and plan, again"
            )
            self._parameter_bytes = now

    def forward_ended(self, output: Any, missing: Sequence[str], notes: Sequence[str]) -> None:
        """Tells who watches."""
        if self._watch is not None:
            self._watch.forward_ended(output, missing, notes)

    def watch(self, by: Watcher | None) -> None:
        """From now on, steps are measured; by nobody, if None."""
        if self._watch is not None:
            self._watch.remove()
        self._watch = by

    @property
    def watched_by(self) -> Watcher | None:
        """The watcher that measures the steps."""
        return self._watch

    # -- choosing --------------------------------------------------------------------------------------------

    @property
    def all(self) -> list[ShapePlan]:
        """Every plan that is kept, the one that was used last at the end."""
        return list(self._plans.values())

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        """The plan for a step. Raises InfeasibleBudget or PlanMismatch where there is none."""
        key = tuple((t.dtype, t.shape) for t in sized((args, kwargs)))
        with self._lock:
            chosen, count = self._chosen.pop(key, (None, 0))
            if chosen is None:
                chosen = self._find(described(args, kwargs), args, kwargs)
            elif count == STEPS_BEFORE_OWN_PLAN and self._policy == "replan":
                chosen = self._faster(chosen, described(args, kwargs), args, kwargs)
            self._chosen[key] = chosen, count + 1
            while len(self._chosen) > 8 * KEPT:
                self._chosen.popitem(last=False)
            if chosen is not self.current:
                self._use(chosen)
            return chosen

    def correct(self, missed: Plan, by_bytes: int) -> None:
        """Replaces a plan whose step took `by_bytes` more than predicted by a better one, if there is one."""
        if self._ranks:
            raise PlanMismatch("ranks that share a model follow one plan; give Budget(reserve=) to plan with more room")
        with self._lock:
            if any(chosen.made == "nearest" and chosen.plan is missed for chosen, _ in self._chosen.values()):
                return  # the plan was not made for all steps that follow it
            for entry in self._plans.values():
                if entry.plan is missed and entry.profile is not None and self._source is not None:
                    entry.profile = entry.profile.corrected(by_bytes)
                    entry.plan, entry.prepared = self._source.plan(entry.profile), None

    def _use(self, chosen: ShapePlan) -> None:
        self.current = chosen
        key = tuple(chosen.shapes)
        if self._plans.get(key) is chosen:
            self._plans.move_to_end(key)

    def _find(self, actual: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        covering = [entry for entry in self._plans.values() if is_covered(actual, entry.shapes)]
        if covering:
            return min(covering, key=lambda entry: count_of(entry.shapes))
        if self._policy == "error":
            raise self._mismatch(actual, args, kwargs)
        if self._policy == "replan" and self._ranks:
            why = ", and ranks that share a model follow one plan"
            raise self._mismatch(actual, args, kwargs, why)
        if self._policy == "nearest":
            return dataclasses.replace(self._nearest(actual), made="nearest")
        return self._kept(self._made(actual, args, kwargs))

    def _kept(self, plan: ShapePlan) -> ShapePlan:
        self._plans[tuple(plan.shapes)] = plan
        while len(self._plans) > KEPT:
            gone = self._plans.popitem(last=False)[1]
            self._chosen = OrderedDict((key, entry) for key, entry in self._chosen.items() if entry[0] is not gone)
        return plan

    def _faster(self, chosen: ShapePlan, actual: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        """An own plan for shapes that are clearly smaller than those of the chosen plan, if it saves time."""
        if chosen.plan.overhead < SLOWER_BY_AT_MOST or count_of(actual) > CLEARLY_SMALLER * count_of(chosen.shapes):
            return chosen
        own = self._measured(actual, args, kwargs)
        if not isinstance(own, ShapePlan) or own.plan.overhead >= chosen.plan.overhead:
            return chosen
        return self._kept(own)

    def _nearest(self, actual: list[str]) -> ShapePlan:
        return min(self._plans.values(), key=lambda entry: abs(count_of(entry.shapes) - count_of(actual)))

    def _mismatch(
        self, actual: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], why: str = ""
    ) -> PlanMismatch:
        return PlanMismatch(
            f"the plan was made for inputs {', '.join(self.current.shapes)}; this step has {', '.join(actual)}"
            f"{self._other_arguments(args, kwargs)}, which may need more memory{why}: plan for the largest step that "
            "you train with, or pass on_shape_change='nearest' (exact, but perhaps over the budget)"
        )

    def _other_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The arguments that only the step has, and those that only the sample had, in words."""
        model, sample = self._model(), self.current.plan.fingerprint.get("input_names")
        if model is None or sample is None:
            return ""
        actual = names_of(model, args, kwargs)
        new, missing = [n for n in actual if n not in sample], [n for n in sample if n not in actual]
        words = [f"with {', '.join(new)} that the sample had not"] if new else []
        words += [f"without {', '.join(missing)} that the sample had"] if missing else []
        hint = _OWN_LOSS if missing == ["labels"] else ""
        return f" ({' and '.join(words)}{hint})" if words else ""

    # -- new plans -------------------------------------------------------------------------------------------

    def _made(self, actual: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        before = max(self._plans.values(), key=lambda entry: count_of(entry.shapes)).plan.overhead
        base = self._base(actual)
        rounded = None if grows_from_one(actual, base) else self._estimated(rounded_up(actual, base))
        if isinstance(rounded, ShapePlan) and rounded.plan.overhead <= before + SLOWER_BY_AT_MOST:
            return rounded
        measured = self._measured(actual, args, kwargs)
        if isinstance(measured, ShapePlan):
            return measured
        estimated = self._estimated(actual)
        if isinstance(estimated, ShapePlan) and not isinstance(measured, InfeasibleBudget):
            return estimated
        error = measured if isinstance(measured, InfeasibleBudget) else estimated
        failed = f"measuring it failed ({type(measured).__name__}: {measured})" if measured is not None else ""
        if isinstance(error, InfeasibleBudget):
            unmeasured = failed or "to measure it might have taken more than the budget, or could not be done"
            raise error.for_shapes(actual, unmeasured if error is estimated else "")
        if isinstance(measured, Exception):
            raise self._mismatch(actual, args, kwargs, f", and {failed}") from measured
        raise self._mismatch(actual, args, kwargs, ", and could be neither estimated nor measured within the budget")

    def _base(self, actual: Sequence[str]) -> tuple[str, ...]:
        """The shapes of the profile from which the least growth leads to the actual ones."""
        growths = {key: growth(actual, key) for key in self._profiles}
        return min(growths, key=lambda key: math.inf if (by := growths[key]) is None else by.most)

    def _estimated(self, shapes: list[str]) -> ShapePlan | Exception | None:
        base = self._base(shapes)
        by = growth(shapes, base)
        if by is None:
            return None
        return self._planned(scaled(self._profiles[base], by, shapes), shapes, "estimate")

    def _planned(self, profile: Profile, shapes: list[str], origin: str) -> ShapePlan | Exception:
        """The plan of a profile, or why there is none."""
        assert self._source is not None
        try:
            return ShapePlan(shapes, self._source.plan(profile), origin, profile)
        except (NoSchedule, MemoryLimit) as error:
            return error.with_traceback(None)  # a traceback would hold the frame that gets the error

    def _measured(
        self, actual: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShapePlan | Exception | None:
        """A plan by profiling the step's inputs. None, or the error, if that is impossible or exceeds the budget."""
        base = self._base(actual)
        model, source, by = self._model(), self._source, numbers_grown(actual, base)
        if model is None or source is None or is_distributed():
            return None
        if by is None:  # tensors have no counterparts
            by = Growth(largest_of(actual) / max(1, largest_of(base)), 1.0)
        elif is_covered(actual, base):
            by = Growth(count_of(actual) / max(1, count_of(base)), 1.0)
        if profiling_bytes(self._profiles[base], by) > self.current.plan.budget_bytes:
            return None
        try:
            blocks, keep = _blocks_of(model, self._profiles[base])
            profile = source.profile(model, args, kwargs, blocks=blocks, keep=keep, passes=1)
        except (TorchError, *_MISFITS) as error:  # a loss for other shapes, for example
            return error.with_traceback(None)
        if _blocks_in(profile.refs) != _blocks_in(self.current.plan.stages):
            return None
        self._profiles[tuple(actual)] = profile
        while len(self._profiles) > KEPT:
            self._profiles.pop(list(self._profiles)[1])
        return self._planned(profile, actual, "measurement")


def _blocks_in(refs: Sequence[StageRef]) -> set[StageRef]:
    return {ref for ref in refs if ref.is_block}


def _blocks_of(model: nn.Module, known: Profile) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules of a profile's blocks, and of those that must be kept."""
    blocks = {stage.name: resolve(model, stage.name).modules for stage in known.stages if stage.kind == "block"}
    kept = {stage.name for stage in known.stages if stage.kind == "block" and stage.keep_reason}
    return [m for modules in blocks.values() for m in modules], [m for name in kept for m in blocks[name]]


def _warn_of_flags(plan: Plan) -> None:
    """Warns if a step begins under other backend flags of torch than the profile."""
    changes = changes_since(plan.fingerprint.get("backend_flags", {}))
    if changes:
        warn(
            f"the step runs in another region than the one that was profiled: {changes}. Other kernels may take more "
            "memory, and blocks under selective recomputation are recomputed as wholes: profile in the region in which "
            "you train"
        )
