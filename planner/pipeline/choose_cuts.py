"""Choose the cuts of a chain of blocks into stages, and the stages' plans, for the least simulated makespan.

Stages without a plan count with a lower bound of their time. The best cuts are planned and chosen again until
all their stages have plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise

from rematplan.ir import InfeasibleBudget
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.pipeline.actions import PipelineSchedule, stages_that_free_outputs
from rematplan.planner.pipeline.dataflow_plans import starting_plans
from rematplan.planner.pipeline.lean_cuts import lean_cuts
from rematplan.planner.pipeline.messages import CHANNELS, RANDOM_STATE, message_memory
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline
from rematplan.planner.pipeline.rank_memory import stages_in_flight
from rematplan.planner.pipeline.rank_search import (
    SHORTEST,
    RankPlan,
    RankSearch,
    StagePlanner,
    plans_of_ranks,
)
from rematplan.planner.pipeline.stage_chain import StageChain
from rematplan.planner.pipeline.stage_floor import time_floors
from rematplan.planner.pipeline.stage_partition import Cuts, StageTime, descent, partitions
from rematplan.planner.pipeline.stage_plan import MessageBytes, StagePlan
from rematplan.planner.pipeline.stage_slices import StageSlice, late_ops, stage_problem
from rematplan.planner.pipeline.timeline import FREE_LINK, Link, StageTimes, replay

ROUNDS = 12
"""How many different cuts (divisions of the chain into stages) the search plans at most."""
REFUSED = 3
"""The search ends after this many cuts (divisions of the chain into stages) whose stages do not fit the budget."""
CHANGED = 12
"""The largest number of changes of the cuts for a smaller largest peak."""
SECONDS_A_CHANGE = 2.0
"""A search tries at most one such change per this many of its seconds: what a change takes is counted in steps, not in
seconds."""
REPLAYED = 400_000
"""The largest number of actions that one choice of cuts simulates to improve its candidates. That takes about 2
seconds."""
SHARE = 0.5
"""The share of the time left that is spent on plans for the next cuts. The rest remains for further cuts."""
Intervals = tuple[tuple[int, int], ...]
"""For each stage of a rank: its first block, and the block after its last one."""


@dataclass(frozen=True)
class Terms:
    """What a pipeline is planned for: memory, links and costs that do not depend on the cuts."""

    budget: int
    """Bytes of memory for each rank."""
    link: Link = FREE_LINK
    overhead: float = 0.0
    """Microseconds that each action takes in addition to the computation."""
    optimizer: float = 0.0
    """Bytes of optimizer state per byte of trained parameters."""
    batch: frozenset[str] = frozenset()
    """Names of inputs that differ between micro-batches. A rank that reads one holds it for all micro-batches."""
    opening: int = RANDOM_STATE
    """Bytes that PyTorch allocates while it prepares the first step."""
    outputs: int = 0
    """Bytes of the model's outputs for one micro-batch, which PyTorch keeps to the end of the step."""


def stage_times(
    chain: StageChain, cuts: Cuts, times: Sequence[tuple[float, float, float]], recovers: bool
) -> tuple[StageTimes, ...]:
    """Return the times and the message sizes of each stage of a pipeline. ``times``: for each stage, the microseconds
    of forward, backward and separate weight gradients. ``recovers``: whether stages send back the inputs that they
    recover."""
    bounds = (0, *cuts, len(chain))
    return tuple(
        StageTimes(*own, sends=chain.sends[end], returns=returned_bytes(chain, start, recovers))
        for own, (start, end) in zip(times, pairwise(bounds), strict=True)
    )


def returned_bytes(chain: StageChain, place: int, recovers: bool) -> int:
    """Return the bytes of gradients that the stage from block ``place`` on sends back to the stage before it
    for one micro-batch.

    With ``recovers`` the message includes the stage's recovered input.
    """
    return chain.returns[place] + (chain.sends[place] if recovers else 0)


