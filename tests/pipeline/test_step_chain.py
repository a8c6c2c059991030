"""Backward ops are in the blocks of their forward ops, as a rank that runs these blocks computes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from rematplan.pipeline.captured_stages import CapturedStage
from rematplan.pipeline.plan_pipeline import captured_pipeline
from rematplan.pipeline.schedules import schedule_named
from rematplan.pipeline.step_chain import named_chain
from rematplan.planner.pipeline.stage_slices import StageSlice
from rematplan.plans.budgets import parse_budget
from rematplan.plans.op_costs import priced
from rematplan.plans.options import PlanOptions
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.with_loss import with_loss
from rematplan.runtime.graph.captured_step import CapturedStep


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


def test_a_block_has_the_backward_ops_that_a_rank_captures() -> None:
    """Wherever the model is cut: each sum of gradients is in the stage in which autograd adds them."""
    model, order = Joined(), schedule_named("gpipe", 2, 4)
    module, batch = with_loss(model, (torch.randn(4, 8),), None, 0)
    step = capture(module, batch, "net")
    chain = named_chain(step, priced(step, "roofline"))
    assert chain.names == ("", "b", "c", "d", "norm", "e")
    asked, inputs = PlanOptions(budget="min", costs="roofline"), (torch.randn(16, 8),)
    for cut in chain.chain.allowed():
        cuts = (chain.names[cut],)
        part = captured_pipeline(model, inputs, None, order, parse_budget("1GiB"), cuts, asked).parts[0]
        assert isinstance(part, CapturedStage)
        block = StageSlice(chain.chain, 0, cut)
        ours = targets(step, [chain.chain.graph.ops[o].name for o in block.ops])
        theirs = targets(part.step, [op.name for op in part.problem.graph.ops])
        assert ours == theirs, cuts


def targets(step: CapturedStep, names: Sequence[str]) -> Counter[tuple[str, bool]]:
    """The ATen ops and phases of calls, without copies, with which a stage sends messages."""
    calls = (step.call[name] for name in names if name in step.call)
    return Counter((op, call.backward) for call in calls if "clone" not in (op := str(call.target)))
