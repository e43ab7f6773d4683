"""A U-Net with published schedules as a training graph: 154 nodes and 219 reads.

Shah et al., "Memory Optimization for Deep Networks" (ICLR 2021), published the schedules that Checkmate's program finds
within 24 hours for a U-Net with batch 11 and images of 416 x 608. Shapes and times are those in the authors' logs. They
measured the times on a GPU, and their program rounds them to units of 10 us. The graph follows their rules:

* a value takes 4 bytes a number, rounded to KiB;
* the backward of a convolution has two nodes, first the gradient of the weights, then that of the input;
* of normalizations, activations and maximum pooling, the backward reads the input of the forward;
* parameters, their gradients and the images are fixed bytes. Workspaces are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import cairn

BATCH, IMAGE_CHANNELS, HEIGHT, WIDTH = 11, 3, 416, 608
FLOAT_BYTES, KIB = 4, 1024
KERNEL = 9  # numbers of a 3 x 3 kernel; the last convolution has 1 x 1
NORM_VECTORS, NORM_TRAINED = 4, 2

UNIT_NS = 10_000

PUBLISHED_NS = {5: 209_265 * UNIT_NS, 6: 199_613 * UNIT_NS, 10: 192_809 * UNIT_NS}
"""Makespan of the published schedule, by the budget in GiB."""

# Operator, output channels, time of the forward, time of the backward, in units of 10 us. A convolution has two times
# of the backward: of the weights and of the input. A concatenation ends with the index of the other operator it reads.
OPERATORS = """
conv 64 559 1881 0
bn 64 545 918
relu 64 273 411
conv 64 3001 7970 2728
bn 64 545 918
relu 64 274 412
pool 64 285 1809
conv 128 1429 1702 1360
bn 128 241 415
relu 128 136 208
conv 128 2645 2925 2768
bn 128 242 418
relu 128 136 206
pool 128 145 910
conv 256 1350 1493 1400
bn 256 143 223
relu 256 70 104
conv 256 2585 2871 2736
bn 256 144 223
relu 256 69 104
pool 256 74 457
conv 512 1342 1495 1435
bn 512 74 114
relu 512 36 53
conv 512 2625 2950 2762
bn 512 75 114
relu 512 36 53
pool 512 37 231
conv 512 723 804 772
bn 512 16 29
relu 512 10 14
conv 512 723 804 772
bn 512 17 29
relu 512 10 14
up 512 151 128
cat 1024 112 82 26
conv 512 5149 5857 5410
bn 512 74 113
relu 512 36 53
conv 256 1342 1480 1401
bn 256 40 62
relu 256 19 27
up 256 228 205
cat 512 199 161 19
conv 256 5069 5672 5429
bn 256 142 223
relu 256 69 104
conv 128 1357 1457 1400
bn 128 71 113
relu 128 36 53
up 128 453 385
cat 256 390 307 12
conv 128 5109 5628 5536
bn 128 240 415
relu 128 136 206
conv 64 1428 1513 1440
bn 64 144 239
relu 64 69 104
up 64 859 737
cat 128 739 590 5
conv 64 5603 15489 5710
bn 64 529 904
relu 64 271 411
conv 64 2999 7964 2728
bn 64 544 918
relu 64 271 412
conv 1 236 2261 181
"""


@dataclass(frozen=True)
class Operator:
    """A forward operator: the operators that it reads, the size of its output in numbers, and its times."""

    kind: str
    inputs: tuple[int, ...]
    channels: int
    numbers: int
    forward_ns: int
    backward_ns: tuple[int, ...]


def operators() -> list[Operator]:
    """The forward of the network."""
    made: list[Operator] = []
    area = HEIGHT * WIDTH
    for line in OPERATORS.split("\n")[1:-1]:
        kind, *fields = line.split()
        channels, *times = map(int, fields)
        inputs = (len(made) - 1,) if made else ()
        if kind == "cat":
            inputs = (times.pop(), *inputs)
        forward_ns, *backward_ns = (time * UNIT_NS for time in times)
        area = area // 4 if kind == "pool" else area * 4 if kind == "up" else area
        made.append(Operator(kind, inputs, channels, BATCH * channels * area, forward_ns, tuple(backward_ns)))
    return made


def training_graph() -> cairn.Graph:
    """Forward, loss and backward."""
    forward = operators()
    nodes = [cairn.Node(o.forward_ns, _kib(o.numbers), o.inputs, name=f"{o.kind} {i}") for i, o in enumerate(forward)]
    loss = len(nodes)
    nodes.append(cairn.Node(0, nodes[-1].bytes, (loss - 1,), name="loss"))
    gradients: list[list[int]] = [[] for _ in forward]  # of an operator's output: the nodes that compute a part of it
    gradients[-1] = [loss]
    for i in reversed(range(loss)):
        _add_backward(nodes, forward, i, gradients[i])
        for d in forward[i].inputs:
            gradients[d].append(len(nodes) - 1)
    return cairn.Graph(nodes, fixed_bytes=_fixed_bytes(forward), backward_begins_at=loss + 1)


def _add_backward(nodes: list[cairn.Node], forward: list[Operator], i: int, gradients: list[int]) -> None:
    """The last node that it adds computes the gradient of the inputs."""
    o = forward[i]
    input_bytes = _kib(sum(forward[d].numbers for d in o.inputs))
    alone = tuple(sorted(gradients))
    with_inputs = (*sorted(o.inputs), *alone)
    if o.kind == "conv":
        weights_ns, input_ns = o.backward_ns
        nodes.append(cairn.Node(weights_ns, 0, with_inputs, name=f"weights {i}"))
        nodes.append(cairn.Node(input_ns, input_bytes, alone, name=f"input {i}"))
    else:
        reads = with_inputs if o.kind in ("bn", "relu", "pool") else alone
        nodes.append(cairn.Node(o.backward_ns[0], input_bytes, reads, name=f"d {o.kind} {i}"))


def _kib(numbers: int) -> int:
    return round(numbers * FLOAT_BYTES / KIB) * KIB


def _fixed_bytes(forward: list[Operator]) -> int:
    numbers = BATCH * IMAGE_CHANNELS * HEIGHT * WIDTH
    for i, o in enumerate(forward):
        if o.kind == "conv":
            read = forward[o.inputs[0]].channels if o.inputs else IMAGE_CHANNELS
            kernel = 1 if i == len(forward) - 1 else KERNEL
            numbers += 2 * (read * o.channels * kernel + o.channels)
        elif o.kind == "bn":
            numbers += (NORM_VECTORS + NORM_TRAINED) * o.channels
    return _kib(numbers)