@dataclass
class PipelineSearch:
    """Searches for the cuts and the stages' plans with the least simulated makespan under one schedule."""

    chain: StageChain
    schedule: PipelineSchedule
    terms: Terms
    planner: StagePlanner
    """Plans single stages."""
    progress: Progress = silent
    """Called with the fraction done and a short text."""
    seconds: float = math.inf
    """How long further cuts are tried."""
    least_kept: bool = True
    """Whether stages of a dataflow schedule keep no more bytes than their known plans that keep the fewest
    (`starting_plans`).
    """
    planned: dict[tuple[int, Intervals], RankPlan | InfeasibleBudget] = field(default_factory=dict)
    """For a rank and the blocks of its stages, its plans, or the error if none were found that fit."""
    _bases: dict[tuple[int, int], tuple[float, float, float]] = field(default_factory=dict)
    _inputs: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    _peaks: dict[tuple[int, Intervals], int] = field(default_factory=dict)

    def run(self, cuts: Cuts | None = None) -> PlannedPipeline:
        """Return the planned pipeline with the given cuts, or with the best cuts found if ``cuts`` is None.
        `UsageError` if cuts divide the readers of a parameter or there are too few places for them; `InfeasibleBudget`
        if no plans fit."""
        if cuts is not None:
            self.chain.check_cuts(cuts)
        return self._pipeline(self.best_cuts() if cuts is None else cuts)

    def best_cuts(self) -> Cuts:
        """Plan the stages of the most promising cuts, up to `ROUNDS` times, until these were planned before or none can
        fit. That ends early if the time is over or `REFUSED` cuts do not fit. Return the cuts with the least makespan
        whose plans all fit; `lean_cuts` if there are none."""
        tried = dict[Cuts, bool]()
        while len(tried) < ROUNDS and list(tried.values()).count(False) < REFUSED:
            self.progress(len(tried) / ROUNDS, "planning the stages")
            chosen = self._promising()
            late = bool(tried) and not self._left
            if late or chosen is None or chosen[0] == math.inf or chosen[1] in tried:
                break
            plans = self._rank_plans(chosen[1], self._left * SHARE)
            tried[chosen[1]] = all(isinstance(plan, RankPlan) for plan in plans)
        fitting = [cuts for cuts, fits in tried.items() if fits]
        return min(fitting, key=self._makespan) if fitting else self.lean_cuts

    @cached_property
    def lean_cuts(self) -> Cuts:
        """The cuts that the function `lean_cuts` finds for a small largest peak, with the smallest peak that a search
        finds for each rank."""

        def estimate(start: int, end: int, stage: int) -> float:
            """Estimate a stage's bytes: those that exist during the whole step, its messages in flight, and its largest
            op."""
            fixed, (shared, trained, _) = self.template(start, end, stage), self._input_bytes(start, end)
            whole = fixed.standing.always + shared + trained
            largest = max(self._largest_ops[start:end])
            return whole + in_flight[stage] * self._leaves(start, end, stage) + largest

        def peaks(cuts: Cuts) -> list[int]:
            return [self._smallest(rank, self._intervals(cuts, rank)) for rank in range(self.schedule.ranks)]

        in_flight = stages_in_flight(self.schedule)
        changes = int(min(CHANGED, self.seconds / SECONDS_A_CHANGE))
        return lean_cuts(self.chain, self.schedule, estimate, peaks, changes)

    def _smallest(self, rank: int, intervals: Intervals) -> int:
        if (rank, intervals) not in self._peaks:
            self._peaks[rank, intervals] = self._rank_search(rank, intervals, 0).lean
        return self._peaks[rank, intervals]

    @cached_property
    def _largest_ops(self) -> list[int]:
        """For each block, the most bytes that one of its ops reads, writes and uses as workspace, without inputs of the
        training step."""
        ix, found = indexed(self.chain.graph), [0] * len(self.chain)
        for o, block in enumerate(self.chain.block):
            made = sum(ix.bytes[t] for t in {*ix.reads[o], *ix.writes[o]} if ix.producer[t] >= 0)
            found[block] = max(found[block], made + self.chain.graph.ops[o].workspace)
        return found

    @cached_property
    def floor(self) -> float:
        """A lower bound, over all cuts, of the slowest stage's or link's microseconds per micro-batch;
        infinite if no cuts fit.
        """
        found = partitions(self.chain, self.schedule.stages, self._floors, self.terms.link)
        return found[0].slowest if found else math.inf

    @cached_property
    def least_makespan(self) -> float:
        """The least simulated makespan in microseconds that the search knows when this is first read;
        infinite if no cuts fit.
        """
        chosen = self._promising()
        return math.inf if chosen is None else chosen[0]

    @cached_property
    def _floors(self) -> StageTime:
        """A function that bounds a stage's microseconds per micro-batch from below, as `time_floors` returns it."""
        k = stages_in_flight(self.schedule)

        def room(start: int, end: int, stage: int) -> tuple[float, int]:
            fixed = self.template(start, end, stage)
            states = fixed.standing.always + self._input_bytes(start, end)[0]
            return self.terms.budget - states - k[stage] * self._leaves(start, end, stage), k[stage]

        return time_floors(self.chain, room)

    def _promising(self) -> tuple[float, Cuts] | None:
        """Return the least simulated makespan (microseconds) that a local search from cuts with fast stages finds, and
        its cuts. The makespan is infinite if none of the cuts found has plans that fit; None if by the bounds no cuts
        can fit the budget."""
        found = [p.cuts for p in partitions(self.chain, self.schedule.stages, self._time, self.terms.link)]
        makespan = cache(self._makespan)
        # The slowest stage alone does not decide the makespan, least of all if a rank has several stages.
        starts = {found[0], min(found, key=makespan)} if found else set()
        most = REPLAYED // (max(1, len(starts)) * sum(map(len, self.schedule.actions)))
        best = [descent(self.chain, start, makespan, most) for start in starts]
        return min(((makespan(cuts), cuts) for cuts in best), default=None)

    def _makespan(self, cuts: Cuts) -> float:
        """Return the simulated makespan in microseconds with these cuts, a lower bound if stages have no plans yet;
        infinite if a rank is known not to fit the budget."""
        times = [(0.0, 0.0, 0.0)] * self.schedule.stages
        for rank, stages in enumerate(self.schedule.stage_of_rank):
            own = self._intervals(cuts, rank)
            plan = self.planned.get((rank, own))
            for at, (stage, (start, end)) in enumerate(zip(stages, own, strict=True)):
                if isinstance(plan, RankPlan):
                    found = plan.stages[at].times
                    times[stage] = (found.forward, found.backward, found.weight)
                else:
                    forward, backward, weight = self._base(start, end)
                    # The stages of a rank without plans count with lower bounds of their times.
                    floor = math.inf if plan else self._floors(start, end, stage)
                    times[stage] = (forward, backward + floor - forward - backward - weight, weight)
        if any(math.inf in own for own in times):
            return math.inf
        messages = stage_times(self.chain, cuts, times, self.recovers)
        return replay(self.schedule, messages, self.terms.link, self.terms.overhead).makespan

    def _time(self, start: int, end: int, stage: int) -> float:
        """Return the microseconds per micro-batch of a stage with the blocks ``start`` to ``end`` − 1. They are those
        of its plan if it is planned and its rank's only stage, else a lower bound.

        Infinite if a search found no plan that fits, or the bound shows that none exists.
        """
        rank = self.schedule.rank_of(stage)
        plan = self.planned.get((rank, ((start, end),)))
        if plan is None:
            return self._floors(start, end, stage)
        if isinstance(plan, InfeasibleBudget):
            return math.inf
        return plan.stages[0].times.total

    def _rank_plans(self, cuts: Cuts, seconds: float) -> Iterator[RankPlan | InfeasibleBudget]:
        """Yield each rank's plans for these cuts, or the error if none were found that fit. Missing plans are searched
        for, all in ``seconds`` together, and recorded in ``planned``."""
        keys = [(rank, self._intervals(cuts, rank)) for rank in range(self.schedule.ranks)]
        effort, unplanned = Effort(seconds), sum(key not in self.planned for key in keys)
        for key in keys:
            if key not in self.planned:
                # Each search has an equal share of the time that its predecessors left.
                share = effort.left / unplanned
                unplanned -= 1
                try:
                    search = self._rank_search(*key, self.terms.budget, share)
                    self.planned[key] = search.run(thorough=False)
                except InfeasibleBudget as error:
                    self.planned[key] = error
            yield self.planned[key]

    def _rank_search(
        self, rank: int, intervals: Intervals, budget: int, seconds: float = math.inf
    ) -> RankSearch:
        """Return a search for plans of the stages of ``rank``, which have the blocks ``intervals``, within ``budget``
        bytes and ``seconds``."""
        stages = zip(self.schedule.stage_of_rank[rank], intervals, strict=True)
        problems = [
            stage_problem(
                StageSlice(self.chain, start, end),
                self.template(start, end, stage),
                batch={self.chain.graph.tensors[t].name for t in self._batch},
                split=self.split,
                recovers=self.recovers,
                hands_over=stage + 1 in self.schedule.stage_of_rank[rank],
                frees=stage in self._freeing,
            )
            for stage, (start, end) in stages
        ]
        actions = self.schedule.actions[rank]
        starts, kept = starting_plans(problems, actions) if self.recovers and self.least_kept else ([], [])
        return RankSearch(problems, actions, budget, self.planner, Effort(seconds), starts, kept)

    def _pipeline(self, cuts: Cuts) -> PlannedPipeline:
        """Return the pipeline for these cuts, with the plans that the search has found, and new searches for the other
        ranks. `InfeasibleBudget` if none are found that fit for some rank."""
        searched = enumerate(self._rank_plans(cuts, self._left))
        known = {rank: plan for rank, plan in searched if isinstance(plan, RankPlan)}
        share = max(SHORTEST, self.seconds / self.schedule.ranks)
        others = plans_of_ranks(
            lambda rank, budget: self._rank_search(rank, self._intervals(cuts, rank), budget, share),
            sorted({*range(self.schedule.ranks)} - {*known}),
            self.terms.budget,
        )
        plans = [plan for _, plan in sorted({**known, **others}.items())]
        stages = sorted((stage for plan in plans for stage in plan.stages), key=lambda one: one.stage)
        times = [(t.forward, t.backward, t.weight) for t in (stage.times for stage in stages)]
        return PlannedPipeline(
            problem=self.chain.graph.name,
            schedule=self.schedule,
            budget=self.terms.budget,
            cuts=cuts,
            stages=tuple(stages),
            times=stage_times(self.chain, cuts, times, self.recovers),
            link=self.terms.link,
            overhead=self.terms.overhead,
            floors=tuple(plan.floor for plan in plans),
            floor=self.floor,
        )

    @property
    def _left(self) -> float:
        """The seconds that are left for trying cuts, from the first use of this property on."""
        return self._effort.left

    @cached_property
    def _effort(self) -> Effort:
        return Effort(self.seconds)

    @property
    def recovers(self) -> bool:
        """Whether, in this schedule, each stage recovers its input from its output."""
        return self.schedule.name in CHANNELS

    @cached_property
    def split(self) -> bool:
        """Whether the schedule computes weight gradients in separate actions (W)."""
        return any(action.kind == "W" for row in self.schedule.actions for action in row)

    def _intervals(self, cuts: Cuts, rank: int) -> Intervals:
        """Return, for each stage of a rank, its first block and the block after its last one."""
        bounds = list(pairwise((0, *cuts, len(self.chain))))
        return tuple(bounds[stage] for stage in self.schedule.stage_of_rank[rank])

    def template(self, start: int, end: int, stage: int) -> StagePlan:
        """Return the memory of stage ``stage``, of the blocks ``start`` to ``end`` − 1, that does not depend
        on its plan; other fields are 0.
        """
        _, trained, batch = self._input_bytes(start, end)
        sends = self.chain.sends
        outputs = self.terms.outputs if end == len(self.chain) else 0
        sizes = MessageBytes(sends[start], self._returns(end), sends[end], self._returns(start))
        plan = message_memory(self.schedule, stage, sizes, outputs, self.terms.opening)
        # The last stage has the outputs from the loss on, which is one of its ops, so they count from the start.
        left = plan.standing.left
        return plan.adding(
            states=int(self.terms.optimizer * trained),
            torch_bytes=self.schedule.microbatches * (batch + left),
            left=-left,
        )

    def _input_bytes(self, start: int, end: int) -> tuple[int, int, int]:
        """Return three sums of bytes of a stage's inputs: of those that all micro-batches share, of the trained
        parameters among these, and of those of one micro-batch."""
        if (start, end) not in self._inputs:
            inputs = self.chain.inputs_of(start, end)
            names = {self.chain.graph.tensors[t].name: t for t in inputs}
            trained = {names[p] for p in self.chain.gradient_of.values() if p in names}
            kinds = {*inputs} - self._batch, trained, self._batch & {*inputs}
            shared, own, batch = map(self.chain.bytes, kinds)
            self._inputs[start, end] = shared, own, batch
        return self._inputs[start, end]

    def _returns(self, place: int) -> int:
        """Return the bytes of the message that the stage that begins at block ``place`` sends to the previous stage in
        the backward."""
        return returned_bytes(self.chain, place, self.recovers)

    def _base(self, start: int, end: int) -> tuple[float, float, float]:
        """Return the microseconds of a stage's forward, backward and separate weight gradients, all without
        recomputation. Without a split backward the third number is 0, and the second includes the weight gradients."""
        if (start, end) not in self._bases:
            piece = StageSlice(self.chain, start, end)
            costs = indexed(self.chain.graph).cost
            late = math.fsum(costs[o] for o in late_ops(piece)) if self.split else 0.0
            forward = self.chain.forward[end] - self.chain.forward[start]
            backward = self.chain.backward[end] - self.chain.backward[start]
            self._bases[start, end] = forward, max(0.0, backward - late), late
        return self._bases[start, end]

    def _leaves(self, start: int, end: int, stage: int) -> int:
        """Return a lower bound of the bytes of messages that a stage keeps for a micro-batch from its forward
        to its backward.
        """
        piece = StageSlice(self.chain, start, end)
        freed = self.split or stage in self._freeing
        return 0 if self.recovers else self.chain.bytes({*piece.received, *(() if freed else piece.sent)})

    @cached_property
    def _freeing(self) -> frozenset[int]:
        return stages_that_free_outputs(self.schedule)

    @cached_property
    def _batch(self) -> frozenset[int]:
        return frozenset(t for t, one in enumerate(self.chain.graph.tensors) if one.name in self.terms.batch)
