"""How far answers for chains can be from the optimum: short chains, long ones, and chains with a link; as Markdown.

The stages are random, of the kinds of `bench/support/chain_kinds.py`. *Way* is the share of the way from the least
budget to what storing everything takes; a gap is what lies between makespan and lower bound, as a part of the makespan.

1. Short chains. Six stages: the optimum is searched, so the gap is that of the bound, which `cairn.bound` gives by
   itself. Seven to twelve stages: the gap of `auto` in a tenth of a second. *Closed* are those without a gap.
2. Long chains, by `auto` within a time limit. *Memory* is the most that solvers had at once.
3. Chains with a link to host memory: `auto` against every other solver, each with the same time limit.

python bench/chain_gaps.py [--tables short long link] [--short-count 186] [--stages 1000 5000] [--kinds ...]
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Iterator

import cairn
from short_limits import others, time_of
from support import arguments
from support.answers import between, known
from support.chain_kinds import KINDS, random_chain

SIX, SIX_SOLVER = 6, "brute-chain"  # finds the optimum
SHORT_STAGES = range(7, 13)
SHORT_WAYS = (0.0, 0.1, 0.25)
SHORT_LIMIT = "100ms"
LONG_KINDS = ("different", "CNN", "U-Net", "heavy-tailed", "blocks", "workspaces")
LONG_WAYS = (0.05, 0.25, 0.5)
LINK_STAGES = (60, 200)
LINK_KINDS = ("different", "CNN", "U-Net")
LINK_WAYS = (0.1, 0.4)
LINK_LIMIT = "300ms"
LINK_TRANSFERS = 0.2  # what share of all saved bytes the link moves in the time of the forwards
LIMITS_TIME = "10s"  # for the least budget
SECONDS_OF = {1000: 10, 5000: 20}  # for chains of so many stages
SECONDS_OTHERWISE = 1


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--short-count", type=int, default=186, help="chains of six stages, and of seven to twelve")
    parser.add_argument("--stages", type=int, nargs="+", default=list(SECONDS_OF), help="of the long chains")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(LONG_KINDS), help="of the long chains")
    parser.add_argument("--link-stages", type=int, nargs="+", default=list(LINK_STAGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    chosen = arguments.parse(parser, short_count=8, stages=[60], kinds=["different"], link_stages=[20])
    for name in chosen.tables:
        print(f"\n## {name.capitalize()}\n")
        for row in TABLES[name](chosen):
            print(row, flush=True)


def line(*columns: object) -> str:
    """A line of a table."""
    return "| " + " | ".join(str(column) for column in columns) + " |"


def heads(*names: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield line(*names)
    yield "|" + "---|" * len(names)


# ---- short chains ----


def short_table(chosen: Namespace) -> Iterator[str]:
    """Chains of six stages, then of seven to twelve."""
    yield from heads("stages", "limit", "way", "chains", "closed", "mean gap", "greatest gap", "mean of the open ones")
    for counts, limit in (([SIX], None), (SHORT_STAGES, SHORT_LIMIT)):
        chains = short_chains(list(counts), chosen)
        for way in SHORT_WAYS:
            gaps = [gap_at(chain, way, limit, chosen.threads) for chain in chains]
            left = [gap for gap in gaps if gap > 0]
            stages = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
            numbers = [len(gaps), len(gaps) - len(left)]
            shares = [f"{mean(gaps):.3%}", f"{max(gaps):.3%}", f"{mean(left):.3%}"]
            yield line(stages, limit or "none", f"{way:.0%}", *numbers, *shares)


def short_chains(counts: list[int], chosen: Namespace) -> list[cairn.Chain]:
    """Of every kind and length in turn."""
    turns = itertools.islice(zip(itertools.cycle(KINDS), itertools.count(chosen.seed)), chosen.short_count)
    return [random_chain(kind, counts[seed // len(KINDS) % len(counts)], seed) for kind, seed in turns]


def gap_at(chain: cairn.Chain, way: float, limit: str | None, threads: int) -> float:
    """The gap of auto's answer within a limit; without one, how far the bound lies below the optimum."""
    limits = cairn.limits(chain)
    budget = between(limits.least_bytes, max(known(limits.store_all_bytes), known(limits.least_bytes)), way)
    if limit is not None:
        return known_gap(cairn.solve(chain, budget, time_limit=limit, threads=threads))
    best = known(cairn.solve(chain, budget, solver=SIX_SOLVER, threads=threads).makespan_ns)
    return 1 - known(cairn.bound(chain, budget).lower_bound_ns) / best


def known_gap(found: cairn.Solution) -> float:
    """The gap of an answer; an error where there is none."""
    if found.gap is None:
        raise ValueError(f"no answer: {found.reason}")
    return found.gap


def mean(numbers: list[float]) -> float:
    """The mean; 0 of none."""
    return sum(numbers) / len(numbers) if numbers else 0.0


# ---- long chains ----


def long_table(chosen: Namespace) -> Iterator[str]:
    """Every kind at every length."""
    yield from heads("stages", "kind", "limit", "way", "gap", "over store-all", "solver", "seconds", "memory")
    for count in chosen.stages:
        for kind in chosen.kinds:
            chain = random_chain(kind, count, chosen.seed)
            limits = cairn.limits(chain, time_limit=LIMITS_TIME)
            for way in LONG_WAYS:
                budget = between(limits.least_bytes, limits.store_all_bytes, way)
                yield long_row(chain, kind, way, budget, chosen.threads)


def long_row(chain: cairn.Chain, kind: str, way: float, budget: int, threads: int) -> str:
    """One answer."""
    limit = f"{SECONDS_OF.get(len(chain), SECONDS_OTHERWISE)}s"
    began = time.perf_counter()
    found = cairn.solve(chain, budget, time_limit=limit, threads=threads)
    seconds = time.perf_counter() - began
    over = known(found.makespan_ns) / known(found.store_all_ns) - 1
    quality = [f"{known_gap(found):.3%}", f"{over:.2%}", found.solver]
    memory = f"{known(found.solver_peak_bytes) / 2**20:.0f} MiB"
    return line(len(chain), kind, limit, f"{way:.0%}", *quality, f"{seconds:.1f}", memory)


# ---- chains with a link ----


def link_table(chosen: Namespace) -> Iterator[str]:
    """Auto, and the best of the others."""
    yield from heads("stages", "kind", "way", "auto over store-all", "best of the others", "by", "auto is behind")
    for count in chosen.link_stages:
        for kind in LINK_KINDS:
            chain = random_chain(kind, count, chosen.seed, LINK_TRANSFERS)
            limits = cairn.limits(chain, time_limit=LIMITS_TIME)
            for way in LINK_WAYS:
                budget = between(limits.least_bytes, limits.store_all_bytes, way)
                yield link_row(chain, kind, way, budget, known(limits.store_all_ns))


def link_row(chain: cairn.Chain, kind: str, way: float, budget: int, base: int) -> str:
    """One budget."""
    auto = known(time_of(chain, budget, "auto", LINK_LIMIT))
    times = {name: ns for name in others(chain) if (ns := time_of(chain, budget, name, LINK_LIMIT)) is not None}
    best = min(times, key=times.__getitem__)
    over = [f"{ns / base - 1:.3%}" for ns in (auto, times[best])]
    return line(len(chain), kind, f"{way:.0%}", *over, best, f"{auto / times[best] - 1:.3%}")


TABLES = {"short": short_table, "long": long_table, "link": link_table}


if __name__ == "__main__":
    main()
