"""Plan a pipeline for a captured step: choose the schedule, the cuts between stages, and what each stage recomputes.

Each rank stays within its budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rematplan.ir import InfeasibleBudget, TrainingGraph, UsageError, show_bytes
from rematplan.pipeline.schedules import schedule_of_stages
from rematplan.pipeline.step_chain import NamedChain, named_chain
from rematplan.pipeline.torch_memory import OPENING
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.auto_stages import AutoStages
from rematplan.planner.pipeline.choose_cuts import PipelineSearch, Terms, returned_bytes
from rematplan.planner.pipeline.messages import CHANNELS
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline
from rematplan.planner.pipeline.rank_search import SHORTEST, StagePlanner
from rematplan.planner.pipeline.stage_partition import Cuts, partitions
from rematplan.planner.pipeline.timeline import FREE_LINK, Link
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
class PipelineRequest:
    """A user's options for planning a pipeline."""

    schedule: str
    """The name of a schedule, or ``auto``."""
    stages: int
    microbatches: int
    budget: Budget
    """The budget of each rank."""
    seconds: float
    """About how long the search may take."""
    cuts: tuple[str, ...] | None = None
    """Names of the modules with which the second and each later stage begin; None: the search chooses."""
    link: Link = FREE_LINK
    """The speed of messages between ranks."""
    overhead: float = 0.0
    """The time of an action in addition to its ops, in microseconds."""
    optimizer: float = 0.0
    """The bytes of optimizer state ÷ those of trained parameters."""


def plan_stages(
    steps: Mapping[str, tuple[CapturedStep, TrainingGraph]],
    asked: PipelineRequest,
    model: Mapping[str, Any],
    progress: Progress,
) -> PlannedPipeline:
    """Divide a step into stages and plan them; of the pipelines found, return the one with the least makespan.
    ``steps``: by schedule, the captured step and its problem; ``model``: stored in the result. `UsageError` for
    wrong cuts, a budget above `AMPLE`, or if no schedule is possible; `InfeasibleBudget` if no pipeline fits."""
    chains = {name: named_chain(*priced, asked.cuts or ()) for name, priced in steps.items()}
    cuts: dict[str, Cuts] = {}
    if asked.cuts is not None:
        cuts = {name: chain.positions(asked.cuts) for name, chain in chains.items()}
        if len(asked.cuts) != asked.stages - 1:
            raise UsageError(f"{asked.stages} stages need {asked.stages - 1} cuts, not {len(asked.cuts)}")
    found = _best(list(_searches(chains, asked, progress)), cuts, asked.seconds)
    name = found.schedule.name
    names = tuple(chains[name].names[cut] for cut in found.cuts)
    return replace(found, model=model, names=names)


def _best(searches: list[PipelineSearch], cuts: Mapping[str, Cuts], seconds: float) -> PlannedPipeline:
    """Return the pipeline with the least makespan that the searches find in ``seconds``; `InfeasibleBudget` if none
    fits. ``cuts``: by schedule, those that are given. The list ``searches`` is sorted, and each search gets its share
    of the time."""
    refused: list[InfeasibleBudget] = []
    best: PlannedPipeline | None = None
    if len(searches) > 1:  # to bound a makespan takes as long as to choose cuts
        searches.sort(key=lambda s: s.least_makespan)
    effort = Effort(seconds)
    for number, search in enumerate(searches):
        if best is not None and search.least_makespan >= best.timeline.makespan:
            break
        # Searches share the time until one succeeds; then each has all that is left, since it may find a better one.
        left = effort.left / (1 if best else len(searches) - number)
        search.planner, search.seconds = _planner(left, search.schedule.ranks), left
        try:
            found = search.run(cuts.get(search.schedule.name))
        except InfeasibleBudget as error:
            refused.append(error)
            continue
        if best is None or found.timeline.makespan < best.timeline.makespan:
            best = found
    if best is None:
        raise min(refused, key=lambda error: error.smallest)
    return best


