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
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rematplan import ir
from rematplan.ir import InfeasibleBudget, Op, TrainingGraph
from rematplan.models import VGG, MobileNetV2, ResNet, UNet
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.core.plan import plan_from_runs

BATCH = 8
PER_ELEMENT = 10.0
"""Floating-point operations that take as long as an element that a cheap layer reads or writes."""
CHANNELS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""VGG-16: for each stage, the number of channels and of convolutions."""


@dataclass(frozen=True)
class Layer:
    """A layer of a network.

    ``kind``: the name of its op, such as ``convolution``. ``reads``: the positions of the layers that it reads; empty
    for the input. ``bytes_``: of its output. ``cost``: of its forward and of its backward, in floating-point
    operations.
    """

    kind: str
    reads: tuple[int, ...]
    bytes_: int
    cost: tuple[float, float]


class Recorder(TorchDispatchMode):
    """Records the ops of a network as layers. Views are part of the layer that they view.

    ``batch``: the network's input.
    """

    def __init__(self, batch: Tensor) -> None:
        super().__init__()
        self.layers = [Layer("input", (), batch.nbytes, (0.0, 0.0))]
        self.position = {id(batch): 0}
        self.alive = [batch]  # ids are unique while these live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and record it if it reads the output of a layer."""
        out = func(*args, **(kwargs or {}))
        result = out[0] if isinstance(out, tuple) else out
        read = [t for t in tree_leaves(args) if id(t) in self.position]
        places = tuple(dict.fromkeys(self.position[id(t)] for t in read))
        if places and not func.is_view:
            count = flop_registry.get(func.overloadpacket)
            flops = float(count(*args, out_val=out)) if count else None
            cheap = PER_ELEMENT * (result.numel() + sum(t.numel() for t in read))
            cost = (cheap, cheap) if flops is None else (flops, 2 * flops)
            name = func.overloadpacket.__name__.strip("_")
            self.layers.append(Layer(name, places, result.nbytes, cost))
            places = (len(self.layers) - 1,)
        if places:
            self.alive.append(result)
            self.position[id(result)] = places[0]
        return out


def stage(before: int, channels: int, count: int, norm: bool) -> list[nn.Module]:
    """Return ``count`` convolutions with ReLU, and with batch norm if ``norm``. ``before``: the channels of the
    input."""
    layers: list[nn.Module] = []
    for inputs in (before, *[channels] * (count - 1)):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if norm else [nn.ReLU()]
    return layers


def vgg16(norm: bool = False) -> list[nn.Module]:
    """Return the layers of VGG-16 up to its last pooling."""
    before = (3, *(channels for channels, _ in CHANNELS[:-1]))
    stages = [stage(b, *c, norm) for b, c in zip(before, CHANNELS, strict=True)]
    return [layer for layers in stages for layer in (*layers, nn.MaxPool2d(2))]


def dense(*features: int) -> list[nn.Module]:
    """Return linear layers with ReLU between them. ``features``: of the input and of each layer's output."""
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(features)]
    return [layer for pair in layers for layer in pair][:-1]


def segnet() -> nn.Module:
    """Return a SegNet on a VGG-16."""
    before, layers = CHANNELS[-1][0], vgg16(norm=True)
    for channels, count in reversed(CHANNELS):
        layers += [nn.Upsample(scale_factor=2), *stage(before, channels, count, norm=True)]
        before = channels
    return nn.Sequential(*layers, nn.Conv2d(before, 12, 1))


class FCN8(nn.Module):
    """An FCN-8 on a VGG-16: scores of the last three stages, each enlarged and added to the one before."""

    def __init__(self) -> None:
        super().__init__()
        layers = vgg16()
        ends = [at + 1 for at, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
        head = [nn.Conv2d(512, 4096, 7, padding=3), nn.ReLU(), nn.Conv2d(4096, 4096, 1), nn.ReLU()]
        parts = (layers[: ends[2]], layers[ends[2] : ends[3]], [*layers[ends[3] :], *head])
        self.parts = nn.ModuleList(nn.Sequential(*part) for part in parts)
        self.scores = nn.ModuleList(nn.Conv2d(channels, 12, 1) for channels in (256, 512, 4096))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of every pixel, (N, 12, H, W), for images (N, 3, H, W)."""
        scores = [score(x := part(x)) for part, score in zip(self.parts, self.scores, strict=True)]
        middle = functional.interpolate(scores[2], scale_factor=2) + scores[1]
        return functional.interpolate(
            functional.interpolate(middle, scale_factor=2) + scores[0], scale_factor=8
        )


SMALL, LARGE = (224, 224), (416, 608)
"""Height and width of images."""
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "vgg16": (lambda: nn.Sequential(*vgg16(), nn.Flatten(), *dense(512 * 49, 4096, 4096, 1000)), SMALL),
    "vgg19": (VGG, SMALL),
    "mobilenet": (MobileNetV2, SMALL),
    "resnet18": (lambda: ResNet(18), SMALL),
    "resnet50": (lambda: ResNet(50), SMALL),
    "unet": (UNet, LARGE),
    "segnet": (segnet, LARGE),
    "fcn8": (FCN8, LARGE),
}
"""Each network, and the size of its images."""


def layers_of(name: str) -> list[Layer]:
    """Return the layers of a network in evaluation mode, where dropout does nothing. ``name``: a key of `NETWORKS`."""
    make, size = NETWORKS[name]
    with torch.device("meta"), torch.no_grad():
        batch, model = torch.empty(BATCH, 3, *size), make().eval()
        with Recorder(batch) as recorder:
            model(batch)
    return recorder.layers


def training_graph(name: str, phases: bool) -> TrainingGraph:
    """Return the training step of a network: its layers, a loss, and the layers' backward ops in reverse order.

    ``name``: a key of `NETWORKS`. ``phases``: whether ops state that they belong to the forward or the backward; if
    not, the planner may reorder them across both halves.
    """
    layers = layers_of(name)
    last = len(layers) - 1
    tensors = [ir.Tensor(f"t{i}", layer.bytes_) for i, layer in enumerate(layers)] + [ir.Tensor("loss", 4)]
    forward, backward = ("forward", "backward") if phases else (None, None)
    ops = [
        Op(f"{layer.kind}{i}", tuple(f"t{j}" for j in layer.reads), (f"t{i}",), layer.cost[0], phase=forward)
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
            tensors.append(ir.Tensor(f"d{i}_{j}", layers[j].bytes_))
            gradients.setdefault(j, []).append(f"d{i}_{j}")
        writes = tuple(f"d{i}_{j}" for j in layer.reads)
        ops.append(Op(f"d_{layer.kind}{i}", tuple(reads), writes, layer.cost[1], phase=backward))
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
