"""Count how many plans of `auto` are proven optimal in a few seconds, for training graphs with layers as nodes.

Such graphs are planned by Checkmate and MOCCASIN; budgets are shares of the given order's peak. A node is a layer (a
convolution, a normalisation, an activation, a sum, ...). Its backward node reads the gradients that reach the layer,
its inputs and its output, and writes a gradient for each input. Parameters and their gradients are left out, as in
those papers. ResNet-50 has 349 ops and 745 reads; the graph published for it has 353 and 751. Costs are
floating-point operations for convolutions and dense layers (twice as many in the backward), and bytes for all others.

usage: python benchmarks/layer_graphs.py [NAME ...] [--shares .9 .8 .7 .6 .5] [--seconds 5] [--without-phases]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.core.plan import plan_from_runs

FLOAT = 4  # bytes
BATCH = 8
PER_ELEMENT = 10.0
"""Operations that an element of a cheap layer's output takes, by the time that its bytes take."""
COMPUTING = ("conv", "dense")
"""Layers whose backward half computes twice as much."""

Shape = tuple[int, int, int]
"""Channels, height, width."""


@dataclass(frozen=True)
class Layer:
    """A layer of a `Network`.

    ``kind``: such as ``conv``. ``reads``: the positions in the network of the layers that it reads; empty for an input.
    ``shape``: of its output for one sample, (channels, height, width). ``flops``: floating-point operations for one
    sample.
    """

    kind: str
    reads: tuple[int, ...]
    shape: Shape
    flops: float


