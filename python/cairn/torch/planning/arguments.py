"""Checks of the public calls' arguments, before anything is measured; each mistake is named in one sentence."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cairn
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..._budget import Budget
from ..base import _compat, budgets
from ..base.choices import ACCUMULATED, ALLOWED, CREATED, DETERMINISM_CHECKS, POLICIES, SCOPES
from ..base.errors import Unsupported, warn
from ..offloading.link import Link
from ..offloading.tiers import check_tier
from ..profiling.optimizer import UNMEASURED, needs_closure, unwrapped

PROFILE_OPTIONS = ("loss_fn", "optimizer", "blocks", "keep", "passes", "inside", "outside", "holds_output", "progress")
PLAN_OPTIONS = ("host_budget", "tier", "link", "allow", "solver", "scope", "gradients")
APPLY_OPTIONS = ("preserve_rng_state", "determinism_check", "on_shape_change")

_OF_THE_BUDGET = ("budget", "solver", "host_budget", "to_host", "to_device", "shared_link", "latency")


def solver_options() -> list[str]:
    """The options of solvers that a plan passes on."""
    return [option.name for option in cairn.options() if option.name not in _OF_THE_BUDGET]


def sorted_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split options into those of `profile`, those of `plan`, and the rest."""
    of_plan = (*PLAN_OPTIONS, *solver_options())
    to_profile = {name: value for name, value in options.items() if name in PROFILE_OPTIONS}
    to_plan = {name: value for name, value in options.items() if name in of_plan}
    return to_profile, to_plan, {n: v for n, v in options.items() if n not in to_profile and n not in to_plan}


def check_names(given: Iterable[str], known: Iterable[str], call: str) -> None:
    """Raises TypeError for an unknown option. The error names the nearest known one."""
    known = list(known)
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(known)}"
            raise TypeError(f"{call} has no option {name!r}{hint}")


def check_budget(budget: Any, name: str = "budget") -> None:
    """Raises TypeError or ValueError if this is not a budget."""
    budgets.resolve(budget, torch.device("cpu"), name=name)
    if isinstance(budget, Budget) and budget.reserve is not None and budget.reserve != 0:
        budgets.size_bytes(budget.reserve, "reserve")


def refuse_torch_compiled(model: Any) -> None:
    """Raises ValueError for a model that torch.compile made: its backend keeps no report."""
    if isinstance(model, nn.Module) and _compat.compiled_inside(model) is not None:
        raise ValueError(
            "torch.compile made this model, with backend='cairn' or another one: report, sweep and verify need one "
            "that cairn.torch.compile returned"
        )


def check_plan_options(options: Mapping[str, Any]) -> None:
    """Raises for options that neither `plan` nor a solver has, and for wrong values."""
    check_names(options, [*PLAN_OPTIONS, *solver_options()], "a plan")
    _check_offloading(allowed(options.get("allow"), options.get("host_budget")), options)
    check_choice("scope", options.get("scope", SCOPES[0]), SCOPES)
    check_choice("gradients", options.get("gradients", ACCUMULATED), (ACCUMULATED, CREATED))
    chains = [info.name for info in cairn.solvers() if info.takes_chains]
    check_choice("solver", options.get("solver", "auto"), chains)
    _check_way(options.get("host_budget"), options.get("tier", "host"), options.get("link"))
    own = {name: value for name, value in options.items() if name in solver_options()}
    cairn.solver_accepts("auto", _ANY, **own)  # raises for values that no solver takes


def allowed(allow: Any, host_budget: Any) -> tuple[str, ...]:
    """The names in `allow`; by default all, "offload" only where there is a host_budget."""
    if allow is None:
        return tuple(name for name in ALLOWED if name != "offload" or host_budget is not None)
    if not isinstance(allow, (tuple, list, set, frozenset)):
        raise ValueError(f"allow={allow!r}: it is a tuple of names, of {', '.join(map(repr, ALLOWED))}")
    for name in allow:
        check_choice("a name in allow=", name, ALLOWED)
    if "recompute" not in allow:
        raise ValueError(
            f"allow={allow!r}: it contains 'recompute' always; what must not be recomputed is named by keep= of profile"
        )
    return tuple(name for name in ALLOWED if name in allow)


