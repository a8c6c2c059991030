"""From what a user asks of a drop-in to the plan of a captured step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import torch

from rematplan.ir import InfeasibleBudget, ProblemError, TrainingGraph, UsageError, show_bytes
from rematplan.planner.auto.strategy import Auto
from rematplan.planner.caches.warm_starts import begin_with, transfer_plan
from rematplan.planner.core.lanes import Sharing
from rematplan.planner.core.plan import Plan, load_plan
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.registry import LIMIT, strategy
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import Budget, least_plan, parse_budget, parse_loss_memory, plan_within
from rematplan.plans.inverting import plan_either
from rematplan.plans.overlapping import OFF, check_mode, overlapped, sharing_here
from rematplan.plans.pricing import check_costs, copies_priced, priced
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.inversion.find import with_exact_inverses, with_inverses
from rematplan.runtime.problem.accumulation import Beside, adding_problem, spare_bytes
from rematplan.runtime.problem.constraints import Name, ops_that_run_once
from rematplan.runtime.problem.loss_boundary import LossMemory, set_aside, with_loss_boundary

FURTHER = 0.25
"""Share of the time limit for a step that a plan of an earlier one serves within the budget: the same ops on other
shapes want much the same runs. For U-Net, ResNet-50 and a GPT at half, double and one more of the batch it came within
.2 points of the whole time, wherever the earlier plan fitted."""
REMEMBERED = 4
"""Earlier plans to begin with."""

MENTIONED = 0.01
"""Share of a refused plan's peak from which on room for a loss is worth a word."""

