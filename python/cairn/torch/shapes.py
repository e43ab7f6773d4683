"""Plans by shape: which plan a step follows whose inputs have other shapes than those that were profiled.

A plan covers every step whose inputs are nowhere larger than those that it was made for. For a step that no plan
covers, a new one is made, in this order:

1. *By an estimate*, in milliseconds. Of the profile nearest in shape, all that depends on the inputs is scaled: what
   goes from stage to stage by the growth of the inputs, what a stage saves and takes by the growth of the batch times
   the square of all other growth, which no operation of a usual block surpasses (attention keeps a number for every
   pair of positions). Shapes are rounded up to an eighth of a power of two first, so that slowly growing inputs do not
   need a plan each. The plan is taken if it fits the budget and is hardly slower, unless a size of one has grown: with
   that, operations do without copies that they make otherwise.
2. *By measuring* the step's own inputs, in about the time of three steps, if that itself fits the budget. Not in
   distributed training, where a backward of its own would disturb the others. Inputs with one tensor more or fewer than
   the sample's, or one of another type or rank, cannot be estimated and are always measured.
3. *By the estimate*, if it fits the budget at all.
4. Else the step is refused before it runs: InfeasibleBudget.

A plan for larger inputs recomputes more than a smaller step has to. So shapes that are clearly smaller than those of
the plan that covers them, and that come again and again, are measured once, too.

Steps that follow a new plan are measured as the first ones are, so that what an estimate cannot know comes to light.
Plans are kept for the shapes that were met last.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .base.blocks import resolve
from .base.errors import InfeasibleBudget, PlanMismatch, TorchError, Unsupported
from .base.stage_measure import OptionMeasure, StageMeasure
from .base.stages import StageRef
from .base.tree import tensors_in

if TYPE_CHECKING:
    from .execute.executor import Executor, Prepared
    from .plan import Plan
    from .profiler import Profile
    from .watch import Watch

POLICIES = ("replan", "error", "nearest")
KEPT = 8  # plans, and profiles
STEPS_PER_DOUBLING = 8  # of a size, when shapes are rounded up
CLEARLY_SMALLER = 0.8  # as a share of the numbers in the inputs
AGAIN = 4  # steps of the same shapes, until a plan of their own is made for the sake of time
_MISFITS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError)  # what code for other shapes raises
SLOWER_BY_AT_MOST = 0.05  # may a plan by estimate be than the one before, else the step is measured

Shape = tuple[str, tuple[int, ...]]  # type and sizes of a tensor


def _sized(value: Any) -> list[torch.Tensor]:
    """The tensors that a plan is made for: single numbers, such as a divisor of the loss, do not change it."""
    found = [t for t in tensors_in(value) if t.dim() > 0]
    if any(t.is_nested for t in found):
        raise Unsupported(
            "a nested tensor among the model's arguments has no sizes that a plan could be made for: pass its values "
            "and offsets, or pad it, and make it nested inside the model"
        )
    return found


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Type and shape of every tensor in a model's arguments, as in a plan's fingerprint: "float32[8, 3, 32, 32]"."""
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _sized((args, dict(kwargs)))]


def names_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The parameters of a model's forward that are given such tensors, in alphabetical order."""
    parameters = [p for p in inspect.signature(type(model).forward).parameters.values() if p.kind in _POSITIONAL][1:]
    names = [parameter.name for parameter in parameters] + [f"argument {i}" for i in range(len(parameters), len(args))]
    return sorted(name for name, value in (*zip(names, args, strict=False), *kwargs.items()) if _sized(value))


