"""Plan and simulate pipelines: peaks and extra time of each rank, dataflow over slow links, energy by a table of
devices.

    python benchmarks/pipelines.py [--quick] [--pictures FOLDER] [PART ...]

Plans are for an A100 by its roofline model, without workspaces. 1F1B runs on 4 ranks with 16 micro-batches.
Checkpointing runs each block of the network again (in reversible networks each pair of couplings); the budget of the
plans is the largest peak of a rank with checkpointing. ``training`` runs small networks in one process, action by
action in the order of the timeline.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from rematplan import api
from rematplan.ir import TrainingGraph, show_bytes
from rematplan.pipeline.schedules import schedule_named
from rematplan.pipeline.step_chain import NamedChain, named_chain
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.blocks.lowering import Partition, lower
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.simulator import simulate
from rematplan.planner.pipeline.actions import StagePlan
from rematplan.planner.pipeline.auto_stages import AutoStages
from rematplan.planner.pipeline.bubble_formulas import ideal_utilisation, utilisation_bound
from rematplan.planner.pipeline.choose_cuts import PipelineSearch, Terms, returned_bytes
from rematplan.planner.pipeline.messages import MessageBytes, message_memory
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.stage_slices import StageSlice, stage_problem
from rematplan.planner.pipeline.timeline import Link, StageTimes, replay
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.report.plot import COLOURS, MARKERS

RANKS, MICROBATCHES = 4, 16
AMPLE = 2**50
MOVES = 1_000
"""For each op, of the searches for plans of least memory, so that they are the same on every machine."""
NETWORKS = {
    "vit_s": ({"batch": 4}, r"blocks\.\d+"),
    "resnet50": ({"batch": 8}, r"stages\.\d+\.\d+"),
    "swin_t": ({"batch": 4}, r"layers\.\d+"),
    "revvit_s": ({"batch": 4}, r"blocks\.blocks\.\d+"),
    "revnet38": ({"batch": 8}, r"stages\.\d+\.\d+"),
}
"""Networks, sizes of a micro-batch, names of what is checkpointed. GPT and BERT have tied weights, which no two stages
can have."""


def loaded(name: str, sizes: dict[str, int], inverses: bool = False) -> tuple[NamedChain, TrainingGraph]:
    """The chain of a network and its problem."""
    step = api.load_step(name, sizes=api.Sizes(**sizes), weightless=not inverses, inverses=inverses)
    graph = api.problem(step)
    return named_chain(step.step, graph), graph


def units(chain: NamedChain, start: int, end: int, pattern: str) -> list[list[int]]:
    """The blocks of a stage in groups: those that a checkpoint runs again as one."""
    groups: list[list[int]] = []
    before = ""
    for block in range(start, end):
        found = re.match(pattern, chain.names[block])
        name = found[0] if found else chain.names[block]
        if not groups or name != before:
            groups.append([])
        before = name
        groups[-1].append(block)
    return groups


def checkpointed(chain: NamedChain, graph: TrainingGraph, start: int, end: int, pattern: str) -> Plan:
    """The plan of a stage that keeps what passes between its groups of blocks, and runs each group again."""
    ix, block = (
        indexed(graph),
        dict(zip((op.name for op in chain.chain.graph.ops), chain.chain.block, strict=True)),
    )
    forward = [o for o, is_forward in enumerate(ix.forward) if is_forward]
    group_of = {b: g for g, blocks in enumerate(units(chain, start, end, pattern)) for b in blocks}
    of = {o: group_of.get(block.get(ix.ops[o], end - 1), 0) for o in forward}
    groups = [[o for o in forward if of[o] == g] for g in range(max(of.values()) + 1)]
    kept = [
        ix.tensors[t]
        for o in forward
        for t in ix.writes[o]
        if any(r in of and of[r] > of[o] for r in ix.readers[t])
    ]
    # The last block of a partition stays resident; an empty one, so that the last group is run again, too.
    blocks = (*(tuple(ix.ops[o] for o in group) for group in groups if group), ())
    parts = Partition(blocks, tuple(kept))
    return plan_from_runs(graph, lower(graph, parts), "checkpoint")


def stages_of(
    search: PipelineSearch, cuts: Sequence[int], plan: Callable[[TrainingGraph, int, int], Plan]
) -> list[StagePlan]:
    """Figures of each stage under a rule for its plan."""
    bounds = [0, *cuts, len(search.chain)]
    found = []
    for stage, (start, end) in enumerate(pairwise(bounds)):
        template = search.template(start, end, stage)
        problem = stage_problem(
            StageSlice(search.chain, start, end), template, per_microbatch=search.terms.batch
        )
        found.append(problem.measured(plan(problem.graph, start, end)))
    return found


def peaks(search: PipelineSearch, stages: Sequence[StagePlan]) -> list[int]:
    """Of each rank with one stage."""
    return [rank_peak(row, [stage]) for row, stage in zip(search.schedule.actions, stages, strict=True)]


def memory(quick: bool, _folder: Path | None) -> None:
    """Nothing recomputed, checkpoints, and our plans within the peak that checkpoints reach."""
    print(
        f"1F1B, {RANKS} ranks, {MICROBATCHES} micro-batches; greatest peak of a rank; extra time of the slowest stage"
    )
    for name, (sizes, pattern) in list(NETWORKS.items())[: 2 if quick else None]:
        chain, _graph = loaded(name, sizes)
        schedule = schedule_named("1f1b", RANKS, MICROBATCHES)
        search = PipelineSearch(chain.chain, schedule, Terms(AMPLE, batch=chain.batch), AutoStages())
        cuts = search.run().cuts
        all_kept = stages_of(search, cuts, lambda graph, i, j: no_recompute(graph))
        again = stages_of(
            search, cuts, lambda graph, i, j, c=chain, p=pattern: checkpointed(c, graph, i, j, p)
        )
        budget = max(peaks(search, again))
        ours = PipelineSearch(
            chain.chain, schedule, Terms(budget, batch=chain.batch), AutoStages(0.5 if quick else 1.0)
        ).run(cuts)
        base = [one.forward + one.backward for one in all_kept]
        slow = [
            max(s.forward + s.backward for s in stages) / max(base) - 1 for stages in (again, ours.stages)
        ]
        least = max(b + floor for b, floor in zip(base, ours.floors, strict=True)) / max(base) - 1
        print(
            f"{name:10} keep {show_bytes(max(peaks(search, all_kept))):>10}  checkpoint {show_bytes(budget):>10} "
            f"{100 * slow[0]:5.1f} %  ours {show_bytes(max(ours.peaks)):>10} {100 * slow[1]:5.1f} %  ratio "
            f"{slow[1] / slow[0]:.2f}, floor {100 * least:.1f} %  cuts {', '.join(chain.names[c] for c in cuts)}"
        )


def latency(_quick: bool, folder: Path | None) -> None:
    """Utilisation of 1F1B and of the dataflow order over slow links."""
    ranks, microbatches, times = 8, 256, [StageTimes(1, 2)] * 8
    hops = [k / 20 for k in range(0, 31)]
    used: dict[str, list[float]] = {"1f1b": [], "dataflow": []}
    for hop in hops:
        for name, row in used.items():
            row.append(
                1 - replay(schedule_named(name, ranks, microbatches, hop=hop), times, Link(3 * hop)).bubble
            )
    bounds = {
        "bound of 1F1B": [
            min(ideal_utilisation(ranks, microbatches, h), utilisation_bound(ranks, h)) for h in hops
        ],
        "ideal": [ideal_utilisation(ranks, microbatches, h) for h in hops],
    }
    for at in (0, 2, 10, 20):
        print(
            f"link {hops[at]:.1f}: " + ", ".join(f"{n} {row[at]:.3f}" for n, row in (used | bounds).items())
        )
    if folder:
        figure, axes = picture(
            "time of a message ÷ time of a stage", "utilisation, 8 stages, 256 micro-batches"
        )
        for k, (name, row) in enumerate(used.items()):
            axes.plot(hops, row, color=COLOURS[k], marker=MARKERS[k], markevery=5, label=name)
        for name, row in bounds.items():
            axes.plot(
                hops, row, color="black", linestyle=":" if name == "ideal" else "--", linewidth=1, label=name
            )
        axes.legend()
        figure.savefig(folder / "dataflow-latency.png", dpi=130)


def dataflow_stage(
    chain: NamedChain, start: int, end: int, stage: int, ranks: int, microbatches: int
) -> StagePlan:
    """A stage of the dataflow that keeps least."""
    schedule = schedule_named("dataflow", ranks, microbatches, hop=0.1)
    piece = StageSlice(chain.chain, start, end)
    size = MessageBytes(
        chain.chain.sends[start],
        returned_bytes(chain.chain, end, True),
        chain.chain.sends[end],
        returned_bytes(chain.chain, start, True),
    )
    problem = stage_problem(
        piece, message_memory(schedule, stage, size), per_microbatch=chain.batch, recovers=True
    )
    starts = Reversible().curve(problem.graph, ())
    found = [problem.measured(plan) for plan in starts]
    least = min(max(one.transient_forward, one.transient_backward) for one in found)
    for weight in (least, 2 * least, 2**30):  # of what is held at the boundary against what is needed besides
        graph = problem.with_room(weight)
        plan = cheapest_near_smallest_peak(
            graph, moves=MOVES * len(graph.ops), starts=priced_for(graph, starts)
        )
        found.append(problem.measured(replace(plan, estimate=simulate(problem.graph, plan.schedule))))
    return min(found, key=lambda one: rank_peak(schedule.actions[stage], [one]))


def priced_for(graph: TrainingGraph, plans: Sequence[Plan]) -> list[Plan]:
    """Plans of another variant of a problem as plans of this one."""
    return [replace(plan, estimate=simulate(graph, plan.schedule)) for plan in plans]


def depth(quick: bool, folder: Path | None) -> None:
    """Print the largest peak of the middle stages, without states and gradients, by depth, ranks and micro-batches."""
    print("RevViT-S, micro-batch 1, inner stage next to the first; bytes without parameters and gradients")
    rows: dict[str, list[int]] = {"keep": [], "checkpoint": [], "dataflow": []}
    couplings = (1, 2, 4) if quick else (1, 2, 4, 8)
    for ranks, microbatches, each in [(4, 16, c) for c in couplings] + [(4, 64, 2), (8, 16, 2)]:
        chain, _graph = loaded("revvit_s", {"batch": 1, "depth": ranks * each}, inverses=True)
        begins = [chain.names.index(f"blocks.blocks.{each * k}") for k in (1, 2)]
        schedule = schedule_named("1f1b", ranks, microbatches)
        flow = schedule_named("dataflow", ranks, microbatches, hop=0.1)
        size = MessageBytes(*(chain.chain.sends[b] for b in (begins[0], begins[1], begins[1], begins[0])))
        problem = stage_problem(
            StageSlice(chain.chain, *begins), message_memory(schedule, 1, size), per_microbatch=chain.batch
        )
        kept = problem.measured(no_recompute(problem.graph))
        again = problem.measured(checkpointed(chain, problem.graph, *begins, NETWORKS["revvit_s"][1]))
        inverted = dataflow_stage(chain, *begins, 1, ranks, microbatches)
        others = []
        for row, one in ((schedule, kept), (schedule, again), (flow, inverted)):
            free = replace(one, states=0, gradients=0, first_backward=None)
            others.append(rank_peak(row.actions[1], [free]))
        extra = inverted.extra / (inverted.forward + inverted.backward - inverted.extra)
        print(
            f"P {ranks} M {microbatches:3} couplings {each}: keep {show_bytes(others[0]):>10} checkpoint "
            f"{show_bytes(others[1]):>10} dataflow {show_bytes(others[2]):>10} ({others[2] / others[1]:.2f}; "
            f"K {inverted.kept_bytes}, extra {100 * extra:.0f} %)"
        )
        if (ranks, microbatches) == (4, 16):
            for name, value in zip(rows, others, strict=True):
                rows[name].append(value)
    if folder:
        figure, axes = picture("couplings in a stage", "peak of the second stage beside states (MiB)")
        for k, (name, row) in enumerate(rows.items()):
            axes.plot(couplings, [n / 2**20 for n in row], color=COLOURS[k], marker=MARKERS[k], label=name)
        axes.set_yscale("log")
        axes.legend()
        figure.savefig(folder / "dataflow-memory.png", dpi=130)


class Couplings(nn.Module):
    """Additive couplings of two-layer functions; the first stage embeds, the last one has a head."""

    def __init__(self, count: int, width: int, inputs: int = 0, classes: int = 0) -> None:
        super().__init__()
        self.functions = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2 * count)
        )
        self.embed = nn.Linear(inputs, 2 * width) if inputs else None
        self.head = nn.Linear(2 * width, classes) if classes else None

    def forward(self, x: Tensor) -> Tensor:
        """Both streams side by side."""
        a, b = (x if self.embed is None else self.embed(x)).chunk(2, -1)
        for f, g in zip(self.functions[::2], self.functions[1::2], strict=True):
            a = a + f(b)
            b = b + g(a)
        return torch.cat([a, b], -1)

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """What the couplings were given."""
        a, b = y.chunk(2, -1)
        for f, g in zip(reversed(self.functions[::2]), reversed(self.functions[1::2]), strict=True):
            b = b - g(a)
            a = a - f(b)
        return torch.cat([a, b], -1)


def backward_by_inversion(stages: Sequence[Couplings], y: Tensor, gradient: Tensor) -> Tensor:
    """Gradients of all stages from the last output and its gradient alone; the input as recovered."""
    for stage in reversed(stages):
        y = stage.inverse(y)
        x = y.detach().requires_grad_(True)
        stage(x).backward(gradient)
        assert x.grad is not None
        gradient = x.grad
    return y


def errors(quick: bool, folder: Path | None) -> None:
    """Relative errors of gradients by inversion and of plain autograd, against float64."""
    depths = (4, 16, 64) if quick else (2, 4, 8, 16, 32, 64, 128)
    rows: dict[str, list[float]] = {}
    for count in depths:
        torch.manual_seed(0)
        exact = Couplings(count, 64).double()
        x, direction = torch.randn(32, 128, dtype=torch.float64), torch.randn(32, 128, dtype=torch.float64)
        exact(x).backward(direction)
        true = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
        for kind in (torch.float64, torch.float32, torch.bfloat16):
            for how in ("inversion", "autograd"):
                net = Couplings(count, 64).double()
                net.load_state_dict(exact.state_dict())
                net, mine, to = net.to(kind), x.to(kind), direction.to(kind)
                with torch.no_grad():
                    out = net(mine)
                if how == "inversion":
                    backward_by_inversion([net], out, to)
                else:
                    net(mine).backward(to)
                got = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()
                error = float((got - true).norm() / true.norm())
                rows.setdefault(f"{str(kind).removeprefix('torch.')}, {how}", []).append(error)
    for name, row in rows.items():
        print(f"{name:20} " + "  ".join(f"{d}: {e:.1e}" for d, e in zip(depths, row, strict=True)))
    if folder:
        figure, axes = picture("couplings", "relative error of the gradients")
        for k, (name, row) in enumerate(rows.items()):
            style = "-" if name.endswith("inversion") else ":"
            shown = [max(e, 1e-18) for e in row]
            axes.plot(depths, shown, style, color=COLOURS[k // 2], marker=MARKERS[k // 2], label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=7)
        figure.savefig(folder / "dataflow-errors.png", dpi=130)


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten shapes of 8 × 8 points, shifted and noisy, and which one each is."""
    shapes = torch.rand(10, 8, 8, generator=torch.Generator().manual_seed(1)) > 0.6
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    moves = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    images = torch.stack(
        [shapes[k].float().roll(m, (0, 1)) for k, m in zip(labels.tolist(), moves, strict=True)]
    )
    return (images + 0.6 * torch.randn(images.shape, generator=generator)).flatten(1), labels


