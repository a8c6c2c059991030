"""Split backwards: ops for the input's gradient run once, before the second boundary; fused ops become two calls."""

from __future__ import annotations

import weakref

import planned_tasks
import pytest
import torch
from one_process import CUTS
from torch import nn

import rematplan
from rematplan.ir import ProblemError
from rematplan.module.plan_access import deferred_backwards
from rematplan.planner.core.schedule import Run, with_frees
from rematplan.planner.core.simulator import simulate
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.problem.loss_boundary import WEIGHTS


def pipe(model: nn.Module, x: torch.Tensor, **more: object) -> rematplan.Pipeline:
    asked = {"schedule": "zbv", "stages": 4, "microbatches": 4, "budget": "100%", "costs": "roofline"}
    asked |= {"cuts": "parts.1,parts.2,parts.3"}
    return rematplan.plan_pipeline(model, (x,), **asked | {"strategy": "store_all"} | more)


class Convolutions(nn.Module):
    """Convolutions and layer norms, whose backward ops give the gradients of input and weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(6), nn.GroupNorm(2, 4))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


def test_ops_that_give_both_gradients_are_called_once_for_each() -> None:
    torch.manual_seed(0)
    found = pipe(Convolutions(), torch.randn(8, 4, 6, 6))
    graph = found.parts[2].problem.graph
    order = [op.name for op in graph.ops]
    boundary = order.index(WEIGHTS)
    for kind in ("convolution_backward", "native_layer_norm_backward", "native_group_norm_backward"):
        sooner = [name for name in order[:boundary] if name.startswith(kind)]
        later = [name for name in order[boundary:] if name.startswith(kind)]
        assert len(sooner) == len(later) == 1


def test_a_split_backward_has_the_bits_of_a_whole_one() -> None:
    torch.manual_seed(0)
    model = Convolutions()
    x = torch.randn(8, 4, 6, 6)
    planned = pipe(model, x).parts[1]
    stage = planned.planned(no_recompute(planned.problem.graph))
    inputs = [torch.randn(t.shape).requires_grad_() for t in planned.stage.inputs]
    output = stage(*inputs)
    tangent = torch.randn(output.shape)
    output.backward(tangent)
    ours = inputs[0].grad
    assert all(p.grad is None for p in stage.parameters())
    rematplan.finish_weights(stage)
    gradients = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
    model.zero_grad()
    again = inputs[0].detach().requires_grad_()
    planned.stage.module(again).backward(tangent)
    assert torch.equal(ours, again.grad)
    theirs = {n: p.grad for n, p in planned.stage.module.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    assert all(torch.equal(gradients[n], theirs[n]) for n in theirs)


def test_what_makes_the_inputs_gradient_never_runs_again() -> None:
    part = pipe(planned_tasks.net(), planned_tasks.data(32)[0], cuts=CUTS).parts[2]
    graph = part.problem.graph
    order = [op.name for op in graph.ops]
    boundary = order.index(WEIGHTS)
    sooner = [n for n in order[:boundary] if n in part.step.after_loss]
    assert sooner
    for name in sooner:
        runs = [*order[: boundary + 1], name, *order[boundary + 1 :]]
        with pytest.raises(ProblemError, match="runs again, but may run only once"):
            simulate(graph, with_frees(graph, runs))
    assert Run(WEIGHTS) in no_recompute(graph).schedule


class Block(nn.Module):
    """Two layers beside a skip connection, so that a stage which begins at the second has two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def test_a_gradient_of_an_input_that_a_weights_gradient_reads_leaves_at_the_boundary() -> None:
    """The gradient of the sum is that of the skipping input, and the second layer's weight gradient reads it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    found = pipe(model, torch.randn(16, 8), cuts=["0.second", "1.second", "2.second"])
    planned = found.parts[2]
    stage = planned.planned(no_recompute(planned.problem.graph))
    inputs = [torch.randn(t.shape).requires_grad_() for t in planned.stage.inputs]
    assert len(inputs) == 2
    outputs = stage(*inputs)
    tangents = [torch.randn(o.shape) for o in outputs]
    torch.autograd.backward(outputs, tangents)
    again = [t.detach().requires_grad_() for t in inputs]
    rematplan.finish_weights(stage)
    gradients = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.autograd.backward(planned.stage.module(*again), tangents)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again, strict=True))
    theirs = {n: p.grad for n, p in planned.stage.module.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    assert all(torch.equal(gradients[n], theirs[n]) for n in theirs)


def test_weight_gradients_read_outputs_only_where_their_calls_do() -> None:
    """The caller keeps the outputs, so a micro-batch that waits for its weight gradients need not keep them, too."""
    part = pipe(planned_tasks.net(), planned_tasks.data(32)[0], cuts=CUTS).parts[3]
    order = [op.name for op in part.problem.graph.ops]
    outputs = {part.step.values[o.value].storage for o in part.step.outputs if o.kind == "output"}
    later = order[order.index(WEIGHTS) + 1 :]
    assert any(call.name in later for call in part.step.calls)
    for name in later:
        read = outputs.intersection(part.problem.graph.op[name].reads)
        assert read <= {*part.step.reads(part.step.call[name])}


def test_an_output_that_only_the_inputs_gradient_needs_is_freed_with_it() -> None:
    """The backward of a tanh reads its result, the stage's output; the weight's gradient does not."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    planned = pipe(model, torch.randn(16, 64), cuts="1,2,3").parts[1]
    stage = planned.planned(no_recompute(planned.problem.graph))
    given = torch.randn(4, 64).requires_grad_()
    output = stage(given)
    output.backward(torch.randn(4, 64))
    storage = output.untyped_storage().data_ptr()
    calls = deferred_backwards(stage)
    assert len(calls) == 1
    kept = {t.untyped_storage().data_ptr() for t in calls[0].running.held}
    assert kept
    assert storage not in kept
    rematplan.finish_weights(stage)


def test_an_input_that_no_weight_gradient_reads_is_freed_with_the_inputs_gradient() -> None:
    """The weight's gradient reads the tanh of the input, and the output's gradient."""
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)))
    part = pipe(model, torch.randn(16, 64), cuts="1,2,3").parts[1]
    plan = no_recompute(part.problem.graph)
    stage, given = part.planned(plan), torch.randn(4, 64).requires_grad_()
    stage(given).backward(torch.randn(4, 64))
    (call,) = deferred_backwards(stage)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in call.running.held}
    assert given.untyped_storage().data_ptr() not in held
    held = {p: n for p, n in held.items() if p not in {q.data_ptr() for q in model.parameters()}}
    assert part.problem.measured(plan).held.deferred == sum(held.values()) == 2 * given.nbytes
    alive = weakref.ref(given)
    del given
    assert alive() is None
    rematplan.finish_weights(stage)


class Turning(nn.Module):
    """A linear layer of transposed rows: the gradient of its contiguous input is transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2))


def test_the_gradient_of_an_input_is_copied_in_the_plan_where_autograd_would_copy_it() -> None:
    """Autograd copies the gradient of a leaf if its strides differ from the leaf's."""
    part = pipe(nn.Sequential(*(Turning() for _ in range(4))), torch.randn(16, 8, 8), cuts="1,2,3").parts[1]
    step = part.step
    (given,) = (step.values[i.value].fake for i in step.inputs if i.kind == "batch")
    (made,) = (step.values[o.value].fake for o in step.outputs if o.kind == "input gradient")
    assert made.stride() == given.stride()
    assert "own_input_gradient_0" in part.problem.graph.op
