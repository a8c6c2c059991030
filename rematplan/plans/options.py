"""The options that determine a plan, for all functions that plan a step, and for the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from rematplan.ir import TrainingGraph, UsageError
from rematplan.ir.files import read_as
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.inversion_error import stated_limit
from rematplan.planner.core.plan import Plan, load_plan, ops_of_plan
from rematplan.planner.core.strategy import Progress, Strategy, silent
from rematplan.planner.registry import LIMIT, checked, strategy
from rematplan.planner.strategies.reversible import Reversible
from rematplan.plans.budgets import Budget, parse_budget, parse_loss_memory
from rematplan.plans.held_by_others import Reserved
from rematplan.plans.op_costs import known_costs
from rematplan.plans.two_lane_plans import OFF

if TYPE_CHECKING:
    from rematplan.runtime.problem.policy import Policy

RAISE, LEAST, EAGER = "raise", "least", "eager"
INSTEAD = (RAISE, LEAST, EAGER)
"""What to do if no plan fits the budget: raise an error, use the smallest found peak, or recompute nothing."""
UNSPLIT, AUTO_SPLIT = "off", "auto"
Splits: TypeAlias = str | tuple[tuple[str, int], ...]
"""What is split along rows: `UNSPLIT`, `AUTO_SPLIT`, or pairs of a module's name and the number of parts of what can be
split in it."""
EAGER_KERNELS, FUSED_KERNELS = "eager", "fused"
KERNELS = (EAGER_KERNELS, FUSED_KERNELS)
"""The kernels of a step: those of eager mode, or for regions of ops one compiled kernel each."""
QUICK = 1.5
"""Seconds of search before the first step, if the plan is refined while training runs."""


@dataclass(frozen=True)
class SavedPlan(Strategy):
    """Use the plan in a file that `save_plan` or ``rematplan plan -o`` wrote, without a search. Its budget applies. The
    command line's plans contain a loss: they are plans of the module of `load_step`, which computes it.

    ``path``: the file.
    """

    path: str | Path
    two_lanes: Literal["off", "auto", "on"] | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    """Whether recomputation runs on a second lane; ``auto``: if that is predicted to save time. None: as the saved plan
    says."""

    name: ClassVar[str] = "saved"
    summary: ClassVar[str] = "a plan that was made before"

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)):
            raise UsageError(f"path is {self.path!r}; write the path of a plan file, as text or a Path")

    def plan(
        self, graph: TrainingGraph, budget: int = 0, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan, whatever ``budget`` is.

        Raises:
            ProblemError: the file cannot be read, or its plan belongs to another problem.
        """
        del budget, progress, starts
        return load_plan(self.path, graph)

    @property
    def ops(self) -> frozenset[str]:
        """The names of the ops in the file's plan."""
        return read_as(self.path, ops_of_plan)


def check_counts(least: int, **stated: object) -> None:
    """Raise `UsageError` unless each is a whole number of at least ``least``."""
    for name, number in stated.items():
        if not isinstance(number, Integral) or int(number) < least:
            raise UsageError(f"{name} is {number!r}; it must be a whole number of at least {least}")


