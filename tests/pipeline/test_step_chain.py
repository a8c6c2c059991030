"""Backward ops are in the blocks of their forward ops, as a rank that runs these blocks computes them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn

from rematplan.ir import ProblemError
from rematplan.pipeline.captured_stages import CapturedStage
from rematplan.pipeline.match_file_plans import file_plan, stages_ops
from rematplan.pipeline.plan_pipeline import captured_pipeline
from rematplan.pipeline.schedules import schedule_named
from rematplan.pipeline.step_chain import named_chain
from rematplan.planner.pipeline.auto_stages import AutoStages
from rematplan.planner.pipeline.choose_cuts import PipelineSearch, Terms
from rematplan.planner.pipeline.timeline import FREE_LINK
from rematplan.plans.budgets import parse_budget
from rematplan.plans.op_costs import priced
from rematplan.plans.options import PlanOptions
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.with_loss import with_loss
from rematplan.runtime.problem.weight_gradients import with_separate_weights


def test_a_backward_op_is_in_its_modules_block_wherever_its_input_is_made() -> None:
    """The backward of GELU reads GELU's input, that of ReLU its output: the first may begin a stage, the second may end
    one."""
    layers = (nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))
    module, batch = with_loss(nn.Sequential(*layers), (torch.randn(4, 8),), None, 0)
    step = capture(module, batch, "net")
    chain = named_chain(step, priced(step, "roofline"))
    assert chain.names == ("", "1", "2", "3", "4", "5")
    at: dict[str, set[int]] = defaultdict(set)
    for op, block in zip(chain.chain.graph.ops, chain.chain.block, strict=True):
        at[step.call[op.name].module].add(block)
    assert [at[f"model.{k}"] for k in range(6)] == [{k} for k in range(6)]


class Joined(nn.Module):
    """Layers with skips: a sum, a tensor that a later layer reads again, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.e = nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.a(x)
        two = one + torch.tanh(self.b(one))
        three = one + torch.tanh(self.c(two))
        four = one + two + self.d(three)  # the gradients of all three are the same tensor
        return self.e(self.norm(torch.cat([x, four], 1)))


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_the_files_plan_of_each_stage_is_one_of_the_stage_that_a_rank_captures(schedule: str) -> None:
    """Wherever the model is cut: each sum of gradients is in the stage in which autograd adds them."""
    model, order = Joined(), schedule_named(schedule, 2 if schedule == "gpipe" else 1, 4)
    module, batch = with_loss(model, (torch.randn(4, 8),), None, 0)
    step = capture(module, batch, "net")
    step = with_separate_weights(step) if schedule == "zbv" else step
    chain = named_chain(step, priced(step, "roofline"))
    asked, inputs = PlanOptions(budget="min", costs="roofline"), (torch.randn(16, 8),)
    for cut in chain.chain.allowed():
        terms = Terms(2**40, FREE_LINK, 0.0, 0.0, chain.batch)
        found = PipelineSearch(chain.chain, order, terms, AutoStages()).run((cut,))
        file = replace(found, ops=stages_ops(step, chain.chain, (cut,)))
        names = (chain.names[cut],)
        pipe = captured_pipeline(model, inputs, None, order, parse_budget("1GiB"), names, asked)
        for number, part in pipe.parts.items():
            assert isinstance(part, CapturedStage)
            assert file_plan(file, number, part).estimate.cost > 0, (chain.names[cut], number)
            with pytest.raises(ProblemError, match="the file does not state the stage's ops"):
                file_plan(found, number, part)
    assert chain.names == ("", "b", "c", "d", "norm", "e")