def host_budget_of(budget: Any, host_budget: Any) -> Any:
    """The host budget: the argument, or else that of a cairn.Budget, whose "auto" stands for none."""
    if host_budget is None and isinstance(budget, Budget) and budget.host != "auto":
        return budget.host
    return host_budget


_ANY = cairn.Chain([cairn.Stage(1, saved_bytes=1, forward_ns=1, backward_ns=1)], input_bytes=1)


def _check_way(host_budget: Any, tier: Any, link: Any) -> None:
    """Raises if host_budget=, tier= or link= are not valid."""
    if host_budget not in (None, "auto", 0):
        budgets.size_bytes(host_budget, "host_budget")
    check_tier(tier)
    if isinstance(link, str):
        try:
            cairn.parse_rate(link)
        except cairn.BadInput as error:
            raise cairn.BadInput(f"link={link!r}: {error.message}") from None
    elif link is not None and not isinstance(link, (Link, cairn.Machine)):
        raise TypeError(f"link must be a rate such as '12GB/s', a Link or a cairn.Machine, not {_kind(link)}")
    if host_budget is None and (tier != "host" or link is not None):
        raise ValueError(
            "tier= and link= are for offloading: say how much memory its tier has, by host_budget='8GiB' or 'auto'"
        )


def _check_offloading(allow: Iterable[str], options: Mapping[str, Any]) -> None:
    """Raises if some options ask for offloading and others forbid it."""
    offloads, host_budget, solver = "offload" in allow, options.get("host_budget"), options.get("solver", "auto")
    if offloads and host_budget is None:
        raise ValueError("allow= contains 'offload': say how much memory its tier has, by host_budget='8GiB' or 'auto'")
    if host_budget is not None and not offloads:
        raise ValueError(
            f"host_budget={host_budget!r} is for offloading, and allow={options['allow']!r} forbids it: "
            "add 'offload', or leave host_budget= out"
        )
    offloading = [info.name for info in cairn.solvers() if info.takes_chains and info.needs_machine]
    if offloads and solver not in ("auto", *offloading):
        raise ValueError(
            f"solver {solver!r} offloads nothing: leave host_budget= out, or solver=; there are {', '.join(offloading)}"
        )
    if solver in offloading and not offloads:
        raise ValueError(
            f"solver {solver!r} offloads: say how much memory its tier has, by host_budget='8GiB' or 'auto'"
        )


def check_profile_options(options: Mapping[str, Any]) -> None:
    """Raises for wrong arguments of `profile`."""
    check_count("passes", options.get("passes", 1), 1)
    for name in ("inside", "outside", "holds_output"):
        check_flag(name, options.get(name, True))


def check_watching(check_steps: Any, strict: Any) -> None:
    """Raises for wrong arguments about the measurement of the first steps."""
    check_count("check_steps", check_steps, 0)
    check_flag("strict", strict)


def check_count(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError if this is not an integer of at least `least`. One of NumPy's is accepted."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} is {value}; at least {least}")


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError if this is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_apply_options(options: Mapping[str, Any]) -> None:
    """Raises for wrong arguments of `apply`."""
    check_flag("preserve_rng_state", options.get("preserve_rng_state", True))
    check_choice("on_shape_change", options.get("on_shape_change", POLICIES[0]), POLICIES)
    check_choice("determinism_check", options.get("determinism_check", "default"), DETERMINISM_CHECKS)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ValueError if a value is none of the choices. The error names the nearest choice."""
    choices = list(choices)
    if value not in choices:
        nearest = difflib.get_close_matches(str(value), choices, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}{hint}")


def check_call(model: Any, kwargs: Any, loss_fn: Any = None, args: Any = None) -> None:
    """Raises TypeError if a model, its sample or its loss has a wrong type, and Unsupported for lazy modules."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, not {_kind(model)}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs must map names to the model's keyword arguments, not be {_kind(kwargs)}; several positional "
            "arguments are a tuple, and a budget is given by name: budget='8GiB'"
        )
    if args is not None:
        _check_sample(model, args, kwargs or {})
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise Unsupported(f"{name} has no shape yet: run the model once, as on this sample, and call this again")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the model's output, not {_kind(loss_fn)}")
    if loss_fn is not None:
        _check_takes_output(loss_fn)