Searched: TypeAlias = list[tuple[frozenset[str], Plan]]


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans the steps of a drop-in; the fields are the arguments of `plan_module`.

    Raises:
        UsageError: no budget, a malformed one or loss memory; an unknown strategy, option, kind of costs or overlap.
    """

    budget: str | int | None
    strategy: str = "auto"
    time_limit: float = 30.0
    options: Mapping[str, object] = field(default_factory=dict)
    costs: str = "profile"
    keep: tuple[Name, ...] = ()
    never_rerun: tuple[Name, ...] = ()
    plan: str | Path | None = None
    inverses: bool = False
    max_inversion_error: float | None = None
    overlap: str | None = None
    loss_memory: str | int | None = None
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The values of parameters and buffers by the names that captured steps know them by, for scales to invert."""
    added: frozenset[str] = frozenset()
    """Names of parameters that have gradients, to which their new ones are added."""
    made: dict[tuple[object, ...], Plan] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Plans by all that decides which peaks there are: a step in which only a number is another needs no new search."""
    searched: Searched = field(default_factory=list, init=False, repr=False, compare=False)
    """The names of the ops of the problems that were searched last, and their plans: others are begun with those."""
    fixed: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """The bytes that a percentage became at the first plan, which hold for all later ones; empty before. A copy or a
    pickle of a planned module has them with its planner."""
    better: dict[tuple[object, ...], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of two steps, without inverses and with them, the one that has the better plan."""

    def __post_init__(self) -> None:
        if self.budget is None and self.plan is None:
            raise UsageError("state a budget, such as budget='8GiB', or a plan")
        if self.budget is not None:
            parse_budget(str(self.budget))
        self.stated_loss()
        self.chosen()
        check_costs(self.costs)
        check_mode(self.overlap)

    def chosen(self) -> Strategy:
        """The strategy with its options."""
        return strategy(self.strategy, **{LIMIT: self.time_limit, **self.options})

    def stated_loss(self) -> Budget | None:
        """What the loss holds, if that is stated."""
        return None if self.loss_memory is None else parse_loss_memory(str(self.loss_memory))

    def limit(self, graph: TrainingGraph) -> Budget:
        """The budget for a problem: ``min``, which each problem has of its own, or bytes. A percentage is of the first
        problem's peak: a later one, of a smaller batch say, would else get less than the device has room for."""
        stated = parse_budget(str(self.budget))
        if stated.kind in ("min", "bytes"):
            return stated
        if not self.fixed:
            self.fixed.append(stated.of(graph))
        return Budget(stated.text, "bytes", Fraction(self.fixed[0]))

    def loss(self, step: CapturedStep, graph: TrainingGraph) -> LossMemory:
        """What the loss holds beside the outputs and their gradients."""
        stated = self.stated_loss()
        if stated is None:
            return LossMemory.usual(step, no_recompute(graph).estimate.peak)
        if stated.kind == "share":
            return LossMemory.of_copies(step, float(stated.amount))
        return LossMemory.of_peak(step, int(stated.amount))

    def problem(self, step: CapturedStep) -> TrainingGraph:
        """The step's planning problem, with all outputs there at the turn and the user's constraints."""
        priced_ = priced(step, self.costs, max_inversion_error=self.max_inversion_error)
        copies = copies_priced(step, priced_, self.costs)
        graph = with_loss_boundary(step, priced_, self.loss(step, priced_), copies)
        once = ops_that_run_once(step, self.keep, self.never_rerun)
        graph = replace(graph, never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *once))))
        return adding_problem(step, graph, self.added) if self.added else graph

    def opened(self, step: CapturedStep) -> CapturedStep:
        """The step with its inverses: all if they are wanted, else those that only move numbers."""
        if self.inverses or self.strategy == Reversible.name:
            return with_inverses(step, self.named, renormalise=True).step
        return with_exact_inverses(step)

    def __call__(self, step: CapturedStep) -> tuple[CapturedStep, Plan]:
        """The step with its inverses, and its plan.

        Raises: see `planned`.
        """
        if self.inverses and isinstance(self.chosen(), Auto):
            return self._either(with_exact_inverses(step), self.opened(step))
        step = self.opened(step)
        return step, self.planned(step)

    def beside(self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]) -> Beside | None:
        """What is planned for a step when gradients of earlier steps are there as it begins; None if its ``plan``, made
        without them, serves.

        ``gradients``: their bytes. ``names``: of the parameters that have them.

        Raises: see `planned`.
        """
        adding = replace(self, added=frozenset(names))
        if self.plan is not None:
            budget = plan.peak if plan.budget is None else plan.budget
        else:
            stated = self.limit(self.problem(with_exact_inverses(step)))
            budget = stated.bytes(0, lambda: plan.peak + gradients)
        if plan.peak + gradients <= budget:
            return None
        if self.plan is not None:
            raise InfeasibleBudget(plan.strategy, budget, plan.peak + gradients)
        left = max(1, budget - gradients)
        try:
            # Two lanes hold what one does not: their gradients are charged to the end.
            found = adding._adding_within(step, left, self.searched) if self.overlap in (None, OFF) else None
            return found or self._within(step, left, self.searched)
        except InfeasibleBudget as error:
            smallest = error.smallest + gradients
            raise InfeasibleBudget(error.strategy, budget, smallest, error.known) from None

    def _adding_within(self, step: CapturedStep, budget: int, searched: Searched) -> Beside | None:
        """What is planned within a budget beside the gradients that are added to; None if it is only kept where new
        ones leave at once."""
        found = self._within(step, budget, searched)
        graph = self.problem(found.step)
        spare = spare_bytes(found.step, graph, found.plan.schedule, budget, self.added)
        return None if spare is None else replace(found, spare=spare)

    def _within(self, step: CapturedStep, budget: int, searched: Searched) -> Beside:
        less = replace(self, budget=budget)
        less.searched[:] = searched
        return Beside(*less(step))

    def _either(self, plain: CapturedStep, inverted: CapturedStep) -> tuple[CapturedStep, Plan]:
        """The step that has the better plan, or that the saved plan is of, and the plan."""
        steps, graphs = (plain, inverted), (self.problem(plain), self.problem(inverted))
        if not any(inverse.noise for inverse in graphs[1].inverses):
            return plain, self._planned(plain, graphs[0])
        if self.plan is not None:
            try:
                return inverted, self._planned(inverted, graphs[1])
            except ProblemError:
                return plain, self._planned(plain, graphs[0])
        both = self._key(graphs[0]), self._key(graphs[1])
        if both not in self.better:
            auto, budget = self.chosen(), self.limit(graphs[0])
            assert isinstance(auto, Auto)
            with self._explaining_refusals(graphs[0]):
                graph, plan = plan_either(auto, *graphs, budget)
            self._note(graph, plan)
            self.better[both] = int(graph is graphs[1])
        one = self.better[both]
        return steps[one], self._planned(steps[one], graphs[one])

    def planned(self, step: CapturedStep) -> Plan:
        """The plan of a step as it stands.

        Raises:
            InfeasibleBudget: the strategy knows no plan that fits; carries the smallest peak that it can reach.
            ProblemError: the saved plan is another graph's, or over the budget.
        """
        return self._planned(step, self.problem(step))

    def _planned(self, step: CapturedStep, graph: TrainingGraph) -> Plan:
        plan = self._one_lane(graph) if self.plan is None else load_plan(self.plan, graph)

        def sharing() -> Sharing:
            return sharing_here(step, graph, plan) if self.costs == "profile" else Sharing()

        return overlapped(graph, plan, self.overlap, sharing)[0]

    def _key(self, graph: TrainingGraph) -> tuple[object, ...]:
        sizes = tuple(t.bytes for t in graph.tensors)
        return graph.fingerprint, sizes, tuple(op.workspace for op in (*graph.ops, *graph.inverses))

    def _note(self, graph: TrainingGraph, plan: Plan) -> None:
        key, costs = self._key(graph), tuple(op.cost for op in (*graph.ops, *graph.inverses))
        self.made[key] = self.made[*key, costs] = replace(plan, fingerprint=graph.fingerprint)

    def _one_lane(self, graph: TrainingGraph) -> Plan:
        key, costs = self._key(graph), tuple(op.cost for op in (*graph.ops, *graph.inverses))
        if key not in self.made:
            plan = self._searched(graph)
            self._note(graph, plan)
            self.searched[:] = [*self.searched, (frozenset(graph.op), plan)][-REMEMBERED:]
        if (*key, costs) not in self.made:  # its bound is of other costs
            known = self.made[key]
            estimate = simulate(graph, known.schedule)
            return replace(known, estimate=estimate, lower_bound=None, status="feasible")
        return self.made[*key, costs]

    def _searched(self, graph: TrainingGraph) -> Plan:
        budget = self.limit(graph)
        if budget.kind == "min":
            return least_plan(self.chosen(), graph)
        bytes_ = budget.bytes(0, lambda: 0)
        with self._explaining_refusals(graph):
            return plan_within(self._begun(self.chosen(), graph, bytes_), graph, bytes_)

    @contextmanager
    def _explaining_refusals(self, graph: TrainingGraph) -> Iterator[None]:
        """A refusal also names the room that is left for a loss outside of the model, unless that was stated, and the
        first plan, if that made bytes of the budget."""
        try:
            yield
        except InfeasibleBudget as error:
            aside, floor, hint = set_aside(graph), error.floor, error.hint
            if self.loss_memory is None and aside >= MENTIONED * error.smallest:
                floor += (
                    f"; {show_bytes(aside)} are set aside for a loss outside of the model, where loss_memory= "
                    f"may state less (loss_memory='3x' does for cross entropy)"
                )
            if self.made and parse_budget(str(self.budget)).kind not in ("min", "bytes"):
                hint = f"{self.budget} became these bytes at the first plan; state bytes that are enough for every call"
            if (floor, hint) == (error.floor, error.hint):
                raise
            raise InfeasibleBudget(
                error.strategy, error.budget, error.smallest, error.known, floor, hint
            ) from None

    def _begun(self, chosen: Strategy, graph: TrainingGraph, budget: int) -> Strategy:
        """The strategy, with less time where an earlier plan serves; it begins with those."""
        if not isinstance(chosen, Auto):
            return chosen
        carried = [(p, ops) for ops, plan in self.searched if (p := transfer_plan(plan, graph))]
        begin_with(graph, [plan for plan, _ in carried])
        serves = any(p.estimate.peak <= budget and ops == graph.op.keys() for p, ops in carried)
        return replace(chosen, time_limit=FURTHER * chosen.time_limit) if serves else chosen
