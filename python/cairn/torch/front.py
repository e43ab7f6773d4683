"""The calls that most people need: one that does everything, and its relatives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._budget import Budget
from .arguments import (
    APPLY_OPTIONS,
    PLAN_OPTIONS,
    PROFILE_OPTIONS,
    check_apply_options,
    check_budget,
    check_call,
    check_names,
    check_plan_options,
    check_profile_options,
    check_watching,
    host_budget_of,
    solver_options,
)
from .base.errors import InfeasibleBudget, warn
from .check import Watch
from .handle import Handle, apply, apply_by_shape, handle
from .plan import Plan, plan
from .profiler import Profile, profile
from .report import Report, explain
from .shapes import Source


def checkpoint(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Any = "auto",
    check_steps: int = 2,
    strict: bool = False,
    **options: Any,
) -> nn.Module:
    """Makes a model train within a budget: profile, plan and apply in one call. Returns the same module.

    args, kwargs: a sample of what the training loop calls the model with (a tensor may stand for a tuple of one).
    budget: bytes, "8GiB", "80%" (of the device), "auto" (what is free), or a cairn.Budget.
    check_steps: so many training steps with each plan are measured. One over the budget warns, and the plan is made
        again with a larger reserve when the optimizer steps; if strict, it raises BudgetExceeded.
    options: loss_fn, optimizer, blocks, keep, passes, inside, outside, holds_output, progress as for `profile`;
        host_budget, tier, link, solver, scope, gradients, allow, and those of solvers, as for `plan`;
        preserve_rng_state, determinism_check, on_shape_change as for `apply`; here on_shape_change is "replan": for a
        step whose inputs are larger than all that were planned for, a plan is made when it begins.

    A plan that was at work is replaced. Raises InfeasibleBudget, with the least budget that works and what it is made
    of, and then leaves the model, and the old plan, alone.
    """
    _applied(model, args, kwargs, budget, check_steps, strict, options)
    return model


def _applied(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    budget: Any,
    check_steps: int,
    strict: bool,
    options: Mapping[str, Any],
) -> Handle:
    check_call(model, kwargs, options.get("loss_fn"), args)
    check_checkpoint(budget, {**options, "check_steps": check_steps, "strict": strict})
    to_profile, to_plan, left = _sorted_options(options)
    measured = profile(model, args, kwargs, **to_profile)
    made = plan(measured, budget, **to_plan)
    old = handle(model)
    if old is not None:
        old.remove()
    left = {"on_shape_change": "replan", **left}
    loss_fn, holds_output = to_profile.get("loss_fn"), to_profile.get("holds_output", True)
    progress: Any = to_profile.get("progress") or False  # no line among what a training loop prints

    def again(*args: Any, **others: Any) -> Profile:
        """Holds no optimizer: a training loop may make another one, and the state of the first goes with it."""
        made = profile(*args, loss_fn=loss_fn, holds_output=holds_output, progress=progress, **others)
        return made.with_optimizer_of(measured)

    limit = Budget(made.budget_bytes, reserve=budget.reserve if isinstance(budget, Budget) else None)
    source = Source(again, functools.partial(plan, budget=limit, **to_plan), measured)
    applied = apply_by_shape(model, made, source, **left)
    shapes = weakref.ref(applied.shapes)

    def plan_again(missed: Plan, by_bytes: int) -> None:
        current = shapes()
        try:
            if current is not None:
                current.correct(missed, by_bytes)
        except InfeasibleBudget as error:
            warn(f"the plan stays as it is: {error}")

    if check_steps > 0:
        applied.shapes.watch(Watch(check_steps, strict, plan_again))
    return applied


def check_checkpoint(budget: Any, options: Mapping[str, Any]) -> None:
    """Raises for a budget, or for options, that `checkpoint` does not take."""
    known = [*PROFILE_OPTIONS, *PLAN_OPTIONS, *APPLY_OPTIONS, "budget", "check_steps", "strict", *solver_options()]
    check_names(options, known, "checkpoint")
    check_budget(budget)
    to_profile, to_plan, left = _sorted_options(options)
    check_watching(options.get("check_steps", 2), options.get("strict", False))
    check_profile_options(to_profile)
    check_plan_options({**to_plan, "host_budget": host_budget_of(budget, to_plan.get("host_budget"))})
    check_apply_options(left)


def _sorted_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Those of `profile`, of `plan`, and the rest."""
    of_plan = (*PLAN_OPTIONS, *solver_options())
    to_profile = {name: value for name, value in options.items() if name in PROFILE_OPTIONS}
    to_plan = {name: value for name, value in options.items() if name in of_plan}
    return to_profile, to_plan, {n: v for n, v in options.items() if n not in to_profile and n not in to_plan}


