"""Five convolutional networks as training graphs: VGG-16, VGG-19, ResNet-50, MobileNet and U-Net.

Shapes follow the published architectures: Simonyan and Zisserman (2014), He et al. (2016), Howard et al. (2017),
Ronneberger et al. (2015, padded convolutions). Nodes are operations, forward, loss and backward:

* a value takes 4 bytes a number; the images are a node that stays throughout;
* an operation costs its floating-point operations at 10 TFLOP/s; a multiplication and an addition count as two;
* the backward of an operation reads the gradient of its output, and its input and output where the formula does; of a
  convolution it costs twice the forward, once for the gradient of the input and once for that of the weights;
* an addition passes its gradient on, a concatenation hands out views of it, several gradients of one value are summed;
* parameters and their gradients are fixed bytes (the paper's 2 M_param).

python bench/support/paper_networks.py NAME [BATCH] > graph.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import cairn

FLOAT_BYTES = 4
FLOPS_PER_NS = 10_000
Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Operation:
    """A forward operation, per image: where it reads, what it makes, what it costs."""

    name: str
    kind: str
    inputs: tuple[int, ...]
    shape: Shape
    flops: int
    backward_flops: int
    reads_input: bool  # in its backward
    reads_output: bool

    @property
    def numbers(self) -> int:
        """Size of the output."""
        return math.prod(self.shape)


class Network:
    """Operations in the order of the forward; methods append one and return its index."""

    def __init__(self, name: str, height: int, width: int) -> None:
        self.name = name
        self.parameters = 0
        self.operations = [Operation("images", "images", (), (3, height, width), 0, 0, False, False)]

    def _add(
        self,
        kind: str,
        inputs: tuple[int, ...],
        shape: Shape,
        flops: int,
        backward_flops: int | None = None,
        reads: str = "",
    ) -> int:
        number = sum(operation.kind == kind for operation in self.operations) + 1
        backward = flops if backward_flops is None else backward_flops
        reads_input, reads_output = "input" in reads, "output" in reads
        name = f"{kind}{number}"
        self.operations.append(Operation(name, kind, inputs, shape, flops, backward, reads_input, reads_output))
        return len(self.operations) - 1

    def shape(self, value: int) -> Shape:
        """Shape of a value."""
        return self.operations[value].shape

    def conv(
        self, value: int, channels: int, kernel: int = 3, stride: int = 1, *, groups: int = 1, relu: bool = False
    ) -> int:
        """A padded convolution; with relu, it has a bias and the activation, and its backward reads the output, too."""
        given, height, width = self.shape(value)
        shape = (channels, -(-height // stride), -(-width // stride))
        weights = kernel * kernel * (given // groups) * channels
        flops = 2 * weights * shape[1] * shape[2]
        self.parameters += weights + (channels if relu else 0)
        gradients = 1 if self.operations[value].kind == "images" else 2  # images need none
        reads = "input output" if relu else "input"
        kind = "conv" if groups == 1 else "depthwise"
        return self._add(kind, (value,), shape, flops, gradients * flops, reads)

    def norm(self, value: int) -> int:
        """Batch normalization."""
        shape = self.shape(value)
        self.parameters += 2 * shape[0]
        return self._add("norm", (value,), shape, 6 * math.prod(shape), 10 * math.prod(shape), "input")

    def relu(self, value: int) -> int:
        """max(x, 0): the output tells where the gradient passes."""
        return self._add("relu", (value,), self.shape(value), math.prod(self.shape(value)), reads="output")

    def pool(self, value: int, kernel: int = 2, stride: int = 2) -> int:
        """The largest of a window."""
        channels, height, width = self.shape(value)
        shape = (channels, -(-height // stride), -(-width // stride))
        return self._add("pool", (value,), shape, kernel * kernel * math.prod(shape), reads="input output")

    def average(self, value: int) -> int:
        """The mean of each channel."""
        return self._add("average", (value,), (self.shape(value)[0], 1, 1), math.prod(self.shape(value)))

    def dense(self, value: int, features: int, *, relu: bool = False) -> int:
        """A fully connected layer."""
        weights = math.prod(self.shape(value)) * features
        self.parameters += weights + features
        reads = "input output" if relu else "input"
        return self._add("dense", (value,), (features, 1, 1), 2 * weights, 4 * weights, reads)

    def add(self, left: int, right: int) -> int:
        """The sum of two values."""
        return self._add("add", (left, right), self.shape(left), math.prod(self.shape(left)))

    def concat(self, left: int, right: int) -> int:
        """The channels of both."""
        _, height, width = self.shape(left)
        shape = (self.shape(left)[0] + self.shape(right)[0], height, width)
        return self._add("concat", (left, right), shape, math.prod(shape))

    def up(self, value: int, channels: int) -> int:
        """A transposed convolution, 2 x 2, that doubles height and width."""
        given, height, width = self.shape(value)
        flops = 2 * 4 * given * channels * height * width
        self.parameters += 4 * given * channels + channels
        return self._add("up", (value,), (channels, 2 * height, 2 * width), flops, 2 * flops, "input")

    def loss(self, value: int) -> int:
        """Softmax and cross-entropy: keeps the probabilities."""
        shape = self.shape(value)
        return self._add("loss", (value,), shape, 5 * math.prod(shape), math.prod(shape), "output")


class _Backward:
    """Appends the backward of a network to the nodes of its forward."""

    def __init__(self, network: Network, nodes: list[cairn.Node], batch: int) -> None:
        self.operations, self.nodes, self.batch = network.operations, nodes, batch
        self.gradients: dict[int, list[int]] = {}  # of a value, by who sends them

    def node(self, name: str, flops: int, numbers: int, deps: set[int], alias_of: int | None = None) -> int:
        """A node; returns its index."""
        size = 0 if alias_of is not None else numbers * FLOAT_BYTES * self.batch
        self.nodes.append(cairn.Node(_ns(flops * self.batch), size, tuple(deps), name=name, alias_of=alias_of))
        return len(self.nodes) - 1

    def gradient(self, value: int) -> int | None:
        """The gradient of a value, summed where there are several."""
        sent = self.gradients.get(value, [])
        if len(sent) < 2:
            return sent[0] if sent else None
        operation = self.operations[value]
        return self.node(f"sum {operation.name}", operation.numbers * (len(sent) - 1), operation.numbers, set(sent))

    def send(self, value: int, gradient: int) -> None:
        if self.operations[value].kind != "images":
            self.gradients.setdefault(value, []).append(gradient)

    def undo(self, index: int) -> None:
        """The backward of one operation."""
        operation, gradient = self.operations[index], self.gradient(index)
        if operation.kind == "add" and gradient is not None:
            for value in operation.inputs:
                self.send(value, gradient)
            return
        if operation.kind == "concat" and gradient is not None:
            for value in operation.inputs:
                view = self.node(f"view {self.operations[value].name}", 0, 0, set(), gradient)
                self.send(value, view)
            return
        [value] = operation.inputs
        reads = {gradient} if gradient is not None else set()
        reads |= ({value} if operation.reads_input else set()) | ({index} if operation.reads_output else set())
        source = self.operations[value]
        numbers = 0 if source.kind == "images" else source.numbers
        self.send(value, self.node(f"d {operation.name}", operation.backward_flops, numbers, reads))


def _ns(flops: int) -> int:
    return -(-flops // FLOPS_PER_NS)


def training_graph(network: Network, batch: int = 1) -> cairn.Graph:
    """The network's training step at a batch."""
    nodes = [
        cairn.Node(
            _ns(operation.flops * batch),
            operation.numbers * FLOAT_BYTES * batch,
            operation.inputs,
            name=operation.name,
            keep=operation.kind == "images",
            no_recompute=operation.kind == "images",
        )
        for operation in network.operations
    ]
    backward = _Backward(network, nodes, batch)
    for index in range(len(network.operations) - 1, 0, -1):
        backward.undo(index)
    return cairn.Graph(
        nodes,
        fixed_bytes=2 * FLOAT_BYTES * network.parameters,
        backward_begins_at=len(network.operations),
        name=f"{network.name} b{batch}",
        provenance={"network": network.name, "batch": batch, "flops_per_ns": FLOPS_PER_NS},
    )