@dataclass(frozen=True)
class InFlight:
    """How many calls of a module may be between the start of their forward and the end of their backward. `UsageError`
    for fewer than 1 call or a negative ``deferred``."""

    calls: int = 1
    deferred: int | None = None
    """The most earlier calls whose weight gradients are still to be computed; None: a backward computes them."""

    def __post_init__(self) -> None:
        check_counts(1, in_flight=self.calls)
        if self.deferred is not None:
            check_counts(0, deferred=self.deferred)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The arguments of `plan_module` and `plan_stage` that determine the plan, with the same names and meanings. Raises
    `UsageError` for a missing or malformed one, and for options that exclude each other."""

    budget: str | int | None = None
    strategy: Strategy = field(default_factory=Auto)
    costs: str = "profile"
    policy: Policy = ()
    """What must be saved (`stated_policy`)."""
    inverses: bool | float = False
    loss_memory: str | int | None = None
    reserved: Reserved = field(default_factory=Reserved)
    on_infeasible: str | None = None
    refine: bool = True
    in_flight: InFlight = field(default_factory=InFlight)
    split: Splits = UNSPLIT
    """What is split along rows (`stated_splits`)."""
    kernels: str = EAGER_KERNELS

    def __post_init__(self) -> None:
        """Raise `UsageError` if there is no budget, or an option is malformed, unknown or excluded by another."""
        if self.budget is None and self.saved is None:
            raise UsageError(
                "there is no budget: state one, such as budget='8GiB', or strategy=SavedPlan('plan.json')"
            )
        if self.budget is not None:
            parse_budget(str(self.budget))
        if not isinstance(self.inverses, (bool, float)) or not (self.inverses > 0 or self.inverses is False):
            raise UsageError(
                f"inverses is {self.inverses!r}; it must be True, False, or the largest relative error, such as 1e-5"
            )
        if not isinstance(self.refine, bool):
            raise UsageError(f"refine is {self.refine!r}; it must be True or False")
        self.stated_loss()
        known_costs(self.costs)
        if self.on_infeasible not in (None, *INSTEAD):
            raise UsageError(f"unknown on_infeasible {self.on_infeasible!r}; known: {', '.join(INSTEAD)}")
        if self.kernels not in KERNELS:
            raise UsageError(f"unknown kernels {self.kernels!r}; known: {', '.join(KERNELS)}")
        for one, other in EXCLUDED:
            if one.holds(self) and other.holds(self):
                raise UsageError(f"{one.name} cannot be combined with {other.name}")

    @property
    def saved(self) -> SavedPlan | None:
        """The saved plan that is used; None if a plan is searched for."""
        return self.strategy if isinstance(self.strategy, SavedPlan) else None

    @property
    def gap(self) -> float:
        """The distance to the proven optimum, as a share of the step's time, at which a search may end."""
        return float(getattr(self.strategy, "gap", 0.0))

    @property
    def time_limit(self) -> float:
        """The seconds of search. A strategy without a time limit has that of `Auto`, for other searches."""
        return float(getattr(self.strategy, LIMIT, Auto.time_limit))

    @property
    def refines(self) -> bool:
        """Whether training starts with a quick plan of `auto`, while another process searches for better ones."""
        return self.takes_quick_plans and self.time_limit > QUICK

    @property
    def takes_quick_plans(self) -> bool:
        """Whether a quickly found plan of `Auto` may serve, also at other sizes. It needs ``refine``, one lane and a
        budget other than ``min`` and ``least``; inverses that round and counted moves exclude it."""
        return (
            self.refine
            and isinstance(self.strategy, Auto)
            and not self.strategy.counted
            and not self.inverting
            and self.strategy.two_lanes == OFF
            and not self.stated_budget().is_lean
        )

    def stated_budget(self) -> Budget:
        """Return the budget that the user stated. It may still be relative to a peak."""
        return parse_budget(str(self.budget))

    def stated_loss(self) -> Budget | None:
        """Return the loss's memory as the user states it: bytes, or a multiple of the outputs' size (kind
        ``share``); None if unstated."""
        return None if self.loss_memory is None else parse_loss_memory(str(self.loss_memory))

    @property
    def several(self) -> bool:
        """Whether a plan is for several calls in flight, or leaves weight gradients for later."""
        return self.in_flight != InFlight()

    @property
    def inverting(self) -> bool:
        """Whether plans may use inverses (ops that compute an input from an output) that round."""
        return bool(self.inverses) or isinstance(self.strategy, Reversible)

    @property
    def stated_parts(self) -> tuple[tuple[str, int], ...]:
        """The modules that the user wants to be split, each with its number of parts."""
        return self.split if isinstance(self.split, tuple) else ()

    @property
    def fuses(self) -> bool:
        """Whether fused kernels run."""
        return self.kernels == FUSED_KERNELS

    @property
    def rewrites(self) -> bool:
        """Whether ops of a step are split or fused."""
        return self.split != UNSPLIT or self.fuses

    @property
    def rounds(self) -> bool:
        """Whether results may differ from those of eager mode by rounding."""
        return self.inverting or self.rewrites

    @property
    def max_inversion_error(self) -> float | None:
        """The largest predicted relative error of a recovered tensor; None: a limit that suits the tensor's type."""
        return stated_limit(self.inverses)


@dataclass(frozen=True)
class Condition:
    """A property of options that excludes others."""

    name: str
    """How messages and the documentation name it."""
    holds: Callable[[PlanOptions], bool]


SPLIT = Condition("split", lambda o: o.split != UNSPLIT)
SEVERAL = Condition("plan_stage", lambda o: o.several)
FUSED = Condition("kernels='fused'", lambda o: o.fuses)
TWO_LANES = Condition("two lanes", lambda o: o.strategy.two_lanes not in (OFF, None))
SAVED = Condition("a saved plan", lambda o: o.saved is not None)
NOT_IN_STAGES = (
    TWO_LANES,
    SAVED,
    Condition("keep_order of auto", lambda o: isinstance(o.strategy, Auto) and o.strategy.keep_order),
)
"""What the search for plans of a pipeline's rank does not follow."""
EXCLUDED = (
    *((SEVERAL, one) for one in NOT_IN_STAGES),
    (SEVERAL, Condition("inverses", lambda o: bool(o.inverses))),
    (SEVERAL, Condition("on_infeasible", lambda o: o.on_infeasible in (LEAST, EAGER))),
    (FUSED, TWO_LANES),
    (FUSED, Condition("inverses", lambda o: o.inverting)),
)
"""Pairs of options that exclude each other."""


def stated_strategy(stated: str | Strategy) -> Strategy:
    """Return the strategy that a user stated by its name or as an object; `UsageError` for anything else."""
    if isinstance(stated, str):
        return strategy(stated)
    if not isinstance(stated, Strategy):
        raise UsageError(
            f"strategy is {stated!r}; write the name of a strategy, such as 'auto', or an object such as "
            f"rematplan.Auto(time_limit=30)"
        )
    return checked(stated)


def stated_splits(stated: object) -> Splits:
    """Return what a user wants to be split: ``off``, ``auto``, or pairs of a module's name and a number of parts;
    else `UsageError`."""
    pairs = tuple(stated.items()) if isinstance(stated, Mapping) else stated
    if stated in (UNSPLIT, AUTO_SPLIT) or (isinstance(pairs, tuple) and pairs and all(map(_is_pair, pairs))):
        return pairs  # type: ignore[return-value]
    raise UsageError(
        f"split is {stated!r}; it must be 'off', 'auto', or a mapping from modules to numbers of parts of 2 or more, "
        f"such as {{'lm_head': 8}}"
    )


def _is_pair(one: object) -> bool:
    return (
        isinstance(one, tuple)
        and len(one) == 2
        and isinstance(one[0], str)
        and type(one[1]) is int
        and one[1] >= 2
    )
