"""graph-search, graph-lp-round, graph-exact and graph-milp on random training graphs: a Markdown table.

A graph has so many forward nodes in a row, some with a second input from up to six nodes before, a loss, and a backward
node for each, which reads the gradient, the inputs of its forward node and in half of the cases its output. Budgets lie
a share of the way from graph-search's least to what storing everything takes. Seconds are processor time of calls. A
star: closed, that is, proved to be the best of all schedules or, for graph-milp, of all frontier schedules.

python bench/graph_milp.py [--forward 24] [--seeds 0 1 2] [--shares 0.02 0.08 0.15 0.45]
"""

from __future__ import annotations

import random
import time

import cairn
from support import arguments
from support.answers import between

EXACT_NODES_MAX = 128


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--forward", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.08, 0.15, 0.45])
    chosen = arguments.parse(parser, forward=6, seeds=[0], shares=[0.15])
    names = [
        "T",
        "graph",
        "way",
        "bytes",
        "store-all",
        "graph-bound",
        "graph-search",
        "graph-lp-round",
        "graph-exact",
        "s",
    ]
    print("| " + " | ".join([*names, "graph-milp", "s"]) + " |")
    print("|---" * (len(names) + 2) + "|")
    for seed in chosen.seeds:
        for skip in (0.0, 0.5):
            graph = training_graph(chosen.forward, seed, skip)
            limits = cairn.limits(graph, solver="graph-search")
            for share in chosen.shares:
                budget = between(limits.least_bytes, limits.store_all_bytes, share)
                print(row(graph, f"{seed}{', skips' if skip else ''} | {share:.0%}", budget), flush=True)


def timed(graph: cairn.Graph, budget: int, solver: str) -> tuple[str, str]:
    """Its makespan, with a star where it is closed, and seconds of processor time."""
    begun = time.process_time()
    answer = cairn.solve(graph, budget, solver=solver)
    seconds = time.process_time() - begun
    closed = answer.outcome == "optimal" or answer.optimal_in
    return f"{answer.makespan_ns}{'*' if closed else ''}", f"{seconds:.1f}"


def row(graph: cairn.Graph, name: str, budget: int) -> str:
    """One line of the table."""
    search = cairn.solve(graph, budget, solver="graph-search")
    rounded = cairn.solve(graph, budget, solver="graph-lp-round")
    numbers = [search.store_all_ns, search.lower_bound_ns, search.makespan_ns, rounded.makespan_ns]
    exact = timed(graph, budget, "graph-exact") if len(graph) <= EXACT_NODES_MAX else ("", "")
    cells = [len(graph), name, budget, *numbers, *exact, *timed(graph, budget, "graph-milp")]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def training_graph(forward: int, seed: int, skip: float) -> cairn.Graph:
    """A random graph of 2 forward + 1 nodes."""
    source = random.Random(seed)
    nodes: list[cairn.Node] = []
    for i in range(forward):
        deps = {i - 1} if i else set()
        if i > 2 and source.random() < skip:
            deps.add(source.randrange(max(0, i - 6), i - 1))
        cost, size = source.randint(10, 100), source.randint(5, 60)
        nodes.append(_node(cost, size, deps, source.choice([0, 0, 5, 10])))
    nodes.append(_node(1, 1, {forward - 1}, 0))
    for i in reversed(range(forward)):
        deps = {len(nodes) - 1, *nodes[i].deps} | ({i} if source.random() < 0.5 else set())
        nodes.append(_node(2 * nodes[i].cost_ns, nodes[i].bytes, deps, source.choice([0, 0, 5, 10]), keep=i == 0))
    return cairn.Graph(nodes, backward_begins_at=forward)


def _node(cost_ns: int, size: int, deps: set[int], workspace_bytes: int, keep: bool = False) -> cairn.Node:
    return cairn.Node(cost_ns=cost_ns, bytes=size, deps=tuple(sorted(deps)), workspace_bytes=workspace_bytes, keep=keep)


if __name__ == "__main__":
    main()
