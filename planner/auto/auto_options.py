"""The constants of the strategy ``auto``: how it divides its time, when it leaves a method out; and its options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeShares:
    """Shares of the time limit, unless another unit is stated.

    They were chosen by trial, on the networks of benchmarks/planner_gaps.py with limits of 5 to 60 seconds, without a
    record of single measurements.
    """

    cut: float = 0.3
    """The plan from the loss cut must be found within this share."""
    blocks: float = 0.4
    """What the block strategies may take."""
    blocks_least: float = 1.0
    """Seconds that they may take at least, however short the time is."""
    marked: float = 0.6
    """For a problem with inferred phases; the rest is for it without them."""
    plain: float = 0.4
    """Of the search's time, for the problem without its inverses."""
    smallest_peak: float = 0.5
    """For lowering the peak, for the budget ``min`` and for refusals. The rest makes the plan cheap."""
    round_seconds: float = 2.0
    """Once a budget is proven to be too small, the peak is lowered in rounds: seconds of the first. Each further one
    takes twice as long."""
    round_gain: float = 0.01
    """These rounds end when one lowers the peak by less than this share of it."""
    cheap_seconds: float = 2.0
    """Seconds for the second plan that a refusal names at most; see `CHEAP_SHARE`."""
    eviction: float = 0.1
    """For eviction, if nothing fits."""
    bound: float = 0.75
    """For the bound, if a second annealing uses the core afterwards."""
    first_annealing: float = 0.3
    """For a first annealing, which may make the block strategies needless."""
    cores: int = 2
    """The number of cores with which a second annealing runs after the search for the bound."""
    few_ops: int = 200
    """With fewer ops, the block strategies take almost no time, and run before the first annealing."""
    near: float = 0.005
    """In a vast problem, a plan from the loss cut whose overhead is this near to the bound makes block plans
    unnecessary. Here 1 is the step's time without recomputation."""


SHARES = TimeShares()


@dataclass(frozen=True)
class SessionOptions:
    """The options of the strategy, as its parts use them; see `Auto`."""

    name: str
    time_limit: float
    seed: int
    keep_order: bool
    gap: float