@dataclass
class Trainer:
    """Stages trained action by action in the order of a dataflow timeline. ``every``: backwards of a stage after which
    it updates, with the weights of the moment for its inversions; 0: all stages once at the end of a step."""

    every: int
    ranks: int = 4
    microbatches: int = 16
    rate: float = 0.02
    drift: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        last = self.ranks - 1
        self.stages = [
            Couplings(2, 32, 64 if s == 0 else 0, 10 if s == last else 0) for s in range(self.ranks)
        ]
        self.optimizers = [torch.optim.SGD(s.parameters(), self.rate, 0.9) for s in self.stages]
        times = [StageTimes(1, 2)] * self.ranks
        line = replay(schedule_named("dataflow", self.ranks, 4096, hop=0.1), times, Link(0.3))
        spans = sorted((span for row in line.rows for span in row), key=lambda span: span.start)
        self.actions = [span.action for span in spans]

    def run(self, steps: int) -> list[float]:
        """The loss of each micro-batch."""
        total = steps * self.microbatches
        images, labels = digits(8 * total, 2)
        batches = list(zip(images.split(8), labels.split(8), strict=True))
        losses, sent, back, truth = [0.0] * total, {}, {}, {}
        schedules = self._steps(total)
        for action in schedules:
            s, m = action.stage, action.microbatch
            stage, last = self.stages[s], s == self.ranks - 1
            if action.kind == "F":
                x = batches[m][0] if s == 0 else sent.pop((s - 1, m))
                if s:
                    truth[s, m] = x
                with torch.no_grad():
                    sent[s, m] = stage(x)
                continue
            if last:
                y = sent.pop((s, m)).requires_grad_(True)
                assert stage.head is not None
                loss = nn.functional.cross_entropy(stage.head(y), batches[m][1])
                loss.backward()
                losses[m], gradient = float(loss.detach()), y.grad
            else:
                y, gradient = back.pop((s + 1, m))
            self._backward(s, m, batches[m][0], y.detach(), gradient, truth, back)
            self._update(s, m, total)
        return losses

    def _steps(self, total: int) -> list:
        """Of `sync` each step's actions by themselves; of `async` one stream."""
        if self.every:
            return [a for a in self.actions if a.microbatch < total]
        once = [a for a in self.actions if a.microbatch < self.microbatches]
        return [
            replace(a, microbatch=a.microbatch + k) for k in range(0, total, self.microbatches) for a in once
        ]

    def _backward(self, s, m, image, y, gradient, truth, back) -> None:
        stage = self.stages[s]
        if s == 0:
            stage(image).backward(gradient)
            return
        x = stage.inverse(y)
        true = truth.pop((s, m))
        self.drift = max(self.drift, float((x - true).norm() / true.norm()))
        x = x.requires_grad_(True)
        stage(x).backward(gradient)
        back[s, m] = (x.detach(), x.grad)

    def _update(self, s: int, m: int, total: int) -> None:
        every = self.every or self.microbatches
        if (m + 1) % every and m + 1 < total:
            return
        for p in self.stages[s].parameters():
            if p.grad is not None:
                p.grad.div_(every)
        self.optimizers[s].step()
        self.optimizers[s].zero_grad()


