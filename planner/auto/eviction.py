"""Plans with a small peak, and cheap plans for a tight budget, by many simulations of eviction with random policies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.auto.eviction_simulation import Policy, Simulation, random_policy, tables_of
from rematplan.planner.core.plan import Plan, plan_from_runs

NAME = "eviction"


@dataclass(frozen=True)
class EvictionOptions:
    """The constants of searches by simulated eviction, chosen by trial without a record of single measurements.

    Each simulation tries to stay within a target: the smallest peak so far, less a share of its distance to the
    least possible peak.
    """

    tries: int = 6
    """The number of simulations that fail at one target before a higher target is tried."""
    first: float = 1.0
    """The share of the first target; 1 stands for the least possible peak."""
    last: float = 1e-3
    """The share of the last target of a pass; a pass halves the share whenever its simulations fail."""
    next_pass: float = 0.125
    """The share of the first target of each pass after the first."""
    passes: int = 2
    """The search ends after so many passes from the first to the last target without any gain."""
    repeat: float = 0.5
    """The probability with which a simulation uses the last successful policy again."""


EVICTION = EvictionOptions()


def lower_by_eviction(
    graph: TrainingGraph,
    best: Plan,
    floor: int,
    go_on: Callable[[], bool],
    *,
    seed: int = 0,
    most_runs: float = math.inf,
) -> Plan:
    """Return a plan with a smaller peak than ``best``, found by simulated eviction, or ``best`` itself if none is
    found.

    The first target is ``floor``; after failures, targets are nearer to the smallest peak found.

    Args:
        graph: the problem.
        best: a plan of it.
        floor: bytes below which no peak can be, or need be; the search ends there.
        go_on: returns whether there is time left; called often.
        seed: the seed of the random choice of eviction policies, and of the simulations.
        most_runs: no further simulation begins once all simulations together have run this many ops, repetitions
            included.
    """
    source, share, failures, passes = random.Random(seed), EVICTION.first, 0, 0
    policy: Policy | None = None
    tables, made = tables_of(graph), 0
    while best.estimate.peak > floor and passes < EVICTION.passes and made < most_runs and go_on():
        peak = best.estimate.peak
        target = peak - max(1, int(share * (peak - floor)))
        tried = policy if policy and source.random() < EVICTION.repeat else random_policy(source)
        simulation = Simulation(tables, target, tried, source, go_on)
        fits = simulation.run()
        made += len(simulation.runs)
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
    graph: TrainingGraph, budget: int, go_on: Callable[[], bool], *, tries: int, seed: int = 0
) -> Plan | None:
    """Return the cheapest plan within ``budget`` bytes that simulations of eviction find, or None if they find none.

    Args:
        graph: the problem.
        budget: bytes.
        go_on: returns whether there is time left; called often.
        tries: the number of simulations, each with a random policy.
        seed: the seed of the random policies.
    """
    source, tables = random.Random(seed), tables_of(graph)
    best: Plan | None = None
    for _ in range(tries):
        simulation = Simulation(tables, budget, random_policy(source), source, go_on)
        if not go_on():
            break
        if simulation.run():
            plan = plan_from_runs(graph, [tables.names[o] for o in simulation.runs], NAME, budget=budget)
            if plan.estimate.peak <= budget and (best is None or plan.estimate.cost < best.estimate.cost):
                best = plan
    return best