# ---- the networks ----


def _vgg(name: str, depths: tuple[int, ...]) -> Network:
    network = Network(name, 224, 224)
    value = 0
    for channels, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            value = network.conv(value, channels, relu=True)
        value = network.pool(value)
    for features in (4096, 4096):
        value = network.dense(value, features, relu=True)
    network.loss(network.dense(value, 1000))
    return network


def vgg16() -> Network:
    """13 convolutions, 3 dense layers."""
    return _vgg("VGG-16", (2, 2, 3, 3, 3))


def vgg19() -> Network:
    """16 convolutions, 3 dense layers."""
    return _vgg("VGG-19", (2, 2, 4, 4, 4))


def resnet50() -> Network:
    """Bottleneck blocks of three convolutions, (3, 4, 6, 3) of them; the stride stands in the 3 x 3 convolution."""
    network = Network("ResNet-50", 224, 224)

    def block(value: int, width: int, stride: int) -> int:
        shortcut = value
        out = network.relu(network.norm(network.conv(value, width, 1)))
        out = network.relu(network.norm(network.conv(out, width, 3, stride)))
        out = network.norm(network.conv(out, 4 * width, 1))
        if network.shape(value) != network.shape(out):
            shortcut = network.norm(network.conv(value, 4 * width, 1, stride))
        return network.relu(network.add(out, shortcut))

    value = network.pool(network.relu(network.norm(network.conv(0, 64, 7, 2))), 3, 2)
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            value = block(value, width, stride if i == 0 else 1)
    network.loss(network.dense(network.average(value), 1000))
    return network