def report(model: nn.Module) -> Report:
    """What is planned for a model on which `checkpoint` or `apply` works, and what was measured."""
    applied = handle(model)
    if applied is None:
        raise ValueError(f"no plan is applied to this {type(model).__name__}; see cairn.torch.checkpoint")
    watch = applied.shapes.watched_by
    found = explain(applied.plan, None if watch is None else watch.measured(applied.plan), applied.plans)
    return dataclasses.replace(found, notes=tuple(applied.executor.notes))


@contextlib.contextmanager
def budget(
    model: nn.Module, total: Any, sample_args: Any = (), sample_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Handle]:
    """`checkpoint` for the body of a with statement; the model is as it was afterwards."""
    check_steps, strict = options.pop("check_steps", 0), options.pop("strict", False)
    applied = _applied(model, sample_args, sample_kwargs, total, check_steps, strict, options)
    try:
        yield applied
    finally:
        applied.remove()


# -- checkpoint_sequential -----------------------------------------------------------------------------------


class _Chained(nn.Module):
    """Functions called one after the other; a tuple is handed on as several arguments."""

    def __init__(self, functions: Sequence[Callable[..., Any]], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.links = nn.ModuleList(f if isinstance(f, nn.Module) else _Function(f) for f in functions)
        self.constant = dict(kwargs)

    def forward(self, *value: Any) -> Any:
        return _run_chain(list(self.links), value if len(value) != 1 else value[0], self.constant)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _run_chain(functions: Sequence[Callable[..., Any]], value: Any, kwargs: Mapping[str, Any]) -> Any:
    for function in functions:
        value = function(*value, **kwargs) if isinstance(value, tuple) else function(value, **kwargs)
    return value


_chains: OrderedDict[tuple[Any, ...], tuple[_Chained, Plan]] = OrderedDict()  # the last few that were planned
_CHAINS_KEPT = 4


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int | None = None,
    input: Any = None,
    *,
    budget: Any = None,
    preserve_rng_state: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """As `torch.utils.checkpoint.checkpoint_sequential`, and with a budget instead of a number of segments.

    segments: the functions are cut into so many of equal count; all but the last are run again in the backward.
    budget: bytes or a size such as "2GiB" for the activations of these functions (parameters and gradients are not
        counted): what is run again is then chosen by measurement, at the first call and for every new input shape.
    input: a tensor, or a tuple that is passed as several arguments. kwargs go to every function.
    """
    chain = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if (segments is None) == (budget is None):
        raise ValueError("give either segments or budget=")
    if segments is not None:
        return _in_segments(chain, segments, input, preserve_rng_state, kwargs or {})
    if not chain:
        raise ValueError("there are no functions to run: the list is empty")
    arguments = input if isinstance(input, tuple) else (input,)
    if not torch.is_grad_enabled():
        return _run_chain(chain, input, kwargs or {})
    planned, made = _planned_chain(chain, budget, arguments, kwargs or {}, options)
    with apply(planned, made, preserve_rng_state=preserve_rng_state):  # the backward needs it no more
        return planned(*arguments)


def _in_segments(
    chain: Sequence[Callable[..., Any]], segments: int, value: Any, preserve_rng_state: bool, kwargs: Mapping[str, Any]
) -> Any:
    try:
        segments = operator.index(segments)  # a NumPy integer, too
    except TypeError:
        raise TypeError(
            f"segments is how many there shall be, not {segments!r}; a budget is given by name: budget='2GiB'"
        ) from None
    if not 1 <= segments <= len(chain):
        raise ValueError(f"segments must lie between 1 and the number of functions, {len(chain)}; it is {segments}")
    length = len(chain) // segments
    for start in range(0, length * (segments - 1), length):
        part = chain[start : start + length]
        arguments = value if isinstance(value, tuple) else (value,)
        value = torch_checkpoint(
            lambda *inputs, part=part: _run_chain(part, inputs if len(inputs) != 1 else inputs[0], kwargs),
            *arguments,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
        )
    return _run_chain(chain[length * (segments - 1) :], value, kwargs)


def _planned_chain(
    chain: Sequence[Callable[..., Any]],
    budget: Any,
    arguments: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[_Chained, Plan]:
    shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in arguments if isinstance(t, torch.Tensor))
    constants = tuple(sorted((name, id(value)) for name, value in kwargs.items()))
    training = tuple(f.training for f in chain if isinstance(f, nn.Module))
    key = (tuple(map(id, chain)), str(budget), shapes, constants, training, str(sorted(options.items())))
    if key not in _chains:
        made = _Chained(chain, kwargs)
        defaults = {"scope": "activations", "blocks": made.links, "progress": False}
        check_names(options, [*PROFILE_OPTIONS, *PLAN_OPTIONS, *solver_options()], "checkpoint_sequential")
        to_profile, to_plan, _ = _sorted_options({**defaults, **options})
        _chains[key] = made, plan(profile(made, arguments, **to_profile), budget, **to_plan)
        while len(_chains) > _CHAINS_KEPT:
            _chains.popitem(last=False)
    _chains.move_to_end(key)
    return _chains[key]
