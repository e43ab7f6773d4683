"""Offloading, and offloading with recomputation, over bandwidth and memory.

Two questions. How near to the bound do the offloading solvers of Beaumont et al. (2019) come, as in the paper's
figures? And how much of the time that recomputation costs does offloading remove, as a function of how fast the link is
for the computation? The networks are chains by their shapes, 32 images of 224 x 224, 32-bit floats; a stage takes the
longer of its floating-point operations at 14 TFLOP/s and its memory traffic at 900 GB/s (a V100's), its backward twice
as long. Nothing is measured but the solvers: times are those of the model.

    python bench/joint_tradeoff.py [NETWORK ...] > bench/results/joint.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import cairn
from support import arguments
from support.answers import between, known

BATCH, FLOAT = 32, 4
FLOPS_PER_S, TRAFFIC_PER_S = 14e12, 900e9
GB = 10**9
HOST = 2**40
RATES = (3, 6, 12, 24)  # GB/s each way
FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75)  # of the way from the least budget without recomputation to storing everything

# A stage: output floats, floats that its backward needs, operations; all an image.
Shape = tuple[int, int, float]


def conv(channels_in: int, channels: int, kernel: int, side: int) -> float:
    """Operations of a convolution, by its output's side."""
    return 2.0 * channels_in * channels * kernel * kernel * side * side


def vgg19() -> Iterator[Shape]:
    """Sixteen convolutions with ReLU, the pooling with the last of each group; the classifier as one stage."""
    channels_in, side = 3, 224
    for count, channels in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for i in range(count):
            size, work = channels * side * side, conv(channels_in, channels, 3, side)
            pooled = size // 4 if i == count - 1 else size
            yield pooled, 2 * size + (pooled if pooled < size else 0), work
            channels_in = channels
        side //= 2
    yield 1000, 3 * 4096 + 1000, 2.0 * (25088 * 4096 + 4096 * 4096 + 4096 * 1000)


def resnet(blocks: tuple[int, int, int, int]) -> Iterator[Shape]:
    """The stem, then bottleneck blocks: three convolutions, each normalized, and the shortcut."""
    stem = 64 * 112 * 112
    yield stem // 4, 3 * stem + stem // 4, conv(3, 64, 7, 112)
    channels_in, side = 64, 56
    for group, count in enumerate(blocks):
        inner, out = 64 << group, 256 << group
        for i in range(count):
            if i == 0 and group > 0:
                side //= 2
            plane = side * side
            work = conv(channels_in, inner, 1, side) + conv(inner, inner, 3, side) + conv(inner, out, 1, side)
            saved = (4 * inner + 3 * out) * plane
            if i == 0:
                work += conv(channels_in, out, 1, side)
                saved += 2 * out * plane
            yield out * plane, saved, work
            channels_in = out
    yield 1000, channels_in + 1000, 2.0 * channels_in * 1000


