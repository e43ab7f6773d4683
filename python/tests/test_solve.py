"""Solving, limits, bounds, options, solvers."""

import json
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import cairn
import pytest
from cairn import _options, _solution
from cairn._units import unit_of

DATA = Path(__file__).parents[2] / "tests" / "data"
GPT2 = cairn.load(DATA / "chains" / "gpt2.json")
GRAPH = cairn.load(DATA / "graphs" / "resnet_8.json")
HOST = cairn.Machine("64GiB", "12GB/s", "10GB/s", shared_link=True, latency_ns="10us")


def in_between(problem: cairn.Problem) -> int:
    limits = cairn.limits(problem)
    return (limits.least_bytes + limits.store_all_bytes) // 2


def test_solution() -> None:
    solution = cairn.solve(GPT2, in_between(GPT2))
    assert solution.found and solution.outcome in ("optimal", "feasible")
    assert solution.schedule is solution.require() and solution.problem is GPT2
    replay = cairn.verify(GPT2, solution.schedule).replay
    for name in ("makespan_ns", "peak_bytes", "recompute_ns", "stall_ns"):
        assert getattr(solution, name) == getattr(replay, name)
    assert solution.lower_bound_ns <= solution.makespan_ns
    assert solution.least_bytes <= solution.peak_bytes <= solution.budget_bytes < solution.store_all_bytes
    assert solution.recompute_ns > 0 and solution.host_peak_bytes is None and solution.checkpoints is None
    assert (solution.schedule.budget_bytes, solution.schedule.solver) == (solution.budget_bytes, solution.solver)
    again = pickle.loads(pickle.dumps(solution))
    assert again == solution and again.schedule == solution.schedule


def test_fields_are_those_of_the_command_line() -> None:
    page = """{"outcome": "optimal", "solver": "chain-exact", "budget_bytes": 1, "makespan_ns": 1, "peak_bytes": 1,
     "host_peak_bytes": null, "lower_bound_ns": 1, "gap": 0.0, "least_bytes": 1, "least_is_exact": true,
     "least_lower_bytes": 1, "store_all_bytes": 1, "store_all_ns": 1, "reason": null, "optimal_in": null,
     "recompute_ns": 0, "stall_ns": 0, "solve_ns": 1, "solver_peak_bytes": 1, "checkpoints": null,
     "objective_bytes": null}"""
    values = json.loads(cairn.solve(GPT2).to_json())
    assert list(values) == list(json.loads(page))
    assert type(values["least_is_exact"]) is bool and type(values["gap"]) is float


def test_outcomes_are_text() -> None:
    outcome = cairn.solve(GPT2).outcome
    assert outcome is cairn.Outcome.optimal and outcome == "optimal" and f"{outcome}" == str(outcome) == "optimal"
    assert outcome.name == outcome.value


def test_without_a_budget_everything_is_stored() -> None:
    for budget in (None, "none"):
        solution = cairn.solve(GPT2, budget)
        assert solution.budget_bytes is None and solution.recompute_ns == 0
        assert (solution.peak_bytes, solution.makespan_ns) == (solution.store_all_bytes, solution.store_all_ns)


def test_search_reaches_the_best_frontier_schedule() -> None:
    graph = cairn.load(DATA / "graphs" / "skips_49.json")
    for budget, best_ns in ((268, 5627), (321, 5131)):  # proved by graph-milp
        assert cairn.solve(graph, budget, solver="graph-search").makespan_ns == best_ns


def test_infeasible_is_an_answer() -> None:
    solution = cairn.solve(GPT2, 1000)
    assert solution.outcome == "infeasible" and not solution.found
    assert solution.schedule is solution.makespan_ns is solution.peak_bytes is None
    with pytest.raises(cairn.InfeasibleBudget, match=str(solution.least_bytes)) as caught:
        solution.require()
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (1000, solution.least_bytes)
    assert caught.value.solution is solution and caught.value.code == "infeasible"
    assert cairn.solve(GPT2, solution.least_bytes).found
    assert not cairn.solve(GPT2, solution.least_bytes - 1).found


