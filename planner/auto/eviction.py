"""Search for a small peak, or a low cost, by simulating eviction many times with random policies."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.auto.eviction_kernel import Policy
from rematplan.planner.auto.eviction_simulation import (
    EvictionTables,
    Simulation,
    random_policy,
    tables_of,
)
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.search_rules import ANY_ORDER, SearchRules

NAME = "eviction"
SCARCE = 1.3
"""A further pass over the step is tried for budgets up to this multiple of what one pass needs if nothing of the
forward stays. Res2Net-50 got to 1.41 instead of 1.62 times its largest working set."""


@dataclass(frozen=True)
class EvictionOptions:
    """The constants of `lower_by_eviction`, tuned by hand; no measurements were kept. A target is the smallest peak so
    far, minus a share of its distance to the least possible one."""

    tries: int = 6
    """After so many failed simulations, the share is halved: the next target is nearer to the smallest peak so far."""
    last: float = 1e-3
    """When the share falls below this, a pass ends, and the next pass begins with a larger share."""
    next_pass: float = 0.5
    """The share at the beginning of each pass after the first, and of the search for the smallest peak. In searches of
    15 s for DenseNet-121 (1,460 ops), 0.125 led to 138.7 MiB, 0.25 to 137.5 and 0.5 to 132.3."""
    passes: int = 2
    """The search ends after so many passes in a row that did not lower the peak."""
    repeat: float = 0.5
    """The probability with which a simulation uses the eviction policy of the last success again, instead of a new
    random one."""


EVICTION = EvictionOptions()


def lower_by_eviction(
    graph: TrainingGraph,
    best: Plan,
    floor: int,
    effort: Effort,
    *,
    first: float = 1.0,
    enough: int = 0,
    rules: SearchRules = ANY_ORDER,
) -> Plan:
    """Return the plan with the smallest peak that simulated eviction finds, or ``best`` if none is smaller. Targets are
    between ``floor`` bytes and the smallest peak so far, nearer to this peak after failures. ``first``: the share of
    this distance to begin with. The search ends at ``enough`` bytes, when ``effort`` is spent, or after
    `EvictionOptions.passes` passes without a gain."""
    source, share, failures, passes = random.Random(rules.seed), first, 0, 0
    policy: Policy | None = None
    while best.estimate.peak > max(floor, enough) and passes < EVICTION.passes and not effort.over:
        peak = best.estimate.peak
        target = peak - max(1, int(share * (peak - floor)))
        tried = policy if policy and source.random() < EVICTION.repeat else random_policy(source)
        tables, tried = fitted(graph, target, tried, rules.keep_order)
        simulation = Simulation(tables, target, tried, source, effort)
        fits = simulation.run()
        if fits:
            plan = plan_from_runs(graph, [tables.names[o] for o in simulation.runs], NAME)
            if plan.estimate.peak < peak:
                best, policy, failures, passes = plan, tried, 0, 0
                continue
        failures += 1
        if failures >= EVICTION.tries:
            share, failures = share / 2, 0
        if share < EVICTION.last:
            share, passes = EVICTION.next_pass, passes + 1
    return best


def plan_by_eviction(
    graph: TrainingGraph,
    budget: int,
    effort: Effort,
    *,
    tries: int,
    rules: SearchRules = ANY_ORDER,
    compiled: bool = True,
) -> Plan | None:
    """Simulate eviction ``tries`` times, fewer if ``effort`` is spent, each time with a random policy. Return the
    cheapest plan found within ``budget`` bytes; None if there is none. ``compiled``: whether numba compiles the
    loops."""
    source = random.Random(rules.seed)
    best: Plan | None = None
    for _ in range(tries):
        policy = random_policy(source)
        tables, policy = fitted(graph, budget, policy, rules.keep_order)
        simulation = Simulation(tables, budget, policy, source, effort, compiled)
        if effort.over:
            break
        if simulation.run():
            plan = plan_from_runs(graph, [tables.names[o] for o in simulation.runs], NAME, budget=budget)
            if plan.estimate.peak <= budget and (best is None or plan.estimate.cost < best.estimate.cost):
                best = plan
    return best


def fitted(
    graph: TrainingGraph, budget: int, policy: Policy, keep_order: bool
) -> tuple[EvictionTables, Policy]:
    """Return the tables for a policy, and the policy. They have one pass if the policy defers no outputs,
    ``keep_order`` is set, or ``budget`` is above `SCARCE` times what one pass needs.

    Else they have the fewest passes that fit, or one more if ``policy.passes`` is 2, but at most those known. If the
    backward's results cannot all stay in them, the returned policy evicts these results, too.
    """
    plain, passes = tables_of(graph), 1
    fewest = next((k for k, peak in enumerate(plain.peaks) if peak <= budget), len(plain.peaks) - 1)
    if policy.passes and not keep_order and budget <= SCARCE * plain.peaks[0]:
        passes = min(max(1, fewest + policy.passes), len(plain.peaks))
    backward = policy.backward or budget < plain.peaks[passes - 1]
    return tables_of(graph, passes), policy._replace(backward=backward)
