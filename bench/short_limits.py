"""Auto against every other solver at the same short time limits, as Markdown.

Chains of stages that all differ and training graphs with skips, at a quarter of the way from the least memory that is
proved to what storing everything takes. One line for each problem and limit: what auto's schedule takes beyond storing
everything and its gap, the best of the others, and the worst of those that found one.

python bench/short_limits.py [--stages 100 1000] [--nodes 400 3000] [--limits 100ms 200ms 500ms 1s 2s 5s 10s]
"""

from __future__ import annotations

import random

import cairn
from large_graphs import training_graph
from support import arguments
from support.answers import between, known

LIMITS = ["100ms", "200ms", "500ms", "1s", "2s", "5s", "10s"]


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--stages", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--nodes", type=int, nargs="*", default=[400, 3000])
    parser.add_argument("--limits", nargs="+", default=LIMITS)
    chosen = arguments.parse(parser, stages=[60], nodes=[200], limits=["100ms"])
    problems: list[cairn.Chain | cairn.Graph] = [different_stages(count) for count in chosen.stages]
    problems += [training_graph(count // 2) for count in chosen.nodes]
    print("| problem | limit | auto | its gap | best of the others | by | worst of the others | by |")
    print("|---|---|---|---|---|---|---|---|")
    for problem in problems:
        for limit in chosen.limits:
            print(row(problem, limit), flush=True)


def row(problem: cairn.Chain | cairn.Graph, limit: str) -> str:
    """One line of the table."""
    limits = cairn.limits(problem, solver="store-all")
    budget = between(limits.least_lower_bytes, limits.store_all_bytes, 0.25)
    auto = cairn.solve(problem, budget, time_limit=limit)
    times = {name: time for name in others(problem) if (time := time_of(problem, budget, name, limit)) is not None}
    best, worst = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    base = known(limits.store_all_ns)
    over = [f"{known(time) / base - 1:.3%}" for time in (auto.makespan_ns, times[best], times[worst])]
    kind = "chain" if isinstance(problem, cairn.Chain) else "graph"
    columns = [f"{kind} of {len(problem)}", limit, over[0], f"{auto.gap or 0:.2%}", over[1], best, over[2], worst]
    return "| " + " | ".join(columns) + " |"


def others(problem: cairn.Chain | cairn.Graph) -> list[str]:
    """The solvers that auto asks; those that need a link, where the problem has one."""
    takes = "takes_chains" if isinstance(problem, cairn.Chain) else "takes_graphs"
    solvers = [solver for solver in cairn.solvers() if solver.available and getattr(solver, takes)]
    usable = [solver for solver in solvers if problem.machine or not solver.needs_machine]
    left_out = ("auto", "graph-milp", "graph-lp-round")
    return [solver.name for solver in usable if solver.name not in left_out and not solver.minimizes_memory]


def time_of(problem: cairn.Chain | cairn.Graph, budget: int, solver: str, limit: str) -> int | None:
    """The makespan that a solver finds within a time limit; None where it finds none or does not take the problem."""
    try:
        return cairn.solve(problem, budget, solver=solver, time_limit=limit).makespan_ns
    except cairn.Error:
        return None


def different_stages(count: int, seed: int = 1) -> cairn.Chain:
    """A chain of stages that all differ in sizes and times."""
    draw = random.Random(seed)
    stages = []
    for _ in range(count):
        output, forward = draw.randint(2**20, 2**24), draw.randint(10**5, 10**6)
        saved = output + draw.randint(2**20, 2**25)
        stages.append(cairn.Stage(output_bytes=output, saved_bytes=saved, forward_ns=forward, backward_ns=2 * forward))
    return cairn.Chain(stages, input_bytes=2**20)


if __name__ == "__main__":
    main()
