"""What a chain supposes of a schedule, and what performing it takes beyond the list: on lists by hand."""

# ruff: noqa: E402

from __future__ import annotations

import collections
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cairn.torch.base.stage_measure import OptionMeasure, StageMeasure
from cairn.torch.base.stages import BLOCK, OUTSIDE, StageRef
from cairn.torch.schedule import dependent_counts
from cairn.torch.schedule.dependent_counts import Assumptions, HeldInForward, assumptions_of, first_runs, releases_early
from cairn.torch.schedule.executed import as_performed, excess_bytes, in_order_of_process
from cairn.torch.schedule.program import FORWARDS
from executor_support import Op, backward, drop, drop_input, keep, save

#: Three stages: all is kept; the first two are recomputed from the input; the input of the second stays.
KEPT = [save(1), save(2), save(3), backward(3), backward(2), backward(1)]
AGAIN = [
    *(keep(1), drop_input(2), save(3), backward(3)),
    *(keep(1), save(2), backward(2), save(1), backward(1)),
]
FROM_INPUTS = [keep(1), keep(2), save(3), backward(3), save(2), backward(2), save(1), backward(1)]
#: What a stage has saved goes before any backward, after that of the stage behind it, and after that of the last.
EARLY = [save(1), save(2), drop("saved", 1), save(3), backward(3), backward(2), save(1), backward(1)]
LATE = [save(1), save(2), save(3), backward(3), backward(2), drop("saved", 1), save(1), backward(1)]
FROM_OUTPUT = [save(1), save(2), save(3), backward(3), drop("saved", 2), save(2), backward(2), backward(1)]


def stages(**changed: dict[str, Any]) -> list[StageMeasure]:
    """Three blocks, with what was measured of some."""
    return [StageMeasure(name, BLOCK, **changed.get(name, {})) for name in "abc"]


# -- what is supposed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "gone"),
    [
        (KEPT, [False, False]),
        (AGAIN, [True, False]),  # the second's output is there when the third's backward is over
        (FROM_INPUTS, [False, False]),
        (EARLY, [True, False]),
        (LATE, [False, False]),
        (FROM_OUTPUT, [False, False]),
        ([keep(1), save(2), drop("output", 1), save(3), backward(3), save(1), backward(2), backward(1)], [True, False]),
    ],
)
def test_what_goes_before_the_next_backward(ops: list[Op], gone: list[bool]) -> None:
    assert [releases_early(ops, stage) for stage in (1, 2)] == gone
    held = assumptions_of(ops, stages(a={"also_held_bytes": 5}, b={"also_held_bytes": 5}))
    assert held == Assumptions(counted_twice=frozenset(n for n, is_gone in zip((1, 2), gone, strict=True) if is_gone))


@pytest.mark.parametrize(
    ("ops", "apart", "again"),
    [
        (KEPT, set(), set()),
        (AGAIN, {1, 2}, {1}),
        (FROM_INPUTS, {1, 2}, set()),
        (EARLY, {1}, set()),
        (LATE, {1}, set()),
        (FROM_OUTPUT, {2}, set()),
    ],
)
def test_outputs_that_stay_to_the_end_are_counted_with_stages_that_always_keep_them(
    ops: list[Op], apart: set[int], again: set[int]
) -> None:
    pinned = {"pinned_bytes": 5, "pinned_saved_bytes": 5}
    runs = collections.Counter(op[1] for op in ops if op[0] in FORWARDS)
    unsaved = Assumptions(
        repeated=frozenset(stage for stage in (1, 2) if runs[stage] > 1), recomputed_unsaved=frozenset(again)
    )
    assert assumptions_of(ops, stages(a=pinned, b=pinned)) == unsaved | Assumptions(frozenset(apart))
    assert assumptions_of(ops, stages(a={"pinned_bytes": 5}, b={"pinned_bytes": 5})) == unsaved