def test_unknown_is_an_answer() -> None:
    solution = cairn.solve(GPT2, in_between(GPT2), solver="chain-dp", time_limit=0)
    assert solution.outcome == "unknown" and solution.stopped_early
    assert solution.reason == "the time limit of 0 ns ended before a schedule was found"
    with pytest.raises(cairn.NoSchedule, match="before") as caught:
        solution.require()
    assert not isinstance(caught.value, cairn.InfeasibleBudget)


def test_many_budgets() -> None:
    budget = in_between(GPT2)
    solutions = cairn.solve_many(GPT2, [budget, 1000, None, "100GiB"], solver="chain-dp")
    assert [solution.budget_bytes for solution in solutions] == [budget, 1000, None, 100 * 2**30]
    assert [solution.found for solution in solutions] == [True, False, True, True]
    assert solutions[0].makespan_ns >= solutions[3].makespan_ns
    assert cairn.solve_many(GPT2, []) == []


def test_limits() -> None:
    limits = cairn.limits(GPT2)
    assert limits.least_lower_bytes <= limits.least_bytes < limits.store_all_bytes
    own = cairn.limits(GPT2, "store-all")
    assert own.least_bytes == own.store_all_bytes == limits.store_all_bytes and not own.least_is_exact
    assert cairn.limits(GRAPH, "store-all").store_all_ns == cairn.solve(GRAPH, solver="store-all").makespan_ns
    with pytest.raises(TypeError, match="limits takes no budget"):
        cairn.limits(GPT2, budget="8GiB")


@pytest.mark.parametrize("option", [{"solver": "chain-dp"}, {"seed": 1}, {"iterations": 5}, {"minimize": "memory"}])
def test_a_bound_takes_no_options_of_solvers(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"bound takes no {next(iter(option))}: no solver is asked"):
        cairn.bound(GPT2, "5GiB", **option)


def test_small_sizes_are_told_once() -> None:
    stage = cairn.Stage(4, saved_bytes=8, forward_ns=1, backward_ns=2)
    chain = cairn.Chain([stage] * 3, input_bytes=4)
    with pytest.raises(
        cairn.InfeasibleBudget, match="^no schedule stays within 10 bytes: the least that works is 24 bytes$"
    ):
        cairn.solve(chain, 10).require()
    wide = cairn.Chain([stage] * 3, input_bytes=2000)
    with pytest.raises(cairn.InfeasibleBudget, match=r"within 1.95 KiB \(2000 bytes\): the least that works is"):
        cairn.solve(wide, 2000).require()


def test_bound() -> None:
    budget = in_between(GPT2)
    bound = cairn.bound(GPT2, budget)
    assert 0 < bound.lower_bound_ns <= cairn.solve(GPT2, budget).makespan_ns
    assert bound.method
    assert cairn.bound(GPT2, None).lower_bound_ns <= bound.lower_bound_ns


def test_a_machine_replaces_the_problems() -> None:
    solution = cairn.solve(GPT2, machine=HOST)
    assert solution.schedule.machine == HOST and solution.host_peak_bytes == 0
    assert cairn.solve(GPT2.replace(machine=HOST)).schedule.machine is None
    by_options = cairn.solve(
        GPT2, host_budget="64GiB", to_host="12GB/s", to_device=10**10, shared_link=True, latency=10_000
    )
    assert by_options.schedule == solution.schedule
    with pytest.raises(TypeError, match="must be a cairn.Machine"):
        cairn.solve(GPT2, machine="64GiB")


def test_solvers() -> None:
    table = {solver.name: solver for solver in cairn.solvers()}
    assert list(table)[-1] == "auto" and table["store-all"].takes_graphs
    assert table["chain-dp"].takes_chains and not table["chain-dp"].takes_graphs and table["chain-dp"].source
    for solver in table.values():
        assert solver.available and solver.summary and solver.cost and solver.source != ""
        assert bool(cairn.solver_accepts(solver.name, GRAPH)) <= solver.takes_graphs