def _searches(
    chains: Mapping[str, NamedChain], asked: PipelineRequest, progress: Progress
) -> Iterator[PipelineSearch]:
    """Yield a search, not run yet, for each possible schedule; without an explicit request, no dataflow without
    inverses. The first `UsageError` is raised if no schedule is possible."""
    errors: list[UsageError] = []
    some = False
    for name, chain in chains.items():
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
    chain: NamedChain, schedule: PipelineSchedule, asked: PipelineRequest, progress: Progress = silent
) -> PipelineSearch:
    """Return a search, not run yet, for the cuts and plans of one schedule within the budget of ``asked``; `UsageError`
    if that exceeds `AMPLE`. For a percentage, a search with ample memory is run first."""
    own = _narrow(chain, schedule.name, schedule.stages)
    # A percentage refers to the largest peak without recomputation, with the cuts of unlimited memory.
    ample = _terms(own, asked, AMPLE)
    search = PipelineSearch(own.chain, schedule, ample, AutoStages(), progress, least_kept=False)
    amount = asked.budget.bytes(max(search.run().peaks) if asked.budget.kind == "share" else 0, int)
    if amount > AMPLE:
        raise UsageError(f"budget {asked.budget.text!r} is too large; a rank can have {show_bytes(AMPLE)}")
    return PipelineSearch(own.chain, schedule, _terms(own, asked, amount), AutoStages(), progress)


def best_cuts(
    chain: NamedChain, schedule: PipelineSchedule, asked: PipelineRequest, planner: StagePlanner | None
) -> tuple[str, ...]:
    """Search for the cuts with the least simulated step; if no tried ones fit all ranks, return cuts with a small
    largest peak. ``planner``: of single stages; None for `AutoStages`."""
    search = _search(chain, schedule, asked)
    search.planner = planner or _planner(asked.seconds, schedule.ranks)
    search.seconds = asked.seconds
    return tuple(chain.names[cut] for cut in search.best_cuts())


def _planner(seconds: float, ranks: int) -> AutoStages:
    """Return a planner of single stages with which searches for all ``ranks`` take about ``seconds`` in total."""
    return AutoStages(min(LONGEST, max(SHORTEST, seconds / ranks) / QUESTIONS))


def _narrow(chain: NamedChain, schedule: str, stages: int) -> NamedChain:
    """Return the chain with the cuts that a schedule may use; unchanged if these would be too few."""
    if schedule not in CHANNELS:
        return chain
    # A cut inside a reversible coupling would send a tensor from which inverses cannot recover the others.
    narrow = replace(chain, chain=replace(chain.chain, narrow=True))
    return narrow if len(narrow.chain.allowed()) >= stages - 1 else chain


def _terms(chain: NamedChain, asked: PipelineRequest, budget: int) -> Terms:
    return Terms(budget, asked.link, asked.overhead, asked.optimizer, chain.batch, OPENING, chain.outputs)


def _schedule(name: str, chain: NamedChain, asked: PipelineRequest) -> PipelineSchedule:
    """Return the schedule called ``name``; `UsageError` if it cannot have so many stages. With ``dataflow``, enough
    micro-batches are in flight to hide the time of messages."""
    hop = _hop(chain, asked) if name == "dataflow" else 0.0
    return schedule_of_stages(name, asked.stages, asked.microbatches, hop)


def _hop(chain: NamedChain, asked: PipelineRequest) -> float:
    """Return the longest time of a message ÷ the time of the slowest stage or link, if the chain is cut into stages of
    similar times."""
    one = chain.chain

    def base(start: int, end: int, _stage: int) -> float:
        return one.forward[end] - one.forward[start] + one.backward[end] - one.backward[start]

    found = partitions(one, asked.stages, base, asked.link)[0]
    sizes = [size for at in found.cuts for size in (one.sends[at], returned_bytes(one, at, True))]
    return max(map(asked.link.travel, sizes), default=0.0) / max(found.slowest, math.ulp(1.0))
