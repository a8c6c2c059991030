"""Pipelines drawn at random, on four gloo processes: the bits of one process, within the promised peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import planned_tasks
from gloo_workers import Workers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import rematplan
from rematplan.ir import InfeasibleBudget
from rematplan.pipeline.rank_plans import rank_plans
from rematplan.pipeline.schedules import VIRTUAL
from rematplan.planner.pipeline import rank_search
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.plans.options import PlanOptions
from rematplan.runtime.graph.compat import PIPELINES_SEND_TO_THEMSELVES

RANKS = 4
SCHEDULES = ("gpipe", "1f1b", *VIRTUAL)
IN_PLACE = ("zbv", "dualpipev")
"""Schedules in which neighbouring stages are on one rank."""


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A chain with skips and frozen blocks, its cuts, its schedule, and a budget in percent."""
    known = [name for name in SCHEDULES if name not in IN_PLACE or not PIPELINES_SEND_TO_THEMSELVES]
    schedule = draw(st.sampled_from(known))
    stages = 2 * RANKS if schedule in VIRTUAL else RANKS
    blocks = draw(st.integers(8, 10))
    at = st.integers(1, blocks - 1)
    cuts = draw(st.lists(at, min_size=stages - 1, max_size=stages - 1, unique=True))
    skips = draw(
        st.none() | st.tuples(st.integers(0, blocks // 2 - 1), st.integers(blocks // 2 + 1, blocks - 1))
    )
    sizes = {
        "blocks": blocks,
        "width": draw(st.sampled_from((8, 16))),
        "frozen": tuple(sorted(draw(st.sets(at, max_size=3)))),
        "skips": (skips,) if skips else (),
    }
    microbatches = draw(st.sampled_from((8,) if schedule == "dualpipev" else (4, 5, 6, 8)))
    asked = {
        "schedule": schedule,
        "stages": stages,
        "microbatches": microbatches,
        "rows": draw(st.sampled_from((4, 8))) * microbatches,
        "sizes": sizes,
        "cuts": tuple(f"blocks.{k}" for k in sorted(cuts)),
    }
    return asked, draw(st.integers(60, 90))


def planned(asked: dict[str, Any], percent: int) -> rematplan.Pipeline:
    """The pipeline within a share of the largest peak, or, where a rank does not fit, within the least budget that the
    refusals state. Its stages are captured once.
    """
    whole = planned_tasks.planned(budget="1GiB", strategy="store_all", **asked)
    budget = percent * max(whole.peaks.values()) // 100
    options = PlanOptions(budget="min", strategy=ApproxDP(), costs="roofline")
    with patch.object(rank_search, "LIMITS", planned_tasks.FEW):
        try:
            found = rank_plans(replace(whole, budget=budget), range(RANKS), options)
        except InfeasibleBudget as refused:
            budget = refused.smallest
            found = rank_plans(replace(whole, budget=budget), range(RANKS), options)
    return replace(whole, budget=budget, ranks=found)


@settings(max_examples=3, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))
@given(drawn=pipelines())
def test_drawn_pipelines_have_the_bits_of_one_process_and_keep_to_their_promises(
    workers: Workers, drawn: tuple[dict[str, Any], int]
) -> None:
    asked, percent = drawn
    pipe = planned(asked, percent)
    plans = {one.stage: one.plan for one in pipe.stage_plans}
    found = workers.run(planned_tasks.run_step, budget=pipe.budget, plans=plans, **asked)
    for rank, one in enumerate(found):
        assert one["different"] == [], f"rank {rank}"
        assert one["peak"] <= one["promise"] <= pipe.budget, f"rank {rank}"
    assert [one["losses"] for one in found if one["losses"] is not None] == [True]
