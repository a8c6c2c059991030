"""`StepPlanner`: plan captured steps according to the options of `plan_module` or of the `torch.compile` backend."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from rematplan.ir import InfeasibleBudget, ProblemError, TrainingGraph, show_bytes
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.background import shared
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.lane_schedule import Sharing
from rematplan.planner.core.plan import Plan, load_plan
from rematplan.planner.core.strategy import Progress, Strategy, silent
from rematplan.planner.peak_report import floor_text
from rematplan.planner.registry import LIMIT
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import StoreAll, no_recompute
from rematplan.plans.budgets import Budget, least_plan, plan_within, unit_missing
from rematplan.plans.first_plan import plan_at_once
from rematplan.plans.in_flight import plan_in_flight
from rematplan.plans.op_costs import copies_priced, priced
from rematplan.plans.options import LEAST, QUICK, RAISE, PlanOptions
from rematplan.plans.over_budget_plans import leanest_plan
from rematplan.plans.plan_with_inverses import better_of, plan_either
from rematplan.plans.progress import log_plan, progress_bar, shapes_of
from rematplan.plans.refining import Refining, Wanted, mapped
from rematplan.plans.resizing import Resizing
from rematplan.plans.sized_costs import SizedCosts
from rematplan.plans.two_lane_plans import OFF, overlapped, sharing_here
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.inversion.find_inverses import with_exact_inverses, with_inverses
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
from rematplan.runtime.problem.loss_boundary import set_aside, with_loss_boundary, without_room
from rematplan.runtime.problem.loss_memory import LossMemory
from rematplan.runtime.problem.optimizer_step import with_optimizer_step

FURTHER = 0.25
"""The share of the time limit for planning a step if an earlier plan, made for other shapes, fits its budget.

The same ops on other shapes need similar plans. With half, double and one more than the first batch, U-Net, ResNet-50
and a GPT came within 0.2 points of the overhead found in the whole time, whenever the earlier plan fitted.
"""
WAITING = 16
"""No further background search for a better plan is started while this many are running or queued, because each
keeps its planning problem in memory."""
RESERVED = "reserved"
"""The name of the problem's input whose size is the memory of optimizers and other objects outside of the model."""
MENTIONED = 0.01
"""The error that no plan fits names the memory for a loss if this is at least this share of the smallest peak found."""


