"""Plan the parts of a model under one common budget.

Equal parts are one stage, and their calls its micro-batches, so that `RankSearch` knows the sum of what all keep.
What the rest holds is charged during the whole step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from rematplan.ir import InfeasibleBudget, TrainingGraph, show_bytes
from rematplan.module.given_plan import ops_of
from rematplan.parts.fsdp_bytes import FsdpBytes
from rematplan.parts.live_bytes import allocated_bytes
from rematplan.parts.rehearsed import EqualParts, Rehearsed
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import Progress
from rematplan.planner.pipeline.actions import Action, RankActions
from rematplan.planner.pipeline.rank_budget_shares import RankBudgetShares
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.rank_search import LIMITS, RankSearch
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import LEAN
from rematplan.plans.held_by_others import GRADIENTS, Reserved
from rematplan.plans.in_flight import common_effort, stage_planner
from rematplan.plans.options import PlanOptions
from rematplan.plans.planner import Planner
from rematplan.plans.refining import StepPlan
from rematplan.plans.stage_problems import stage_problem, whole_outputs
from rematplan.runtime.costs.device_models import ROOFLINE
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import MODEL, CapturedStep
from rematplan.runtime.graph.tensor_storages import plain_tensors
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.problem.loss_memory import COPIES

MARGIN = 1 / 8
"""The share of the rest's measured bytes that is charged in addition, since its sizes may depend on values."""
FIRST = 5.0
"""The most seconds of search before the first step if quickly found plans may serve; no later search replaces them."""


@dataclass(eq=False)
class PlannedPart:
    """The plan that parts with equal calls and sizes share. It is for one part's forward and backward, while the other
    parts hold what they keep."""

    step: CapturedStep
    problem: StageProblem
    figures: StagePlan
    made: StepPlan
    room: int
    """The bytes within which another plan of this part must stay, inputs of its problem included. That plan keeps no
    more between forward and backward than this one."""
    planner: Planner
    """The planner that makes the part's planning problems."""

    def is_of(self, step: CapturedStep) -> bool:
        """Return whether a step has the same calls and sizes as the plan's step."""
        return step.calls == self.step.calls and step.storage_bytes == self.step.storage_bytes

    def plan(self, step: CapturedStep) -> StepPlan:
        """Return a plan of a part's step that keeps and needs no more bytes than the present plan. If none is found,
        return the one found that keeps least between forward and backward, and warn if it exceeds the present plan."""
        if self.is_of(step):
            return replace(self.made, step=self.planner.with_inverses(step))
        form, problem = part_problem(step, self.planner, self.figures.stage)
        known = [no_recompute(problem.graph)]
        if _structure(problem.graph) == _structure(self.problem.graph):
            schedule = self.made.plan.schedule
            known.append(replace(self.made.plan, estimate=simulate(problem.graph, schedule)))
        for plan in known:
            if not self.excess(problem.measured(plan)):
                return StepPlan(form, plan)
        room = self.room - self.problem.graph.input_bytes + problem.graph.input_bytes
        search, effort = stage_planner(self.planner.options.strategy), common_effort(self.planner.options)
        graph = problem.bounded(room, self.figures.held.kept)
        found = search.within(
            graph, room, search.starts(graph, self._question(effort)), self._question(effort)
        )
        if found is None:
            found = search.least(problem.with_boundary_workspace(room), (), self._question(effort))
            if excess := self.excess(problem.measured(found)):
                warn(
                    f"{step.name} is called with other sizes than those for which the budget was divided, and "
                    f"{excess}: this step may exceed the budget"
                )
        return StepPlan(form, found)

    def _question(self, effort: Effort) -> Effort:
        return effort.part(effort.total / LIMITS.questions)

    def excess(self, figures: StagePlan) -> str:
        """Return in words the first of three numbers, bytes kept, needed in the forward and in the backward, that is
        larger in ``figures`` than in the present plan; empty if none is."""
        own = self.figures
        needed = (
            ("holds", figures.held.kept, own.held.kept, "to its backward"),
            ("needs", figures.transients.forward, own.transients.forward, "in its forward"),
            ("needs", figures.transients.backward, own.transients.backward, "in its backward"),
        )
        return next(
            (
                f"{verb} {show_bytes(bytes_)} {when}, not {show_bytes(most)}"
                for verb, bytes_, most, when in needed
                if bytes_ > most
            ),
            "",
        )