@pytest.mark.parametrize(
    ("ops", "gone", "gone_unsaved"),
    [
        (KEPT, False, False),
        (AGAIN, True, True),
        (FROM_INPUTS, False, True),
        (EARLY, True, True),
        (LATE, False, False),
    ],
)
def test_listed_outputs_stay_with_what_first_runs_leave(ops: list[Op], gone: bool, gone_unsaved: bool) -> None:
    """Of outputs that are listed, a stage that saves nothing of them leaves none in its own output."""
    of_a = frozenset({(1, "a")})
    assert assumptions_of(ops, stages(c={"listed": {"a": 10}})).released_early == (of_a if gone else frozenset())
    apart = stages(a={"left_bytes": 10}, c={"listed": {"a": 10}})
    assert assumptions_of(ops, apart).released_early == (of_a if gone_unsaved else frozenset())


def copies(**changed: dict[str, Any]) -> list[StageMeasure]:
    """The first two stages save autocast's copy of a parameter that both read."""
    a = {"made_copies": {"w": 8, "v": 4}, "saved_copies": ["w", ""]}
    return stages(**{"a": a, "b": {"saved_copies": ["w"]}, **changed})


def test_copies_go_with_the_first_runs_that_saved_them() -> None:
    of_a, of_b = (1, "w"), (2, "w")
    assert assumptions_of(KEPT, copies()).released_early == set()
    assert assumptions_of(AGAIN, copies()).released_early == {of_a, of_b}
    assert assumptions_of(EARLY, copies()).released_early == {of_a}
    assert assumptions_of(FROM_OUTPUT, copies()).released_early == {of_b}  # before its own backward
    assert assumptions_of(FROM_OUTPUT, copies(a={})).released_early == set()  # which tells where only one saves it
    part = OptionMeasure("dk", 0, 0, 0, 0, 0, 0, "")
    with_part = copies(a={"saved_copies": ["w", ""], "options": [part, part]})
    assert assumptions_of([("forward_save", 1, 1), *KEPT[1:]], with_part).released_early == {of_a}
    assert assumptions_of([("forward_save", 1), *KEPT[1:]], with_part).released_early == set()


@pytest.mark.parametrize(
    ("ops", "wanted"),
    [
        (KEPT, set()),
        (AGAIN, {1, 2}),
        (FROM_INPUTS, {1, 2}),
        (FROM_OUTPUT, {1, 2}),  # the second is recomputed from the output of the first
        ([keep(1), save(2), save(3), backward(3), backward(2), save(1), backward(1)], {1}),
        ([("forward_save", 1, 0), ("forward_save", 2, 1), *KEPT[2:]], {1, 2}),  # what it recomputes may take its input
    ],
)
def test_outputs_that_no_stage_saves_stay_where_the_next_one_runs_from_them(ops: list[Op], wanted: set[int]) -> None:
    passing = {"passing_bytes": 5}
    assert assumptions_of(ops, stages(a=passing, b=passing)) == Assumptions(read_by_recomputation=frozenset(wanted))
    assert assumptions_of(ops, stages(b=passing)) == Assumptions(read_by_recomputation=frozenset(wanted & {2}))


def test_schedules_matter_where_something_is_held() -> None:
    assert not any(map(dependent_counts.depends, stages(a={"output_bytes": 5, "saved_copies": ["w"]})))
    for held in (
        {"also_held_bytes": 1},
        {"pinned_bytes": 1},
        {"made_copies": {"w": 1}},
        {"listed": {"b": 1}},
        {"passing_bytes": 1},
    ):
        assert dependent_counts.depends(stages(a=held)[0])


def test_what_is_supposed_adds_up() -> None:
    one = Assumptions(frozenset({1}), frozenset({2}), frozenset({3}), frozenset({(1, "w")}), frozenset({4}), 4)
    other = Assumptions(frozenset({5}), frozenset({6}), frozenset({7}), frozenset({(2, "w")}), frozenset({8}), 9)
    gone = frozenset({(1, "w"), (2, "w")})
    both = Assumptions(frozenset({1, 5}), frozenset({2, 6}), frozenset({3, 7}), gone, frozenset({4, 8}), 9)
    assert one | other == other | one == both
    assert one | dependent_counts.NO_ASSUMPTIONS == one


