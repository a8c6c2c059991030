"""An independent count of the bytes that a rank holds, by the checker of pipeline files."""

from pipeline_checker import held_bytes

from rematplan.planner.pipeline.actions import Action
from rematplan.planner.pipeline.pipeline_file import stage_plan_to_json
from rematplan.planner.pipeline.stage_plan import StagePlan


def replayed(actions: tuple[Action, ...], plans: dict[int, StagePlan]) -> list[int]:
    """The most bytes at the start, before and during each action, after the last one, and at the step's end."""
    places = [*(a.messages for a in actions), actions[-1].after]
    return held_bytes(
        [(a.kind, a.stage, a.microbatch) for a in actions],
        [(at, *entry) for at, entries in enumerate(places) for entry in entries],
        {stage: stage_plan_to_json(plan) for stage, plan in plans.items()},
    )