def test_acceptance() -> None:
    assert cairn.solver_accepts("chain-dp", GPT2)
    answer = cairn.solver_accepts("chain-dp", GRAPH)
    assert not answer and answer.code == "unsupported" and "graph" in answer.reason
    with pytest.raises(cairn.BadInput, match='did you mean "chain-dp"'):
        cairn.solver_accepts("chain_dp", GPT2)
    with pytest.raises(TypeError, match="solver must be text, not int"):
        cairn.solver_accepts(3, GPT2)


def test_options() -> None:
    table = {option.name: option for option in cairn.options()}
    assert {"slots", "time_limit", "memory_limit", "minimize", "seed"} <= set(table)
    assert table["time_limit"].type == "duration" and table["minimize"].choices == ("time", "memory")
    assert all(option.help and option.fallback for option in table.values())
    assert {option.type for option in table.values()} <= set(_options._TYPE_NAMES)
    few = cairn.solve(GPT2, in_between(GPT2), solver="chain-dp", slots=20, time_limit="1m", seed=None)
    assert few.makespan_ns >= cairn.solve(GPT2, in_between(GPT2), solver="chain-dp").makespan_ns


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"slot": 3}, TypeError, "no option 'slot'; did you mean 'slots'"),
        ({"zzz": 3}, TypeError, "there are budget, solver, "),
        ({"slots": 0}, cairn.BadInput, "it goes from 1 to"),
        ({"slots": "many"}, cairn.BadInput, "not an integer"),
        ({"slots": True}, TypeError, "slots must be an integer, not True"),
        ({"seed": -1}, cairn.BadInput, "seed is -1"),
        ({"seed": 2**64}, cairn.Overflow, "seed"),
        ({"time_limit": 0.5}, TypeError, "nanoseconds or text such as '500ms', not 0.5"),
        ({"time_limit": "5"}, cairn.BadInput, "time-limit"),
        ({"minimize": "space"}, cairn.BadInput, r"time\|memory"),
        ({"minimize": 1}, TypeError, "minimize must be text"),
        ({"shared_link": "yes"}, cairn.BadInput, "shared-link"),
        ({"host_budget": "1GiB"}, cairn.BadInput, "to-host"),
        ({"solver": "magic"}, cairn.BadInput, r'^there is no solver "magic"; cairn.solvers\(\) lists them'),
        ({"solver": "chain-exat"}, cairn.BadInput, '^there is no solver "chain-exat"; did you mean "chain-exact"'),
        ({"solver": "brute-chain"}, cairn.Unsupported, "brute-chain"),
        ({"memory_limit": 1000, "solver": "chain-dp"}, cairn.MemoryLimit, "memory-limit"),
    ],
)
def test_options_are_checked(options: dict, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        cairn.solve(GPT2, in_between(GPT2), **options)


@pytest.mark.parametrize(
    ("budget", "kind"),
    [("1 GiB", cairn.BadInput), (-1, cairn.BadInput), (0.5, TypeError), (2**63, cairn.Overflow), (b"1", TypeError)],
)
def test_budgets_are_checked(budget: object, kind: type) -> None:
    for call in (cairn.solve, cairn.bound, lambda problem, limit: cairn.solve_many(problem, [limit])):
        with pytest.raises(kind, match="budget|size"):
            call(GPT2, budget)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"must be a cairn.Chain or a cairn.Graph, not PosixPath; cairn.load reads"):
        cairn.solve(DATA)
    with pytest.raises(TypeError, match=r"not dict; cairn.Problem.from_json reads its JSON text"):
        cairn.solve(json.loads(GPT2.to_json()))
    with pytest.raises(TypeError, match="must be a cairn.Schedule, not Solution; a Solution has one"):
        cairn.verify(GPT2, cairn.solve(GPT2))


def test_lists_and_callbacks_are_checked() -> None:
    with pytest.raises(TypeError, match="budgets must be a list of sizes, not str"):
        cairn.solve_many(GPT2, "8GiB")
    with pytest.raises(TypeError, match=r"progress must be a function of a cairn.Progress, not int"):
        cairn.solve(GPT2, "8GiB", progress=3)