def _structure(graph: TrainingGraph) -> Hashable:
    """Return a key that is equal for two problems if each schedule of one is a schedule of the other."""
    ops = tuple((op.name, op.reads, op.writes) for op in (*graph.ops, *graph.inverses))
    return ops, graph.inputs, graph.outputs, graph.never_rerun, graph.ordered


@dataclass(frozen=True, kw_only=True)
class PartPlanner(Planner):
    """Plans the steps of one module as the common budget allows. ``parts``: the plans of its calls."""

    parts: tuple[PlannedPart, ...] = field(compare=False)

    @property
    def bounds_one_call(self) -> bool:
        """False: the budget is for all parts together."""
        return False

    def plan(self, step: CapturedStep, first: bool = False, progress: Progress | None = None) -> StepPlan:
        """Return the plan of a step. A step that is none of the parts is planned within the bytes of a part with the
        same ops, or of the first part if none has them."""
        del first, progress
        ops = ops_of(step)
        ranked = sorted(self.parts, key=lambda part: (not part.is_of(step), ops_of(part.step) != ops))
        return ranked[0].plan(step)

    def with_gradients(self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]) -> None:
        """Return None: the common budget counts the gradients of earlier steps."""


@dataclass(frozen=True)
class CommonPlan:
    """The plans of a model's parts under one budget."""

    rehearsed: Rehearsed
    parts: Mapping[EqualParts, PlannedPart]
    peak: int
    budget: int
    rest: int
    """The bytes that are charged for what the rest holds."""
    overhead: float
    """The time of recomputation ÷ that of the parts without recomputation."""
    share: float
    """What the parts would keep between forward and backward without recomputation ÷ what the step holds then."""

    def text(self) -> str:
        """Return text that says which modules are planned, and with what share of the activations, what the rest is
        charged, and the first module that is not planned, and why."""
        if not self.parts:
            return f"in eager mode, without a plan; it is charged {show_bytes(self.rest)}"
        names = [[*dict.fromkeys(group.names)] for group in self.parts]
        shown = ", ".join(f"{one[0]}{f' and {len(one) - 1} equal' * (len(one) > 1)}" for one in names[:3])
        more = f", and {len(names) - 3} more" * (len(names) > 3)
        told = [f"; not planned: {name} ({why})" for name, why in self.rehearsed.told.items()][:1]
        others = f", and {len(self.rehearsed.told) - 1} more" * (len(self.rehearsed.told) > 1)
        return (
            f"planned in parts: {shown}{more}, {100 * self.share:.0f} % of the activations; the rest is charged "
            f"{show_bytes(self.rest)}{''.join(told)}{others}"
        )


@dataclass(frozen=True)
class CommonSearch:
    """The search for plans of a model's parts under one budget. Searches for several budgets share effort and plans."""

    rehearsed: Rehearsed
    planner: Planner
    """The planner that makes the problems of the parts."""
    forms: Mapping[EqualParts, CapturedStep]
    """The steps with inverses, in the order of the stages."""
    search: RankSearch
    least: int
    """The bytes of the optimizer's step."""
    always: int
    """The bytes that what is around the parts holds during the whole step."""

    def plan(self, budget: int | None = None) -> CommonPlan:
        """Return the plans within ``budget`` bytes (None: the budget of `search`). `InfeasibleBudget` if none are
        found, or the step of the optimizer needs more."""
        search = self.search if budget is None else self.search.with_budget(budget)
        if self.least > search.budget:
            smallest = max(self.least, search.with_budget(self.least).smallest)
            raise InfeasibleBudget("parts", search.budget, smallest, "proven")
        try:
            found = search.run()
        except InfeasibleBudget as error:
            raise replace(error, strategy=f"{self.planner.options.strategy.name} in parts") from None
        stages = search.stages
        shares = RankBudgetShares(stages, search.rank.actions, tuple(found.stages))
        bounds = [(one.held.kept, one.held.deferred) for one in found.stages]
        planned = {
            group: PlannedPart(
                group.step,
                stages[at],
                found.stages[at],
                StepPlan(form, found.plans[at]),
                shares.stage_budget(at, search.budget, bounds),
                self.planner,
            )
            for at, (group, form) in enumerate(self.forms.items())
        }
        base = sum(stage.graph.base_cost for stage in stages)
        return CommonPlan(
            self.rehearsed,
            planned,
            max(found.peak, self.least),
            search.budget,
            self.always + max(max(one.before, one.during) for one in search.rank.actions),
            found.extra / base if base else 0.0,
            _share(self.rehearsed, search.rank.all),
        )


