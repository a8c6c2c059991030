"""The options that determine a plan, for `plan_module` and for the `torch.compile` backend of this package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from rematplan.ir import UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.registry import LIMIT, strategy
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.reversible import Reversible
from rematplan.plans.budgets import Budget, parse_budget, parse_loss_memory
from rematplan.plans.held_by_others import Reserved
from rematplan.plans.op_costs import known_costs
from rematplan.plans.two_lane_plans import OFF, check_mode

if TYPE_CHECKING:
    from rematplan.runtime.problem.constraints import Name

RAISE, LEAST, EAGER = "raise", "least", "eager"
INSTEAD = (RAISE, LEAST, EAGER)
"""What to do if no plan fits the budget: raise an error, use the plan of the smallest found peak, or
recompute nothing.
"""
QUICK = 1.5
"""Seconds of search before the first step, if the plan is refined while training runs."""
DETERMINISTIC_MOVES = 100_000
"""The number of annealing moves that count as a second: fewer than most machines make in one."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The arguments of `plan_module` that determine the plan, with the same names and meanings.

    Raises:
        UsageError: no budget; a malformed budget, loss memory or time limit; an unknown strategy, option, kind of
            costs, overlap or ``on_infeasible``; or options that exclude each other.
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
    lane_speed: float | None = None
    """The speed of each of two lanes while both run, relative to one that runs alone. None: it is measured if costs are
    measured, otherwise it is a typical value."""
    loss_memory: str | int | None = None
    accumulate: bool = False
    reserved: Reserved = field(default_factory=Reserved)
    on_infeasible: str | None = None
    refine: bool = True
    gap: float = 0.001
    deterministic: bool = False
    in_flight: int = 1
    deferred: int | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.budget is None and self.plan is None:
            raise UsageError("there is no budget: state one, such as budget='8GiB', or a saved plan")
        if self.budget is not None:
            parse_budget(str(self.budget))
        if not isinstance(self.options, Mapping):
            raise UsageError(
                f"options is {self.options!r}; it must be a dict of options of the strategy, by name"
            )
        if not isinstance(self.time_limit, Real) or not 0 < self.time_limit < math.inf:
            raise UsageError(
                f"time_limit is {self.time_limit!r}; it must be a finite number of seconds above 0"
            )
        if self.in_flight < 1 or (self.deferred or 0) < 0:
            raise UsageError(
                f"in_flight is {self.in_flight} and deferred is {self.deferred}: in_flight must be 1 or more, and "
                f"deferred 0 or more, or None"
            )
        if self.several and (self.inverses or self.plan is not None or self.overlap not in (None, OFF)):
            raise UsageError(
                "in_flight and deferred cannot be combined with inverses, overlap or a saved plan"
            )
        self.stated_loss()
        self.chosen()
        known_costs(self.costs)
        check_mode(self.overlap)
        if self.on_infeasible not in (None, *INSTEAD):
            raise UsageError(f"unknown on_infeasible {self.on_infeasible!r}; known: {', '.join(INSTEAD)}")

    def chosen(self) -> Strategy:
        """Return the strategy (planning algorithm) that the options name, with its options and, if it has one, its
        time limit.

        If ``deterministic`` is true, `auto` is replaced by annealing, which makes `DETERMINISTIC_MOVES` moves for
        each second of the time limit.

        Raises:
            UsageError: the strategy or an option is unknown.
        """
        if self.strategy != Auto.name:
            return strategy(self.strategy, **{LIMIT: self.time_limit, **self.options})
        if self.deterministic:
            moves = round(self.time_limit * DETERMINISTIC_MOVES)
            return strategy(Anneal.name, **{"moves": moves, **self.options})
        return strategy(self.strategy, **{LIMIT: self.time_limit, "gap": self.gap, **self.options})

    @property
    def refines(self) -> bool:
        """Whether training starts with a quickly found plan, while another process searches for better plans.

        True only if ``refine`` is true, the strategy is `auto` and its time limit is above `QUICK` seconds. It is
        false with ``deterministic``, a saved plan, or a budget ``min`` or ``least``. It is also false with inverses
        that round, because results would change with the plan, and with ``overlap`` other than ``off``, because that
        needs measurements of one fixed plan.
        """
        return (
            self.refine
            and not self.deterministic
            and self.plan is None
            and self.strategy == Auto.name
            and not self.inverting
            and self.overlap in (None, OFF)
            and not self.stated_budget().is_lean
            and self.time_limit > QUICK
        )

    def stated_budget(self) -> Budget:
        """Return the budget that the user stated. It may still be relative to a peak.

        Raises:
            UsageError: there is no budget, because the options have a saved plan instead.
        """
        return parse_budget(str(self.budget))

    def stated_loss(self) -> Budget | None:
        """Return the memory of the loss that the user stated: bytes (kind ``bytes``), or a number of tensors of the
        outputs' size (kind ``share``). None if the user did not state it."""
        return None if self.loss_memory is None else parse_loss_memory(str(self.loss_memory))

    @property
    def several(self) -> bool:
        """Whether the options have ``in_flight`` above 1 (several micro-batches between forward and backward), or
        ``deferred`` (weight gradients are computed after the backward)."""
        return self.in_flight > 1 or self.deferred is not None

    @property
    def inverting(self) -> bool:
        """Whether plans may use inverses (ops that compute an input from an output) that round."""
        return self.inverses or self.strategy == Reversible.name