@dataclass
class Network:
    """A network as a list of layers. Each method appends a layer and returns its position in ``layers``."""

    layers: list[Layer] = field(default_factory=list)

    def add(self, kind: str, reads: Sequence[int], shape: Shape, flops: float | None = None) -> int:
        """Append a layer of any kind that reads the layers at the positions ``reads``, and return its position.

        ``shape``: of its output, (channels, height, width). ``flops``: None for a cheap layer, whose cost is
        proportional to the elements read and written.
        """
        cheap = PER_ELEMENT * (math.prod(shape) + sum(math.prod(self.layers[i].shape) for i in reads))
        self.layers.append(Layer(kind, tuple(reads), shape, cheap if flops is None else flops))
        return len(self.layers) - 1

    def conv(self, x: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> int:
        """Append a padded convolution with ``channels`` output channels of layer ``x``, and return its position."""
        before, height, width = self.layers[x].shape
        shape = (channels, -(-height // stride), -(-width // stride))
        return self.add("conv", [x], shape, 2.0 * math.prod(shape) * kernel**2 * before / groups)

    def dense(self, x: int, features: int) -> int:
        """Append a dense layer with ``features`` outputs, which reads all numbers of layer ``x``, and return its
        position."""
        return self.add("dense", [x], (features, 1, 1), 2.0 * math.prod(self.layers[x].shape) * features)

    def same(self, kind: str, *reads: int) -> int:
        """Append a cheap layer whose output has the shape of the first layer that it reads, and return its position."""
        return self.add(kind, reads, self.layers[reads[0]].shape)

    def block(self, x: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> int:
        """Append a convolution of layer ``x``, batch norm and ReLU, and return the position of the ReLU."""
        return self.same("relu", self.same("norm", self.conv(x, channels, kernel, stride, groups)))

    def pool(self, x: int, by: int = 2) -> int:
        """Append a pooling of layer ``x`` that divides height and width by ``by``, and return its position."""
        channels, height, width = self.layers[x].shape
        return self.add("pool", [x], (channels, height // by, width // by))

    def up(self, x: int, by: int = 2) -> int:
        """Append an upsampling of layer ``x`` that multiplies height and width by ``by``, and return its position."""
        channels, height, width = self.layers[x].shape
        return self.add("up", [x], (channels, height * by, width * by))

    def cat(self, x: int, y: int) -> int:
        """Append the concatenation of layers ``x`` and ``y`` along the channels, and return its position."""
        (first, *size), (second, *_) = self.layers[x].shape, self.layers[y].shape
        return self.add("cat", [x, y], (first + second, size[0], size[1]))


def image(channels: int, height: int, width: int) -> tuple[Network, int]:
    """Return a network that has only an input of the given shape, and the input's position."""
    net = Network()
    return net, net.add("input", [], (channels, height, width), 0.0)


VGG = {
    16: ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)),
    19: ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)),
}


def vgg(depth: int) -> Network:
    """Return a VGG for images of 224 × 224. ``depth``: a key of `VGG`."""
    net, x = image(3, 224, 224)
    for channels, convs in VGG[depth]:
        for _ in range(convs):
            x = net.same("relu", net.conv(x, channels))
        x = net.pool(x)
    for features in (4096, 4096, 1000):
        x = net.dense(x, features)
    return net


def mobilenet() -> Network:
    """Return a MobileNet for images of 224 × 224."""
    net, x = image(3, 224, 224)
    x = net.block(x, 32, stride=2)
    widths = [
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    ]
    for channels, stride in widths:
        before = net.layers[x].shape[0]
        x = net.block(net.block(x, before, stride=stride, groups=before), channels, kernel=1)
    net.dense(net.pool(x, 7), 1000)
    return net


def resnet(blocks: Sequence[int], bottleneck: bool) -> Network:
    """Return a ResNet for images of 224 × 224. ``blocks``: of each stage. ``bottleneck``: whether they are
    bottlenecks."""
    net, x = image(3, 224, 224)
    x = net.pool(net.block(x, 64, kernel=7, stride=2))
    for stage, count in enumerate(blocks):
        inner = 64 * 2**stage
        outer = 4 * inner if bottleneck else inner
        for place in range(count):
            stride = 2 if stage and not place else 1
            y = net.block(x, inner, kernel=1 if bottleneck else 3, stride=stride)
            if bottleneck:
                y = net.block(y, inner)
            y = net.same("norm", net.conv(y, outer, kernel=1 if bottleneck else 3))
            if net.layers[x].shape != net.layers[y].shape:
                x = net.same("norm", net.conv(x, outer, kernel=1, stride=stride))
            x = net.same("relu", net.same("add", y, x))
    net.dense(net.pool(x, 7), 1000)
    return net


def unet() -> Network:
    """Return a U-Net for images of 416 × 608."""
    net, x = image(3, 416, 608)
    skips = []
    for channels in (64, 128, 256, 512):
        x = net.block(net.block(x, channels), channels)
        skips.append(x)
        x = net.pool(x)
    x = net.block(net.block(x, 1024), 1024)
    for channels in (512, 256, 128, 64):
        x = net.cat(skips.pop(), net.conv(net.up(x), channels, kernel=2))
        x = net.block(net.block(x, channels), channels)
    net.conv(x, 12, kernel=1)
    return net


def segnet() -> Network:
    """Return a SegNet on a VGG-16 for images of 416 × 608."""
    net, x = image(3, 416, 608)
    for channels, convs in VGG[16]:
        for _ in range(convs):
            x = net.block(x, channels)
        x = net.pool(x)
    for channels, convs in reversed(VGG[16]):
        x = net.up(x)
        for _ in range(convs):
            x = net.block(x, channels)
    net.conv(x, 12, kernel=1)
    return net


def fcn8() -> Network:
    """Return an FCN-8 on a VGG-16 for images of 416 × 608."""
    net, x = image(3, 416, 608)
    pooled = []
    for channels, convs in VGG[16]:
        for _ in range(convs):
            x = net.same("relu", net.conv(x, channels))
        pooled.append(x := net.pool(x))
    for kernel in (7, 1):
        x = net.same("relu", net.conv(x, 4096, kernel=kernel))
    x = net.conv(x, 12, kernel=1)
    for skip in (pooled[3], pooled[2]):
        x = net.same("add", net.up(x), net.conv(skip, 12, kernel=1))
    net.up(x, 8)
    return net


NETWORKS: dict[str, Callable[[], Network]] = {
    "vgg16": lambda: vgg(16),
    "vgg19": lambda: vgg(19),
    "mobilenet": mobilenet,
    "resnet18": lambda: resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: resnet((3, 4, 6, 3), bottleneck=True),
    "unet": unet,
    "segnet": segnet,
    "fcn8": fcn8,
}


def training_graph(name: str, phases: bool) -> TrainingGraph:
    """Return the training step of a network: its layers, a loss, and the layers' backward ops in reverse order.

    ``name``: a key of `NETWORKS`. ``phases``: whether ops state that they belong to the forward or the backward; if
    not, the planner may reorder them across both halves.
    """
    layers = NETWORKS[name]().layers
    last = len(layers) - 1
    bytes_ = [FLOAT * BATCH * math.prod(layer.shape) for layer in layers]
    tensors = [Tensor(f"t{i}", size) for i, size in enumerate(bytes_)] + [Tensor("loss", FLOAT)]
    forward, backward = ("forward", "backward") if phases else (None, None)
    ops = [
        Op(f"{layer.kind}{i}", tuple(f"t{j}" for j in layer.reads), (f"t{i}",), layer.flops, phase=forward)
        for i, layer in enumerate(layers)
        if layer.reads
    ]
    ops.append(Op("loss", (f"t{last}",), ("loss",), 1.0, phase=forward))
    gradients: dict[int, list[str]] = {last: ["loss"]}
    for i in range(last, -1, -1):
        layer = layers[i]
        if not layer.reads:
            continue
        reads = dict.fromkeys([*gradients[i], *(f"t{j}" for j in layer.reads), f"t{i}"])
        for j in layer.reads:
            tensors.append(Tensor(f"d{i}_{j}", bytes_[j]))
            gradients.setdefault(j, []).append(f"d{i}_{j}")
        cost = layer.flops * (2 if layer.kind in COMPUTING else 1)
        writes = tuple(f"d{i}_{j}" for j in layer.reads)
        ops.append(Op(f"d_{layer.kind}{i}", tuple(reads), writes, cost, phase=backward))
    inputs = [i for i, layer in enumerate(layers) if not layer.reads]
    return TrainingGraph(
        name=name,
        tensors=tuple(tensors),
        inputs=tuple(f"t{i}" for i in inputs),
        outputs=("loss", *(t for i in inputs for t in gradients[i])),
        ops=tuple(ops),
    )


def cell(graph: TrainingGraph, share: float, seconds: float) -> tuple[str, bool]:
    """Plan a graph at a share of the peak without recomputation, and return a line of the table.

    The second result is whether the search ended with a proof: that the plan is optimal, or that no plan fits.
    """
    peak = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    start = f"{graph.name:>10} {len(graph.ops):>5} {sum(len(op.reads) for op in graph.ops):>6} {share:>6}"
    began = time.monotonic()
    try:
        plan = Auto(time_limit=seconds, reuse=False).plan(replace(graph), int(share * peak))
    except InfeasibleBudget as error:
        took = time.monotonic() - began
        return f"{start} least found {error.smallest / peak:.3f} of the peak {took:>14.1f} s", took < seconds
    took = time.monotonic() - began
    bound = 100 * (plan.lower_bound or 0.0)
    figures = f"{100 * plan.estimate.overhead:>11.4f} {bound:>10.4f} {took:>8.1f} s"
    return f"{start} {figures}  {plan.status}", plan.status == "optimal"


def main() -> None:
    """Plan the chosen networks at all shares, print a line for each, and count the proofs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.8, 0.7, 0.6, 0.5])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each plan")
    parser.add_argument(
        "--without-phases", action="store_true", help="as a plain graph that may be reordered"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NETWORKS)):
        parser.error(f"unknown network {unknown[0]!r}; there are {', '.join(NETWORKS)}")
    compile_kernels()
    print(
        f"{'network':>10} {'n':>5} {'m':>6} {'share':>6} {'overhead %':>11} {'bound %':>10} {'seconds':>10}"
    )
    proven = []
    for name in options.names:
        graph = training_graph(name, phases=not options.without_phases)
        for share in options.shares:
            text, proof = cell(graph, share, options.seconds)
            proven.append(proof)
            print(text, flush=True)
    print(f"{sum(proven)} of {len(proven)} with a proof")


if __name__ == "__main__":
    main()