_OWN_LOSS = (
    "; where the loop computes the loss from them itself, leave them out of the sample and give loss_fn=, or give "
    "compute_loss_func= to trainer_callback"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parsed(text: str) -> Shape:
    dtype, _, sizes = text.rstrip("]").partition("[")
    return dtype, tuple(int(size) for size in sizes.split(",") if size.strip())


def _paired(actual: Sequence[str], expected: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Sizes of tensors that correspond; None where some have no counterpart. Keywords have no order, so types and then
    sizes say which do.
    """
    pairs = list(zip(map(_parsed, actual), map(_parsed, expected), strict=False))
    if len(actual) != len(expected) or any(_kind(a) != _kind(b) for a, b in pairs):
        ours, theirs = sorted(map(_parsed, actual), key=_order), sorted(map(_parsed, expected), key=_order)
        pairs = list(zip(ours, theirs, strict=False))
    if len(actual) != len(expected) or any(_kind(a) != _kind(b) for a, b in pairs):
        return None
    return [(a[1], b[1]) for a, b in pairs]


def _kind(shape: Shape) -> tuple[str, int]:
    return shape[0], len(shape[1])


def _order(shape: Shape) -> Any:
    return _kind(shape), shape[1]


_FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def _widened(actual: Sequence[str], expected: Sequence[str]) -> list[str]:
    """The actual tensors, those of a narrower floating type than their counterparts' in the type of these: a wrapper
    may cast what the model is called with.
    """
    widened = []
    for ours, theirs in zip(actual, expected, strict=True):
        (dtype, _, sizes), wider = ours.partition("["), theirs.partition("[")[0]
        is_narrower = dtype in _FLOATS and wider in _FLOATS and _FLOATS[dtype] < _FLOATS[wider]
        widened.append(f"{wider}[{sizes}" if is_narrower else ours)
    return widened


def is_covered(actual: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether no tensor is larger anywhere than its counterpart."""
    pairs = _paired(actual if len(actual) != len(expected) else _widened(actual, expected), expected)
    return pairs is not None and all(a <= b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


@dataclasses.dataclass(frozen=True)
class Growth:
    """By how much inputs have grown: their first size, and all other sizes together."""

    batch: float
    other: float

    @property
    def linear(self) -> float:
        """Of what has a number for each of the inputs' numbers."""
        return self.batch * self.other

    @property
    def most(self) -> float:
        """Of what has one for each pair of them within a sample."""
        return self.batch * self.other**2


def growth(actual: Sequence[str], expected: Sequence[str]) -> Growth | None:
    """From the expected shapes to the actual ones, sizes that became smaller left out; None where it cannot be said."""
    pairs = _paired(actual, expected)
    if pairs is None or any(0 in theirs for _, theirs in pairs):
        return None
    batch = other = 1.0
    for ours, theirs in pairs:
        ratios = [max(1.0, a / b) for a, b in zip(ours, theirs, strict=True)]
        batch = max(batch, *ratios[:1], 1.0)
        other = max(other, math.prod(ratios[1:]))
    return Growth(batch, other)


def grows_from_one(actual: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether a size of one has grown."""
    pairs = _paired(actual, expected) or []
    return any(b == 1 < a for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def rounded_up(actual: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Shapes that cover the actual ones: sizes that have grown lie on a grid that doubles in eight steps."""
    pairs = _paired(actual, expected) or []
    grown = {a for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True) if a > b}
    parsed = [_parsed(text) for text in actual]
    return [f"{dtype}{[_on_grid(s) if s in grown else s for s in sizes]}" for dtype, sizes in parsed]


def _on_grid(size: int) -> int:
    step = max(1, 2 ** (size.bit_length() - 1) // STEPS_PER_DOUBLING)
    return -(-size // step) * step


def _size(shapes: Sequence[str]) -> int:
    return sum(math.prod(_parsed(text)[1]) for text in shapes)


def _largest(shapes: Sequence[str]) -> int:
    return max((_size([text]) for text in shapes), default=0)


# -- plans by shape ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ShapePlan:
    """A plan for some shapes. `made`: "given" with the model, by "estimate", or by "measurement"; or "nearest", used
    although it does not cover the step.
    """

    shapes: list[str]
    plan: Plan
    made: str
    profile: Profile | None = dataclasses.field(default=None, repr=False)
    prepared: Prepared | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass
class Source:
    """What new plans are made from."""

    profile: Callable[..., Profile]  # with what was given beside the sample
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
        #: By types and sizes of what steps were called with: their plan, and how many there were.
        self._chosen: OrderedDict[tuple[Any, ...], tuple[ShapePlan, int]] = OrderedDict()
        self._lock = threading.RLock()
        self._watch: Watch | None = None
        self._frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self.current = first

    # -- accompanying steps ----------------------------------------------------------------------------------

    def begin(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """The schedule that a step follows. Raises InfeasibleBudget or PlanMismatch where there is none."""
        if self._frozen and self._policy != "nearest":
            self._refuse_unfrozen()
        chosen = self.choose(args, kwargs)
        if chosen.prepared is None:
            plan = chosen.plan
            chosen.prepared = executor.prepare(plan.stages, plan.executed_ops, plan.opened, plan.itinerary)
        model = self._model()
        if self._watch is not None and model is not None:
            self._watch.begin(model, chosen.plan)
        return chosen.prepared

    def _refuse_unfrozen(self) -> None:
        """Raises if parameters are trained that were not when the plan was made: their blocks may be no stages of it,
        and all that these save, and their gradients, would come on top.
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

    def forward_ended(self, output: Any, missing: Sequence[str], notes: Sequence[str]) -> None:
        """Tells who watches."""
        if self._watch is not None:
            self._watch.forward_ended(output, missing, notes)

    def watch(self, by: Watch | None) -> None:
        """From now on, steps are measured; by nobody, if None."""
        if self._watch is not None:
            self._watch.remove()
        self._watch = by

    @property
    def watched_by(self) -> Watch | None:
        """Who measures the steps."""
        return self._watch

    # -- choosing --------------------------------------------------------------------------------------------

    @property
    def all(self) -> list[ShapePlan]:
        """Every plan that is kept, the one that was used last at the end."""
        return list(self._plans.values())

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        """The plan for a step. Raises InfeasibleBudget or PlanMismatch where there is none."""
        key = tuple((t.dtype, t.shape) for t in _sized((args, kwargs)))
        with self._lock:
            chosen, count = self._chosen.pop(key, (None, 0))
            if chosen is None:
                chosen = self._find(described(args, kwargs), args, kwargs)
            elif count == AGAIN and self._policy == "replan":
                chosen = self._faster(chosen, described(args, kwargs), args, kwargs)
            self._chosen[key] = chosen, count + 1
            while len(self._chosen) > 8 * KEPT:
                self._chosen.popitem(last=False)
            if chosen is not self.current:
                self._use(chosen)
            return chosen

    def correct(self, missed: Plan, by_bytes: int) -> None:
        """Puts a better plan in the place of one that took so much more than was predicted, where there is one."""
        with self._lock:
            if any(chosen.made == "nearest" and chosen.plan is missed for chosen, _ in self._chosen.values()):
                return  # it was not made for all steps that follow it
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
            return min(covering, key=lambda entry: _size(entry.shapes))
        if self._policy == "error":
            raise self._mismatch(actual, args, kwargs)
        if self._policy == "nearest":
            return dataclasses.replace(self._nearest(actual), made="nearest")
        return self._kept(self._made(actual, args, kwargs))

    def _kept(self, made: ShapePlan) -> ShapePlan:
        self._plans[tuple(made.shapes)] = made
        while len(self._plans) > KEPT:
            gone = self._plans.popitem(last=False)[1]
            self._chosen = OrderedDict((key, found) for key, found in self._chosen.items() if found[0] is not gone)
        return made

    def _faster(self, chosen: ShapePlan, actual: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        """A plan of their own for shapes that are clearly smaller than the plan's, if it is worth it."""
        if chosen.plan.overhead < SLOWER_BY_AT_MOST or _size(actual) > CLEARLY_SMALLER * _size(chosen.shapes):
            return chosen
        found = self._measured(actual, args, kwargs)
        if not isinstance(found, ShapePlan) or found.plan.overhead >= chosen.plan.overhead:
            return chosen
        return self._kept(found)

    def _nearest(self, actual: list[str]) -> ShapePlan:
        return min(self._plans.values(), key=lambda entry: abs(_size(entry.shapes) - _size(actual)))

    def _mismatch(
        self, actual: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], why: str = ""
    ) -> PlanMismatch:
        return PlanMismatch(
            f"the plan was made for inputs {', '.join(self.current.shapes)}; this step has {', '.join(actual)}"
            f"{self._other_arguments(args, kwargs)}, which may need more memory{why}: plan for the largest step that "
            "you train with"
        )

    def _other_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Which arguments the step has and the sample had not, or the other way round, in words."""
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
        before = max(self._plans.values(), key=lambda entry: _size(entry.shapes)).plan.overhead
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
        if isinstance(error, InfeasibleBudget):
            raise error.for_shapes(actual, estimated=error is estimated)
        if isinstance(measured, Exception):
            why = f", and measuring it failed ({type(measured).__name__}: {measured})"
            raise self._mismatch(actual, args, kwargs, why) from measured
        raise self._mismatch(actual, args, kwargs, ", and could be neither estimated nor measured within the budget")

    def _base(self, actual: Sequence[str]) -> tuple[str, ...]:
        """The shapes of the profile from which the least growth leads to the actual ones."""
        found = {key: growth(actual, key) for key in self._profiles}
        return min(found, key=lambda key: math.inf if (by := found[key]) is None else by.most)

    def _estimated(self, shapes: list[str]) -> ShapePlan | InfeasibleBudget | None:
        base = self._base(shapes)
        by = growth(shapes, base)
        if by is None:
            return None
        return self._planned(scaled(self._profiles[base], by, shapes), shapes, "estimate")

    def _planned(self, found: Profile, shapes: list[str], made: str) -> ShapePlan | InfeasibleBudget:
        assert self._source is not None
        try:
            return ShapePlan(shapes, self._source.plan(found), made, found)
        except InfeasibleBudget as error:
            return error.with_traceback(None)  # which would hold the frame that it is returned to

    def _measured(
        self, actual: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShapePlan | Exception | None:
        """By profiling the step's own inputs; None, or why, where that cannot be done or takes more than the budget."""
        base = self._base(actual)
        model, source, by = self._model(), self._source, growth(actual, base)
        if model is None or source is None or _is_distributed():
            return None
        if by is None:  # tensors have no counterparts
            by = Growth(_largest(actual) / max(1, _largest(base)), 1.0)
        elif is_covered(actual, base):
            by = Growth(_size(actual) / max(1, _size(base)), 1.0)
        if profiling_bytes(self._profiles[base], by) > self.current.plan.budget_bytes:
            return None
        try:
            blocks, keep = _blocks_of(model, self._profiles[base])
            found = source.profile(model, args, kwargs, blocks=blocks, keep=keep, passes=1)
        except (TorchError, *_MISFITS) as error:  # a loss for other shapes, for example
            return error.with_traceback(None)
        if _blocks_in(found.refs) != _blocks_in(self.current.plan.stages):
            return None
        self._profiles[tuple(actual)] = found
        while len(self._profiles) > KEPT:
            self._profiles.pop(list(self._profiles)[1])
        return self._planned(found, actual, "measurement")


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _blocks_in(refs: Sequence[StageRef]) -> set[StageRef]:
    return {ref for ref in refs if ref.is_block}


def _blocks_of(model: nn.Module, known: Profile) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules of a profile's blocks, and of those that must be kept."""
    blocks = {stage.name: resolve(model, stage.name).modules for stage in known.stages if stage.kind == "block"}
    kept = {stage.name for stage in known.stages if stage.kind == "block" and stage.keep_reason}
    return [m for modules in blocks.values() for m in modules], [m for name in kept for m in blocks[name]]


# -- estimates -----------------------------------------------------------------------------------------------

_LINEAR = (
    "input_bytes",
    "output_bytes",
    "also_held_bytes",
    "pinned_bytes",
    "pinned_saved_bytes",
    "added_bytes",
    "left_bytes",
    "left_saved_bytes",
    "grad_bytes",
    "held_bytes",
)
_CONSTANT = (
    "parameters",
    "buffers",
    "optimizer state",
    "workspaces of libraries",
    "random states and buffers to replay",
)


def scaled(measured: Profile, by: Growth, shapes: Sequence[str]) -> Profile:
    """A profile as a step with inputs of these shapes would give it, or more."""
    stages = tuple(_scaled_stage(stage, by) for stage in measured.stages)
    _let_wait(measured.stages, stages, by)
    resident = {name: size if name in _CONSTANT else _grown(size, by.most) for name, size in measured.resident.items()}
    return dataclasses.replace(
        measured,
        stages=stages,
        resident=resident,
        input_bytes=_grown(measured.input_bytes, by.linear),
        input_grad_bytes=_grown(measured.input_grad_bytes, by.linear),
        miss_bytes=_grown(measured.miss_bytes, by.most),
        fingerprint={**measured.fingerprint, "inputs": list(shapes)},
    )


def _grown(size: int, factor: float) -> int:
    return math.ceil(size * factor) if size > 0 else size


def _scaled_stage(stage: StageMeasure, by: Growth) -> StageMeasure:
    """Rises count from the level at which an operation begins, so what grows less than they do may stay in them."""
    grown = dataclasses.replace(stage, options=[dataclasses.replace(option) for option in stage.options])
    for name in _LINEAR:
        setattr(grown, name, _grown(getattr(stage, name), by.linear))
    grown.listed = {name: _grown(size, by.linear) for name, size in stage.listed.items()}
    _scale_measured(grown, by)
    for option in grown.options:
        _scale_measured(option, by)
    return grown


def _scale_measured(grown: StageMeasure | OptionMeasure, by: Growth) -> None:
    for field in dataclasses.fields(grown):
        if field.name not in _LINEAR and field.name.endswith(("saved_bytes", "travel_bytes", "rise_bytes", "_ns")):
            setattr(grown, field.name, _grown(getattr(grown, field.name), by.most))


def _let_wait(measured: Sequence[StageMeasure], stages: Sequence[StageMeasure], by: Growth) -> None:
    """Lets the gradients grow that are there beside the chain's when a stage's backward begins: those that wait, and
    those that later stages leave to the end. Where gradients exist already, these are hardly ever parameters'.
    """
    left = 0
    for before, stage in zip(reversed(measured), reversed(stages), strict=True):
        there = left + before.accumulated_waiting_bytes
        more = _grown(there, by.linear) - there
        stage.waiting_bytes += more
        stage.accumulated_waiting_bytes += more
        left += before.accumulated_weight_grad_bytes


def profiling_bytes(measured: Profile, by: Growth) -> int:
    """About what it takes to profile a step: outputs of all blocks, what lies outside of them, and one block."""
    outputs = sum(stage.output_bytes for stage in measured.stages)
    outside = sum(stage.saved_bytes for stage in measured.stages if stage.kind == "outside")
    block = max(
        max(stage.forward_rise_bytes, stage.saved_bytes + stage.grad_bytes + stage.accumulated_backward_rise_bytes)
        for stage in measured.stages
    )
    growing = _grown(measured.input_bytes + outputs + outside, by.linear) + _grown(block, by.most)
    return measured.resident_bytes() + growing