def _check_sample(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises TypeError if the model cannot be called with the sample."""
    if isinstance(args, (DataLoader, Dataset, Iterator)):
        raise TypeError(
            f"args is {_kind(args)}: give what the loop passes to the model of one batch of it, such as "
            "next(iter(loader))[0]"
        )
    name, takes = type(model).__name__, _signature(model.forward)
    if takes is None:
        return
    if isinstance(args, Mapping) and args and set(args) <= set(takes.parameters):
        raise TypeError(
            f"args is {_kind(args)} of what this {name} takes by name ({', '.join(map(str, args))}): give it as kwargs="
        )
    if model._forward_pre_hooks:
        return  # hooks may change the arguments
    try:
        takes.bind(*positional(args), **kwargs)
    except TypeError as error:
        targets = ", without the targets of a batch" if "too many positional" in str(error) else ""
        raise TypeError(
            f"this {name} cannot be called with the sample ({error}): args and kwargs are what the loop calls the "
            f"model with{targets}"
        ) from None


def _signature(function: Any) -> inspect.Signature | None:
    """The parameters of a function; None if its signature is unknown."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _check_takes_output(loss_fn: Any) -> None:
    """Raises TypeError if the loss cannot be called with the model's output alone."""
    try:
        _check_takes(loss_fn, 1)
    except TypeError as error:
        raise TypeError(
            f"loss_fn is called with the model's output alone, and this one cannot be ({error}): give a function such "
            "as loss_fn=lambda output: criterion(output, target)"
        ) from None


def check_takes_targets(loss_fn: Any) -> None:
    """Raises if a loss cannot be called with the model's output and targets."""
    if loss_fn is None:
        raise ValueError("targets= are for loss_fn, which is called as loss_fn(output, targets): give loss_fn=, too")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the model's output and targets, not {_kind(loss_fn)}")
    try:
        _check_takes(loss_fn, 2)
    except TypeError as error:
        raise TypeError(
            f"with targets=, loss_fn is called as loss_fn(output, targets), and this one cannot be ({error})"
        ) from None


def _check_takes(loss_fn: Any, count: int) -> None:
    """Raises TypeError if the signature of a function does not allow `count` positional arguments."""
    takes = _signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    if takes is not None:
        takes.bind(*[None] * count)


def check_extra_time(extra_time: Any) -> None:
    """Raises TypeError or ValueError if this is not a share of a step's time."""
    if isinstance(extra_time, bool) or not isinstance(extra_time, (int, float)):
        raise TypeError(f"extra_time must be a share of the plain step's time, such as 0.3, not {extra_time!r}")
    if not 0 <= extra_time < math.inf:
        raise ValueError(f"extra_time is {extra_time}; it is a share of the plain step's time: at least 0, and finite")


def positional(args: Any) -> tuple[Any, ...]:
    """The positional arguments of a model; a single tensor counts as a tuple of one."""
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)


def check_plan(plan: Any) -> None:
    """Raises TypeError if this is not a plan."""
    if not hasattr(plan, "executed_ops"):
        raise TypeError(f"a plan is what cairn.torch.plan or Plan.load returns, not {_kind(plan)}")


def check_optimizer(model: nn.Module | None, optimizer: Any) -> None:
    """Raises if the step of an optimizer cannot be measured. Warns if it has none of the parameters of a model."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        several = (
            ". Of several, pass the one that keeps most, and leave room for the others by cairn.Budget(reserve=)"
            if isinstance(optimizer, (list, tuple))
            else ""
        )
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {_kind(optimizer)}{several}")
    optimizer = unwrapped(optimizer)
    if "param_groups" not in vars(optimizer):
        raise Unsupported(f"the {type(optimizer).__name__} has its parameters in another optimizer: pass that one")
    if needs_closure(optimizer):
        raise Unsupported(
            f"a step of {type(optimizer).__name__} runs the model again and again by a closure, so it cannot be "
            f"measured apart: {UNMEASURED}"
        )
    own = set() if model is None else {id(p) for p in model.parameters()}
    if model is not None and not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        warn("the optimizer has none of the model's parameters: is it the one of another model?")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
