"""The constants of the strategy ``auto``: how it divides its time limit, and when it leaves out a method."""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.planner.core.effort import Effort


@dataclass(frozen=True)
class TimeShares:
    """How ``auto`` divides its time limit: shares from 0 to 1, unless a field states another unit. The values were
    tuned by hand on the networks of benchmarks/planner_gaps.py, with time limits of 5 to 60 seconds. No measurements
    were kept."""

    cut: float = 0.3
    """The plan that is made from a minimum cut at the loss must be found before this share is spent."""
    blocks: float = 0.4
    """The block strategies must end before this share is spent."""
    blocks_least: float = 1.0
    """Seconds that the block strategies may always take, even if the time limit is shorter."""
    marked: float = 0.6
    """If phases were inferred: the share of the time left that is for annealing with the inferred phases. Then the
    problem is annealed without phases."""
    plain: float = 0.4
    """If the problem has inverses: the share of the time left that is for annealing the problem without them."""
    smallest_peak: float = 0.5
    """The largest share for lowering the peak, if the budget is ``min`` or ``least``, or if no plan fits the budget
    yet. For ``min`` and ``least``, the rest lowers the overhead."""
    refused_blocks: float = 4.0
    """Seconds for block plans, once a budget is proven to be too small. For DenseNet-121 they take about two."""
    round_seconds: float = 2.0
    """If a budget is proven to be too small, the peak is lowered in rounds. This is the length of the first round in
    seconds; each further round takes twice as long as the one before."""
    round_gain: float = 0.01
    """The rounds that lower the peak end when a round lowers it by less than this share of the peak."""
    rungs_seconds: float = 0.6
    """If no plan fits, the error also states what plans slightly above the smallest peak cost. This is the largest
    number of seconds for that search."""
    cheap_seconds: float = 1.4
    """If no plan fits, the error also names the smallest peak found at a small overhead. This is the largest number of
    seconds for that search; see `CHEAP_SHARE`."""
    refused_per_op: float = 0.004
    """The most seconds for each op that the searches of a refusal (``rungs_seconds``, ``cheap_seconds``) may take:
    small problems converge in a fraction."""
    eviction: float = 0.1
    """The share for simulations of eviction, which are used if no other plan fits the budget yet."""
    falling: float = 0.3
    """The share of the time of a curve for one annealing whose budget falls through all budgets (`plans_down_to`)."""
    bound: float = 0.75
    """The share for the search for a lower bound, if there are at least `cores` cores. With fewer, the search may take
    the whole time."""
    proof_seconds: float = 0.3
    """A short search of a stage looks for a lower bound only if it has at least so many seconds. The process that
    solves integer programs takes a tenth of a second to start."""
    first_annealing: float = 0.3
    """The share of the time left for an annealing before the block strategies. If it closes the gap to the lower bound,
    the block strategies are not run."""
    cores: int = 2
    """The number of cores from which on a second annealing runs, after the search for the lower bound has ended."""
    few_ops: int = 200
    """With fewer ops than this, the block strategies take almost no time, and there is no annealing before them."""
    before_states: float = 0.1
    """The share of the time left for annealing a small problem before all of its schedules are tried."""
    states_per_second: int = 60_000
    """All schedules of a small problem are tried through at most so many sets of resident tensors per second of the
    time limit. That takes up to a third of the time."""
    states: int = 1_000_000
    """If the plans from which annealing would start are not proven optimal, all schedules of a small problem are tried.
    At most this many sets of resident tensors are kept. That takes up to 5 seconds and 80 MB."""
    near: float = 0.005
    """A problem of more than `VAST` ops gets no block plans if that from the minimum cut at the loss exceeds the lower
    bound by at most this. It is an overhead: a share of the step's time without recomputation."""

    def proving(self, effort: Effort) -> Effort:
        """Return the effort for a lower bound in one of many short searches: ``effort``, or nothing if it is too
        little."""
        return effort if effort.left >= effort.of(self.proof_seconds) else effort.part(0.0)


SHARES = TimeShares()