def plain_training(steps: int) -> list[float]:
    """The same networks, data and updates with plain autograd."""
    trainer = Trainer(0)
    images, labels = digits(8 * steps * trainer.microbatches, 2)
    losses = []
    for m, (x, y) in enumerate(zip(images.split(8), labels.split(8), strict=True)):
        for stage in trainer.stages:
            x = stage(x)
        head = trainer.stages[-1].head
        assert head is not None
        loss = nn.functional.cross_entropy(head(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        if (m + 1) % trainer.microbatches == 0:
            for s in range(trainer.ranks):
                trainer._update(s, m, len(losses) + 1)
    return losses


def training(quick: bool, folder: Path | None) -> None:
    """Losses of one process, of synchronous and asynchronous dataflow."""
    steps = 30 if quick else 160
    rows = {"one process": plain_training(steps)}
    for every in (0, 16, 4, 1):
        trainer = Trainer(every, rate=0.02 if every in (0, 16) else 0.02 * every / 16)
        rows[f"async, update every {every}" if every else "sync"] = trainer.run(steps)
        print(
            f"{'async, every ' + str(every) if every else 'sync':16} reconstruction off by up to {trainer.drift:.1e}"
        )
    sixth = len(rows["sync"]) // 6
    for name, row in rows.items():
        print(f"{name:24} mean loss of the last sixth {sum(row[-sixth:]) / sixth:.4f}")
    if folder:
        figure, axes = picture("micro-batches", "loss, mean of 64")
        for k, (name, row) in enumerate(rows.items()):
            means = torch.tensor(row[: len(row) // 64 * 64]).reshape(-1, 64).mean(1)
            axes.plot([64 * i for i in range(len(means))], means, color=COLOURS[k], label=name, linewidth=1.2)
        axes.legend(fontsize=8)
        figure.savefig(folder / "dataflow-training.png", dpi=130)


@dataclass(frozen=True)
class Device:
    """Peak rates in GFLOP/s (GOP/s) and watts, each from least to most; ``source`` of both."""

    name: str
    rate: tuple[float, float]
    watts: tuple[float, float]
    source: str

    @property
    def efficiency(self) -> tuple[float, float]:
        """GFLOP/s a watt at the peak rate."""
        return self.rate[0] / self.watts[1], self.rate[1] / self.watts[0]


def fpga(slices: int, each: int) -> tuple[float, float]:
    """GFLOP/s of so many DSP slices, ``each`` for a multiplication and an addition, at 200 to 300 MHz."""
    return slices / each * 2 * 0.2, slices / each * 2 * 0.3


U280 = "9024 DSP slices, 300 MHz: product table; 45 W measured (SPLAG, FPGA 2022) to 225 W (DS963)"
ZCU = "2520 DSP slices: DS891; 10 to 36 W at the board (estimate)"
DEVICES = {
    "float32": (
        Device("U280, float32 of 5 slices", fpga(9024, 5), (45, 225), U280),
        Device("ZCU102, float32 of 5 slices", fpga(2520, 5), (10, 36), ZCU),
        Device(
            "A100, float32",
            (19500, 19500),
            (300, 400),
            "data sheet: 19.5 TFLOP/s, 300 W (PCIe) and 400 W (SXM)",
        ),
    ),
    "16 bits": (
        Device("U280, int16", fpga(9024, 1), (45, 225), U280),
        Device("ZCU102, int16", fpga(2520, 1), (10, 36), ZCU),
        Device("A100, bfloat16", (312000, 312000), (300, 400), "data sheet: 312 TFLOP/s"),
    ),
}
USED = (0.3, 0.9)
"""Shares of an FPGA's slices that a dataflow design keeps busy, least and most."""
EXTRA = 4 / 3
"""Work of a step that inverts ÷ work of one that keeps all: forward, inversion, backward of twice the forward."""


def energy(_quick: bool, _folder: Path | None) -> None:
    """The utilisation of a GPU below which an FPGA takes less energy for the same step."""
    print("model, not measured")
    for kind, (*boards, gpu) in DEVICES.items():
        for board in boards:
            low = board.efficiency[0] * USED[0] / EXTRA / gpu.efficiency[1]
            high = board.efficiency[1] * USED[1] / EXTRA / gpu.efficiency[0]
            print(
                f"{kind}: {board.name}: {board.efficiency[0]:.1f} to {board.efficiency[1]:.1f} a watt; {gpu.name}: "
                f"{gpu.efficiency[0]:.0f} to {gpu.efficiency[1]:.0f}; less energy where the GPU runs below "
                f"{100 * low:.1f} % (surely) or {100 * high:.1f} % (at best) of its peak"
            )


def picture(x: str, y: str):
    """A figure with one pair of named axes."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


PARTS: dict[str, Callable[[bool, Path | None], None]] = {
    "memory": memory,
    "latency": latency,
    "depth": depth,
    "errors": errors,
    "training": training,
    "energy": energy,
}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.parts or PARTS:
        print(f"== {name}")
        PARTS[name](args.quick, args.pictures)


if __name__ == "__main__":
    main()
