"""What a forward overwrites is charged twice only while both contents exist."""

import copy

import torch
from torch import Tensor, nn

import rematplan
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.problem.loss_boundary import LOSS, OLD_BUFFERS, with_loss_boundary
from rematplan.runtime.problem.planning_problem import training_graph

CPU = torch.device("cpu")


class Momentum(nn.Module):
    """Compares with a queue of what a moving average of itself gave earlier, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
        self.other = copy.deepcopy(self.own).requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, 512))

    def forward(self, x: Tensor) -> Tensor:
        q = self.own(x)
        with torch.no_grad():
            for theirs, ours in zip(self.other.parameters(), self.own.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)
            k = self.other(x)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1)
        with torch.no_grad():
            self.queue[:, : len(x)] = k.T
        return scores.logsumexp(1).mean()


def test_old_content_that_nothing_reads_again_is_not_charged() -> None:
    torch.manual_seed(0)
    step = capture(Momentum(), (torch.randn(8, 32),), "momentum")
    graph = training_graph(step, profile_costs(step))
    bounded = with_loss_boundary(step, graph)
    assert step.renewed
    assert OLD_BUFFERS not in bounded.size
    new = step.returned("buffer")
    assert new.isdisjoint(bounded.outputs)
    assert new <= {*bounded.op[LOSS].reads}
    clones = [call.name for call in step.calls if "clone" in str(call.target)]
    assert {*clones} & {*bounded.never_rerun}


def test_a_step_that_overwrites_buffers_and_frozen_weights_is_within_its_least_budget() -> None:
    torch.manual_seed(0)
    model = Momentum()
    plain = copy.deepcopy(model)
    rematplan.apply(model, "min", strategy="approx_dp")
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    for step in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        peak, _ = peak_above_entry(lambda x=x: model(x).backward(), CPU)
        plain(x).backward()
        assert not step or resident + x.nbytes + peak <= rematplan.planning(model).plan.budget
        for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, theirs)
            assert own.grad is None or torch.equal(own.grad, theirs.grad)
            own.grad = theirs.grad = None
        assert torch.equal(model.queue, plain.queue)
