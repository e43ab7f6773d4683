"""One plan for all ranks that share a model (FSDP2).

A recomputation gathers the parameters of its block from all ranks. Ranks that recompute blocks in different orders wait
for each other for ever, or take the parameters of one block for those of another. Plans that ranks make by themselves
differ, because measured times do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import distributed

from ..._budget import Budget
from ..base.errors import PlanMismatch
from ..base.ranks import Ranks
from .plan import Plan


def plan_of_ranks(make: Callable[[Any], Plan], budget: Any, ranks: Ranks) -> Plan:
    """The plan that `make` gives for a budget; ranks that share a model take one that they all have made.

    It is within the smallest of their budgets, and that of the rank whose plain step takes the most memory, which may
    have the largest batch. An error of one rank is raised on all of them.
    """
    if not ranks:
        return make(budget)
    plans = _of_all(make, budget, ranks)
    smallest = min(plan.budget_bytes for plan in plans)
    if any(plan.budget_bytes > smallest for plan in plans):
        given = budget if isinstance(budget, Budget) else Budget()
        plans = _of_all(make, dataclasses.replace(given, total=smallest), ranks)
    return max(plans, key=lambda plan: plan.plain_peak_bytes)  # the first of equals: the same on each rank


def _of_all(make: Callable[[Any], Plan], budget: Any, ranks: Ranks) -> list[Plan]:
    outcome: Any
    try:
        outcome = make(budget).to_json()
    except Exception as error:  # which all ranks raise
        outcome = error.with_traceback(None)
    outcomes = ranks.of_all(outcome)
    failed = next((each for each in outcomes if isinstance(each, Exception)), None)
    if failed is not None:
        raise failed
    return list(map(Plan.from_json, outcomes))


def refuse_other_plans(model_name: str, plan: Plan, ranks: Ranks) -> None:
    """Raises PlanMismatch on each rank that shares a model if not all of them follow this plan."""
    if not ranks:
        return
    hashes = dict(ranks.of_all((distributed.get_rank(), plan.hash)))
    if len(set(hashes.values())) > 1:
        found = ", ".join(f"{each[:15]} on rank {rank}" for rank, each in sorted(hashes.items()))
        raise PlanMismatch(
            f"ranks that share a {model_name} follow different plans ({found}). They would gather parameters in "
            "different orders, and wait for each other for ever or compute wrong gradients: call "
            "cairn.torch.checkpoint after fully_shard, or send the plan of one rank to all (Plan.to_json)"
        )
