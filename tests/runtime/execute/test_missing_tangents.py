"""Laws of outputs that a loss does not use: the same bits, and the same gradients missing, as of plain autograd."""

import copy
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.runtime.execute.missing_tangents import unused_by
from rematplan.runtime.problem.loss_boundary import split_at_loss


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
    chosen = rematplan.Anneal(moves=4000) if strategy == "anneal" else strategy
    x = torch.randn(128, 32).requires_grad_()
    planned = rematplan.plan_module(model, (x,), budget=budget, strategy=chosen, costs="roofline")
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
    step, own = compiled.step, split_at_loss(compiled.step, compiled.schedule)
    schedule = own.schedule
    (second,) = [i.value for i in step.inputs if i.kind == "tangent" and i.target == "1"]
    unused = unused_by(step, schedule, own.boundary, {second})
    skipped = {schedule[at].op for at in unused.skipped}
    assert {c.name for c in step.calls if c.module == "second" and c.backward and not c.is_view} <= skipped
    assert (
        not {c.name for c in step.calls if c.module.startswith(("trunk", "first")) and c.backward} & skipped
    )


class Parts(nn.Module):
    """Gives what one call makes several of, as it is."""

    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.cut, self.layers = cut, nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.cut(self.layers(x))


CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda h: h.chunk(2, -1),
    "split": lambda h: h.split((6, 10), -1),
    "unbind": lambda h: h.unflatten(1, (2, 8)).unbind(1),
    "one of them goes on": lambda h: (h.chunk(2, -1)[0], h.chunk(2, -1)[1].tanh()),
    "nested": lambda h: (h.chunk(2)[0], *h.chunk(2)[1].chunk(2)),
    "eigh": lambda h: tuple(torch.linalg.eigh(h.T @ h + torch.diag(torch.arange(16.0)))),
    "cummax": lambda h: (h.cummax(0)[0], *torch.var_mean(h, dim=1)),
    "qr": lambda h: tuple(torch.linalg.qr(h)),
    "views": lambda h: (h[:, 1], h[:, 2:], h.T),
    "one number": lambda h: (h.expand(2, -1, -1), h.sum()),
}


@pytest.mark.parametrize("kind", CUTS)
def test_each_part_of_what_is_cut_may_be_unused(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Parts(CUTS[kind]), torch.randn(24, 8)
    planned = rematplan.plan_module(copy.deepcopy(model), (x,), budget="100%", strategy="approx_dp")
    parts = [at for at, part in enumerate(model(x)) if part.requires_grad]
    for used in (
        ([at] for at in parts) if len(parts) < 3 else (p for n in (1, 2) for p in combinations(parts, n))
    ):
        for one in (planned, model):
            one.zero_grad()
            out = one(x)
            torch.stack([out[at].abs().pow(1.5).mean() for at in used]).sum().backward()
        for ours, eager in zip(planned.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours.grad, eager.grad), used