def common_search(
    rehearsed: Rehearsed,
    asked: PlanOptions,
    named: Mapping[str, torch.Tensor],
    fixed: int | None,
    *,
    accumulating: bool,
    around: FsdpBytes,
) -> CommonSearch:
    """Return the search, not run yet, for the plans of a model's parts. ``fixed``: the budget in bytes, if it is known
    already. ``accumulating``: whether gradients of earlier steps exist. ``around``: what FSDP2 needs."""
    planner, calls = Planner(of_part(asked)), Counter(group for _, group in rehearsed.calls)
    forms, stages = {}, []
    for number, (group, times) in enumerate(calls.items()):
        forms[group], problem = part_problem(group.step, planner, number, times)
        if (left := around.left.get(group.names[0])) is not None:
            standing = replace(problem.template.standing, left=left)
            problem = replace(problem, template=replace(problem.template, standing=standing))
        stages.append(problem)
    always, stepping = _always(asked, named, accumulating=accumulating)
    charged = stages[0].template.adding(
        states=always + around.always + rehearsed.repeated,
        ending=_charged(rehearsed.given, rehearsed.ending) + around.ending,
    )
    stages[0] = replace(stages[0], template=charged)
    actions = _actions(rehearsed, [*forms], _loss(rehearsed, asked), around)
    least = always + _gradients(rehearsed, named) + stepping
    search = _searching(stages, actions, asked, fixed, least)
    return CommonSearch(rehearsed, planner, forms, search, least, around.always)


def share_of_parts(rehearsed: Rehearsed, asked: PlanOptions) -> float:
    """Return what the parts would keep between forward and backward without recomputation ÷ what the step holds
    then."""
    planner = Planner(of_part(replace(asked, costs=ROOFLINE)))  # no bytes that are kept depend on costs
    groups = dict.fromkeys(group for _, group in rehearsed.calls)
    problems = (part_problem(group.step, planner, number)[1] for number, group in enumerate(groups))
    return _share(rehearsed, [one.measured(no_recompute(one.graph)) for one in problems])


def _share(rehearsed: Rehearsed, figures: Sequence[StagePlan]) -> float:
    """Return the share for parts without recomputation. ``figures``: of each group, in the order of its first call."""
    calls = Counter(group for _, group in rehearsed.calls)
    kept = sum(one.held.kept * times for one, times in zip(figures, calls.values(), strict=True))
    return kept / max(1, kept + rehearsed.rest)


def eager_plan(
    rehearsed: Rehearsed,
    asked: PlanOptions,
    named: Mapping[str, torch.Tensor],
    budget: int | None,
    *,
    accumulating: bool,
    around: FsdpBytes,
) -> CommonPlan:
    """Return the plan of a step without parts, all of which is the rest; arguments as for `common_search`.
    `InfeasibleBudget` if the step, with a loss outside of the model, or the optimizer's step needs more."""
    always, stepping = _always(asked, named, accumulating=accumulating)
    rest = (
        around.always + _charged(rehearsed.given, rehearsed.ending) + around.ending + _loss(rehearsed, asked)
    )
    peak = always + max(rest, around.always + _gradients(rehearsed, named) + stepping)
    if budget is None:
        budget = asked.stated_budget().bytes(peak, lambda: peak)
    if peak > budget:
        raise InfeasibleBudget("eager mode", budget, peak)
    return CommonPlan(rehearsed, {}, peak, budget, rest, 0.0, 0.0)


def of_part(asked: PlanOptions) -> PlanOptions:
    """Return the options for one part, which needs no bytes for a loss or other objects: the sum counts them."""
    return replace(asked, loss_memory=0, reserved=Reserved(), refine=False)


