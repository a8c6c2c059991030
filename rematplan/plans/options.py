"""What a user asks of a plan, whichever door is taken: `plan_module` or `backend`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rematplan.ir import UsageError
from rematplan.planner.auto.strategy import Auto
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.registry import LIMIT, strategy
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.reversible import Reversible
from rematplan.plans.budgets import Budget, parse_budget, parse_loss_memory
from rematplan.plans.overlapping import OFF, check_mode
from rematplan.plans.pricing import check_costs
from rematplan.plans.reserved import Reserved

if TYPE_CHECKING:
    from rematplan.runtime.problem.constraints import Name

RAISE, LEAST, EAGER = "raise", "least", "eager"
INSTEAD = (RAISE, LEAST, EAGER)
"""What may happen where no plan keeps the budget: an error, the leanest plan known, or one that recomputes nothing."""
QUICK = 1.5
"""Seconds of the search before the first step, where a better plan is searched for while training runs."""
DETERMINISTIC_MOVES = 100_000
"""The annealer's moves that count as a second: fewer than it makes in one on most machines."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The arguments of `plan_module` that decide which plan is made; see there.

    Raises:
        UsageError: no budget, a malformed one or loss memory; an unknown strategy, option, kind of costs, overlap or
            reaction to a budget that no plan keeps.
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
    accumulate: bool = False
    reserved: Reserved = field(default_factory=Reserved)
    on_infeasible: str | None = None
    refine: bool = True
    gap: float = 0.001
    deterministic: bool = False
    in_flight: int = 1
    deferred: int | None = None

    def __post_init__(self) -> None:
        if self.budget is None and self.plan is None:
            raise UsageError("state a budget, such as budget='8GiB', or a plan")
        if self.budget is not None:
            parse_budget(str(self.budget))
        if self.in_flight < 1 or (self.deferred or 0) < 0:
            raise UsageError(
                f"{self.in_flight} micro-batches in flight, {self.deferred} deferred: not numbers of such"
            )
        if self.several and (self.inverses or self.plan is not None or self.overlap not in (None, OFF)):
            raise UsageError(
                "in_flight and deferred go neither with inverses nor with overlap or a saved plan"
            )
        self.stated_loss()
        self.chosen()
        check_costs(self.costs)
        check_mode(self.overlap)
        if self.on_infeasible not in (None, *INSTEAD):
            raise UsageError(f"unknown on_infeasible {self.on_infeasible!r}; known: {', '.join(INSTEAD)}")

    def chosen(self) -> Strategy:
        """The strategy with its options. One that is deterministic counts moves instead of seconds."""
        if self.strategy != Auto.name:
            return strategy(self.strategy, **{LIMIT: self.time_limit, **self.options})
        if self.deterministic:
            moves = round(self.time_limit * DETERMINISTIC_MOVES)
            return strategy(Anneal.name, **{"moves": moves, **self.options})
        return strategy(self.strategy, **{LIMIT: self.time_limit, "gap": self.gap, **self.options})

    @property
    def refines(self) -> bool:
        """Whether a plan that is quickly found is used at once, and improved in another process while training runs.

        Not where what is computed may depend on the plan (inverses that round), where the least peak is asked for, or
        where recomputation on a second lane is timed for the plan.
        """
        return (
            self.refine
            and not self.deterministic
            and self.plan is None
            and self.strategy == Auto.name
            and not self.inverting
            and self.overlap in (None, OFF)
            and self.stated_budget().kind != "min"
            and self.time_limit > QUICK
        )

    def stated_budget(self) -> Budget:
        """The budget as it is stated."""
        return parse_budget(str(self.budget))

    def stated_loss(self) -> Budget | None:
        """What the loss holds, if that is stated."""
        return None if self.loss_memory is None else parse_loss_memory(str(self.loss_memory))

    @property
    def several(self) -> bool:
        """Whether several micro-batches may be under way."""
        return self.in_flight > 1 or self.deferred is not None

    @property
    def inverting(self) -> bool:
        """Whether inverses that round are wanted."""
        return self.inverses or self.strategy == Reversible.name
