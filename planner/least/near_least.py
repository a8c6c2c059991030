"""Plans near the least peak, and a proof of how low a peak can be: values, proofs, then a descent from the
outputs.

It keeps results of the backward half if it can, because each costs a whole step. Actions are unfolded into
runs and shortened. If there is no plan at a level, the next is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.bounds.cut_bounds import min_peak_bound, record_peak_bound
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.least.demands import NEVER, Demands, demands_of
from rematplan.planner.least.group_descent import TENSORS_PER_MOVE, descend_by_groups, work_of
from rematplan.planner.least.inverses_as_parts import inverses_as_parts
from rematplan.planner.least.last_heavy_run import LastHeavyRun
from rematplan.planner.least.regression import search
from rematplan.planner.least.reuse import shortened
from rematplan.planner.least.unfold import TooLong, Unfolding
from rematplan.planner.least.values import Values

NAME = "regression"


@dataclass(frozen=True)
class NearLeastOptions:
    """The constants of the search for plans near the least peak."""

    first: tuple[int, int] = (60, 60)
    """The states to expand for the value of one op, and for one group of a descent, at first."""
    rounds: int = 4
    """Rounds that improve values. Each expands three times as many states as the one before."""
    flows: tuple[int, int, int] = (1500, 10, 200)
    """The most maximum flows for the outputs' bound, the number of ops with large values whose reads are bounded too,
    and the most flows for each of these ops."""
    coarse: tuple[float, ...] = (0.16, 0.12, 0.09, 0.07, 0.05, 0.035, 0.025, 0.017)
    """Bounds are searched in problems without the tensors up to this share of the largest working set. With fewer
    tensors, searches end; DenseNet-121's bound rose from 124.2 to 130.3 MiB."""
    coarse_states: int = 2000
    """The states to expand in the search of a coarser problem."""
    whole: int = 128
    """Problems of at most so many tensors are first searched from the outputs over all tensors. If that search ends,
    the least peak is proven."""
    whole_share: float = 0.5
    """The share of the effort for the search over all tensors."""
    looks: int = 10
    """About how many times one state of the search over all tensors looks at all of them: 8 in a transformer layer, 18
    in a residual network."""
    levels: tuple[float, ...] = (1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5)
    """The levels that are tried: multiples of the proven peak."""
    descents: tuple[int, ...] = (300, 1000)
    """The states to expand for one group in the descent from the outputs: a second descent follows if the first is
    stuck."""
    worth: float = 3.0
    """No plan is searched if less than this multiple of what values and proofs took is left. In dense networks a
    descent takes still longer and ends in too many runs."""
    most_ops: int = 3000
    """Larger problems are not searched."""
    longest: int = 600_000
    """If a sequence of runs would be longer, the search gives up. DenseNet-121 would need a million."""
    run_moves: int = 2
    """The moves that each run of a sequence counts as, since it takes time to shorten. GoogLeNet's sequence has 560,000
    runs."""
    most_tidied: int = 300_000
    """Longer sequences are not tidied but given up, after they were shortened."""


NEAR_LEAST = NearLeastOptions()


def plan_near_least(graph: TrainingGraph, known: int, effort: Effort) -> Plan | None:
    """Return a plan without inverses, with a peak near the least and below ``known`` bytes. None if none is found, too
    little effort is left, or the problem has no ops or more than `NearLeastOptions.most_ops`. For other numbers of ops,
    the proven bound is recorded for `min_peak_bound`, even if no plan is found."""
    plain = without_inverses(graph)
    demands = demands_of(plain)
    if not 0 < len(demands.ops) <= NEAR_LEAST.most_ops:
        return None
    values = Values(demands, effort)
    values.run(*NEAR_LEAST.first)
    exact = _least_of_all(graph, plain, known, effort)
    proven = min_peak_bound(plain).bytes
    if exact is None:
        proven = max(_proven(plain, demands, values, effort), proven)
        record_peak_bound(plain, proven)
    relaxed = inverses_as_parts(graph)
    if relaxed is not None:
        own = Values(demands_of(relaxed), effort)
        own.run(*NEAR_LEAST.first)
        record_peak_bound(graph, _proven(relaxed, own.demands, own, effort))
    if exact is not None:
        return exact
    _improve(values, proven - demands.inputs)
    if effort.left < NEAR_LEAST.worth * effort.done:
        return None
    for share in NEAR_LEAST.levels:
        level = int(share * proven) - demands.inputs - demands.left_out
        if effort.over or share * proven >= known:
            return None
        try:
            runs = _runs_within(demands, values, level, effort)
        except TooLong:
            return None
        plan = _tidied(graph, plain, demands, runs, effort)
        if plan is not None and plan.peak < known:
            return plan
    return None