def mobilenet() -> Network:
    """Depthwise and pointwise convolutions in turn, version 1."""
    network = Network("MobileNet", 224, 224)

    def step(value: int) -> int:
        return network.relu(network.norm(value))

    value = step(network.conv(0, 32, 3, 2))
    plan = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for channels, stride in plan:
        given = network.shape(value)[0]
        value = step(network.conv(value, given, 3, stride, groups=given))
        value = step(network.conv(value, channels, 1))
    network.loss(network.dense(network.average(value), 1000))
    return network


def unet() -> Network:
    """Four levels down and up, 64 to 1024 channels, on images of 416 x 608, two classes."""
    network = Network("U-Net", 416, 608)
    value, skips = 0, []
    for channels in (64, 128, 256, 512):
        for _ in range(2):
            value = network.conv(value, channels, relu=True)
        skips.append(value)
        value = network.pool(value)
    for _ in range(2):
        value = network.conv(value, 1024, relu=True)
    for channels, skip in zip((512, 256, 128, 64), reversed(skips), strict=True):
        value = network.concat(skip, network.up(value, channels))
        for _ in range(2):
            value = network.conv(value, channels, relu=True)
    network.loss(network.conv(value, 2, 1))
    return network


NETWORKS: dict[str, Callable[[], Network]] = {
    "vgg16": vgg16,
    "vgg19": vgg19,
    "resnet50": resnet50,
    "mobilenet": mobilenet,
    "unet": unet,
}


def main() -> int:
    """Prints one graph."""
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1] not in NETWORKS:
        print(f"usage: paper_networks.py {'|'.join(NETWORKS)} [BATCH]", file=sys.stderr)
        return 2
    batch = int(sys.argv[2]) if len(sys.argv) == 3 else 1
    print(training_graph(NETWORKS[sys.argv[1]](), batch).to_json(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
