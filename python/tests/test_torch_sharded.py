"""Parameters in parts on two ranks: what cannot be planned is refused by name before ranks wait for each other."""

# ruff: noqa: E402

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch without gloo", allow_module_level=True)

import sharded_support as ranks
from cairn.torch import PlanMismatch
from cairn.torch.planning.rank_plans import refuse_other_plans

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
shards = pytest.mark.skipif(TORCH_VERSION < (2, 7), reason="fully_shard needs streams there, which the CPU has not")

TASKS: ranks.Tasks = {
    "tensor-parallel": (ranks.refused, ranks.tensor_parallel, {}),
    "tensor-parallel later": (ranks.planned_before, None, {}),
}
SHARDED: ranks.Tasks = {
    "both": (ranks.refused, ranks.both, {}),
    "pairs": (ranks.planned, ranks.pairs, {}),
    "root": (ranks.planned, ranks.root, {}),
    "pairs that stay": (ranks.planned, ranks.pairs_that_stay, {}),
    "norm and head": (ranks.planned, ranks.norm_and_head, {}),
    "predicted": (ranks.predicted, ranks.pairs, {}),
    "named parts": (ranks.refused, ranks.pairs, {"blocks": "pairs.*.layers.*"}),
    "lists": (ranks.refused, ranks.lists, {}),
    "compiled": (ranks.compiled, ranks.pairs, {}),
    "checkpointed": (ranks.checkpointed, ranks.pairs, {}),
    "stages": (ranks.stages, None, {}),
    "root that goes": (ranks.refused, ranks.root_that_goes, {}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tasks = {**TASKS, **SHARDED} if TORCH_VERSION >= (2, 7) else TASKS
    return ranks.on_two_ranks(tmp_path_factory.mktemp("ranks"), tasks)


def test_tensor_parallel_modules_are_refused_by_name(found: dict[str, Any]) -> None:
    assert "pairs.0.layers.0.up.weight is a DTensor" in found["tensor-parallel"]
    assert "parallelize_module" in found["tensor-parallel"]


def test_a_model_that_was_made_tensor_parallel_after_its_plan_is_refused(found: dict[str, Any]) -> None:
    assert "pairs.0.layers.0.up.weight is a DTensor" in found["tensor-parallel later"]


@shards
def test_tensor_parallel_modules_that_are_fully_sharded_as_well_are_refused(found: dict[str, Any]) -> None:
    assert "pairs.0.layers.0.up.weight is a DTensor" in found["both"]


@shards
def test_what_is_sharded_as_one_is_a_block(found: dict[str, Any]) -> None:
    assert found["pairs"] == ["pairs.0", "pairs.1", "pairs.2"]


@shards
@pytest.mark.parametrize("how", ["root", "pairs that stay", "norm and head"])
def test_blocks_whose_parameters_stay_or_come_by_themselves_are_as_ever(found: dict[str, Any], how: str) -> None:
    assert found[how] == [f"pairs.{i}.layers.{j}" for i in range(3) for j in range(2)]


@shards
def test_the_peak_of_a_sharded_step_is_predicted(found: dict[str, Any]) -> None:
    assert found["predicted"] == [True] * 3


@shards
def test_parts_of_what_is_sharded_are_refused_where_they_are_named(found: dict[str, Any]) -> None:
    assert "blocks= names 'pairs." in found["named parts"] and "name 'pairs." in found["named parts"]


@shards
@pytest.mark.parametrize(
    ("how", "what"), [("lists", "as one, of which"), ("root that goes", "with those of the whole")]
)
def test_models_without_a_block_that_can_be_recomputed_are_refused(found: dict[str, Any], how: str, what: str) -> None:
    assert what in found[how]


@shards
def test_sharded_blocks_are_compiled_by_one_plan_of_all_ranks(found: dict[str, Any]) -> None:
    assert found["compiled"] == [True] * 10


@shards
def test_ranks_that_share_a_model_follow_one_plan(found: dict[str, Any]) -> None:
    """Ranks that recompute in different orders would wait for each other, or take wrong parameters."""
    assert found["checkpointed"] == [True] * 4


def test_ranks_that_share_no_parameters_do_not_wait_for_each_other(found: dict[str, Any]) -> None:
    assert found["stages"] == [True, True]


def test_the_error_of_different_plans_names_the_ranks_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh may have any ranks, such as those of a second stage."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    others = SimpleNamespace(of_all=lambda own: [own, (2, "other")])
    with pytest.raises(PlanMismatch, match=r"\(other on rank 2, own on rank 3\)"):
        refuse_other_plans("Net", SimpleNamespace(hash="own"), others)  # type: ignore[arg-type]


def test_a_task_that_fails_on_one_rank_is_named_with_where_the_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ALONE_SECONDS", 1)
    tasks: ranks.Tasks = {"alone": (ranks.fails_alone, None, {}), "never": (ranks.fails_alone, None, {})}
    with pytest.raises(pytest.fail.Exception, match="task 'alone': no answer of rank 0 in time") as failure:
        ranks.on_two_ranks(tmp_path, tasks)
    assert "ValueError: on one rank" in str(failure.value) and "in fails_alone" in str(failure.value)
    assert "in barrier" in str(failure.value)
