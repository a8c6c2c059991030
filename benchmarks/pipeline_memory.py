"""Peaks and extra time of pipelines' stages under plans, checkpoints and dataflow, by the roofline model of an A100."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add
from pathlib import Path

import torch
from pictures import picture
from torch import nn

from rematplan import api
from rematplan.ir import TrainingGraph, show_bytes
from rematplan.models import build, example_inputs
from rematplan.pipeline.schedules import schedule_named
from rematplan.pipeline.step_chain import NamedChain, named_chain
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.blocks.lowering import Partition, lower_to_positions
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.simulator import simulate
from rematplan.planner.pipeline.auto_stages import AutoStages
from rematplan.planner.pipeline.choose_cuts import PipelineSearch, Terms, returned_bytes
from rematplan.planner.pipeline.messages import message_memory
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.stage_plan import MessageBytes, StagePlan
from rematplan.planner.pipeline.stage_slices import StageSlice, stage_problem
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.report.plot import COLOURS, MARKERS
from rematplan.runtime.capture.fake_weights import without_data
from rematplan.runtime.capture.with_loss import with_loss
from rematplan.step_loading import LoadedModel, captured

RANKS, MICROBATCHES = 4, 16
AMPLE = 2**50
MOVES = 1_000
"""For each op, of the searches for plans of least memory, so that they are the same on every machine."""


@dataclass(frozen=True)
class Network:
    """A network of the table.

    ``name``: in the zoo, or `UNTIED`. ``sizes``: of a micro-batch. ``pattern``: matches the names of the modules that
    are checkpointed. ``inverses``: whether plans may recover tensors by inverses (ops that compute an input from an
    output) that round.
    """

    name: str
    sizes: dict[str, int]
    pattern: str
    inverses: bool = False

    @property
    def label(self) -> str:
        """The network's name in the table."""
        return f"{self.name}, inverses" if self.inverses else self.name


UNTIED = "gpt12, untied"
PRODUCTS = re.compile(r"(mm|bmm|addmm|convolution|_scaled_dot_product\w*)(_\d+)?")
"""Matches the names of products, convolutions and attention, whose results selective checkpointing keeps."""
CHECKPOINTS: dict[str, re.Pattern[str] | None] = {"checkpoint": None, "selective": PRODUCTS}
"""For each kind of checkpointing, the ops whose results it keeps within a group."""
COUPLINGS = r"blocks\.blocks\.\d+"
NETWORKS = (
    Network("vit_s", {"batch": 4}, r"blocks\.\d+"),
    Network("resnet50", {"batch": 8}, r"stages\.\d+\.\d+"),
    Network(UNTIED, {"batch": 2, "tokens": 256, "width": 384, "vocabulary": 8192}, r"blocks\.\d+"),
    Network("swin_t", {"batch": 4}, r"layers\.\d+"),
    Network("revvit_s", {"batch": 4}, COUPLINGS),
    Network("revvit_s", {"batch": 4}, COUPLINGS, inverses=True),
    Network("revnet38", {"batch": 8}, r"stages\.\d+\.\d+"),
)
"""In the zoo's GPT and in BERT, embedding and head share a weight, which no two stages can have."""


class UntiedGPT(nn.Module):
    """The zoo's GPT with a separate weight for its scores, so that its first and last stage share no weight.

    ``sizes``: of the zoo's ``gpt12``.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        gpt = build("gpt12", **sizes)
        self.embedding, self.positions, self.blocks, self.norm = (
            gpt.embedding,
            gpt.positions,
            gpt.blocks,
            gpt.norm,
        )
        self.head = nn.Linear(self.embedding.embedding_dim, self.embedding.num_embeddings, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next token, (N, T, vocabulary), for token numbers (N, T)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def untied(sizes: dict[str, int]) -> api.LoadedStep:
    """Return the captured step of `UntiedGPT`, without data. ``sizes``: of the zoo's ``gpt12``."""
    model, inputs, mode = without_data(
        lambda: UntiedGPT(**sizes), lambda: example_inputs("gpt12", seed=0, **sizes)
    )
    with mode:
        whole = LoadedModel(*with_loss(model, inputs, "cross_entropy", 0), UNTIED, (), mode)
    return captured(whole)


def loaded(name: str, sizes: dict[str, int], inverses: bool = False) -> tuple[NamedChain, TrainingGraph]:
    """Return a network's step as a chain of blocks, between which stages are cut, and its planning problem."""
    step = (
        untied(sizes)
        if name == UNTIED
        else api.load_step(name, sizes=api.Sizes(**sizes), weightless=not inverses, inverses=inverses)
    )
    graph = api.problem(step)
    return named_chain(step.step, graph), graph