def test_who_stops_a_long_solver_has_an_answer() -> None:
    """`auto` asks those that take a small part of the longest work before it."""
    stages = [cairn.Stage(10 + i % 17, saved_bytes=100 + 37 * i % 101, forward_ns=1000 + i * i % 997, backward_ns=2000)
              for i in range(150)]  # fmt: skip
    chain = cairn.Chain(stages, input_bytes=10)
    limits = cairn.limits(chain)
    budget = (9 * limits.least_bytes + limits.store_all_bytes) // 10
    solution = cairn.solve(chain, budget, progress=lambda state: state.phase == "chain-exact")
    assert solution.stopped_early and solution.found and "chain-dp" in solution.reason
    assert cairn.verify(chain, solution.schedule).replay.peak_bytes <= budget


def test_infeasible_says_whose_least_it_is() -> None:
    least = cairn.limits(GPT2).least_bytes
    said = f"every schedule needs at least 1.08 GiB ({least} bytes)"
    assert cairn.solve(GPT2, least - 1).reason == said
    assert cairn.solve(GPT2, least, solver="store-all").reason.startswith("store-all found none below ")
    assert cairn.solve(GPT2, 1000, solver="store-all").reason == said


@pytest.mark.parametrize("stages", [8, 40])
@pytest.mark.parametrize("objective", ["eq9", "eq6"])
def test_auto_asks_those_that_minimize_the_objective(objective: str, stages: int) -> None:
    """Of more than 16 layers the exhaustive solver is out, which takes both."""
    chain = cairn.Chain([cairn.Stage(9, saved_bytes=9, forward_ns=1, backward_ns=1)] * stages, input_bytes=5)
    found = cairn.solve(chain, minimize="memory", objective=objective)
    assert found.optimal_in == objective


def test_what_frees_most_for_its_time_runs_again() -> None:
    times = [70, 90, 5, 80, 60, 75]
    chain = cairn.Chain([cairn.Stage(10, saved_bytes=50, forward_ns=t, backward_ns=t) for t in times], input_bytes=10)
    most = cairn.limits(chain, solver="store-all")
    found = cairn.solve(chain, (most.store_all_bytes or 0) - 1, solver="keep-greedy")
    assert found.makespan_ns == (most.store_all_ns or 0) + 5


