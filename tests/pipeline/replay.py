"""An independent count of the bytes that a rank holds, by the checker of pipeline files."""

from dataclasses import asdict

from pipeline_checker import held_bytes

from rematplan.planner.pipeline.actions import Action, StagePlan


def replayed(actions: tuple[Action, ...], plans: dict[int, StagePlan]) -> list[int]:
    """The most bytes at the start, before and during each action, after the last one, and at the step's end."""
    places = [*(a.messages for a in actions), actions[-1].after]
    return held_bytes(
        [(a.kind, a.stage, a.microbatch) for a in actions],
        [(at, *entry) for at, entries in enumerate(places) for entry in entries],
        {stage: asdict(plan) for stage, plan in plans.items()},
    )
