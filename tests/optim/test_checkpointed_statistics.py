"""Statistics under checkpointing and accumulation: what hooks that average as they run find, and what we find.

`HooksThatAverage` is the rule of the library kfac-pytorch with its default ``update_factors_in_hook=True``, rewritten
in a few lines, since the package is not on PyPI: a hook before each forward of a layer counts a micro-step and adds the
layer's A; at each ``accumulation``-th count the mean goes into the moving average; a hook behind each backward adds G
and does the same at the same counts. A recomputed forward counts as another micro-step.
"""

import pytest
import torch
from hook_source import HookSource
from small_networks import SHAPES, batch, maker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematplan

DECAY = 0.95
STEPS = 4
SAMPLES = 512


class Blocks(nn.Module):
    """Linear layers in blocks; with ``checkpointed``, each block is recomputed in the backward."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()) for _ in range(3)
        )
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.last(x)


SHAPES[Blocks] = (6,)
PLAIN = maker(Blocks)


def checkpointed() -> nn.Module:
    model = PLAIN()
    model.checkpointed = True
    return model


class HooksThatAverage:
    """The moving averages of A and G of every linear layer."""

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self.accumulation = accumulation
        self.count: dict[nn.Module, int] = {}
        self.sums: dict[tuple[nn.Module, str], list[Tensor]] = {}
        self.averages: dict[tuple[nn.Module, str], Tensor] = {}
        for module in model.blocks.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self.forward)
                module.register_full_backward_hook(self.backward)

    @torch.no_grad()
    def forward(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = torch.cat((args[0], torch.ones_like(args[0][:, :1])), 1)
        self.count[module] = self.count.get(module, 0) + 1
        self.add(module, "A", x.mT @ x / len(x))

    @torch.no_grad()
    def backward(self, module: nn.Module, _: object, grads: tuple[Tensor, ...]) -> None:
        self.add(module, "G", grads[0].mT @ grads[0] * len(grads[0]))

    def add(self, module: nn.Module, side: str, factor: Tensor) -> None:
        held = self.sums.setdefault((module, side), [])
        held.append(factor)
        if self.count[module] % self.accumulation == 0:
            before = self.averages.get((module, side), torch.eye(len(factor), dtype=factor.dtype))
            self.averages[module, side] = DECAY * before + (1 - DECAY) * torch.stack(held).mean(0)
            held.clear()

    def step(self) -> None:
        self.count.clear()


def backwards(model: nn.Module, step: int, parts: int) -> None:
    x, y = batch(PLAIN, step, SAMPLES)
    for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
        nn.functional.cross_entropy(model(some), labels).backward()


def hooked(model: nn.Module, parts: int) -> dict[str, list[Tensor]]:
    """The averages of a library that averages in hooks, after some steps with the weights as they are."""
    hooks = HooksThatAverage(model, parts)
    for step in range(STEPS):
        backwards(model, step, parts)
        hooks.step()
    inner = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    return {side: [hooks.averages[m, side] for m in inner] for side in "AG"}


def ours(model: nn.Module, parts: int, source: HookSource | None = None) -> dict[str, list[Tensor]]:
    """Our averages after the same steps."""
    kfac = rematplan.KFAC(model, 0.0, source=source, decay=DECAY, others=torch.optim.SGD)
    for step in range(STEPS):
        kfac.zero_grad()
        backwards(model, step, parts)
        kfac.step()
    inner = [layer for name, layer in kfac.layers.items() if name.startswith("blocks")]
    return {"A": [layer.a.mean() for layer in inner], "G": [layer.g.mean() for layer in inner]}


def error(found: dict[str, list[Tensor]], true: dict[str, list[Tensor]], side: str) -> float:
    """The largest relative error of a factor."""
    pairs = zip(found[side], true[side], strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def planned(parts: int, budget: str) -> nn.Module:
    statistics = rematplan.Kronecker(fisher="empirical")
    found = rematplan.plan_module(
        checkpointed(),
        (batch(PLAIN, 0, SAMPLES // parts)[0],),
        budget=budget,
        reserved=["gradients"] if parts > 1 else [],
        strategy="approx_dp",
        costs="roofline",
        statistics=statistics,
    )
    assert any(plan.estimate.reruns > 0 for plan in rematplan.planning(found).plans)
    return found


@pytest.mark.parametrize(("parts", "budget", "wrong"), [(1, "90%", "A"), (2, "95%", "AG")])
def test_hooks_that_average_are_wrong_under_checkpointing_and_ours_are_not(
    parts: int, budget: str, wrong: str
) -> None:
    true, found = hooked(PLAIN(), parts), hooked(checkpointed(), parts)
    for side in "AG":
        measured = error(found, true, side)
        assert measured > 0.1 if side in wrong else measured <= 1e-12, (side, measured)
    plain = PLAIN()
    exact = ours(plain, parts, HookSource(plain))
    averages = ours(planned(parts, budget), parts)
    for side in "AG":
        assert error(averages, exact, side) <= 1e-12