def densenet(layers: tuple[int, int, int, int], growth: int = 32) -> Iterator[Shape]:
    """The stem, then dense layers, whose output holds all that was made before; transitions between the groups."""
    stem = 64 * 112 * 112
    yield stem // 4, 3 * stem + stem // 4, conv(3, 64, 7, 112)
    channels, side = 64, 56
    for group, count in enumerate(layers):
        for _ in range(count):
            plane = side * side
            work = conv(channels, 4 * growth, 1, side) + conv(4 * growth, growth, 3, side)
            out = (channels + growth) * plane
            yield out, out + (channels + 8 * growth) * plane, work
            channels += growth
        if group < 3:
            work, saved = conv(channels, channels // 2, 1, side), (channels + channels // 2) * side * side
            channels //= 2
            side //= 2
            yield channels * side * side, saved + channels * side * side, work
    yield 1000, channels + 1000, 2.0 * channels * 1000


def chain(shapes: Iterator[Shape]) -> cairn.Chain:
    """The chain of a batch."""
    stages = []
    for output, saved, work in shapes:
        seconds = max(work * BATCH / FLOPS_PER_S, 2 * saved * FLOAT * BATCH / TRAFFIC_PER_S)
        forward = round(seconds * 1e9)
        size = output * FLOAT * BATCH
        stages.append(cairn.Stage(size, saved_bytes=saved * FLOAT * BATCH, forward_ns=forward, backward_ns=2 * forward))
    return cairn.Chain(stages, input_bytes=3 * 224 * 224 * FLOAT * BATCH)


NETWORKS = {
    "VGG-19": chain(vgg19()),
    "ResNet-50": chain(resnet((3, 4, 6, 3))),
    "ResNet-152": chain(resnet((3, 8, 36, 3))),
    "DenseNet-121": chain(densenet((6, 12, 24, 16))),
    "DenseNet-201": chain(densenet((6, 12, 48, 32))),
}


def link(rate: float) -> cairn.Machine:
    """A link of so many bytes a second each way."""
    return cairn.Machine(HOST, int(rate), int(rate))


def bound_without_recomputation(solution: cairn.Solution) -> int:
    """The number in the reason of an offloading solver's answer."""
    found = re.search(r"\d+", solution.reason or "")
    if not found:
        raise SystemExit(f"{solution.solver} names no bound")
    return int(found[0])


def ratios(networks: list[str]) -> Iterator[str]:
    """The paper's figures: makespan over the bound without recomputation, by memory and bandwidth."""
    solvers = ("offload-greedy", "offload-vdnn", "offload-dp")
    yield "| network | stages | GB/s | memory | " + " | ".join(f"`{solver}`" for solver in solvers) + " |"
    yield "|---|---|---|---|" + "---|" * len(solvers)
    for name in networks:
        problem = NETWORKS[name]
        for rate in RATES:
            machine = link(rate * GB)
            limits = cairn.limits(problem, machine=machine, solver="offload-dp")
            for fraction in FRACTIONS:
                budget = between(limits.least_bytes, limits.store_all_bytes, fraction)
                cells = []
                for solver in solvers:
                    found = cairn.solve(problem, budget, machine=machine, solver=solver)
                    cells.append(
                        f"{known(found.makespan_ns) / bound_without_recomputation(found):.3f}" if found.found else "-"
                    )
                yield f"| {name} | {len(problem)} | {rate} | {fraction:.0%} | {' | '.join(cells)} |"


def removed(networks: list[str]) -> Iterator[str]:
    """How much of recomputation's overhead the joint solver removes, by the ratio of link to computation."""
    speeds = (0.05, 0.2, 0.8)
    yield "| network | memory | recomputation | " + " | ".join(f"{speed}" for speed in speeds) + " |"
    yield "|---|---|---|" + "---|" * len(speeds)
    for name in networks:
        problem = NETWORKS[name]
        least = cairn.limits(problem, solver="chain-exact")
        forward = sum(stage.options[0].forward_ns for stage in problem.stages)
        saved = sum(stage.options[0].saved_bytes for stage in problem.stages)
        for share in (0.0, 0.25):
            budget = between(least.least_bytes, least.store_all_bytes, share)
            alone = cairn.solve(problem, budget, solver="chain-exact")
            time, everything = known(alone.makespan_ns), known(alone.store_all_ns)
            over = time - everything
            cells = []
            for speed in speeds:
                machine = link(speed * saved / forward * 1e9)
                joint = cairn.solve(problem, budget, machine=machine, solver="joint-chain")
                only = cairn.solve(problem, budget, machine=machine, solver="offload-dp")
                part = (time - known(joint.makespan_ns)) / over if over else 1.0
                offload = f"{known(only.makespan_ns) / everything - 1:+.0%}" if only.found else "-"
                cells.append(f"{part:.0%} ({offload})")
            yield f"| {name} | {share:.0%} | {over / everything:+.1%} | {' | '.join(cells)} |"


def main() -> None:
    """Prints both tables."""
    parser = arguments.parser(__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"{', '.join(NETWORKS)}; default: all")
    chosen = arguments.parse(parser, networks=["VGG-19"])
    networks = chosen.networks or list(NETWORKS)
    about = (__doc__ or "").split("\n", 2)[2].split("    python")[0].strip()
    print(f"# Offloading, and with recomputation\n\n{about}\n")
    print("Made by `python bench/joint_tradeoff.py`.\n")
    print("## Offloading alone: makespan over the bound without recomputation\n")
    print("Memory: 0 % is the least budget without recomputation, 100 % that of storing everything.\n")
    for row in ratios(networks):
        print(row, flush=True)
    print("\n## What offloading removes of recomputation's overhead\n")
    print(
        "Columns: what part of all saved bytes the link moves in the time of the forwards. *Recomputation* is the\n"
        "overhead of `chain-exact`; cells are the part of it that `joint-chain` removes, and in brackets the overhead\n"
        "of offloading alone (`offload-dp`; - where it does not fit). Memory: 0 % is the least with recomputation.\n"
    )
    for row in removed(networks):
        print(row, flush=True)


if __name__ == "__main__":
    main()
