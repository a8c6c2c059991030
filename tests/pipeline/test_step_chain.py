"""Backward ops are in the blocks of their forward ops, as a rank that runs these blocks computes them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from rematplan.pipeline.step_chain import named_chain
from rematplan.plans.op_costs import priced
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.with_loss import with_loss


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
