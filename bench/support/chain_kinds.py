"""Chains of random stages, by kinds. The same kind, count and seed make the same chain."""

from __future__ import annotations

import random
from collections.abc import Callable

import cairn

KB, MB = 10**3, 10**6
US, MS = 10**3, 10**6
INPUT_BYTES = MB

# A stage of a kind: from random numbers, and from how far along the chain it is, from 0 to 1.
Maker = Callable[[random.Random, float, int], cairn.Stage]


def plain(output: float, beside: float, forward: float, backward: float | None = None) -> cairn.Stage:
    """A stage by its output, what it saves beside that, and its times; the backward takes twice the forward."""
    saved = int(output) + int(beside)
    ns = int(forward)
    return cairn.Stage(
        int(output), saved_bytes=saved, forward_ns=ns, backward_ns=2 * ns if backward is None else int(backward)
    )


def different(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """Sizes spread by a factor of up to 16, times by 20."""
    return plain(draw.randint(MB // 2, 2 * MB), draw.randint(0, 6 * MB), draw.randint(100 * US, 2 * MS))


def spread(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """Logarithms of sizes and times are uniform, over three powers of ten."""
    forward = US * 10 ** draw.uniform(1, 4)
    return plain(10 ** draw.uniform(4, 7), 10 ** draw.uniform(4, 7.5), forward, forward * draw.uniform(1, 3))


def cnn(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """Sizes fall to a small part along the chain."""
    output = KB + 4 * MB * max(0.02, 1 - place) ** 2 * draw.uniform(0.7, 1.3)
    return plain(output, output * draw.uniform(0.5, 3), MS * draw.uniform(0.5, 1.5))


def unet(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """Sizes fall to the middle and rise again."""
    output = 4 * MB * (0.05 + (2 * place - 1) ** 2) * draw.uniform(0.8, 1.2)
    return plain(output, output * draw.uniform(0.5, 4), MS * draw.uniform(0.3, 1.7))


def heavy_tailed(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """Sizes and times of a Pareto distribution: a few stages have most of all."""
    tail = 1.3
    output, beside = MB / 2 * draw.paretovariate(tail), MB * draw.paretovariate(tail)
    return plain(output, beside, 200 * US * draw.paretovariate(tail))


def blocks(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """Blocks of four stages as in a transformer, each within a few percent of the same one of another block."""
    block = ((MB, 5 * MB, 300 * US), (MB, 3 * MB, MS), (4 * MB, 8 * MB, 2 * MS), (MB, MB, 100 * US))
    output, beside, forward = block[index % len(block)]
    near = [draw.uniform(0.95, 1.05) for _ in range(4)]
    return plain(output * near[0], beside * near[1], forward * near[2], 2 * forward * near[3])


def workspaces(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """As different ones, with workspaces of either sign, gradients of parameters and forwards that save nothing."""
    output, forward = draw.randint(MB // 2, 2 * MB), draw.randint(100 * US, 2 * MS)
    return cairn.Stage(
        output,
        saved_bytes=output + draw.randint(0, 6 * MB),
        forward_ns=forward,
        backward_ns=2 * forward,
        forward_workspace_bytes=draw.randint(0, 4 * MB),
        backward_workspace_bytes=draw.randint(-2 * MB, 6 * MB),
        weight_grad_bytes=draw.randint(0, 10 * KB),
        forward_only_ns=forward * 9 // 10,
        forward_only_workspace_bytes=draw.randint(0, 4 * MB),
    )


def two_options(draw: random.Random, place: float, index: int) -> cairn.Stage:
    """As different ones, with an option that saves a half to a fifth and recomputes it in the backward."""
    output, forward = draw.randint(MB // 2, 2 * MB), draw.randint(100 * US, 2 * MS)
    beside = draw.randint(MB, 6 * MB)
    less, again = beside // draw.randint(2, 5), forward * draw.randint(10, 60) // 100
    keep = cairn.Option(output + beside, forward, 2 * forward, name="keep")
    return cairn.Stage(output, [keep, cairn.Option(output + less, forward, 2 * forward + again, name="less")])


KINDS: dict[str, Maker] = {
    "different": different,
    "spread": spread,
    "CNN": cnn,
    "U-Net": unet,
    "heavy-tailed": heavy_tailed,
    "blocks": blocks,
    "workspaces": workspaces,
    "two options": two_options,
}


def random_chain(kind: str, count: int, seed: int = 0, transfers: float | None = None) -> cairn.Chain:
    """A chain of a kind.

    Parameters
    ----------
    kind
        A key of KINDS.
    count
        Number of stages.
    seed
        Chains of the same kind and length with different seeds are independent.
    transfers
        What share of all saved bytes a link to host memory moves, each way, in the time of the forwards; None: no link.
    """
    draw = random.Random(f"{kind} {count} {seed}")
    stages = [KINDS[kind](draw, index / count, index) for index in range(count)]
    machine = None if transfers is None else link(stages, transfers)
    return cairn.Chain(stages, input_bytes=INPUT_BYTES, machine=machine)


def link(stages: list[cairn.Stage], transfers: float) -> cairn.Machine:
    """A link that moves a share of the saved bytes in the time of the forwards, to as much memory as they all take."""
    saved = sum(stage.options[0].saved_bytes for stage in stages)
    forward_ns = sum(stage.options[0].forward_ns for stage in stages)
    rate = int(transfers * saved / forward_ns * 10**9)
    return cairn.Machine(saved, rate, rate)
