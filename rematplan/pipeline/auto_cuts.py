"""Choose where `plan_pipeline` cuts a model into stages, with the same search as the command ``rematplan pipeline``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import distributed, nn

from rematplan.ir import UsageError
from rematplan.pipeline.captured_stages import captured_step
from rematplan.pipeline.planning import PipelineRequest, best_cuts
from rematplan.pipeline.step_chain import named_chain
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.auto_stages import StrategyStages
from rematplan.planner.pipeline.messages import CHANNELS
from rematplan.plans.budgets import Budget
from rematplan.plans.options import PlanOptions
from rematplan.plans.planner import Planner
from rematplan.runtime.execute.compile import tensors_in_step
from rematplan.runtime.pipeline.exported_model import exported
from rematplan.runtime.pipeline.stage_modules import StageModule, cut_names


def auto_cuts(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    schedule: PipelineSchedule,
    budget: Budget,
    asked: PlanOptions,
) -> tuple[str, ...]:
    """Return the modules to cut before, with the shortest simulated step found that fits all ranks (messages take no
    time), else with a small peak. `UsageError` if places to cut are too few."""
    known = cut_names(exported(model, args, kwargs))
    if len(known) < schedule.stages - 1:
        raise UsageError(f"the model has {len(known) + 1} places for stages, not {schedule.stages}")
    own = asked if schedule.name not in CHANNELS else replace(asked, inverses=True)
    whole = StageModule(model, tuple(args), dict(kwargs), ())
    planner = Planner(own, named=tensors_in_step(model))
    step = planner.with_inverses(captured_step(whole))
    chain = named_chain(step, planner.priced(step), only=known, prefix="")
    if not set(known).issuperset(chain.names[1:]):
        raise UsageError(
            f"no module of {type(model).__name__} has a part of the step of its own to cut before"
        )
    strategy = asked.strategy
    options = PipelineRequest(schedule.name, schedule.stages, schedule.microbatches, budget, asked.time_limit)
    stages = None if isinstance(strategy, Auto) else StrategyStages(strategy)
    return best_cuts(chain, schedule, options, stages)


def agreed(choose: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Return, in all processes, what ``choose`` returns in rank 0. If it fails, raise its error there, and `UsageError`
    with its text in the others. Without a process group, call ``choose`` here."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return choose()
    # Measured costs and timed searches differ between processes.
    found: list[Any] = [None, None]
    error: Exception | None = None
    if distributed.get_rank() == 0:
        try:
            found = [choose(), None]
        # An error of any kind: the other processes wait for an answer. It is raised again below.
        except Exception as raised:
            error, found = raised, [None, str(raised) or type(raised).__name__]
    distributed.broadcast_object_list(found, src=0)
    if error is not None:
        raise error
    if found[1] is not None:
        raise UsageError(found[1])
    return tuple(found[0])