def _least_of_all(graph: TrainingGraph, plain: TrainingGraph, known: int, effort: Effort) -> Plan | None:
    """Search over all tensors for a plan with the least peak of all plans without inverses, and record the bound that
    this proves. None if the problem has too many tensors (`NearLeastOptions.whole`), or the search does not end. None
    also if the peak is not below ``known`` bytes, or the runs are too many or not allowed. ``plain``: the problem
    without inverses."""
    demands = demands_of(plain, 0.0)
    if len(demands.sizes) > NEAR_LEAST.whole:
        return None
    affordable = int(NEAR_LEAST.whole_share * effort.left * TENSORS_PER_MOVE)
    states = affordable // (NEAR_LEAST.looks * len(demands.sizes))
    values = Values(demands, effort)
    values.run(*NEAR_LEAST.first)
    outputs = np.array(demands.large_of(demands.outputs), np.int64)
    low = LastHeavyRun(demands).bound(demands.outputs, int(values.floor.max(initial=0)), NEAR_LEAST.flows[0])
    level, proven, looked, actions, _ = search(
        demands.tables, outputs, values.free, low, -1, states, False, -1
    )
    effort.charge(moves=work_of(int(looked)))
    record_peak_bound(plain, demands.inputs + int(proven))
    if proven < level or demands.inputs + level >= known:
        return None
    try:
        runs = Unfolding(values, int(level), NEAR_LEAST.longest).run(actions.tolist())
    except TooLong:
        return None
    return _tidied(graph, plain, demands, shortened(demands, runs, int(level)), effort)


def _proven(graph: TrainingGraph, demands: Demands, values: Values, effort: Effort) -> int:
    """Return a lower bound of the peak of any plan, inputs included, by cuts and by searches in coarser problems."""
    most, targets, fewer = NEAR_LEAST.flows
    bound = int(values.floor.max(initial=0))
    heavy = LastHeavyRun(demands)
    bound = heavy.bound(demands.outputs, bound, most)
    for v in sorted(values.risen, key=lambda v: -int(values.value[v]))[:targets]:
        if values.value[v] > bound and not effort.over:
            bound = heavy.bound(demands.reads[v], bound, fewer)
    effort.charge(moves=heavy.flows * len(demands.sizes) // 10)
    for share in NEAR_LEAST.coarse:
        if values.value.max(initial=0) <= bound or effort.over:
            break
        coarse = Values(demands_of(graph, 0.0, int(share * values.largest)), effort)
        coarse.run(100, 100)
        bound = max(bound, coarse.proven(bound, NEAR_LEAST.coarse_states))
    return demands.inputs + bound


def _improve(values: Values, bound: int) -> None:
    limit = NEAR_LEAST.first[0]
    for k in range(NEAR_LEAST.rounds):
        if values.value.max() <= bound:
            break
        limit *= 3
        values.improve(bound, limit, deepest=k % 2 == 0)


def _runs_within(demands: Demands, values: Values, level: int, effort: Effort) -> list[int]:
    """Return a sequence of runs (positions in `Demands.ops`) of at most ``level`` bytes without inputs and small
    tensors; an empty one if none is found. `TooLong` if it would have more than `NearLeastOptions.longest` runs, or
    more than the effort left allows."""
    value, outputs = demands.tables.value, demands.large_of(demands.outputs)
    before = value.copy()
    of_backward = np.array([demands.backward[v] for v in demands.tables.maker], np.bool_)
    for limit in NEAR_LEAST.descents:
        # The first descent ends with demands for tensors of the forward alone.
        value[of_backward] = NEVER
        first = descend_by_groups(demands.tables, outputs, level, limit, effort)
        value[:] = before
        if first.peak_of_actions > level:
            break
        rest = descend_by_groups(demands.tables, first.rest, level, limit, effort)
        if rest.level > level:
            continue
        longest = min(NEAR_LEAST.longest, int(effort.left) // NEAR_LEAST.run_moves)
        runs = Unfolding(values, level, longest).run([*first.actions, *rest.actions])
        effort.charge(moves=NEAR_LEAST.run_moves * len(runs))
        return shortened(demands, runs, level + demands.left_out)
    return []


def _tidied(
    graph: TrainingGraph, plain: TrainingGraph, demands: Demands, runs: list[int], effort: Effort
) -> Plan | None:
    """Return the plan of ``runs`` without needless ones; None if there are no runs or too many, or their order is not
    allowed. ``plain``: the problem without inverses."""
    names = [demands.ops[v].name for v in runs]
    annealer = Annealer(plain)
    once = set(graph.never_rerun)
    singles = [name for name in names if name in once]
    if (
        not 0 < len(runs) <= NEAR_LEAST.most_tidied
        or len(singles) > len(set(singles))
        or not annealer.accepts(names)
    ):
        return None
    effort.charge(moves=4 * len(runs))
    annealer.load(names, 0)
    return plan_from_runs(graph, annealer.tidied(names, annealer.peak), NAME)
