"""From what a user asks of a drop-in to the plan of a captured step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from rematplan.ir import InfeasibleBudget, ProblemError, TrainingGraph, show_bytes
from rematplan.planner.auto.strategy import Auto
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.lanes import Sharing
from rematplan.planner.core.plan import Plan, load_plan
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.peak_report import floor_text
from rematplan.planner.registry import LIMIT
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.at_once import plan_at_once
from rematplan.plans.budgets import Budget, least_plan, plan_within
from rematplan.plans.in_flight import plan_in_flight
from rematplan.plans.inverting import better_of, plan_either
from rematplan.plans.leanest import leanest_plan
from rematplan.plans.options import LEAST, QUICK, RAISE, PlanOptions
from rematplan.plans.overlapping import OFF, overlapped, sharing_here
from rematplan.plans.pricing import copies_priced, priced
from rematplan.plans.refining import Refining, Wanted, mapped
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.inversion.find import with_exact_inverses, with_inverses
from rematplan.runtime.pipeline.weight_gradients import with_separate_weights, with_weight_boundary
from rematplan.runtime.problem.accumulation import (
    EARLIER,
    StepPlan,
    adding_problem,
    earlier_gradients,
    holding,
    spare_bytes,
)
from rematplan.runtime.problem.constraints import ops_that_run_once
from rematplan.runtime.problem.loss_boundary import (
    LossMemory,
    set_aside,
    with_loss_boundary,
    without_room,
)
from rematplan.runtime.problem.optimizer_step import with_optimizer_step

LOG = logging.getLogger("rematplan")

FURTHER = 0.25
"""Share of the time limit for a step that a plan of an earlier one serves within the budget: the same ops on other
shapes want much the same runs. For U-Net, ResNet-50 and a GPT at half, double and one more of the batch it came within
.2 points of the whole time, wherever the earlier plan fitted."""
RESERVED = "reserved"
"""The input that stands for what others hold."""
MENTIONED = 0.01
"""Share of a refused plan's peak from which on room for a loss is worth a word."""


