"""`sweep`: the trade-off curve of a model, predicted and measured, next to PyTorch's own ways to save memory."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cairn
import torch
from torch import nn

from ..base import memory
from ..base.choices import ACCUMULATED
from ..base.errors import InfeasibleBudget
from ..compiled.compiled_model import CompiledModel, curve, known
from ..compiling_regions import RegionModel
from ..handle import SuspendablePlan, set_aside
from ..planning.arguments import (
    allowed,
    check_budget,
    check_call,
    check_count,
    host_budget_of,
    positional,
)
from ..planning.offload_plans import destination
from ..planning.plan import Plan
from ..planning.step_profile import Profile
from ..planning.task import Task, check_request
from ..profiling.sample import Sample
from ..rerun_state.attributes import restored_attributes
from . import sweep_plot
from .alternatives import ALTERNATIVES, Alternative, alternatives, predicted
from .comparison import Comparison, Steps, Turn
from .sweep_data import PLAIN, Measurement, Point, Sweep, Way

PLANS_MEASURED = 5  # at most, of each curve
POINTS_DRAWN = 32  # least number of points of a curve in a picture, without offloading
_UNLIMITED = 2**62


def sweep(
    profile: Profile | nn.Module,
    budgets: int | Iterable[Any] = 10,
    *,
    plot: str | Path | None = None,
    model: nn.Module | None = None,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    beside: Iterable[str] = ALTERNATIVES,
    rounds: int = 3,
    host_budget: Any = None,
    tier: str = "host",
    link: Any = None,
    allow: Collection[str] | None = None,
    solver: str = "auto",
    scope: str = "step",
    gradients: str = ACCUMULATED,
    **options: Any,
) -> Sweep:
    """The trade-off curve: a plan for each budget.

    Many budgets take little more time than one: the solver's tables serve all of them. With a model, steps are run and
    measured, too: plain ones, up to five plans of the curve and of that of whole blocks, and PyTorch's own ways.

    Parameters
    ----------
    profile : Profile
        Made by `profile`. Or a model that `compile` returned, for the curve of its graph: `sweep(compiled, 10)`.
    budgets : int or iterable
        The number of budgets, from the least that works to the one that stores everything; or a list of budgets as
        `plan` takes them ("6MiB", bytes, "80%", a cairn.Budget).
    plot : str or Path, optional
        The file of a picture to draw (needs matplotlib): the curve, that of whole blocks if there is selective
        recomputation, and all measurements. If the number of budgets is given, curves are drawn through more budgets.
    model, args, kwargs, loss_fn
        The profiled model and sample, to measure steps. The model is restored afterwards; its plan is inactive
        meanwhile.
    beside : iterable of str
        PyTorch's ways to measure: "every block" (each checkpointed; a transformers model does so by itself),
        "checkpoint_sequential" (over the longest run of blocks that form a sequence, with every number of segments),
        and "torch.compile" (backend "aot_eager", with activation memory budgets from 0 to 1). Ways that fail or do not
        apply are in `left_out`.
    rounds : int
        The number of timed steps of each way, in turns.
    host_budget, tier, link, allow, solver, scope, gradients, **options
        As for `plan`.

    Returns
    -------
    Sweep
        A sequence of points, and the measurements.

    Examples
    --------
    >>> for point in ct.sweep(profile, 5):
    ...     print(point.budget_bytes, point.overhead)
    """
    compiled = known(profile)
    if compiled is not None:
        return _compiled_curve(compiled, _wanted(budgets))
    way = {"host_budget": host_budget, "tier": tier, "link": link}
    request = {**way, "allow": allow, "scope": scope, "gradients": gradients, "solver": solver}
    check_request(profile, {**request, **options})
    assert isinstance(profile, Profile)
    wanted = _wanted(budgets)
    others = _checked(beside, rounds)
    is_bare = isinstance(args, tuple) and not args and kwargs is None and loss_fn is None and others == ALTERNATIVES
    if model is None and not is_bare:
        raise TypeError("args, kwargs, loss_fn and beside are for steps that are measured: give model=, too")
    if plot is not None:
        sweep_plot.check(Path(plot))
    profile = profile if "inside" in allowed(allow, host_budget) else profile.without_options()
    to = destination(host_budget, tier, link, torch.device(profile.device))

    def planned(profiled: Profile, wanted: int | Sequence[Any]) -> _Curve:
        return _Curve.of(Task(profiled, scope, gradients, solver, options, to), wanted)

    curves = [planned(profile, wanted)]
    if (plot is not None or model is not None) and any(stage.options for stage in profile.stages):
        curves.append(
            dataclasses.replace(planned(profile.without_options(), curves[0].budgets), is_whole=curves[0].is_whole)
        )
    whole_blocks = curves[1].points if len(curves) > 1 else ()
    swept = Sweep(profile.model_name, profile.device, scope, gradients, curves[0].points, whole_blocks)
    if model is not None:
        check_call(model, kwargs, loss_fn, args)
        arguments = positional(args)
        sample = Sample(model, arguments, dict(kwargs or {}), loss_fn, profile.holds_output)
        swept = _measured(swept, dict(zip(swept.curves, curves, strict=True)), sample, others, rounds)
    if plot is not None:
        sweep_plot.draw(
            swept, {name: curve.drawn() for name, curve in zip(swept.curves, curves, strict=True)}, Path(plot)
        )
    return swept


def _compiled_curve(compiled: CompiledModel, wanted: int | list[Any]) -> Sweep:
    """Points of the graph of a compiled step, or of its regions; the reserve is left free in each."""
    assert compiled.report is not None
    if isinstance(compiled, RegionModel):
        profile, request = compiled.profile, compiled.request
        assert profile is not None and request is not None
        points = tuple(map(_point, compiled.plans(wanted)))
        return Sweep(profile.model_name, profile.device, "step", request.gradients, points)
    plan = compiled.report.plans[-1]
    return Sweep(plan.model_name, plan.device, "step", plan.gradients, tuple(
        Point(budget, *result) for budget, result in curve(plan, wanted)
    ))  # fmt: skip


def _wanted(budgets: Any) -> int | list[Any]:
    """The budgets, or their number. Raises TypeError or ValueError for other values."""
    if hasattr(type(budgets), "__index__") and not isinstance(budgets, bool):  # an integer, one of NumPy's too
        if budgets < 1:
            raise ValueError(f"a sweep has at least one point, not {budgets}")
        return operator.index(budgets)
    if isinstance(budgets, (str, bytes)) or not isinstance(budgets, Iterable):
        raise TypeError(f"sweep takes a list of budgets, or how many there shall be, not {budgets!r}")
    wanted = list(budgets)
    if not wanted:
        raise ValueError("sweep takes a list of budgets, or how many there shall be; the list is empty")
    for number, budget in enumerate(wanted):
        check_budget(budget, f"budgets[{number}]")
        if host_budget_of(budget, None) is not None:
            raise ValueError(f"budgets[{number}]: the curve has one host_budget=, for all of its budgets")
    return wanted


def _checked(beside: Any, rounds: Any) -> tuple[str, ...]:
    others = tuple(beside)
    wrong = [beside] if isinstance(beside, str) else [name for name in others if name not in ALTERNATIVES]
    if wrong:
        raise ValueError(f"beside= takes a list of {', '.join(map(repr, ALTERNATIVES))}, not {wrong[0]!r}")
    check_count("rounds", rounds, 1)
    return others


# -- planning ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Curve:
    """Plans for several budgets."""

    task: Task
    budgets: Sequence[Any]
    plans: Sequence[Plan | InfeasibleBudget]
    is_whole: bool = False  # from the least budget to that of storing everything

    @classmethod
    def of(cls, task: Task, wanted: int | Sequence[Any]) -> _Curve:
        """Plans for budgets, or for a number of budgets."""
        budgets = task.even_budgets(wanted) if isinstance(wanted, int) else wanted
        return cls(task, budgets, task.plans(budgets), isinstance(wanted, int) and wanted > 1)

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(map(_point, self.plans))

    def drawn(self) -> list[Point]:
        """The points for a picture, so close that the curve between two of them is almost a line."""
        more = self.is_whole and self.task.to is None and len(self.budgets) < POINTS_DRAWN
        plans = self.task.plans(self.task.even_budgets(POINTS_DRAWN)) if more else []
        return sorted(map(_point, (*self.plans, *plans)), key=lambda point: point.budget_bytes)

    def to_measure(self) -> list[Plan]:
        """Plans that differ, spread evenly."""
        by_schedule = {str(plan.ops): plan for plan in self.plans if isinstance(plan, Plan)}
        plans = list(by_schedule.values())
        count = min(PLANS_MEASURED, len(plans))
        return [plans[i * (len(plans) - 1) // max(count - 1, 1)] for i in range(count)]


def _point(plan: Plan | InfeasibleBudget) -> Point:
    if isinstance(plan, InfeasibleBudget):
        return Point(plan.budget_bytes or 0, None, None, None)
    return Point(plan.budget_bytes, plan.peak_bytes, plan.step_ns, plan.overhead)


# -- measuring -----------------------------------------------------------------------------------------------


def _measured(swept: Sweep, curves: Mapping[str, _Curve], sample: Sample, beside: Sequence[str], rounds: int) -> Sweep:
    """The sweep with measurements."""
    task = next(iter(curves.values())).task
    roomy = task.plan(_UNLIMITED)
    model = sample.model
    roomy.check_fits(model, sample.args, sample.kwargs)
    restored = sample.preserved(memory.device_of(model))
    with set_aside(model, *sample.others), restored as parameters, restored_attributes(model):
        with contextlib.suppress(RuntimeError):  # what fails here fails in the steps, and they say so
            sample.watch(parameters)
        others, left_out = alternatives(sample, task.profile.refs, beside)
        ways: list[tuple[Way, Turn]] = [(_plain(roomy), lambda: contextlib.nullcontext(model))]
        ways += [(_other(other, roomy, task.chain), other.turn) for other in others]
        for method, curve in curves.items():
            ways += [(_planned(method, plan), _following(model, plan)) for plan in curve.to_measure()]
        steps = _in_turns(Comparison(sample, roomy, parameters), ways, rounds)
    measured = []
    for way, result in steps:
        if isinstance(result, str):
            left_out[way.name] = result
        else:
            measured.append(Measurement(**dataclasses.asdict(way), **dataclasses.asdict(result)))
    return dataclasses.replace(swept, measured=tuple(measured), left_out=left_out, rounds=rounds)


def _in_turns(comparison: Comparison, ways: Sequence[tuple[Way, Turn]], rounds: int) -> list[tuple[Way, Steps | str]]:
    """Measure all ways in turns. A compiled way takes turns with plain steps alone: others would make it recompile."""
    together = [(way, turn) for way, turn in ways if way.activation_memory_budget is None]
    steps = comparison.measured([turn for _, turn in together], rounds)
    results = [(way, its) for (way, _), its in zip(together, steps, strict=True)]
    for way, turn in ways:
        if way.activation_memory_budget is not None:
            results.append((way, comparison.measured([ways[0][1], turn], rounds)[1]))
    return results


def _following(model: nn.Module, plan: Plan) -> Turn:
    recalled = SuspendablePlan(model, plan)

    @contextlib.contextmanager
    def turn() -> Iterator[nn.Module]:
        with recalled.at_work():
            yield model

    return turn


def _plain(plan: Plan) -> Way:
    return Way(PLAIN, predicted_peak_bytes=_unless_replaced(plan, plan.plain_peak_bytes), predicted_overhead=0.0)


def _planned(method: str, plan: Plan) -> Way:
    return Way(
        method, budget_bytes=plan.budget_bytes, predicted_peak_bytes=plan.peak_bytes, predicted_overhead=plan.overhead
    )


def _other(other: Alternative, plan: Plan, chain: cairn.Chain) -> Way:
    """One of PyTorch's; those that run whole blocks again can be predicted."""
    result = None if other.recomputed is None else predicted(chain, other.recomputed)
    peak = None if result is None else _unless_replaced(plan, max(result[0], plan.optimizer_peak_bytes))
    overhead = None if result is None or peak is None else result[1] / plan.plain_ns - 1
    return Way(other.method, None, other.segments, other.share, peak, overhead)


def _unless_replaced(plan: Plan, peak_bytes: int) -> int | None:
    """The peak; None if plans replace modules outside blocks, because the chain is then too small for other steps."""
    return None if any(plan.replacements.get(what) for what in ("tied", "loss", "heads")) else peak_bytes