def test_long_chains_of_unlike_stages_use_their_budget() -> None:
    choose = random.Random(1)
    stages = []
    for _ in range(1400):  # too many for solvers that take seconds
        output = choose.randint(10**6, 10**8)
        forward, saved = choose.randint(10**5, 10**7), output + choose.randint(0, 3 * 10**8)
        stages.append(cairn.Stage(output, saved_bytes=saved, forward_ns=forward, backward_ns=2 * forward))
    chain = cairn.Chain(stages, input_bytes=10**6)
    most = cairn.limits(chain, solver="store-all")
    for share, at_most in ((97, 1.005), (70, 1.06), (50, 1.14)):
        found = cairn.solve(chain, (most.store_all_bytes or 0) * share // 100)
        assert found.makespan_ns is not None and found.makespan_ns <= at_most * (most.store_all_ns or 0)


def test_the_least_memory_of_deep_chains_is_that_of_the_best_selection() -> None:
    sizes = [100_000 + 100 * abs(i - 1650) + i * 37 % 100 for i in range(3300)]
    chain = cairn.Chain([cairn.Stage(s, saved_bytes=2**30, forward_ns=1, backward_ns=1) for s in sizes], input_bytes=9)
    found = cairn.solve(chain, minimize="memory")
    others = [cairn.solve(chain, minimize="memory", solver=f"select-{name}") for name in ("linear", "cubic")]
    assert found.least_bytes == found.peak_bytes == min(each.peak_bytes or 2**63 for each in others)


def test_options_of_other_solvers() -> None:
    """What would change nothing is refused, or, of limits, told."""
    budget = in_between(GPT2)
    with pytest.raises(cairn.Unsupported, match=r"^chain-exact takes no option slots; these do: .*chain-dp") as caught:
        cairn.solve(GPT2, budget, solver="chain-exact", slots=20)
    assert caught.value.path == "slots"
    with pytest.raises(cairn.Unsupported, match="a bound takes no option slots"):
        cairn.bound(GPT2, budget, slots=20)
    with pytest.raises(
        cairn.Unsupported, match="none of the solvers that auto asks about this problem takes option slots"
    ):
        cairn.compare(GRAPH, [None], slots=20)
    for call in (cairn.solve, lambda problem, limit, **options: cairn.solve_many(problem, [limit], **options)):
        with pytest.warns(UserWarning, match=r"^chain-dp has no use for seed; these have: .*graph-search") as told:
            call(GPT2, budget, solver="chain-dp", seed=3, slots=20, iterations=None)
        assert len(told) == 1
    with pytest.warns(UserWarning, match="store-all has no use for iterations"):
        cairn.limits(GPT2, solver="store-all", iterations=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cairn.solve(GPT2, solver="select-linear", minimize="memory", objective="eq9")
    table = {solver.name: solver.options for solver in cairn.solvers()}
    assert table["joint-graph"] == ("iterations", "seed") and table["store-all"] == ()
    assert set(table["auto"]) == {option for options in table.values() for option in options}


def test_compare_gives_each_solver_what_it_takes() -> None:
    stages = [cairn.Stage(10, saved_bytes=30, forward_ns=5, backward_ns=10) for _ in range(6)]
    chain = cairn.Chain(stages, input_bytes=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = cairn.compare(
            chain, ["150", None], slots=3, segments=2, seed=1, only=["chain-dp", "periodic", "chain-exact"]
        )
    assert list(made.solutions) == ["chain-dp", "periodic", "chain-exact"]
    coarse = cairn.solve(chain, "150", solver="chain-dp", slots=3)
    assert made.solutions["chain-dp"][0].makespan_ns == coarse.makespan_ns


def test_compare_goes_on_without_a_solver_that_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve_many(*arguments: Any, solver: str, **options: Any) -> list[cairn.Solution]:
        if solver == "chain-exact":
            raise cairn.NoMemory("out of memory")
        return cairn.solve_many(*arguments, solver=solver, **options)

    monkeypatch.setattr("cairn._compare.solve_many", solve_many)
    made = cairn.compare(GPT2, [None], only=["store-all", "chain-exact"])
    assert list(made.solutions) == ["store-all"] and made.left_out == {"chain-exact": "out of memory"}


@pytest.mark.parametrize(("option", "meant"), [("budget", "budgets"), ("solver", "only"), ("solvers", "only")])
def test_compare_says_what_it_has_instead_of_the_options_of_solve(option: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"compare has no option '{option}'; did you mean '{meant}'"):
        cairn.compare(GPT2, 2, **{option: "auto"})


def test_report() -> None:
    text = cairn.solve(GPT2, in_between(GPT2)).report()
    assert "budget" in text and "least memory" in text and text.endswith("\n")
    assert "infeasible" in cairn.solve(GPT2, 1000).report()
    selection = _solution.info_of(cairn.solve(GPT2))
    assert (selection.checkpoint_count, selection.gap) == (-1, 0.0)


def test_units() -> None:
    assert unit_of([]) == ("B", 1) and unit_of([3, 2**20]) == ("MiB", 2**20) and unit_of([2**50]) == ("TiB", 2**40)
    assert [cairn.parse_size(size) for size in ("8GiB", "1.5KB", 12, "12")] == [8 * 2**30, 1500, 12, 12]
    assert cairn.parse_rate("12GB/s") == 12 * 10**9 and cairn.parse_rate(5) == 5
    assert cairn.parse_duration("500ms") == 500_000_000 and cairn.parse_duration(7) == 7
    assert cairn.format_bytes(3 * 2**29) == "1.50 GiB" and cairn.format_ns(12_300_000) == "12.3 ms"
    for parse, text in ((cairn.parse_size, "8gib"), (cairn.parse_rate, "1GB"), (cairn.parse_duration, "1")):
        with pytest.raises(cairn.BadInput, match=text):
            parse(text)
        with pytest.raises(TypeError):
            parse(1.0)


def test_max_batch() -> None:
    stages = [cairn.Stage(10, saved_bytes=30, forward_ns=5, backward_ns=10) for _ in range(6)]
    chain = cairn.Chain(stages, input_bytes=10, fixed_bytes=100)
    found = cairn.max_batch(chain, 2000, 1, solver="chain-exact")
    assert found.batch is not None and found.refuted_batch is not None and found.refuted_batch > found.batch
    assert found.forward_ns == 30 * found.batch and found.recompute_ns <= found.forward_ns
    assert found.solver == "chain-exact" and found.peak_bytes <= 2000 and not found.stopped_early
    here = cairn.solve(chain.scaled(found.batch), 2000)
    assert here.makespan_ns == found.makespan_ns
    nothing = cairn.max_batch(chain, 100, 1)
    assert nothing.batch is None and nothing.makespan_ns is None and nothing.proved
    with pytest.raises(cairn.BadInput):
        cairn.max_batch(chain, 2000, 0)
    with pytest.raises(cairn.BadInput):
        cairn.max_batch(chain, None, 1)  # type: ignore[arg-type]
    with pytest.raises(cairn.BadInput):
        cairn.max_batch(cairn.Graph([cairn.Node(1, 1)]), 10, 1)
    with pytest.raises(cairn.Cancelled):
        cairn.max_batch(chain, 2000, 1, solver="chain-exact", progress=lambda state: True)


def test_compare(tmp_path: Path) -> None:
    stages = [cairn.Stage(10, saved_bytes=30, forward_ns=5, backward_ns=10) for _ in range(6)]
    chain = cairn.Chain(stages, input_bytes=10, name="six")
    made = cairn.compare(chain, 4)
    ends = cairn.limits(chain)
    budgets = [solution.budget_bytes for solution in made.solutions["auto"]]
    assert (budgets[0], budgets[-1], len(budgets)) == (ends.least_bytes, ends.store_all_bytes, 4)
    assert made.overheads("store-all") == [None, None, None, 0.0]
    assert made.left_out["graph-search"].startswith("graph-search takes graphs")
    assert set(made.solutions) | set(made.left_out) == {solver.name for solver in cairn.solvers()}
    lines = made.csv().splitlines()
    assert len(lines) == 1 + 4 * len(made.solutions) and lines[0].startswith("solver,outcome,budget_bytes")
    assert made.table().count("\n") == len(lines)
    chosen = [f"auto: {solution.solver}" for solution in made.solutions["auto"]]
    assert all(row.startswith(name) for row, name in zip(made.table().splitlines()[-4:], chosen, strict=True))
    assert all(line.startswith("auto,") for line in lines[-4:])
    two = cairn.compare(chain, ["1KB", None], only=["store-all"])
    assert list(two.solutions) == ["store-all"] and two.overheads("store-all") == [0.0, 0.0]
    for wrong, error, text in (
        (0, cairn.BadInput, "budgets is 0; at least 1"),
        (1001, cairn.BadInput, "at most 1000; a size stands in a list"),
        (["80%"], cairn.BadInput, "only the budget of cairn.torch may be a share of the device's memory"),
        ([], cairn.BadInput, "budgets: the list is empty"),
        (True, TypeError, "not a bool"),
        (None, TypeError, "budgets must be an integer, not NoneType"),
        ("4", TypeError, "budgets must be a list of sizes, or how many there shall be, not str"),
        ([cairn.Budget("1KB")], TypeError, "text such as '8GiB'; cairn.torch takes a Budget"),
    ):
        with pytest.raises(error, match=text):
            cairn.compare(chain, wrong)
    with pytest.raises(cairn.BadInput):
        cairn.compare(chain, only=["nobody"])
    pytest.importorskip("matplotlib")
    made.plot(tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert "<svg" in drawn and "<!-- budget, B -->" in drawn
