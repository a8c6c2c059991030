"""Plan the pipeline of a captured step: choose schedule and cuts, within a budget for each rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rematplan.ir import InfeasibleBudget, TrainingGraph, UsageError
from rematplan.pipeline.schedules import ONE_STAGE, SCHEDULES, STAGES_A_RANK, VIRTUAL, schedule_named
from rematplan.pipeline.step_chain import NamedChain, named_chain
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.auto_stages import AutoStages
from rematplan.planner.pipeline.choose_cuts import RECOVERING, PipelineSearch, Terms, returned_bytes
from rematplan.planner.pipeline.in_flight import StagePlanner
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline
from rematplan.planner.pipeline.stage_partition import Cuts, partitions
from rematplan.planner.pipeline.timeline import Link
from rematplan.plans.budgets import Budget
from rematplan.runtime.graph.captured_step import CapturedStep

AUTO = "auto"
QUESTIONS = 48
"""About how many searches for plans and lower bounds of single stages one rank needs."""
LONGEST = 5.0
"""The largest number of seconds for one search or lower bound of a single stage."""
AMPLE = 2**50
"""A number of bytes that is enough for any rank."""


@dataclass(frozen=True)
class Asked:
    """A user's options for a pipeline.

    ``schedule``: the name of a schedule, or ``auto``. ``stages``: the number of stages. ``microbatches``: the number of
    micro-batches in a step. ``budget``: the budget of each rank. ``cuts``: names of the modules with which the second
    and each later stage begin; None: they are chosen. ``link``: bandwidth and latency of the network between ranks.
    ``overhead``: microseconds that each action (a forward or backward of a stage) takes in addition to its ops.
    ``optimizer``: the size of the optimizer's state ÷ that of the trained parameters. ``seconds``: about how long the
    search may take.
    """

    schedule: str
    stages: int
    microbatches: int
    budget: Budget
    cuts: tuple[str, ...] | None
    link: Link
    overhead: float
    optimizer: float
    seconds: float


def plan_stages(
    step: CapturedStep, graph: TrainingGraph, asked: Asked, model: Mapping[str, Any], progress: Progress
) -> PlannedPipeline:
    """Divide a captured step into pipeline stages, plan their recomputation, and return the pipeline of least makespan.

    Args:
        step: the captured step of one micro-batch.
        graph: its planning problem.
        asked: the user's options.
        model: how the model was loaded, as JSON data; it is stored in the result.
        progress: called with the fraction done (0 to 1) and a short text.

    Raises:
        InfeasibleBudget: a rank does not fit. The error names the rank and the smallest budget found for it.
        UsageError: impossible cuts or numbers of stages or micro-batches.
    """
    chain = named_chain(step, graph, asked.cuts or ())
    cuts = None if asked.cuts is None else chain.positions(asked.cuts)
    if cuts is not None and len(cuts) != asked.stages - 1:
        raise UsageError(f"{asked.stages} stages need {asked.stages - 1} cuts, not {len(cuts)}")
    found = _best(chain, asked, cuts, progress)
    return replace(found, names=tuple(chain.names[cut] for cut in found.cuts), model=model)


def _best(chain: NamedChain, asked: Asked, cuts: Cuts | None, progress: Progress) -> PlannedPipeline:
    """Return the pipeline with the least makespan, of all schedules that are asked for."""
    refused: list[InfeasibleBudget] = []
    best: PlannedPipeline | None = None
    searches = sorted(_searches(chain, asked, progress), key=lambda s: s.least_makespan)
    until = time.monotonic() + asked.seconds
    for number, search in enumerate(searches):
        if best is not None and search.least_makespan >= best.timeline.makespan:
            break
        left = max(0.0, until - time.monotonic()) / (1 if best else len(searches) - number)
        search.planner = _planner(left, search.schedule.ranks)
        search.seconds = left
        try:
            found = search.run(cuts)
        except InfeasibleBudget as error:
            refused.append(error)
            continue
        if best is None or found.timeline.makespan < best.timeline.makespan:
            best = found
    if best is None:
        raise min(refused, key=lambda error: error.smallest)
    return best


def _searches(chain: NamedChain, asked: Asked, progress: Progress) -> Iterator[PipelineSearch]:
    names = SCHEDULES if asked.schedule == AUTO else (asked.schedule,)
    errors: list[UsageError] = []
    some = False
    for name in names:
        if asked.schedule == AUTO and name == "dataflow" and not chain.chain.graph.inverses:
            continue  # nothing could be recovered
        try:
            schedule = _schedule(name, _narrow(chain, name, asked.stages), asked)
            found = _search(chain, schedule, asked, progress)
        except UsageError as error:
            errors.append(error)
            continue
        some = True
        yield found
    if not some:
        raise errors[0]


def _search(
    chain: NamedChain, schedule: PipelineSchedule, asked: Asked, progress: Progress = silent
) -> PipelineSearch:
    """Return the search for cuts and plans with a schedule, within the budget that is asked for.

    Raises:
        UsageError: too few places to cut at.
    """
    own = _narrow(chain, schedule.name, schedule.stages)
    ample = _terms(own, asked, AMPLE)
    search = PipelineSearch(own.chain, schedule, ample, AutoStages(), progress, least_kept=False)
    amount = asked.budget.bytes(_largest_peak(search) if asked.budget.kind == "share" else 0, int)
    return PipelineSearch(own.chain, schedule, _terms(own, asked, amount), AutoStages(), progress)


def best_cuts(
    chain: NamedChain, schedule: PipelineSchedule, asked: Asked, planner: StagePlanner | None
) -> tuple[str, ...]:
    """Return the names of the modules with which the second and each later stage begin, for the least simulated
    makespan.

    If no cuts are found with which the plans of all ranks fit their budget, the result is the most promising cuts.

    Args:
        chain: the step of one micro-batch as a chain of blocks.
        schedule: the order of the ranks' actions.
        asked: the user's options; its schedule and its cuts are ignored.
        planner: plans single stages; None for `auto`.

    Raises:
        UsageError: the chain has too few places to cut at.
    """
    search = _search(chain, schedule, asked)
    search.planner = planner or _planner(asked.seconds, schedule.ranks)
    search.seconds = asked.seconds
    return tuple(chain.names[cut] for cut in search.best_cuts())


def _planner(seconds: float, ranks: int) -> AutoStages:
    """Return the planner of stages that searches for ``seconds`` in all."""
    return AutoStages(min(LONGEST, seconds / (QUESTIONS * ranks)), time.monotonic() + seconds)


def _narrow(chain: NamedChain, schedule: str, stages: int) -> NamedChain:
    """Return the chain of blocks with the cuts that a schedule may use.

    For ``dataflow`` these are only places where few bytes cross, if there are enough of them: a cut within a branch of
    a coupling would send a tensor that no inverse recovers.
    """
    if schedule not in RECOVERING:
        return chain
    narrow = replace(chain, chain=replace(chain.chain, narrow=True))
    return narrow if len(narrow.chain.allowed()) >= stages - 1 else chain


def _largest_peak(search: PipelineSearch) -> int:
    """Return the largest peak of all ranks, with balanced cuts and without recomputation."""
    return max(search.run().peaks)


def _terms(chain: NamedChain, asked: Asked, budget: int) -> Terms:
    return Terms(budget, asked.link, asked.overhead, asked.optimizer, chain.batch)


def _schedule(name: str, chain: NamedChain, asked: Asked) -> PipelineSchedule:
    """Return the schedule called ``name``; for ``dataflow``, with as many micro-batches in flight as its links need.

    Raises:
        UsageError: the schedule cannot have these numbers of stages and micro-batches.
    """
    if name in VIRTUAL and asked.stages % STAGES_A_RANK:
        raise UsageError(
            f"{name} has {STAGES_A_RANK} stages on each rank; {asked.stages} stages are not a multiple of that"
        )
    ranks = asked.stages if name in ONE_STAGE else asked.stages // STAGES_A_RANK
    hop = _hop(chain, asked) if name == "dataflow" else 0.0
    return schedule_named(name, ranks, asked.microbatches, hop=hop)


def _hop(chain: NamedChain, asked: Asked) -> float:
    """Return the longest time of a message, ÷ the time of the slowest stage, in a balanced pipeline."""
    one = chain.chain

    def base(start: int, end: int, _stage: int) -> float:
        return one.forward[end] - one.forward[start] + one.backward[end] - one.backward[start]

    found = partitions(one, asked.stages, base, asked.link)[0]
    sizes = [size for at in found.cuts for size in (one.sends[at], returned_bytes(one, at, True))]
    return max(map(asked.link.travel, sizes), default=0.0) / max(found.slowest, math.ulp(1.0))
