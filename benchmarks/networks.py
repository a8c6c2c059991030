"""The networks for the planner's benchmarks, at the sizes of the papers, and the plans to compare with.

Costs come from the roofline model of a data-centre GPU. No weights are allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rematplan.api import LoadedStep, Sizes, load_step, problem
from rematplan.ir import LatticeTooLarge, TrainingGraph
from rematplan.planner.blocks.lowering import Partition, lower
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.exact_dp import ExactDP

DEVICE = "a100"


@dataclass(frozen=True)
class Network:
    """A network of the zoo and its sizes. ``block``: what in a parameter's name tells its block, for checkpointing."""

    name: str
    sizes: Sizes
    block: str
    model: str = ""

    def load(self) -> tuple[LoadedStep, TrainingGraph]:
        """The captured step without weights, and its problem."""
        loaded = load_step(self.model or self.name, sizes=self.sizes, weightless=True)
        return loaded, problem(loaded, "roofline", DEVICE)


_ALL = (
    Network("gpt12", Sizes(), r"blocks\.\d+"),
    Network("gpt24", Sizes(), r"blocks\.\d+"),
    Network("resnet50", Sizes(batch=96), r"stages\.\d+\.\d+"),
    Network("vgg19", Sizes(batch=64), r"features\.\d+"),
    Network("googlenet", Sizes(batch=256), r"layers\.\d+"),
    Network("unet", Sizes(batch=8, image=448), r"(?:down|merge)\.\d+|bottom"),
    Network("resnet152", Sizes(batch=48), r"stages\.\d+\.\d+"),
    Network("densenet161", Sizes(batch=32), r"features\.\d+(?:\.layers\.\d+)?"),
    Network("pspnet", Sizes(batch=2, image=713), r"stages\.\d+\.\d+|head\.0\.levels"),
    Network(
        "10k ops",
        Sizes(batch=4, tokens=256, depth=345, width=256, vocabulary=1000),
        r"blocks\.\d+",
        "gpt12",
    ),
)
NETWORKS: Mapping[str, Network] = {n.name: n for n in _ALL}
"""By name. U-Net's image is the one whose peak without recomputation is nearest the 9.1 GB of Kusumoto et al. 2019."""


def activation_share(graph: TrainingGraph, share: float) -> int:
    """The budget, bytes, at a share f of the activation part: the no-recompute peak less inputs and outputs."""
    peak, fixed = _peak_and_fixed(graph)
    return fixed + int(share * (peak - fixed))


def share_of(graph: TrainingGraph, budget: int) -> float:
    """The share f that a budget is."""
    peak, fixed = _peak_and_fixed(graph)
    return (budget - fixed) / (peak - fixed)


def _peak_and_fixed(graph: TrainingGraph) -> tuple[int, int]:
    inputs = set(graph.inputs)
    fixed = graph.input_bytes + sum(graph.size[t] for t in graph.outputs if t not in inputs)
    return base_plan(graph).estimate.peak, fixed


def base_plan(graph: TrainingGraph) -> Plan:
    """Every op once, in the base order."""
    return plan_from_runs(graph, [op.name for op in graph.ops], "base")


def per_block(network: Network, loaded: LoadedStep, graph: TrainingGraph) -> Plan:
    """Checkpointing per block, as one does it by hand: kept is what one block gives another, the rest runs again.

    An op belongs to the block of the parameters that it or the last op before it reads.
    """
    step = loaded.step
    names = {step.values[i.value].storage: i.target for i in step.inputs if i.kind == "parameter"}
    blocks: list[list[str]] = [[]]
    current, block_of = "", dict[str, int]()
    for op in graph.ops:
        if op.phase == "backward":
            continue
        for parameter in (names[t] for t in op.reads if t in names):
            found = re.search(network.block, parameter)
            if found and found[0] != current:
                current = found[0]
                blocks.append([])
        blocks[-1].append(op.name)
        block_of.update(dict.fromkeys(op.writes, len(blocks) - 1))
    forward = {name: at for at, block in enumerate(blocks) for name in block}
    kept = {
        t
        for op in graph.ops
        if op.name in forward
        for t in op.reads
        if t in block_of and block_of[t] != forward[op.name]
    }
    partition = Partition(tuple(tuple(block) for block in blocks if block), tuple(kept))
    return plan_from_runs(graph, lower(graph, partition), "per block")


def rivals(
    network: Network, loaded: LoadedStep, graph: TrainingGraph
) -> Iterator[tuple[str, tuple[Plan, ...]]]:
    """What others would do: each one's trade-off, by falling peak. A DP that the graph is too large for is left out."""
    yield "per block", (per_block(network, loaded, graph),)
    for strategy in (ChenSqrt(), ChenGreedy(), ApproxDP(), ExactDP()):
        try:
            yield strategy.name, strategy.curve(graph, ())
        except LatticeTooLarge:
            continue