# -- what is counted where -----------------------------------------------------------------------------------


def added(found: list[StageMeasure], supposed: Assumptions, number: int) -> list[int]:
    """What stage `number` counts beside its own: a run that saves nothing; saved bytes, and both workspaces."""
    described: dict[str, Any] = {
        "forward_only_workspace_bytes": 0,
        "options": [{"saved_bytes": 0, "forward_workspace_bytes": 0, "backward_workspace_bytes": 0}],
    }
    HeldInForward(found, supposed).count(number, found[number - 1], described, supposed)
    return [described["forward_only_workspace_bytes"], *described["options"][0].values()]


def test_copies_are_counted_with_who_makes_and_who_keeps_them() -> None:
    assert [added(copies(), Assumptions(), number) for number in (1, 2, 3)] == [
        [0, 0, 0, 0],
        [0, -8, 8, 8],  # the first has it already
        [4, 0, 4, 0],  # what nobody saves, and stays to the end of the region
    ]
    early = Assumptions(early=frozenset({2}), late_bytes=5)
    assert [added(copies(), early, number) for number in (2, 3)] == [[4, -8, 12, 8], [9, 0, 9, 5]]
    gone = Assumptions(released_early=frozenset({(1, "w")}), early=frozenset({2}))
    assert [added(copies(), gone, number) for number in (1, 2, 3)] == [[0, 0, 0, 0], [12, 0, 12, 0], [4, 0, 4, 0]]


@pytest.mark.parametrize(("slack", "more"), [(0, 10), (3, 7), (20, 0)])
def test_listed_outputs_are_counted_but_for_what_goes_before_the_peak(slack: int, more: int) -> None:
    listing = stages(c={"listed": {"a": 10, "b": 100}, "listed_slack_bytes": slack})
    assert added(listing, Assumptions(), 3) == [0, 0, 0, 0]
    assert added(listing, Assumptions(released_early=frozenset({(1, "a")})), 3) == [more, 0, more, 0]
    listing[0].passing_bytes = 10  # so no stage has it in what it saves
    assert added(listing, Assumptions(), 3) == [more, 0, more, 0]
    assert added(listing, Assumptions(read_by_recomputation=frozenset({1})), 3) == [0, 0, 0, 0]


# -- what performing it takes --------------------------------------------------------------------------------

MEMORY: dict[str, Any] = {"fixed_bytes": 100, "input_bytes": 5, "input_grad_bytes": 5}


def problem(*workspaces: int, always_kept: int = 0) -> dict[str, Any]:
    """A chain whose stages take so much beside what they save in their forwards; the first as much in its backward."""
    made: list[dict[str, Any]] = []
    for number, workspace in enumerate(workspaces, 1):
        own = {"forward_workspace_bytes": workspace, "backward_workspace_bytes": workspace if number == 1 else 2}
        sizes = {"output_bytes": 10, "grad_bytes": 10, "weight_grad_bytes": 7, "forward_only_workspace_bytes": 3}
        made.append({**sizes, "no_recompute": number == always_kept, "options": [{"saved_bytes": 20, **own}]})
    return {**MEMORY, "stages": made}


def test_first_runs_and_the_last_backward_are_told_from_later_ones() -> None:
    assert first_runs(problem(1, 1, 1), KEPT) == ({1: 136, 2: 156, 3: 176}, 194, 194)
    assert first_runs(problem(1, 1, 1), AGAIN) == ({1: 128, 2: 138, 3: 146}, 164, 171)


BLOCKS = [StageRef(BLOCK, name) for name in "abc"]
BETWEEN = [BLOCKS[0], StageRef(OUTSIDE, "between"), BLOCKS[2]]


