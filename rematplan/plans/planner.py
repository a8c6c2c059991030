"""`Planner`: plan captured steps according to the options of `plan_module` or of the `torch.compile` backend."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

from rematplan.ir import InfeasibleBudget, ProblemError, TrainingGraph, show_bytes
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.latest import remember
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Schedule
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.store_all import StoreAll
from rematplan.plans.budgets import Budget
from rematplan.plans.held_by_others import Reserved
from rematplan.plans.in_flight import (
    budget_in_flight,
    plan_in_flight,
    problem_in_flight,
    search_in_flight,
    trial_of_rank,
)
from rematplan.plans.on_infeasible import accepts_refusals, explaining_refusals, plan_over_budget, reaction
from rematplan.plans.options import AUTO_SPLIT, LEAST, RAISE, UNSPLIT
from rematplan.plans.plan_searches import background_search, one_lane_plan, quick_plan, store_key
from rematplan.plans.plan_with_inverses import better_of, plan_either
from rematplan.plans.progress import LOG, log_plan, progress_bar
from rematplan.plans.refining import Refining, StepPlan, mapped
from rematplan.plans.resizing import Resizing
from rematplan.plans.splitting import (
    RewrittenStep,
    SplitTrial,
    SplitTrials,
    about_splits,
    split_as_asked,
    split_as_planned,
    strategy_of_trials,
    trials_of_step,
)
from rematplan.plans.step_problems import StepProblems
from rematplan.plans.step_structure import structure_of
from rematplan.plans.two_lane_plans import OFF, overlapped, sharing_on
from rematplan.runtime.costs.device_models import PROFILE
from rematplan.runtime.fuse.fuse import FusedStep, fuse
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.inversion.find_inverses import with_exact_inverses, with_inverses
from rematplan.runtime.problem.earlier_gradients import EARLIER, earlier_gradients, spare_bytes, waiting_bytes
from rematplan.runtime.problem.policy import ops_that_run_once
from rematplan.runtime.problem.weight_gradients import with_separate_weights, with_weight_boundary

FUSED_STEPS = 32
"""The largest number of structures of steps whose regions are remembered."""


@dataclass(frozen=True)
class Planner(StepProblems):
    """Plans captured steps as the options of a user say. A planned module calls it for each new step."""

    fused_steps: dict[Hashable, FusedStep] = field(default_factory=dict, compare=False)
    """By structure, the last step with open sizes whose regions were fused. Steps of other sizes get its regions."""
    store: PlanStore = field(default_factory=PlanStore, compare=False)
    """Known plans; new plans are stored in it."""
    fixed: dict[tuple[str, str], int] = field(default_factory=dict, compare=False)
    """The bytes of budgets in percent, by `budget_key`. A copy of a planned module has its own."""
    scope: str = ""
    """A key for budgets in percent. They refer to the peak of the first problem that was planned with this key. The
    `torch.compile` backend uses one key for each graph."""

    @property
    def bounds_one_call(self) -> bool:
        """Whether the budget bounds one call alone. With ``in_flight``, it bounds several calls together."""
        return not self.options.several

    def limit(self, graph: TrainingGraph) -> Budget:
        """Return the budget in bytes, or ``min`` or ``least``, which depend on the smallest peak found. A percentage
        keeps the bytes that it has for the first problem with this text and `scope`."""
        stated = self.options.stated_budget()
        if stated.is_lean or stated.kind == "bytes":
            return stated
        # The device does not become smaller with a smaller batch.
        if self.budget_key not in self.fixed:
            self.fixed[self.budget_key] = stated.of(graph)
        return Budget(stated.text, "bytes", Fraction(self.fixed[self.budget_key]))

    @property
    def budget_key(self) -> tuple[str, str]:
        """The key of a percentage's bytes in ``fixed``."""
        return self.options.stated_budget().text, self.scope

    def of_training(self) -> Planner | None:
        """Return this planner with another scope, so that its percentage becomes bytes anew when training begins, as
        under DDP. None without a percentage, with a saved plan, or with several calls in flight."""
        asked = self.options
        if asked.saved is not None or asked.several or not asked.stated_budget().is_percentage:
            return None
        return replace(self, scope=f"{self.scope} in training")

    def plan(self, step: CapturedStep, first: bool = False, progress: Progress | None = None) -> StepPlan:
        """Split and fuse ops of a step and add inverses as the options say, plan it, and return the changed step with
        its plan. If no plan fits, ``on_infeasible`` decides; if that is unset, `InfeasibleBudget` is raised with
        ``first`` or an empty store."""
        first = first or not self.store
        changed = self.rewritten(step, first)
        for note in changed.notes:
            LOG.info("%s", note)
        try:
            found = self._planned_whole(changed.step, step, first, progress)
        except InfeasibleBudget as error:
            if not first or self.options.saved or self.options.several:
                raise
            if self.options.fuses:
                of = "fused kernels" if self.options.split == UNSPLIT else "fused kernels and these splits"
                raise replace(error, floor=f"{error.floor}, with {of}") from None
            raise about_splits(self._with_earlier_gradients(step)[0], step, error) from None
        carries = found.carries and self.options.split == UNSPLIT  # splits are those of one size
        notes = (*changed.notes, *found.notes)
        return replace(found, notes=notes, carries=carries, rounds=bool(changed.notes))

    def rewritten(self, step: CapturedStep, first: bool = False) -> RewrittenStep:
        """Return the step with ops split along rows or fused, as the options say, and what to tell the user. ``first``:
        whether what cannot be split is a `UsageError`."""
        return self.fused(self._split(step, first))

    def fused(self, changed: RewrittenStep) -> RewrittenStep:
        """Return a step with fused kernels, if the options ask for them, and what to tell the user in addition."""
        if not self.options.fuses:
            return changed
        found = self._with_fused_kernels(changed.step)
        return RewrittenStep(found.step, (*changed.notes, *found.notes))

    def _with_fused_kernels(self, step: CapturedStep) -> RewrittenStep:
        """Return the step with fused kernels; with open sizes, they are kept for steps of the same structure. If some
        regions have none, one warning says how many, and why the first."""
        if self.options.split != UNSPLIT:
            step = replace(step, open_sizes=None)  # the sizes of parts are plain numbers
        key = structure_of(step) if step.open_sizes else None
        saved = frozenset(ops_that_run_once(step, self.options.policy))
        found = fuse(step, known=self.fused_steps.get(key), alone=saved)
        if step.open_sizes:
            remember(self.fused_steps, key, found, FUSED_STEPS)
        if found.failures:
            warn(
                f"{step.name}: {len(found.failures)} of {found.regions} regions run eager kernels, since they have no "
                f"fused kernel that may be used: {found.failures[0]}"
            )
        return RewrittenStep(found.step, (found.note,) if found.kernels else ())

    def as_planned(self, step: CapturedStep) -> CapturedStep:
        """Return the step as its plans have it: with splits, fused kernels and inverses, as the options say."""
        return self.with_inverses(self.rewritten(step).step)

    def _split(self, step: CapturedStep, first: bool) -> RewrittenStep:
        """Return the step split as the options say: not at all, as the saved plan has it, or as asked. ``first``:
        whether a named module without splits is an error."""
        if self.options.split == UNSPLIT:
            return RewrittenStep(step)
        charged, _ = self._with_earlier_gradients(step)
        saved = self.options.saved
        if saved is not None and self.options.split == AUTO_SPLIT:
            return split_as_planned(charged, step, saved.ops)
        # Trials turn a percentage into bytes for the step without splits. A saved plan has no budget.
        trials = None if saved is not None else charged._trials(step)
        return split_as_asked(charged, step, trials, first)

    def _trials(self, step: CapturedStep) -> SplitTrials:
        """Return trials of splits of ``step``, with eager kernels, within the budget. A percentage refers to ``step``
        without splits."""
        if not self.options.several:
            return trials_of_step(self, self.limit(self.inverting_problem(step)))
        most = budget_in_flight(self._stage(step)[1], self.options)
        short = replace(self.options, strategy=strategy_of_trials(self.options))

        def trial(step: CapturedStep) -> SplitTrial:
            problem = self._stage(step)[1]
            return trial_of_rank(problem.graph, search_in_flight(problem, most, short))

        return SplitTrials(most, trial)

    def _planned_whole(
        self, step: CapturedStep, original: CapturedStep, first: bool, progress: Progress | None
    ) -> StepPlan:
        """Plan a step in which splits and fused kernels are made already. If no plan fits, ``on_infeasible`` decides as
        in `plan`; with ``in_flight``, `InfeasibleBudget`. ``original``: the step without splits and fused kernels."""
        if self.options.several:
            return self._in_flight(step, original)
        charged, names = self._with_earlier_gradients(step)
        try:
            adding = replace(charged, added=names)._adding(step) if names else None
            found = adding or charged._alone(step, progress)
        except InfeasibleBudget as error:
            form = self.with_inverses(step)
            found = StepPlan(form, charged.instead(form, error, first))
        counted = mapped(found, lambda one: replace(one, gradients=charged.held[EARLIER]))
        assert counted is not None
        return counted

    def _with_earlier_gradients(self, step: CapturedStep) -> tuple[Planner, frozenset[str]]:
        """Return this planner with the bytes of earlier steps' gradients, and the parameters that have them; 0 bytes
        and none unless they are reserved."""
        earlier = self.options.reserved.gradients
        names, held = earlier_gradients(step, self.named) if earlier else (frozenset(), 0)
        return replace(self, held={**self.held, EARLIER: held}), names

    def instead(self, step: CapturedStep, error: InfeasibleBudget, first: bool) -> Plan:
        """Return a plan to use although no plan fits (`plan_over_budget`). Raise ``error`` for a saved plan, if
        ``on_infeasible`` is ``raise``, or if that is unset and the plan is the ``first``."""
        how = reaction(self.options, first)
        if how == RAISE:
            raise error
        return plan_over_budget(error, how, self.problem(step), step.name)

    def _in_flight(self, step: CapturedStep, original: CapturedStep) -> StepPlan:
        """Return the plan of a step for the options ``in_flight`` (several micro-batches in flight) and
        ``deferred``. A percentage refers to the step ``original``."""
        step, problem = self._stage(step)
        whole = problem if self.options.split == UNSPLIT else self._stage(original)[1]
        return plan_in_flight(step, problem, budget_in_flight(whole, self.options), self.options)

    def _stage(self, step: CapturedStep) -> tuple[CapturedStep, StageProblem]:
        asked, step = self.options, self.with_inverses(step)
        split = asked.in_flight.deferred is not None
        step = with_separate_weights(step) if split else step
        graph, loss = self.with_loss(step)
        graph = self.around(step, graph)
        graph = with_weight_boundary(step, graph) if split else graph
        return step, problem_in_flight(step, graph, loss)

    def _alone(self, step: CapturedStep, progress: Progress | None = None) -> StepPlan:
        """Return the plan of a step that begins without gradients: the saved one, or one of a search, with or without
        inverses. `InfeasibleBudget` if none is found."""
        shown = nullcontext(progress) if progress else progress_bar(step.name)
        with shown as progress:
            if self.options.saved is not None:
                return self._saved(step, progress)
            if self.options.inverses and isinstance(self.options.strategy, Auto):
                return self._either(with_exact_inverses(step), self.with_inverses(step), progress)
            step, began = self.with_inverses(step), time.monotonic()
            graph = self.problem(step, progress)
            profiled = time.monotonic()
            plan, notes = self._planned(step, graph, progress)
            log_plan(step, plan, profiled - began, time.monotonic() - profiled)
        search = background_search(self.options, self.store, step, graph, plan)
        return StepPlan(step, plan, refinement=search, problem=graph, carries=self._carries, notes=notes)

    def _saved(self, step: CapturedStep, progress: Progress = silent) -> StepPlan:
        """Return the saved plan and the first form of the step that it fits; `ProblemError` if it fits none. Forms have
        the options' inverses, or, if these may round, exact ones or those without weights. Each form is tried again
        with reserved bytes, as of DDP."""
        assert self.options.saved is not None
        reserved = Reserved((*self.options.reserved.items, 1))
        counted = replace(self, options=replace(self.options, reserved=reserved))
        forms = [self.with_inverses(step)]
        if self.options.inverting:
            forms += [with_exact_inverses(step), with_inverses(step, {}, renormalise=True).step]
        errors = []
        for planner, form in itertools.product((self, counted), forms):
            graph = planner.problem(form, progress)
            try:
                plan, notes = self._overlapped(form, graph, self.options.saved.plan(graph))
                return StepPlan(form, plan, problem=graph, notes=notes)
            except ProblemError as error:
                errors.append(error.with_traceback(None))
        raise errors[0]

    @property
    def _carries(self) -> bool:
        """Whether a plan that was found at one size may be used at other sizes without a search."""
        asked = self.options
        if asked.several or asked.reserved.gradients or asked.inverting or asked.saved is not None:
            return False
        # Background searches improve the plan, or none would take long, or `StoreAll` makes the only one.
        one_lane = asked.strategy.two_lanes == OFF and not asked.stated_budget().is_lean
        return asked.takes_quick_plans or (one_lane and isinstance(asked.strategy, StoreAll))

    def resizing(self, step: CapturedStep, problem: TrainingGraph, storages: tuple[str, ...]) -> Resizing:
        """Return what evaluates the known plans of a problem at other sizes, without capturing the step. The budget
        must be in bytes. ``storages``: the names of the step's storages."""
        amount = self.limit(problem).fixed
        assert amount is not None

        def search(other: TrainingGraph, plan: Plan) -> Refining | None:
            return background_search(self.options, self.store, step, other, plan)

        found = search if self.options.refines else None
        waiting = partial(self._waiting, step) if self.added else None
        return Resizing(problem, step, storages, amount, self.store.family(problem), found, waiting)

    def _waiting(self, step: CapturedStep, schedule: Schedule) -> Sequence[int]:
        """Return the bytes of gradients that wait if every segment of the backward ends as early as possible. They are
        as large as parameters, whatever the batch is."""
        return waiting_bytes(step, schedule, (0,) * len(schedule), self.added)

    def adding_to_gradients(self, plan: Plan, gradients: int, names: Set[str]) -> Planner | None:
        """Return the planner of steps that begin with ``gradients`` bytes of earlier gradients of the parameters
        ``names``. None if ``plan`` fits with them or has no budget, or plans may not be used at other sizes."""
        if (
            self.options.split != UNSPLIT
            or not self.bounds_one_call
            or not self._carries
            or plan.budget is None
        ):
            return None
        if plan.peak + gradients <= plan.budget:
            return None
        return replace(self, added=frozenset(names)).within(max(1, plan.budget - gradients))

    def _adding(self, step: CapturedStep) -> StepPlan | None:
        """Return a plan that frees each new gradient as it is added to the earlier one; `InfeasibleBudget` if none
        fits. None on two lanes, for a saved plan that keeps new gradients until the end, or if gradients that wait
        exceed the budget."""
        # Plans for two lanes assume that new gradients exist until the step ends.
        if self.options.strategy.two_lanes not in (OFF, None):
            return None
        try:
            found = self._alone(step)
        except ProblemError:  # a saved plan that charges new gradients until the end
            return None
        budget = found.plan.peak if found.plan.budget is None else found.plan.budget
        graph = self.problem(found.step)

        def with_spare(one: StepPlan) -> StepPlan | None:
            # Autograd adds a gradient when its segment ends, so some wait.
            spare = spare_bytes(one.step, graph, one.plan.schedule, budget, self.added)
            return None if spare is None else replace(one, spare=spare)

        return mapped(found, with_spare)

    def with_gradients(
        self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]
    ) -> StepPlan | None:
        """Return a plan for a step that begins with ``gradients`` bytes of earlier gradients of the parameters
        ``names``; None if ``plan`` fits with them, or with ``in_flight``. If none fits, raise `InfeasibleBudget` with
        ``raise``, else warn and return a plan of a smaller peak (``least``), or None to keep ``plan``."""
        if self.options.several:  # the plan counts all possible gradients
            return None
        step = self.rewritten(step).step
        adding = replace(self, added=frozenset(names))
        if self.options.saved is not None:
            budget = plan.peak if plan.budget is None else plan.budget
        else:
            stated = self.limit(self.problem(with_exact_inverses(step)))
            budget = stated.bytes(0, lambda: plan.peak + gradients)
        if plan.peak + gradients <= budget:
            return None

        def within(left: int) -> StepPlan:
            return adding.within(left)._adding(step) or self.within(left)._alone(step)

        try:
            if self.options.saved is not None:
                raise InfeasibleBudget(plan.strategy, budget, plan.peak)
            return within(max(1, budget - gradients))
        except InfeasibleBudget as error:
            smallest = error.smallest + gradients
            cheap = error.cheap and error.cheap + gradients
            refusal = InfeasibleBudget(error.strategy, budget, smallest, error.known, cheap=cheap)
            if self.options.on_infeasible == RAISE:
                raise refusal from None
            takes_least = reaction(self.options, first=False) == LEAST
            lean = _first_fitting(within, error, plan.peak) if takes_least else None
            needed = gradients + (lean.plan if lean else plan).peak
            warn(
                f"{step.name}: parameters have {show_bytes(gradients)} of gradients of earlier steps, and no plan fits "
                f"the budget in addition to them ({refusal}). This step takes {show_bytes(needed)}. Set the gradients "
                f"to None before it (optimizer.zero_grad()), or state a larger budget"
            )
            return lean

    def plan_ahead(self, problem: TrainingGraph) -> None:
        """Store a plan of a problem that a later call may have, if a short search finds one."""
        with suppress(InfeasibleBudget):
            quick_plan(self.options, self.store, problem, self.limit(problem))

    def within(self, budget: int | str) -> Planner:
        """Return this planner with another budget: bytes, or text as of `PlanOptions`."""
        return replace(self, options=replace(self.options, budget=budget))

    def _either(self, plain: CapturedStep, inverted: CapturedStep, progress: Progress) -> StepPlan:
        """Return the better plan, with its step, of the steps ``plain``, which has the exact inverses, and
        ``inverted``. Plan only ``plain`` if no inverse of ``inverted`` rounds. `InfeasibleBudget` if none is found."""
        graphs = self.problem(plain, progress), self.problem(inverted, progress)
        if not any(inverse.noise for inverse in graphs[1].inverses):
            alone, notes = self._planned(plain, graphs[0], progress)
            return StepPlan(plain, alone, problem=graphs[0], notes=notes)
        budget, auto = self.limit(graphs[0]), self.options.strategy
        assert isinstance(auto, Auto)
        made = [(graph, plan) for graph in graphs if (plan := self.store.get(graph, store_key(budget)))]
        if made:
            graph, plan = better_of(made, budget)
        else:
            with explaining_refusals(self.options, self.store, graphs[0]):
                hurried = accepts_refusals(self.options, self.store)
                graph, plan = plan_either(auto, *graphs, budget, progress, store=self.store, hurried=hurried)
        step = inverted if graph is graphs[1] else plain
        plan, notes = self._overlapped(step, graph, replace(plan, fingerprint=graph.fingerprint))
        return StepPlan(step, plan, problem=graph, notes=notes)

    def planned(self, step: CapturedStep) -> Plan:
        """Return the plan of a step. Unlike `plan`, it adds no inverses, and raises `InfeasibleBudget` if no plan fits.
        A saved plan must be one of this step, else `ProblemError`."""
        graph = self.problem(step)
        if self.options.saved is not None:
            return self._overlapped(step, graph, self.options.saved.plan(graph))[0]
        return self._planned(step, graph)[0]

    def _planned(
        self, step: CapturedStep, graph: TrainingGraph, progress: Progress = silent
    ) -> tuple[Plan, tuple[str, ...]]:
        plan = one_lane_plan(self.options, self.store, graph, self.limit(graph), progress)
        return self._overlapped(step, graph, plan)

    def _overlapped(
        self, step: CapturedStep, graph: TrainingGraph, plan: Plan
    ) -> tuple[Plan, tuple[str, ...]]:
        """Return the plan divided into two lanes if the options ask for it and it is possible, else the plan, and notes
        for the user."""
        strategy = self.options.strategy
        sharing = partial(sharing_on, step, graph, plan, strategy, measured=self.options.costs == PROFILE)
        return overlapped(graph, plan, strategy.two_lanes, sharing)


def _first_fitting(within: Callable[[int], StepPlan], error: InfeasibleBudget, most: int) -> StepPlan | None:
    """Return the plan that ``within`` finds for the smallest peak that ``error`` names. While ``within`` refuses with a
    larger smallest peak, try that. None if the next peak is not larger, or not below ``most`` bytes."""
    while error.smallest < most:
        try:
            return within(error.smallest)
        except InfeasibleBudget as later:
            if later.smallest <= error.smallest:
                break
            error = replace(later)  # whose traceback does not hold this frame
    return None