def units(chain: NamedChain, start: int, end: int, pattern: str) -> list[list[int]]:
    """Group the blocks from ``start`` to ``end`` (excluded) of a chain: each group is what one checkpoint runs again.

    Neighbouring blocks belong to one group if ``pattern`` matches the same text at the beginning of their names.
    """
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


def checkpointed(
    chain: NamedChain,
    graph: TrainingGraph,
    start: int,
    end: int,
    pattern: str,
    saved: re.Pattern[str] | None = None,
) -> Plan:
    """Return the plan of a stage that keeps what passes between its groups of blocks (`units`), and runs each group
    again.

    ``graph``: the stage's problem. ``start``, ``end``: the stage's blocks, ``end`` excluded. ``saved``: matches the
    names of ops whose results are kept, too; they do not run again.
    """
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
        if any(r in of and of[r] > of[o] for r in ix.readers[t]) or (saved and saved.fullmatch(ix.ops[o]))
    ]
    # The last block of a partition stays resident; an empty one, so that the last group is run again, too.
    blocks = (*(tuple(ix.ops[o] for o in group) for group in groups if group), ())
    runs = [ix.ops[o] for o in lower_to_positions(graph, Partition(blocks, tuple(kept)))]
    return plan_from_runs(graph, runs, "selective" if saved else "checkpoint")


def stages_of(
    search: PipelineSearch, cuts: Sequence[int], plan: Callable[[TrainingGraph, int, int], Plan]
) -> list[StagePlan]:
    """Return the memory and times of each stage under given cuts.

    ``plan``: returns the plan of a stage from its problem, its first block and the block after its last.
    """
    bounds = [0, *cuts, len(search.chain)]
    found = []
    for stage, (start, end) in enumerate(pairwise(bounds)):
        template = search.template(start, end, stage)
        problem = stage_problem(StageSlice(search.chain, start, end), template, batch=search.terms.batch)
        found.append(problem.measured(plan(problem.graph, start, end)))
    return found


def peaks(search: PipelineSearch, stages: Sequence[StagePlan]) -> list[int]:
    """Return the peak of each rank in bytes. ``stages``: one per rank."""
    return [rank_peak(row, [stage]) for row, stage in zip(search.schedule.actions, stages, strict=True)]


def with_all_buffers(stage: StagePlan, microbatches: int = MICROBATCHES) -> StagePlan:
    """Return a stage with buffers for the messages of all ``microbatches`` during the whole step, as PyTorch's own
    stages allocate them up to version 2.14."""
    received, one = stage.messages.received, stage.transients
    both = received + stage.messages.answered
    return replace(
        stage.adding(torch_bytes=microbatches * both),
        held=replace(stage.held, kept=stage.held.kept - received),
        transients=replace(
            one,
            forward=one.forward - received,
            backward=one.backward - both,
            first_backward=None if one.first_backward is None else one.first_backward - both,
        ),
        messages=replace(stage.messages, received=0, answered=0),
    )


BUFFERS: dict[str, Callable[[StagePlan], StagePlan]] = {"2.15": lambda one: one, "2.14": with_all_buffers}
"""The memory of a stage with the buffers for messages of each version of PyTorch."""


def memory(quick: bool, _folder: Path | None) -> None:
    """Print for each network the peak and extra time of: no recomputation, checkpoints, selective checkpoints, and
    plans within the peak of either kind of checkpoints.

    All have the cuts that are best without a budget. Checkpoints run in PyTorch's stages: those of version 2.15 and
    later allocate the buffer of a message when its receive begins, as ours do; those of earlier versions allocate the
    buffers of all micro-batches. ``quick``: shorter searches.
    """
    print(
        f"1F1B, {RANKS} ranks, {MICROBATCHES} micro-batches; greatest peak of a rank; extra time of the slowest stage"
    )
    for network in NETWORKS:
        chain, _graph = loaded(network.name, network.sizes, network.inverses)
        schedule = schedule_named("1f1b", RANKS, MICROBATCHES)
        search = PipelineSearch(chain.chain, schedule, Terms(AMPLE, batch=chain.batch), AutoStages())
        cuts = search.run().cuts
        all_kept = stages_of(search, cuts, lambda graph, i, j: no_recompute(graph))
        for kind, saved in CHECKPOINTS.items():
            again = stages_of(
                search,
                cuts,
                lambda graph, i, j, c=chain, p=network.pattern, s=saved: checkpointed(c, graph, i, j, p, s),
            )
            for version, of in BUFFERS.items():
                budget = max(peaks(search, [of(one) for one in again]))
                within = PipelineSearch(
                    chain.chain, schedule, Terms(budget, batch=chain.batch), AutoStages(0.5 if quick else 1.0)
                ).run(cuts)
                print(
                    f"{network.label:18} PyTorch {version}: keep "
                    f"{show_bytes(max(peaks(search, [of(one) for one in all_kept]))):>10}  {kind:10} "
                    f"{show_bytes(budget):>10}  plans {show_bytes(max(within.peaks)):>10}  "
                    f"{extra_times(all_kept, again, within)}",
                    flush=True,
                )


