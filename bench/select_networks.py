"""Checkpoint selection on the networks that Hong et al. measure: VGG-19 and AlexNet.

Output sizes follow from the published architectures (224 x 224 images, 32-bit floats). Prints a Markdown table: for
every set of checkpoints, the paper's or ours, eq. 9 and eq. 6 over those sizes, the memory that the paper measured with
it, and the difference between what was measured and eq. 9.

    python bench/select_networks.py > bench/results/select-networks.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import cairn
from support import arguments

MIB = 1 << 20
FLOAT = 4
IMAGE = 3 * 224 * 224


def vgg19() -> list[int]:
    """Floats an image: the input, 16 convolutions with ReLU, 5 poolings, 3 fully connected layers."""
    sizes = [IMAGE]
    for convolutions, channels, side in ((2, 64, 224), (2, 128, 112), (4, 256, 56), (4, 512, 28), (4, 512, 14)):
        sizes += [channels * side * side] * convolutions + [channels * side * side // 4]
    return [*sizes, 4096, 4096, 1000]


# Convolutions of 64 x 55, 192 x 27, 384, 256 and 256 x 13; poolings after the first, second and last; then average
# pooling, flattening and dropout, which the paper counts as layers here, and three fully connected layers.
ALEXNET_TAIL = [9216, 9216, 9216, 4096, 4096, 4096, 1000]


def alexnet() -> list[int]:
    """Poolings as layers of their own."""
    convolutions = [64 * 55**2, 64 * 27**2, 192 * 27**2, 192 * 13**2, 384 * 13**2, 256 * 13**2, 256 * 13**2]
    return [IMAGE, *convolutions, 256 * 6**2, *ALEXNET_TAIL]


def alexnet_plain() -> list[int]:
    """Poolings inside the convolution before them: their outputs are the outputs."""
    convolutions = [64 * 27**2, 192 * 13**2, 384 * 13**2, 256 * 13**2, 256 * 6**2]
    return [IMAGE, *convolutions, *ALEXNET_TAIL]


def eq9(sizes: Sequence[int], checkpoints: Sequence[int]) -> int:
    """Checkpoints up to each one, the segment before it, a buffer for the largest gradient in that segment."""
    peak, kept, before = 0, sizes[0], 0
    for at in checkpoints:
        kept += sizes[at]
        peak = max(peak, kept + sum(sizes[before + 1 : at]) + max(sizes[before:at]))
        before = at
    return peak


def eq6(sizes: Sequence[int], checkpoints: Sequence[int]) -> int:
    """All checkpoints and the largest segment."""
    ends = [0, *checkpoints]
    segments = [sum(sizes[h + 1 : i]) for h, i in zip(ends, checkpoints, strict=False)]
    return sum(sizes[i] for i in ends) + max(segments)


def chain(sizes: Sequence[int]) -> cairn.Chain:
    """What eq. 9 knows of a network: outputs that are all that is saved, gradients as large, no times."""
    stages = [cairn.Stage(size, options=[cairn.Option(size, 1, 2)]) for size in sizes[1:]]
    return cairn.Chain(stages, input_bytes=sizes[0])


# name, floats an image, rows of (whose set, the set, {batch: measured MiB})
Published = tuple[str, tuple[int, ...], dict[int, int]]
PUBLISHED: tuple[tuple[str, list[int], tuple[Published, ...]], ...] = (
    (
        "VGG-19",
        vgg19(),
        (
            (
                "algorithm 6",
                (2, 4, 6, 9, 11, 14, 16, 19, 21, 23, 24),
                {128: 6444, 256: 11220, 320: 13609, 384: 15997, 400: 16594},
            ),
            ("algorithm 3", (3, 6, 24), {128: 6835, 256: 12004, 320: 14592, 384: 17177, 400: 17824}),
            ("sqrt(n)", (5, 10, 15, 20, 24), {128: 8404, 256: 15139, 320: 18511}),
        ),
    ),
    (
        "AlexNet",
        alexnet(),
        (
            ("algorithm 6", (2, 4, 6, 8, 12, 14, 15), {128: 1002, 4096: 9866}),
            ("algorithm 3", (2, 4, 12, 15), {128: 1003, 4096: 9866}),
            ("sqrt(n)", (4, 8, 12, 15), {128: 1106, 4096: 13182}),
        ),
    ),
    ("AlexNet, plain", alexnet_plain(), (("algorithm 6", (3, 4, 5, 9, 11, 12), {}),)),
)


def row(
    name: str, batch: int, whose: str, checkpoints: Sequence[int], sizes: Sequence[int], measured: int | None
) -> str:
    """One line of the table."""
    nine, six = eq9(sizes, checkpoints) / MIB, eq6(sizes, checkpoints) / MIB
    known = (f"{measured:,}", f"{measured - nine:,.1f}") if measured else ("", "")
    listed = ", ".join(map(str, checkpoints))
    return f"| {name} | {batch} | {whose} | {listed} | {nine:,.1f} | {six:,.1f} | {known[0]} | {known[1]} |"


def ours(name: str, batch: int, sizes: Sequence[int]) -> list[str]:
    """The sets that the solvers choose, after the library's objective was compared with the one computed here."""
    rows = []
    for solver, objective in (("select-linear", eq9), ("select-quadratic", eq9), ("select-cubic", eq6)):
        found = cairn.solve(chain(sizes), solver=solver, minimize="memory")
        assert found.checkpoints is not None, f"{solver} on {name} chose no checkpoints"
        if found.objective_bytes != objective(sizes, found.checkpoints):
            sys.exit(f"{solver} on {name}: {found.objective_bytes} bytes is not the objective of its set")
        rows.append(row(name, batch, f"`{solver}`", found.checkpoints, sizes, None))
    return rows


def main() -> None:
    """Prints the table, which takes seconds."""
    arguments.parse(arguments.parser(__doc__))
    print("| network | batch | set of | checkpoints | eq. 9, MiB | eq. 6, MiB | measured, MiB | measured - eq. 9 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, floats, published in PUBLISHED:
        batches = sorted({batch for _, _, measured in published for batch in measured} or {128})
        for batch in batches:
            sizes = [floats_of_layer * FLOAT * batch for floats_of_layer in floats]
            for whose, checkpoints, measured in published:
                print(row(name, batch, f"paper, {whose}", checkpoints, sizes, measured.get(batch)))
            if batch == batches[0]:
                print(*ours(name, batch, sizes), sep="\n")


if __name__ == "__main__":
    main()
