"""Saved states of random generators are charged from the first draw to the last replay, and held no longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planned_steps import PlannedStep, problem, with_saves
from torch import nn

from rematplan.ir import TrainingGraph
from rematplan.module.verification import run_once
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.random_states import (
    saves_state,
    state_of,
    without_random_states,
    without_unused_states,
)

WIDE = 128


class Dropouts(nn.Module):
    """Blocks with dropout, and a loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        blocks_ = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Dropout(0.3)) for _ in range(blocks)]
        self.blocks = nn.Sequential(*blocks_)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def made() -> tuple[nn.Module, tuple[torch.Tensor, ...], CapturedStep, TrainingGraph]:
    torch.manual_seed(0)
    module, batch = Dropouts(3), (torch.randn(WIDE, WIDE),)
    step = capture(module, batch, "dropouts")
    return module, batch, step, problem(step, profile_costs(step))


def test_a_plan_that_draws_once_is_charged_at_most_the_state_of_the_op_that_runs() -> None:
    _, _, _, graph = made()
    plain = without_random_states(graph)
    (state,) = {graph.size[state_of(name)] for name in graph.ordered}
    assert state == torch.get_rng_state().nbytes
    for more in (
        no_recompute(graph).estimate.peak - no_recompute(plain).estimate.peak,
        min_peak_bound(graph).bytes - min_peak_bound(plain).bytes,
    ):
        assert 0 <= more <= state


@pytest.mark.parametrize("replays", [1, 2])
def test_states_are_charged_and_held_from_the_first_draw_to_the_last_replay(replays: int) -> None:
    module, batch, step, graph = made()
    runs = [op.name for op in graph.ops if not saves_state(op.name)]
    first, *_, last = (name for name in runs if name in graph.ordered)
    loss = runs.index("(loss)")
    # The first dropout runs again after the loss; so does what it reads, and before it everything of its block.
    again = runs[: runs.index(first) + 1]
    plan = plan_from_runs(
        graph, with_saves(graph, [*runs[: loss + 1], *again * replays, *runs[loss + 1 :]]), "test"
    )
    planned = PlannedStep(module, step, plan.schedule)
    assert f"del rng_v_{first}" in planned.source
    assert f"rng_v_{last}" not in planned.source
    run_once(planned, batch)
    above, _ = peak_above_entry(lambda: run_once(planned, batch), step.device)
    assert graph.input_bytes + above <= plan.estimate.peak
    freed = {one.tensor for one in plan.schedule if hasattr(one, "tensor")}
    assert {state_of(name) for name in graph.ordered} <= freed


def test_ops_that_may_run_only_once_have_no_states() -> None:
    _, _, _, graph = made()
    once = without_unused_states(replace(graph, never_rerun=(*graph.never_rerun, *graph.ordered)))
    assert not any(once.size[state_of(name)] for name in graph.ordered)
    assert no_recompute(once).estimate.peak == no_recompute(without_random_states(graph)).estimate.peak