def part_problem(
    step: CapturedStep, planner: Planner, number: int, times: int = 1
) -> tuple[CapturedStep, StageProblem]:
    """Return a part's step with inverses, and its problem as stage ``number``, with the costs of its ``times`` runs
    in a step."""
    step = planner.with_inverses(step)
    graph = planner.problem(step)
    ops, inverses = (
        tuple(replace(op, cost=op.cost * times) for op in every) for every in (graph.ops, graph.inverses)
    )
    graph = replace(graph, ops=ops, inverses=inverses)
    problem = stage_problem(step, graph, own_weights=True, template=StagePlan(number))
    of_model = step.given("parameter", "buffer")  # they are counted for the whole model
    states = (t for t in problem.states if t not in of_model)
    return step, replace(problem, states=tuple(states), handed=whole_outputs(step, problem.graph))


def _loss(rehearsed: Rehearsed, asked: PlanOptions) -> int:
    """Return the bytes of a loss outside of the model: as stated, else `COPIES` times the outputs that it reads."""
    outputs = [allocated(t.numel() * max(4, t.itemsize), t.device) for t in rehearsed.unread]
    stated = asked.stated_loss()
    if stated is not None and stated.kind != "share":
        return int(stated.amount)
    return int((COPIES if stated is None else stated.amount) * sum(outputs))


def _charged(given: int, measured: int) -> int:
    """Return the bytes charged for ``given`` bytes before a call and ``measured`` bytes outside of the parts: the sum
    of both, and the share `MARGIN` of ``measured`` in addition."""
    return given + measured + int(MARGIN * measured)


def _always(asked: PlanOptions, named: Mapping[str, torch.Tensor], *, accumulating: bool) -> tuple[int, int]:
    """Return the bytes that exist during the whole step, and those that the optimizer's step needs in addition."""
    device = next((t.device for t in named.values()), torch.device("cpu"))
    others = asked.reserved.on(device, named)
    always = allocated_bytes(named.values()) + others.always
    if accumulating or GRADIENTS in asked.reserved.items:
        always += sum(_bytes(t) for t in named.values() if t.requires_grad)
    return always, others.stepping


def _gradients(rehearsed: Rehearsed, named: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all gradients at the optimizer's step. ``named``: with ``model.`` before the names."""
    inside = tuple(f"{MODEL}{name}." if name else MODEL for name, _ in rehearsed.calls)
    trained = {name: _bytes(t) for name, t in named.items() if t.requires_grad}
    of_parts = sum(size for name, size in trained.items() if name.startswith(inside))
    # Those of the rest may be sparse, and then take less than their parameters.
    return of_parts + min(sum(trained.values()) - of_parts, rehearsed.ending)


def _bytes(tensor: torch.Tensor) -> int:
    return sum(allocated(t.nbytes, t.device) for t in plain_tensors(tensor))


def _actions(rehearsed: Rehearsed, groups: list[EqualParts], loss: int, around: FsdpBytes) -> RankActions:
    """Return the forwards and backwards of the parts as a rank's actions. ``loss``: bytes of a loss outside, charged
    from backwards on."""
    seen: Counter[EqualParts] = Counter()
    places = []
    for _, group in rehearsed.calls:
        places.append((groups.index(group), seen[group]))
        seen[group] += 1
    actions = []
    for event in rehearsed.events:
        before, during = (_charged(rehearsed.given, n) for n in (event.before, event.during))
        if event.kind == "B":
            own = around.own.get(rehearsed.calls[event.call][0], 0)
            before, during = before + loss + around.backward, during + loss + around.running - own
        else:
            before, during = before + around.forward, during + around.forward
        actions.append(Action(event.kind, *places[event.call], before=before, during=during))
    return tuple(actions)


def _searching(
    stages: list[StageProblem], actions: RankActions, asked: PlanOptions, fixed: int | None, least: int
) -> RankSearch:
    """Return the search for the parts' plans within ``fixed`` bytes; None: within the stated budget. ``least``: the
    bytes of the optimizer's step."""

    effort = common_effort(asked, FIRST if asked.takes_quick_plans else math.inf)

    def search(budget: int) -> RankSearch:
        return RankSearch(stages, actions, budget, stage_planner(asked.strategy), effort)

    stated = asked.stated_budget()
    if fixed is not None:
        return search(fixed)
    if stated.is_lean:
        leanest = search(0)
        return leanest.with_budget(max(least, int((1 + LEAN[stated.kind]) * leanest.smallest)))
    whole = rank_peak(actions, [stage.measured(no_recompute(stage.graph)) for stage in stages])
    return search(stated.bytes(whole, lambda: 0))