def extra_times(all_kept: Sequence[StagePlan], again: Sequence[StagePlan], within: PlannedPipeline) -> str:
    """Return, as text, the extra time of the slowest stage under checkpoints and under plans, and its proven floor.

    ``all_kept``, ``again``: the stages without recomputation and with checkpoints. ``within``: the pipeline whose
    stages follow plans.
    """

    def times(stages: Sequence[StagePlan]) -> list[float]:
        return [one.times.total for one in stages]

    base = times(all_kept)

    def slowest(own: Iterable[float]) -> float:
        return max(own) / max(base) - 1

    theirs, ours = slowest(times(again)), slowest(times(within.stages))
    least = slowest(map(add, base, within.floors))
    ratio = f"{ours / theirs:.2f}" if theirs else "-"
    return f"extra {100 * theirs:.1f} %, plans {100 * ours:.1f} % ({ratio}; floor {100 * least:.1f} %)"


def dataflow_stage(
    chain: NamedChain, start: int, end: int, stage: int, ranks: int, microbatches: int
) -> StagePlan:
    """Return the memory and times of a dataflow stage (inverses recover its input) under the plan with the smallest
    peak found.
    """
    schedule = schedule_named("dataflow", ranks, microbatches, hop=0.1)
    piece = StageSlice(chain.chain, start, end)
    size = MessageBytes(
        chain.chain.sends[start],
        returned_bytes(chain.chain, end, True),
        chain.chain.sends[end],
        returned_bytes(chain.chain, start, True),
    )
    problem = stage_problem(piece, message_memory(schedule, stage, size), batch=chain.batch, recovers=True)
    starts = Reversible().curve(problem.graph, ())
    found = [problem.measured(plan) for plan in starts]
    least = min(max(one.transients.forward, one.transients.backward) for one in found)
    for weight in (least, 2 * least, 2**30):  # of what is held at the boundary against what is needed besides
        graph = problem.with_boundary_workspace(weight)
        plan = cheapest_near_smallest_peak(
            graph, moves=MOVES * len(graph.ops), starts=priced_for(graph, starts)
        )
        found.append(problem.measured(replace(plan, estimate=simulate(problem.graph, plan.schedule))))
    return min(found, key=lambda one: rank_peak(schedule.actions[stage], [one]))


def priced_for(graph: TrainingGraph, plans: Sequence[Plan]) -> list[Plan]:
    """Return plans of a variant of a problem as plans of ``graph``, with their peaks and costs simulated for it."""
    return [replace(plan, estimate=simulate(graph, plan.schedule)) for plan in plans]


def depth(quick: bool, folder: Path | None) -> None:
    """Print the second stage's peak, without states and gradients, by couplings per stage, ranks and micro-batches.

    It is printed for no recomputation and checkpoints in the stages of PyTorch up to 2.14, and for dataflow.
    ``quick``: fewer couplings. ``folder``: where a picture is saved; None: nowhere.
    """
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
            StageSlice(chain.chain, *begins), message_memory(schedule, 1, size), batch=chain.batch
        )
        kept = with_all_buffers(problem.measured(no_recompute(problem.graph)), microbatches)
        again = with_all_buffers(
            problem.measured(checkpointed(chain, problem.graph, *begins, COUPLINGS)), microbatches
        )
        inverted = dataflow_stage(chain, *begins, 1, ranks, microbatches)
        peaks = []
        for row, one in ((schedule, kept), (schedule, again), (flow, inverted)):
            free = replace(
                one,
                held=replace(one.held, gradients=0),
                transients=replace(one.transients, first_backward=None),
                standing=replace(one.standing, states=0),
            )
            peaks.append(rank_peak(row.actions[1], [free]))
        extra = inverted.times.extra / (inverted.times.total - inverted.times.extra)
        print(
            f"P {ranks} M {microbatches:3} couplings {each}: keep {show_bytes(peaks[0]):>10} checkpoint "
            f"{show_bytes(peaks[1]):>10} dataflow {show_bytes(peaks[2]):>10} ({peaks[2] / peaks[1]:.2f}; "
            f"K {inverted.held.kept}, extra {100 * extra:.0f} %)"
        )
        if (ranks, microbatches) == (4, 16):
            for name, value in zip(rows, peaks, strict=True):
                rows[name].append(value)
    if folder:
        figure, axes = picture("couplings in a stage", "peak of the second stage in addition to states (MiB)")
        for k, (name, row) in enumerate(rows.items()):
            axes.plot(couplings, [n / 2**20 for n in row], color=COLOURS[k], marker=MARKERS[k], label=name)
        axes.set_yscale("log")
        axes.legend()
        figure.savefig(folder / "dataflow-memory.png", dpi=130)