@pytest.mark.parametrize("ops", [KEPT, AGAIN, FROM_INPUTS, EARLY, LATE, FROM_OUTPUT])
def test_lists_of_blocks_are_performed_as_they_are(ops: list[Op]) -> None:
    assert as_performed(ops, BLOCKS) == [(op, 0) for op in ops]
    assert excess_bytes(problem(1, 1, 1), ops, as_performed(ops, BLOCKS)) == 0


def test_what_runs_again_waits_for_what_runs_by_itself() -> None:
    first, rest = [keep(1), save(2), save(3), backward(3)], [save(1), backward(1)]
    moves = [keep(1), drop("output", 1)]
    performed = as_performed([*first, *moves, backward(2), *rest], BETWEEN)
    assert [op for op, _ in performed] == [*first, backward(2), *moves, *rest]
    listed = [*first, drop("output", 1), keep(1), backward(2), *rest]
    assert [op for op, _ in as_performed(listed, BETWEEN)] == [*first, drop("output", 1), backward(2), keep(1), *rest]
    assert [op for op, _ in as_performed([*first, *moves], BETWEEN)] == [*first, *moves]


def test_what_is_offloaded_goes_ahead_of_what_waits() -> None:
    """But for the values that a run which waits reads or makes."""
    stages = [*BLOCKS, StageRef(OUTSIDE, "between"), StageRef(BLOCK, "d")]
    far, near = [("offload", "saved", 1), drop("saved", 1)], [("offload", "saved", 3), ("offload", "output", 2)]
    ops = [save(1), save(2), keep(3), save(3), *near, *far, drop("saved", 3), save(4), save(5)]
    expected = [save(1), save(2), keep(3), *far, save(4), save(3), *near, drop("saved", 3), save(5)]
    assert in_order_of_process(ops, stages) == expected
    assert as_performed(expected, stages) == [(op, 0) for op in expected]


def test_what_a_backward_outside_of_blocks_lets_go_of_is_not_dropped_behind_it() -> None:
    ops = [keep(1), save(1), drop("output", 1), save(2), backward(2), backward(1)]
    expected = [keep(1), save(2), backward(2), save(1), backward(1)]
    assert in_order_of_process(ops, BETWEEN[:2]) == expected
    ops = [save(1), keep(1), drop("output", 1), save(2), backward(2), backward(1)]  # of one that is made while it waits
    assert in_order_of_process(ops, BETWEEN[:2]) == [
        save(1),
        save(2),
        backward(2),
        keep(1),
        drop("output", 1),
        backward(1),
    ]


def test_what_is_made_too_late_to_be_read_goes_again() -> None:
    """The output of the first stage, which the list has for the backward of what lies outside of blocks."""
    ops = [keep(1), save(2), save(3), drop("output", 1), backward(3), keep(1), backward(2), save(1), backward(1)]
    performed = as_performed(ops, BETWEEN)
    assert excess_bytes(problem(500, 1, 1, always_kept=2), ops, performed) == 0
    assert excess_bytes(problem(500, 1, 1), ops, performed) == 10  # another run may read it


def test_an_output_that_is_made_again_while_the_caller_has_it_is_there_twice() -> None:
    ops = [keep(1), drop("output", 1), keep(1), save(2), backward(2), save(1), backward(1)]
    performed = as_performed(ops, BLOCKS[:2])
    assert [alone for _, alone in performed] == [0, 0, 1, 1, 0, 0, 0]
    assert excess_bytes(problem(1, 40), ops, performed) == 10
    assert excess_bytes(problem(1, 1), ops, performed) == 0  # the peak is elsewhere
    ops = [save(1), save(2), drop("saved", 2), save(2), backward(2), backward(1)]
    assert [alone for _, alone in as_performed(ops, BLOCKS[:2])] == [0, 0, 0, 2, 2, 0]
