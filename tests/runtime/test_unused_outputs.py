"""Laws of outputs that a loss does not use: the same bits, and the same gradients missing, as of plain autograd."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.runtime.turn import turned
from rematplan.runtime.unused_outputs import unused_by


class Heads(nn.Module):
    """A trunk, with dropout; a head that a second head reads; a third that packs two outputs into one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
        self.first, self.second, self.third = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = functional.dropout(self.trunk(x), 0.3, self.training)
        first = self.first(x)
        second = self.second(torch.relu(first))
        left, right = self.third(x).chunk(2, -1)
        return first, second, left.sin(), functional.layer_norm(right + x, (32,)), x


LOSSES: dict[str, Callable[[tuple[Tensor, ...]], Tensor]] = {
    "all": lambda out: sum(o.pow(2).mean() for o in out),
    "first": lambda out: out[0].pow(2).mean(),
    "second": lambda out: out[1].pow(2).mean(),
    "a half": lambda out: out[2].pow(2).mean(),
    "the other half, and the first": lambda out: out[3].pow(2).mean() + out[0].sum(),
    "trunk": lambda out: out[4].pow(2).mean(),
}


def pair(strategy: str, budget: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Heads()
    plain = copy.deepcopy(model)
    options = {"moves": 4000} if strategy == "anneal" else {}
    x = torch.randn(128, 32).requires_grad_()
    planned = rematplan.plan_module(
        model, (x,), budget=budget, strategy=strategy, costs="roofline", options=options
    )
    return planned, plain


@pytest.mark.parametrize(
    ("strategy", "budget"), [("store_all", "100%"), ("anneal", "85%"), ("approx_dp", "95%")]
)
def test_what_the_loss_uses_decides_as_in_plain_autograd(strategy: str, budget: str) -> None:
    planned, plain = pair(strategy, budget)
    for name, loss in LOSSES.items():
        found = []
        for model in (planned, plain):
            torch.manual_seed(2)
            model.zero_grad(set_to_none=True)
            x = torch.randn(128, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
            loss(model(x)).backward()
            found.append([*(p.grad for p in model.parameters()), x.grad, torch.get_rng_state()])
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None), name
            assert ours is None or torch.equal(ours, theirs), name
    assert len(planned.plans) == 1


def test_what_only_an_unused_output_needs_is_skipped() -> None:
    planned, _ = pair("anneal", "85%")
    compiled = planned._rematplan.last.compiled
    step, own = compiled.step, turned(compiled.step, compiled.schedule)
    schedule = own.schedule
    (second,) = [i.value for i in step.inputs if i.kind == "tangent" and i.target == "1"]
    unused = unused_by(step, schedule, own.turn, {second})
    skipped = {schedule[at].op for at in unused.skipped}
    assert {c.name for c in step.calls if c.module == "second" and c.backward and not c.is_view} <= skipped
    assert (
        not {c.name for c in step.calls if c.module.startswith(("trunk", "first")) and c.backward} & skipped
    )
