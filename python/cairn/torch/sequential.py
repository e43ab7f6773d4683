"""`checkpoint_sequential`: torch's, and with a budget instead of a number of segments."""

from __future__ import annotations

import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .handle import apply
from .planning.arguments import PLAN_OPTIONS, PROFILE_OPTIONS, check_names, solver_options, sorted_options
from .planning.fingerprint import fingerprint_of
from .planning.plan import Plan
from .planning.task import plan
from .profiler import profile
from .rerun_state.snapshot import frozen

_PLANS_KEPT = 8  # of each chain of functions, those that were used last
_CHAINS_KEPT = 1024


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
    """Run functions in sequence, like `torch.utils.checkpoint.checkpoint_sequential`, within a budget.

    Parameters
    ----------
    functions : nn.Sequential or sequence of callables
        Functions to call one after the other. They may differ, and take and return tuples.
    segments : int, optional
        The number of segments of equally many functions; all but the last are recomputed in the backward.
    input : torch.Tensor or tuple
        A tuple is passed as several arguments.
    budget : int or str, optional
        Bytes, or a size such as "2GiB", for the activations of these functions; parameters and gradients are not
        counted. A measurement at the first call, and for every new input shape, chooses the recomputations.
    preserve_rng_state : bool
        Restore the state of random generators for a recomputation.
    kwargs
        Keyword arguments for every function.
    **options
        As for `plan`.

    Returns
    -------
    Any
        The result of the last function.

    Raises
    ------
    InfeasibleBudget
        No plan fits.

    Examples
    --------
    >>> out = ct.checkpoint_sequential(layers, input=hidden, budget="2GiB")
    """
    chain = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if (segments is None) == (budget is None):
        stray = " (a tensor in the second place is taken for these: give it as input=)"
        is_stray = isinstance(segments, (torch.Tensor, tuple))
        raise ValueError(f"give either segments{stray if is_stray else ''} or budget=")
    if segments is not None:
        _check_torch_options(options)
        return _in_segments(chain, segments, input, preserve_rng_state, kwargs or {})
    if not chain:
        raise ValueError("there are no functions to run: the list is empty")
    arguments = input if isinstance(input, tuple) else (input,)
    if not torch.is_grad_enabled():
        return _run_chain(chain, input, kwargs or {})
    planned, chosen = _planned(chain, budget, arguments, kwargs or {}, options)
    with apply(planned, chosen, preserve_rng_state=preserve_rng_state):  # the backward needs it no more
        return planned(*arguments)


def _check_torch_options(options: Mapping[str, Any]) -> None:
    """Raises for arguments that torch's function refuses, or that do not go with segments."""
    check_names(options, ["use_reentrant"], "checkpoint_sequential with segments")
    if options.get("use_reentrant", False) is not False:
        raise ValueError("use_reentrant=False is the only way: the recomputation runs in the graph's own backward")


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


# -- plans ---------------------------------------------------------------------------------------------------

_Key = tuple[Any, ...]

#: By the identities of a chain's functions: what tells that they are gone, and what was planned for them.
_chains: OrderedDict[_Key, tuple[list[Any], OrderedDict[_Key, Plan]]] = OrderedDict()


def _planned(
    chain: Sequence[Callable[..., Any]],
    budget: Any,
    arguments: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[_Chained, Plan]:
    """The chain as a module, and the plan for it: made once for all that a plan depends on."""
    chained, plans = _Chained(chain, kwargs), _plans_of(chain)
    leaves = tuple(t.requires_grad for t in (*arguments, *kwargs.values()) if isinstance(t, torch.Tensor))
    modes = tuple(part.training for part in chained.modules())
    key = (
        str(fingerprint_of(chained, arguments, kwargs)),
        leaves,
        modes,
        repr(frozen(dict(kwargs))),
        str(budget),
        str(sorted(options.items())),
    )
    if key not in plans:
        defaults = {"scope": "activations", "blocks": chained.links, "progress": False}
        check_names(options, [*PROFILE_OPTIONS, *PLAN_OPTIONS, *solver_options()], "checkpoint_sequential")
        to_profile, to_plan, _ = sorted_options({**defaults, **options})
        plans[key] = plan(profile(chained, arguments, **to_profile), budget, **to_plan)
        while len(plans) > _PLANS_KEPT:
            plans.popitem(last=False)
    plans.move_to_end(key)
    return chained, plans[key]


def _plans_of(chain: Sequence[Callable[..., Any]]) -> OrderedDict[_Key, Plan]:
    """The plans of a chain of functions. They are freed with the functions."""
    owners = [f.__self__ if isinstance(f, types.MethodType) else f for f in chain]
    parts = [f.__func__ if isinstance(f, types.MethodType) else None for f in chain]  # a method is made anew each time
    identity = tuple(map(id, (*owners, *parts)))
    if identity not in _chains:

        def forget(_: Any) -> None:
            _chains.pop(identity, None)

        _chains[identity] = [_weakly(owner, forget) for owner in owners], OrderedDict()
        while len(_chains) > _CHAINS_KEPT:
            _chains.popitem(last=False)
    _chains.move_to_end(identity)
    return _chains[identity][1]


def _weakly(owner: Any, forget: Callable[[Any], None]) -> Any:
    try:
        return weakref.ref(owner, forget)
    except TypeError:  # its class leaves no room for it; so that its identity is given to no other
        return owner
