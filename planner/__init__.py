"""How to choose: lower sets, strategies, the one lowering and the one simulator. Knows no torch."""

from rematplan.planner.plan import Plan, load_plan, plan_from_json, plan_from_runs, plan_to_json, save_plan
from rematplan.planner.schedule import Free, Run, Schedule, Step, runs_of, with_frees
from rematplan.planner.simulator import Estimate, resident_bytes, simulate
from rematplan.planner.strategies import STRATEGIES, strategy
from rematplan.planner.strategy import Progress, Strategy, pareto, silent

__all__ = [
    "STRATEGIES",
    "Estimate",
    "Free",
    "Plan",
    "Progress",
    "Run",
    "Schedule",
    "Step",
    "Strategy",
    "load_plan",
    "pareto",
    "plan_from_json",
    "plan_from_runs",
    "plan_to_json",
    "resident_bytes",
    "runs_of",
    "save_plan",
    "silent",
    "simulate",
    "strategy",
    "with_frees",
]