@dataclass(frozen=True)
class StepPlanner:
    """Plans captured steps as the options of a user say. A planned module calls it for each new step.

    ``options``: the user's options. ``store``: known plans; new plans are stored in it.
    """

    options: PlanOptions
    store: PlanStore = field(default_factory=PlanStore, compare=False)
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The model's parameters and buffers under the names that captured steps use. Inverses need the values of
    scales."""
    added: frozenset[str] = frozenset()
    """Names of parameters that have gradients before the step. The step adds its gradients to them."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes that are allocated during the whole step in addition to the step's tensors, by a name for each."""
    sized: SizedCosts = field(default_factory=SizedCosts, compare=False)
    """Measured costs of ops. Costs of the same steps at other sizes are interpolated from them."""
    scope: str = ""
    """A key for budgets in percent. They refer to the peak of the first problem that was planned with the same store
    and key. The `torch.compile` backend uses one key for each graph."""

    def limit(self, graph: TrainingGraph) -> Budget:
        """Return the budget for a problem: in bytes, or ``min`` or ``least``, which depend on the smallest peak
        found for it.

        A percentage is converted to bytes for the first problem. The store remembers this number of bytes, by the
        text of the budget and `scope`, and all later problems get it, too: the device does not become smaller with a
        smaller batch.

        ``graph``: the problem.
        """
        stated = self.options.stated_budget()
        if stated.is_lean or stated.kind == "bytes":
            return stated
        fixed, key = self.store.fixed, (stated.text, self.scope)
        if key not in fixed:
            fixed[key] = stated.of(graph)
        return Budget(stated.text, "bytes", Fraction(fixed[key]))

    def loss(self, step: CapturedStep, graph: TrainingGraph) -> LossMemory:
        """Return the memory of a loss outside of the model: what the user states, otherwise a default amount.

        ``step``: the captured step. ``graph``: its planning problem, without the memory of the loss.
        """
        stated = self.options.stated_loss()
        if stated is None:
            return LossMemory.usual(step, no_recompute(graph).estimate.peak)
        if stated.kind == "share":
            return LossMemory.of_copies(step, float(stated.amount))
        return LossMemory.of_peak(step, int(stated.amount))

    def problem(self, step: CapturedStep, progress: Progress = silent) -> TrainingGraph:
        """Make the planning problem of a captured step, with everything that the user's options add to it.

        The costs of ops are measured or modelled. An op between forward and backward represents a loss outside of
        the model. Ops that must not run again are marked. The bytes of optimizers and other reserved objects are
        added as inputs.

        ``step``: the captured step. ``progress``: called with the fraction done (0 to 1) and a short text.
        """
        asked = self.options
        error = asked.max_inversion_error
        priced_ = priced(step, asked.costs, progress=progress, max_inversion_error=error, sized=self.sized)
        copies = copies_priced(step, priced_, asked.costs)
        graph = with_loss_boundary(step, priced_, self.loss(step, priced_), copies)
        once = ops_that_run_once(step, asked.keep, asked.never_rerun)
        graph = replace(graph, never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *once))))
        graph = adding_problem(step, graph, self.added) if self.added else graph
        others = asked.reserved.on(step.device, self.named)
        graph = with_optimizer_step(step, graph, others.stepping)
        return holding(graph, {**self.held, RESERVED: others.always})

    def opened(self, step: CapturedStep) -> CapturedStep:
        """Return the step with inverses (ops that compute an input from an output) added.

        If the user allows inverses that round, all inverses are added; otherwise only exact ones, which copy numbers
        without changing them.
        """
        if self.options.inverting:
            return with_inverses(step, self.named, renormalise=True).step
        return with_exact_inverses(step)

    def __call__(self, step: CapturedStep, first: bool = False) -> StepPlan:
        """Plan a step, and return the plan with the step, to which inverses were added.

        With ``accumulate``, the budget includes gradients of earlier backwards. If no plan fits, ``on_infeasible``
        decides whether an error is raised or another plan is used.

        Args:
            step: the captured step.
            first: treat the step as the first one, even if plans of other steps are known. If ``on_infeasible`` is
                None and no plan fits, the error is raised for the first step only.

        Raises:
            InfeasibleBudget: no plan is found that fits, and ``on_infeasible`` says that this is raised.
            ProblemError: the saved plan belongs to another graph.
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
        """Return a plan to use although no plan fits the budget. Warn if its peak exceeds the budget.

        The plan is the one with the smallest peak found (``on_infeasible`` is ``least``), or one that recomputes
        nothing (``eager``).

        Args:
            step: the captured step, with its inverses.
            error: the error of the search that found no plan.
            first: whether it is the first step. If ``on_infeasible`` is None, the error is raised for the first
                step, and the plan with the smallest peak is used for later ones.

        Raises:
            InfeasibleBudget: ``error``, if ``on_infeasible`` says that it is raised, or there is a saved plan.
        """
        how = self._reaction(first)
        if how == RAISE:
            raise error
        graph = self.problem(step)
        plan, what = no_recompute(graph), "a plan that recomputes nothing"
        if how == LEAST:
            plan, what = (
                leanest_plan(graph, [error.plan] if error.plan else []),
                "the plan of the smallest found peak",
            )
        if plan.peak > error.budget:
            warn(
                f"{error}. {step.name} runs with {what}; its peak is {show_bytes(plan.peak)} ({plan.peak} bytes), "
                f"above the budget of {show_bytes(error.budget)}"
            )
        return replace(plan, budget=max(plan.peak, error.budget), fingerprint=graph.fingerprint)

    def _reaction(self, first: bool) -> str:
        """Return what to do if no plan fits the budget: ``raise``, ``least`` or ``eager``.

        ``first``: whether it is the first step, for which the default is ``raise``. With a saved plan, it is always
        ``raise``.
        """
        if self.options.plan is not None:
            return RAISE
        return self.options.on_infeasible or (RAISE if first else LEAST)

    @property
    def _hurried(self) -> bool:
        return self._reaction(first=not self.store) != RAISE

    def _in_flight(self, step: CapturedStep) -> StepPlan:
        """Return the plan of a step for the options ``in_flight`` (several micro-batches in flight) and
        ``deferred``."""
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
        with progress_bar(step.name, self.options.verbose) as progress:
            graph = self.problem(step, progress)
            profiled = time.monotonic()
            plan = self._planned(step, graph, progress)
        log_plan(step, plan, profiled - began, time.monotonic() - profiled)
        carrier = self if self._carries else None
        return StepPlan(
            step, plan, refinement=self._refinement(step, graph, plan), problem=graph, carrier=carrier
        )

    @property
    def _carries(self) -> bool:
        """Whether a plan that was found at one size may be used at other sizes without a search.

        It may not if the options have several micro-batches in flight, ``accumulate``, inverses that round, or a
        saved plan. Otherwise it may in two cases. First, background searches improve plans while training runs
        (`PlanOptions.refines`). Second, the strategy makes only the plan that recomputes nothing, without
        ``overlap``, and the budget is neither ``min`` nor ``least``.
        """
        asked = self.options
        if asked.several or asked.accumulate or asked.inverting or asked.plan is not None:
            return False
        one_lane = asked.overlap in (None, OFF) and not asked.stated_budget().is_lean
        return asked.refines or (one_lane and asked.strategy == StoreAll.name)

    def problem_at(self, step: CapturedStep) -> tuple[CapturedStep, TrainingGraph]:
        """Add inverses to a captured step, and return the step and its planning problem."""
        opened = self.opened(step)
        return opened, self.problem(opened)

    def resizing(self, step: CapturedStep, problem: TrainingGraph, storages: tuple[str, ...]) -> Resizing:
        """Return a `Resizing`: it evaluates the known plans of a problem at other sizes, without capturing the step
        again.

        Args:
            step: the captured step, with its inverses.
            problem: its planning problem.
            storages: the names of the step's storages whose bytes can be computed at any sizes.
        """
        amount = _amount(self.limit(problem))
        assert amount is not None

        def search(other: TrainingGraph, plan: Plan) -> Refining | None:
            return self._refinement(step, other, plan)

        found = search if self.options.refines else None
        return Resizing(problem, step, storages, amount, self.store.family(problem), found)

    def _refinement(self, step: CapturedStep, graph: TrainingGraph, plan: Plan) -> Refining | None:
        """Return a background search for a better plan, not begun. None if no search is wanted or needed.

        No search is wanted if the options exclude it or `WAITING` searches are running or queued. None is needed if
        the plan's overhead is proven to be within the option ``gap`` of the optimum, or if an earlier search was as
        long as this one would be.
        """
        asked = self.options
        if not asked.refines or plan.budget is None or (plan.gap is not None and plan.gap <= asked.gap):
            return None
        if shared().waiting >= WAITING:
            return None
        lasting = asked.chosen().lasting  # otherwise plans on disk do not count
        if lasting and self.store.solved(graph, plan.budget, asked.gap, asked.time_limit) is not None:
            return None
        starts = self.store.starts(graph, plan.budget)
        limit = FURTHER * asked.time_limit if starts else asked.time_limit
        search = {LIMIT: limit, "gap": asked.gap, **asked.options}
        wanted = Wanted(graph, shapes_of(step), plan.budget, plan, asked.strategy, search, starts)
        return Refining(
            wanted, lambda better: StepPlan(step, replace(better, fingerprint=graph.fingerprint)), self.store
        )

    def _adding(self, step: CapturedStep) -> StepPlan | None:
        """Return a plan in which each new gradient is added to the earlier one and freed during the step, or None.

        Autograd cannot add every gradient as soon as it is computed. None is returned if the gradients that wait
        need more than the budget. None is also returned if a saved plan assumes that new gradients exist until the
        end of the step, or if ``overlap`` is not ``off``: all plans for two threads or streams assume that.
        """
        if self.options.overlap not in (None, OFF):
            return None
        try:
            found = self._alone(step)
        except ProblemError:  # a saved plan that charges new gradients until the end
            return None
        budget = found.plan.peak if found.plan.budget is None else found.plan.budget
        graph = self.problem(found.step)

        def with_spare(one: StepPlan) -> StepPlan | None:
            spare = spare_bytes(one.step, graph, one.plan.schedule, budget, self.added)
            return None if spare is None else replace(one, spare=spare)

        return mapped(found, with_spare)

    def with_gradients(
        self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]
    ) -> StepPlan | None:
        """Return a plan for a step that begins while parameters have gradients of earlier steps, or None to keep
        ``plan``.

        None is returned in three cases. First, ``plan`` and these gradients fit within the budget together. Second,
        no plan fits; then a warning says so. Third, several micro-batches are in flight, so that ``plan`` counts all
        possible gradients already.

        Args:
            step: the captured step.
            plan: its plan, which does not count gradients of earlier steps.
            gradients: bytes of the gradients of earlier steps.
            names: the parameters that have gradients.

        Raises:
            InfeasibleBudget: no plan fits, and ``on_infeasible`` is ``raise``.
        """
        if self.options.several:  # the plan counts all possible gradients
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
            cheap = error.cheap and error.cheap + gradients
            refusal = InfeasibleBudget(error.strategy, budget, smallest, error.known, cheap=cheap)
            if self.options.on_infeasible == RAISE:
                raise refusal from None
            warn(
                f"{step.name}: parameters have {show_bytes(gradients)} of gradients of earlier steps, and no plan fits "
                f"the budget in addition to them ({refusal}). This step exceeds the budget. Set the gradients to "
                f"None before it (optimizer.zero_grad()), or state a larger budget"
            )
            return None

    def _within(self, budget: int) -> StepPlanner:
        """Return this planner with another budget. ``budget``: bytes."""
        return replace(self, options=replace(self.options, budget=budget))

    def _either(self, plain: CapturedStep, inverted: CapturedStep) -> StepPlan:
        """Plan a step with and without inverses that round, and return the better plan with its step.

        If there is a saved plan, it is used, for the step that it belongs to. If there are no inverses that round,
        only the step without them is planned.

        Args:
            plain: the captured step with exact inverses only.
            inverted: the same step with inverses that round, too.
        """
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
        made = [(graph, plan) for graph in graphs if (plan := self.store.get(graph, _key(budget)))]
        if made:
            graph, plan = better_of(made, budget)
        else:
            with self._explaining_refusals(graphs[0]):
                graph, plan = plan_either(auto, *graphs, budget, store=self.store, hurried=self._hurried)
        step = inverted if graph is graphs[1] else plain
        return StepPlan(step, self._overlapped(step, graph, replace(plan, fingerprint=graph.fingerprint)))

    def planned(self, step: CapturedStep) -> Plan:
        """Return the plan of a step. Unlike `__call__`, it adds no inverses, and raises an error if no plan fits.

        Raises:
            InfeasibleBudget: the strategy finds no plan that fits. The error has the smallest peak found.
            ProblemError: the saved plan belongs to another graph.
        """
        return self._planned(step, self.problem(step))

    def _planned(self, step: CapturedStep, graph: TrainingGraph, progress: Progress = silent) -> Plan:
        saved = self.options.plan
        plan = self._one_lane(graph, progress) if saved is None else load_plan(saved, graph)
        return self._overlapped(step, graph, plan)

    def _overlapped(self, step: CapturedStep, graph: TrainingGraph, plan: Plan) -> Plan:
        def sharing() -> Sharing:
            return sharing_here(step, graph, plan) if self.options.costs == "profile" else Sharing()

        return overlapped(graph, plan, self.options.overlap, sharing)[0]

    def _one_lane(self, graph: TrainingGraph, progress: Progress) -> Plan:
        budget = self.limit(graph)
        found = self.store.get(graph, _key(budget))
        if found is None:
            found = self._searched(graph, budget, progress)
        return replace(found, fingerprint=graph.fingerprint)

    def _searched(self, graph: TrainingGraph, budget: Budget, progress: Progress) -> Plan:
        asked, amount = self.options, _amount(budget)
        chosen = asked.chosen()
        if amount is None:
            return least_plan(chosen, graph, progress, kind=budget.kind, store=self.store)
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
                        part, graph, amount, progress, store=self.store, starts=starts, hurried=self._hurried
                    )
                except InfeasibleBudget as error:
                    if part is chosen or (error.known == "proven" and self._hurried):
                        raise
        raise AssertionError("the last part is the whole search")

    def _in_parts(self, chosen: Strategy, graph: TrainingGraph, budget: int) -> Iterator[Strategy]:
        """Yield the searches for a plan. The caller runs them one after the other until one finds a plan.

        If another process improves the plan later, or if a plan for other sizes fits already, the first search is
        short. The last search always has the whole time limit: so a tight budget is not refused for lack of time,
        and the error states a peak as small as the budget ``min`` would find.

        Args:
            chosen: the strategy with the user's time limit.
            graph: the problem.
            budget: bytes.
        """
        if isinstance(chosen, Auto) and budget >= min_peak_bound(graph).bytes:
            if self.options.refines:
                yield replace(chosen, time_limit=QUICK)
            elif self.store.serving(graph, budget) is not None:
                yield replace(chosen, time_limit=FURTHER * chosen.time_limit)
        yield chosen

    @contextmanager
    def _explaining_refusals(self, graph: TrainingGraph) -> Iterator[None]:
        """In this context, an error that no plan fits gets text on what the user may change.

        It states the memory set aside for a loss (if the user did not state it), that a percentage was converted to
        bytes for the first plan, or that a unit may be missing. If the budget is proven too small only because of
        the memory for a loss, the error says so.

        ``graph``: the problem.
        """
        try:
            yield
        except InfeasibleBudget as error:
            aside, known, floor = set_aside(graph), error.known, error.floor
            stated = self.options.stated_budget()
            hint = unit_missing(stated, graph) or error.hint
            if self.options.loss_memory is None and aside:
                bare = without_room(graph)
                must_hold = min_peak_bound(bare).bytes
                known = "room" if known == "proven" and error.budget >= must_hold else known
                floor = floor_text(bare) if floor else floor
            if self.options.loss_memory is None and aside >= MENTIONED * error.smallest:
                floor += (
                    f"; {show_bytes(aside)} are set aside for a loss outside of the model; if it needs less, say so "
                    f"with loss_memory= (cross entropy needs loss_memory='3x')"
                )
            if self.store and not (stated.is_lean or stated.kind == "bytes"):
                hint = (
                    f"the first plan turned {self.options.budget} into this number of bytes; state one that is enough "
                    f"for every call"
                )
            if (known, floor, hint) == (error.known, error.floor, error.hint):
                raise
            raise error.changed(known=known, floor=floor, hint=hint) from None


def _amount(budget: Budget) -> int | None:
    """Return the bytes of a budget from `StepPlanner.limit`; None for ``min`` and ``least``, which depend on the
    problem."""
    return None if budget.is_lean else budget.bytes(0, lambda: 0)


def _key(budget: Budget) -> int | str:
    """Return the key under which plans within a budget from `StepPlanner.limit` are stored: its bytes, or ``min`` or
    ``least``."""
    amount = _amount(budget)
    return budget.kind if amount is None else amount