@dataclass(frozen=True)
class StepPlanner:
    """Plans the steps of a drop-in.

    ``options``: what is asked for. ``store``: what is known of plans; those made are put in it.
    """

    options: PlanOptions
    store: PlanStore = field(default_factory=PlanStore, compare=False)
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The values of parameters and buffers by the names that captured steps know them by, for scales to invert."""
    added: frozenset[str] = frozenset()
    """Names of parameters that have gradients, to which their new ones are added."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes that others hold during the whole step, by a name for them."""
    scope: str = ""
    """What has a first plan of its own, whose peak a percentage is of; in a compiler each graph."""

    def limit(self, graph: TrainingGraph) -> Budget:
        """The budget for a problem: ``min``, which each problem has of its own, or bytes. A percentage is of the first
        problem's peak: a later one, of a smaller batch say, would else get less than the device has room for."""
        stated = self.options.stated_budget()
        if stated.kind in ("min", "bytes"):
            return stated
        fixed, key = self.store.fixed, (stated.text, self.scope)
        if key not in fixed:
            fixed[key] = stated.of(graph)
        return Budget(stated.text, "bytes", Fraction(fixed[key]))

    def loss(self, step: CapturedStep, graph: TrainingGraph) -> LossMemory:
        """What the loss holds beside the outputs and their gradients."""
        stated = self.options.stated_loss()
        if stated is None:
            return LossMemory.usual(step, no_recompute(graph).estimate.peak)
        if stated.kind == "share":
            return LossMemory.of_copies(step, float(stated.amount))
        return LossMemory.of_peak(step, int(stated.amount))

    def problem(self, step: CapturedStep) -> TrainingGraph:
        """The step's planning problem, with all outputs there at the turn and the user's constraints."""
        asked = self.options
        priced_ = priced(step, asked.costs, max_inversion_error=asked.max_inversion_error)
        copies = copies_priced(step, priced_, asked.costs)
        graph = with_loss_boundary(step, priced_, self.loss(step, priced_), copies)
        once = ops_that_run_once(step, asked.keep, asked.never_rerun)
        graph = replace(graph, never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *once))))
        graph = adding_problem(step, graph, self.added) if self.added else graph
        others = asked.reserved.on(step.device, self.named)
        graph = with_optimizer_step(step, graph, others.stepping)
        return holding(graph, {**self.held, RESERVED: others.always})

    def opened(self, step: CapturedStep) -> CapturedStep:
        """The step with its inverses: all if they are wanted, else those that only move numbers."""
        if self.options.inverting:
            return with_inverses(step, self.named, renormalise=True).step
        return with_exact_inverses(step)

    def __call__(self, step: CapturedStep, first: bool = False) -> StepPlan:
        """The plan of a step, which has its inverses; beside gradients of earlier steps where they accumulate.

        ``first``: whether it is the first of its kind, though others have a plan.

        Raises: see `planned`; where no plan keeps the budget, as far as the options say so.
        """
        if self.options.several:
            return self._in_flight(step)
        first = first or not self.store
        names, held = earlier_gradients(step, self.named) if self.options.accumulate else (frozenset(), 0)
        charged = replace(self, held={**self.held, EARLIER: held})
        try:
            adding = replace(charged, added=names)._adding(step) if names else None
            found = adding or charged._alone(step)
        except InfeasibleBudget as error:
            opened = self.opened(step)
            found = StepPlan(opened, charged.instead(opened, error, first))
        counted = mapped(found, lambda one: replace(one, gradients=held))
        assert counted is not None
        return counted

    def instead(self, step: CapturedStep, error: InfeasibleBudget, first: bool) -> Plan:
        """The plan that a step gets where none keeps the budget; a warning says what it needs.

        Args:
            error: the refusal.
            first: whether it is of the first plan, which raises it if nothing else is asked for.

        Raises:
            InfeasibleBudget: the refusal, if that is asked for.
        """
        how = self._reaction(first)
        if how == RAISE:
            raise error
        graph = self.problem(step)
        plan, what = no_recompute(graph), "a plan that recomputes nothing"
        if how == LEAST:
            plan, what = (
                leanest_plan(graph, [error.plan] if error.plan else []),
                "the leanest plan that is known",
            )
        if plan.peak > error.budget:
            warn(
                f"{error}. {step.name} is run by {what}, which needs {show_bytes(plan.peak)} ({plan.peak} bytes), "
                f"beyond the budget of {show_bytes(error.budget)}"
            )
        return replace(plan, budget=max(plan.peak, error.budget), fingerprint=graph.fingerprint)

    def _reaction(self, first: bool) -> str:
        """What a budget that no plan keeps leads to."""
        if self.options.plan is not None:
            return RAISE
        return self.options.on_infeasible or (RAISE if first else LEAST)

    @property
    def _hurried(self) -> bool:
        return self._reaction(first=not self.store) != RAISE

    def _in_flight(self, step: CapturedStep) -> StepPlan:
        """The plan for as many micro-batches under way as are asked for."""
        asked, step = self.options, self.opened(step)
        split = asked.deferred is not None
        step = with_separate_weights(step) if split else step
        graph = self.problem(step)
        return plan_in_flight(
            step,
            with_weight_boundary(step, graph) if split else graph,
            self.loss(step, priced(step, asked.costs)),
            asked.stated_budget(),
            asked.chosen(),
            asked.time_limit,
            asked.in_flight,
            asked.deferred,
        )

    def _alone(self, step: CapturedStep) -> StepPlan:
        if self.options.inverses and isinstance(self.options.chosen(), Auto):
            return self._either(with_exact_inverses(step), self.opened(step))
        step, began = self.opened(step), time.monotonic()
        graph = self.problem(step)
        profiled = time.monotonic()
        plan = self._planned(step, graph)
        LOG.info("%s; costs %.1f s, search %.1f s", plan, profiled - began, time.monotonic() - profiled)
        return StepPlan(step, plan, refinement=self._refinement(step, graph, plan))

    def _refinement(self, step: CapturedStep, graph: TrainingGraph, plan: Plan) -> Refining | None:
        """The search for a better plan, where there may be one worth the while."""
        asked = self.options
        if not asked.refines or plan.budget is None or (plan.gap is not None and plan.gap <= asked.gap):
            return None
        if self.store.solved(graph, plan.budget, asked.gap, asked.time_limit) is not None:
            return None
        starts = self.store.starts(graph, plan.budget)
        limit = FURTHER * asked.time_limit if starts else asked.time_limit
        search = {LIMIT: limit, "gap": asked.gap, **asked.options}
        wanted = Wanted(graph, plan.budget, plan, asked.strategy, search, asked.gap, starts)
        return Refining(
            wanted, lambda better: StepPlan(step, replace(better, fingerprint=graph.fingerprint)), self.store
        )

    def _adding(self, step: CapturedStep) -> StepPlan | None:
        """The plan where new gradients are added to earlier ones and leave; None if it keeps its budget only where they
        leave at once. Two lanes hold what one does not: their gradients are charged to the end."""
        if self.options.overlap not in (None, OFF):
            return None
        try:
            found = self._alone(step)
        except ProblemError:  # a saved plan that charges them to the end
            return None
        budget = found.plan.peak if found.plan.budget is None else found.plan.budget
        graph = self.problem(found.step)

        def with_spare(one: StepPlan) -> StepPlan | None:
            spare = spare_bytes(one.step, graph, one.plan.schedule, budget, self.added)
            return None if spare is None else replace(one, spare=spare)

        return mapped(found, with_spare)

    def beside(self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]) -> StepPlan | None:
        """What is planned for a step when gradients of earlier steps are there as it begins; None if its ``plan``, made
        without them, serves, or if there is none, which a warning says.

        ``gradients``: their bytes. ``names``: of the parameters that have them.

        Raises: see `planned`.
        """
        if self.options.several:  # it counts all gradients there can be
            return None
        adding = replace(self, added=frozenset(names))
        if self.options.plan is not None:
            budget = plan.peak if plan.budget is None else plan.budget
        else:
            stated = self.limit(self.problem(with_exact_inverses(step)))
            budget = stated.bytes(0, lambda: plan.peak + gradients)
        if plan.peak + gradients <= budget:
            return None
        left = max(1, budget - gradients)
        try:
            if self.options.plan is not None:
                raise InfeasibleBudget(plan.strategy, budget, plan.peak)
            return adding._within(left)._adding(step) or self._within(left)._alone(step)
        except InfeasibleBudget as error:
            smallest = error.smallest + gradients
            refusal = InfeasibleBudget(error.strategy, budget, smallest, error.known)
            if self.options.on_infeasible == RAISE:
                raise refusal from None
            warn(
                f"{step.name} has gradients of {show_bytes(gradients)} when it is called, and no plan keeps the budget "
                f"beside them ({refusal}); this step goes beyond it. Let them be None by then (zero_grad), or allow "
                f"more"
            )
            return None

    def _within(self, budget: int) -> StepPlanner:
        """The planner with another budget, in bytes."""
        return replace(self, options=replace(self.options, budget=budget))

    def _either(self, plain: CapturedStep, inverted: CapturedStep) -> StepPlan:
        """The step that has the better plan, or that the saved plan is of, and the plan."""
        graphs = self.problem(plain), self.problem(inverted)
        if not any(inverse.noise for inverse in graphs[1].inverses):
            return StepPlan(plain, self._planned(plain, graphs[0]))
        if self.options.plan is not None:
            try:
                return StepPlan(inverted, self._planned(inverted, graphs[1]))
            except ProblemError:
                return StepPlan(plain, self._planned(plain, graphs[0]))
        budget, auto = self.limit(graphs[0]), self.options.chosen()
        assert isinstance(auto, Auto)
        amount = _amount(budget)
        made = [(graph, plan) for graph in graphs if (plan := self.store.get(graph, amount))]
        if made:
            graph, plan = better_of(made, budget)
        else:
            with self._explaining_refusals(graphs[0]):
                graph, plan = plan_either(auto, *graphs, budget, store=self.store, hurried=self._hurried)
        step = inverted if graph is graphs[1] else plain
        return StepPlan(step, self._overlapped(step, graph, replace(plan, fingerprint=graph.fingerprint)))

    def planned(self, step: CapturedStep) -> Plan:
        """The plan of a step as it stands.

        Raises:
            InfeasibleBudget: the strategy knows no plan that fits; carries the smallest peak that it can reach.
            ProblemError: the saved plan is another graph's, or over the budget.
        """
        return self._planned(step, self.problem(step))

    def _planned(self, step: CapturedStep, graph: TrainingGraph) -> Plan:
        saved = self.options.plan
        plan = self._one_lane(graph) if saved is None else load_plan(saved, graph)
        return self._overlapped(step, graph, plan)

    def _overlapped(self, step: CapturedStep, graph: TrainingGraph, plan: Plan) -> Plan:
        def sharing() -> Sharing:
            return sharing_here(step, graph, plan) if self.options.costs == "profile" else Sharing()

        return overlapped(graph, plan, self.options.overlap, sharing)[0]

    def _one_lane(self, graph: TrainingGraph) -> Plan:
        budget = self.limit(graph)
        found = self.store.get(graph, _amount(budget))
        if found is None:
            found = self._searched(graph, budget)
        return replace(found, fingerprint=graph.fingerprint)

    def _searched(self, graph: TrainingGraph, budget: Budget) -> Plan:
        asked, amount = self.options, _amount(budget)
        chosen = asked.chosen()
        if amount is None:
            plan = least_plan(chosen, graph)
            self.store.put(graph, None, plan)
            return plan
        known = self.store.solved(graph, amount, asked.gap, asked.time_limit) if chosen.lasting else None
        if known is not None:
            self.store.put(graph, amount, known)
            return known
        if asked.refines and (found := plan_at_once(graph, amount, self.store)):
            self.store.put(graph, amount, found)
            return found
        starts = ApproxDP().around(graph, amount) if asked.deterministic else ()
        with self._explaining_refusals(graph):
            for part in self._in_parts(chosen, graph, amount):
                try:
                    return plan_within(
                        part, graph, amount, store=self.store, starts=starts, hurried=self._hurried
                    )
                except InfeasibleBudget as error:
                    if error.known == "proven" or part is chosen:
                        raise
        raise AssertionError("the last part is the whole search")

    def _in_parts(self, chosen: Strategy, graph: TrainingGraph, budget: int) -> Iterator[Strategy]:
        """The searches that are made before the first step, one after the other until one finds a plan: a short one
        first, where a better plan is searched for later. A tight budget is never refused for being late."""
        if isinstance(chosen, Auto):
            if self.options.refines:
                yield replace(chosen, time_limit=QUICK)
            elif self.store.serving(graph, budget) is not None:
                yield replace(chosen, time_limit=FURTHER * chosen.time_limit)
        yield chosen

    @contextmanager
    def _explaining_refusals(self, graph: TrainingGraph) -> Iterator[None]:
        """A refusal also names the room that is left for a loss outside of the model, unless that was stated, and the
        first plan, if that made bytes of the budget. What it says of all plans holds without that room."""
        try:
            yield
        except InfeasibleBudget as error:
            aside, known, floor, hint = set_aside(graph), error.known, error.floor, error.hint
            if self.options.loss_memory is None and aside:
                bare = without_room(graph)
                must_hold = min_peak_bound(bare).bytes
                known = "room" if known == "proven" and error.budget >= must_hold else known
                floor = floor_text(bare) if floor else floor
            if self.options.loss_memory is None and aside >= MENTIONED * error.smallest:
                floor += (
                    f"; {show_bytes(aside)} are set aside for a loss outside of the model, where loss_memory= "
                    f"may state less (loss_memory='3x' does for cross entropy)"
                )
            if self.store and self.options.stated_budget().kind not in ("min", "bytes"):
                hint = (
                    f"{self.options.budget} became these bytes at the first plan; state bytes that are enough for "
                    f"every call"
                )
            if (known, floor, hint) == (error.known, error.floor, error.hint):
                raise
            raise error.changed(known=known, floor=floor, hint=hint) from None


def _amount(budget: Budget) -> int | None:
    """Bytes, or None for the least."""
    return None if budget.kind == "min" else budget.bytes(0, lambda: 0)
