"""graph-search and graph-lp-round beside the best frontier schedule, on random training graphs: a Markdown table.

A graph has so many forward nodes in a row, some with a second input from up to six nodes before, a loss, and a backward
node for each, which reads the gradient, the inputs of its forward node and in half of the cases its output. Budgets lie
a share of the way from graph-search's least to what storing everything takes. Seconds are graph-milp's processor time.

python bench/graph_milp.py [--forward 24] [--seeds 1 2] [--shares 0.15 0.45]
"""

from __future__ import annotations

import argparse
import random
import time

import cairn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 0.45])
    chosen = parser.parse_args()
    print("| T | graph | budget | plain | graph-bound | graph-search | graph-milp | graph-lp-round | closed | s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for seed in chosen.seeds:
        for skip in (0.0, 0.5):
            graph = training_graph(chosen.forward, seed, skip)
            limits = cairn.limits(graph, solver="graph-search")
            for share in chosen.shares:
                budget = limits.least_bytes + int((limits.store_all_bytes - limits.least_bytes) * share)
                print(row(graph, f"{seed}{', skips' if skip else ''}", budget), flush=True)


def row(graph: cairn.Graph, name: str, budget: int) -> str:
    """One line of the table."""
    search = cairn.solve(graph, budget, solver="graph-search")
    begun = time.process_time()
    milp = cairn.solve(graph, budget, solver="graph-milp")
    seconds = time.process_time() - begun
    rounded = cairn.solve(graph, budget, solver="graph-lp-round")
    closed = "yes" if milp.outcome == "optimal" or milp.optimal_in else "no"
    numbers = [milp.store_all_ns, milp.lower_bound_ns, search.makespan_ns, milp.makespan_ns, rounded.makespan_ns]
    cells = [len(graph), name, budget, *numbers, closed, f"{seconds:.1f}"]
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
    return cairn.Node(cost_ns=cost_ns, bytes=size, deps=sorted(deps), workspace_bytes=workspace_bytes, keep=keep)


if __name__ == "__main__":
    main()
