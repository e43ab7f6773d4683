"""A U-Net with published schedules (support/published_unet.py): makespans and bounds beside the published makespans.

The published ones are those of Checkmate's program, solved by Gurobi with 12 threads to a gap of 0.01 %. That took 3.7
hours at 5 GiB, 13 minutes at 6 GiB and 37 seconds at 10 GiB.

python bench/published_unet.py [--budgets 5 6 7 8 9 10] [--limit 10s] [--threads 1]
"""

from __future__ import annotations

import cairn
from support import arguments
from support.answers import known
from support.published_unet import PUBLISHED_NS, training_graph


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--budgets", type=int, nargs="+", default=[5, 6, 7, 8, 9, 10], help="in GiB")
    parser.add_argument("--limit", default="10s")
    parser.add_argument("--threads", type=int, default=1)
    chosen = arguments.parse(parser, budgets=[6], limit="1s")
    graph = training_graph()
    reads = sum(len(node.deps) for node in graph.nodes)
    limits = cairn.limits(graph, solver="graph-search")
    least, most = known(limits.least_bytes), known(limits.store_all_bytes)
    print(f"{len(graph)} nodes, {reads} reads, least memory {cairn.format_bytes(least)}, store-all peak ", end="")
    print(f"{cairn.format_bytes(most)}\n")
    print("| budget | published | graph-search | over store-all | bound | gap |")
    print("|---|---|---|---|---|---|")
    for gib in chosen.budgets:
        print(row(graph, gib, chosen.limit, chosen.threads), flush=True)


def row(graph: cairn.Graph, gib: int, limit: str, threads: int) -> str:
    """One line of the table."""
    found = cairn.solve(graph, gib << 30, solver="graph-search", time_limit=limit, threads=threads)
    makespan, bound = known(found.makespan_ns), known(found.lower_bound_ns)
    published = in_ms(PUBLISHED_NS[gib]) if gib in PUBLISHED_NS else "-"
    over = f"{makespan / known(found.store_all_ns) - 1:.2%}"
    gap = "-" if found.gap is None else f"{found.gap:.2%}"
    return f"| {gib} GiB | {published} | {in_ms(makespan)} | {over} | {in_ms(bound)} | {gap} |"


def in_ms(ns: int) -> str:
    """To a unit of the published times."""
    return f"{ns / 1e6:,.2f} ms"


if __name__ == "__main__":
    main()
