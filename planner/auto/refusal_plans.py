"""The plans that `InfeasibleBudget` names: with the smallest peak found, and with the smallest at little overhead."""

from __future__ import annotations

import math

from rematplan.ir import InfeasibleBudget
from rematplan.ir.errors import Known
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, cheap_plan
from rematplan.planner.auto.auto_session import AutoSession
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.rungs import rungs_above
from rematplan.planner.auto.smallest_peak_search import is_small
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.peak_ladder import ladder
from rematplan.planner.core.plan import Plan

REFUSED = 1.05
"""The smallest peak, as a multiple of the smallest found, at which a refusal searches for a further plan."""


def plan_or_refuse(session: AutoSession, strategy: str) -> Plan:
    """Return the plan that `AutoSession.find` finds. If it is None, search for the smallest peak and raise
    `InfeasibleBudget`, which names ``strategy``."""
    if (found := session.find()) is not None:
        return found
    _lower(session)
    known: Known = "proven" if session.unreachable else "searched"
    # The smallest peak among plans with little overhead.
    cheap = cheap_plan(
        session.graph, session.known, _brief(session, SHARES.cheap_seconds), rules=session.rules
    )
    session.take((cheap,))
    # What peaks up to 1.2 times the smallest found cost.
    effort = _brief(session, SHARES.rungs_seconds)
    session.take(rungs_above(session.graph, session.known, effort, least=REFUSED, rules=session.rules))
    least = session.smallest
    assert least is not None
    raise InfeasibleBudget(
        strategy,
        session.budget,
        least.peak,
        known,
        plan=least,
        cheap=cheap.peak,
        cheap_plan=cheap,
        near=ladder(session.known),
    )


def _lower(session: AutoSession) -> None:
    """Search for the smallest peak, and add the plans found to the known ones. Unless it is proven that no plan fits,
    the effort left is spent. If so, small problems spend as much as for ``min``. Large ones spend up to half of the
    time limit, in longer and longer rounds until one gains little."""
    proven = session.unreachable
    if is_small(session.problem) or not proven:
        session.lower_for(session.effort_of_min if proven else session.effort.part(session.effort.left))
        return
    effort = session.effort.like(SHARES.smallest_peak)
    session.take(leanest_plans(session.problem, effort.part(effort.of(SHARES.refused_blocks))))
    amount, before = effort.of(SHARES.round_seconds), min((p.peak for p in session.known), default=math.inf)
    while not effort.over:
        part = effort.part(amount)
        session.lower_for(part)
        smallest = min(plan.peak for plan in session.known)
        if part.interrupted or smallest > (1 - SHARES.round_gain) * before:
            return
        before, amount = smallest, 2 * amount


def _brief(session: AutoSession, seconds: float) -> Effort:
    most = min(seconds, SHARES.refused_per_op * len(session.graph.ops))
    return session.effort.like(CHEAP_SHARE, most=most)
