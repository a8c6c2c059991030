"""The networks for the planner's benchmarks, at the sizes of the papers, and the plans to compare with.

Costs come from the roofline model of a data-centre GPU. No weights are allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import dtr_networks

from rematplan.api import LoadedStep, Sizes, load_step, problem
from rematplan.ir import LatticeTooLarge, TrainingGraph
from rematplan.planner.blocks.lowering import Partition, lower_to_positions
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import whole_bytes

DEVICE = "a100"


@dataclass(frozen=True)
class Network:
    """A network for the planner's benchmarks.

    ``name``: of the row. ``sizes``: the network's sizes. ``block``: a pattern that matches, in a parameter's name, the
    name of its block. ``model``: the network's name in the zoo; empty if it is ``name``. Networks of `dtr_networks`
    have the sizes stated there.
    """

    name: str
    sizes: Sizes
    block: str
    model: str = ""

    def load(self) -> tuple[LoadedStep, TrainingGraph]:
        """Capture the network's step without weights, and return it and its planning problem."""
        if self.name in dtr_networks.MODELS:
            loaded = dtr_networks.load(self.name)
        else:
            loaded = load_step(self.model or self.name, sizes=self.sizes, weightless=True)
        return loaded, problem(loaded, DEVICE)


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
    Network("resnet32", Sizes(), r"stages\.\d+\.\d+"),
    Network("treelstm", Sizes(), r"(?:gates|forget)_[xh]"),
    Network("lstm", Sizes(batch=64, tokens=16), r"cells\.\d+"),
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
    """Return the budget in bytes that leaves a share of the activations: inputs and outputs + ``share`` · (peak −
    these).

    The peak is the one without recomputation.
    """
    peak, fixed = no_recompute(graph).peak, whole_bytes(graph)
    return fixed + int(share * (peak - fixed))


def share_of(graph: TrainingGraph, budget: int) -> float:
    """Return the share of the activations that a budget in bytes leaves; the inverse of `activation_share`."""
    peak, fixed = no_recompute(graph).peak, whole_bytes(graph)
    return (budget - fixed) / (peak - fixed)


def per_block(network: Network, loaded: LoadedStep, graph: TrainingGraph) -> Plan:
    """Return the plan of checkpointing each block, as people do it by hand.

    Tensors that one block reads of another are kept, and everything within a block is run again. An op belongs to the
    block of the parameters that it reads, or that the last op before it reads which reads any.
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
    runs = [graph.ops[o].name for o in lower_to_positions(graph, partition)]
    return plan_from_runs(graph, runs, "per block")


def rivals(
    network: Network, loaded: LoadedStep, graph: TrainingGraph
) -> Iterator[tuple[str, tuple[Plan, ...]]]:
    """Yield the plans of other methods: the method's name, and its plans by falling peak.

    The methods are per-block checkpointing, both strategies of Chen et al. (2016), and both dynamic programs of
    Kusumoto et al. (2019), except those for which the graph is too large.
    """
    yield "per block", (per_block(network, loaded, graph),)
    for strategy in (ChenSqrt(), ChenGreedy(), ApproxDP(), ExactDP()):
        with suppress(LatticeTooLarge):
            yield strategy.name, strategy.curve(graph, ())
