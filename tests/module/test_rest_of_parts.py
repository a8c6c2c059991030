"""What a plan in parts charges for the rest of the model is what the rest needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import show_bytes
from rematplan.module.plan_access import runner_of
from rematplan.runtime.costs.measure import peak_above_entry

ROWS, WIDTH = 96, 32


def layers(count: int) -> nn.Sequential:
    wide = ((nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count))
    return nn.Sequential(*(nn.Sequential(*one) for one in wide))


class Remembering(nn.Module):
    """Adds its last result, which it keeps in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kept = layers(2), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers(x + self.kept["last"] if self.kept else x)
        self.kept["last"] = made.detach()
        return made.square().mean()


class Iterating(nn.Module):
    """Repeats a block until its result changes little."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.block, self.end = layers(2), layers(1), layers(1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.start(x)
        point = torch.zeros_like(made)
        with torch.no_grad():
            for _ in range(10):
                before, point = point, torch.tanh(self.block(point) + made)
                if (point - before).norm() < 0.01 * point.norm():
                    break
        return self.end(torch.tanh(self.block(point) + made)).square().mean()


class Working(nn.Module):
    """Convolves outside of its parts, by a kernel that needs more memory while it runs than its result takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kernel = layers(1), nn.Parameter(torch.ones(1, 1, 31, 31, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers(x)
        if made.sum() > 1e6:
            return made.mean()
        return functional.conv2d(made.double()[None, None], self.kernel, padding=15).square().mean()


class Scoring(nn.Module):
    """Returns a number and a tensor of which the number is not made; the rest's backward needs much for both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.turn = layers(1), nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layers(x)
        if made.sum() > 1e6:
            return made, made.mean()
        return made @ torch.matrix_exp(self.turn), torch.logdet(self.turn @ self.turn.T + torch.eye(WIDTH))


def test_results_of_which_no_loss_is_made_are_gone_through_backwards() -> None:
    torch.manual_seed(0)
    model, x = Scoring(), torch.randn(ROWS, WIDTH)
    rematplan.apply(model, "1000%", strategy="store_all", costs="profile", refine=False)

    def step() -> None:
        made, number = model(x)
        (made.square().mean() + number).backward()

    step()
    model.zero_grad()
    peak, _ = peak_above_entry(step, torch.device("cpu"))
    assert peak + sum(t.nbytes for t in (*model.parameters(), x)) <= runner_of(model).parts.last.plan.peak


@pytest.mark.parametrize(("kind", "most"), [(Remembering, 1.1), (Iterating, 1.05), (Working, 1.13)])
def test_the_stated_peak_without_recomputation_is_the_measured_one(
    kind: Callable[[], nn.Module], most: float
) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(ROWS, WIDTH)
    options = {"strategy": "store_all", "costs": "profile", "refine": False}
    rematplan.apply(model, "1000%", **options)
    backward = partial(lambda: model(x).backward())
    for _ in range(2):  # the second call may begin with other state
        backward()
        model.zero_grad()
    held = sum(t.nbytes for t in (*model.parameters(), x, *getattr(model, "kept", {}).values()))
    peak = held + peak_above_entry(backward, torch.device("cpu"))[0]
    assert peak <= runner_of(model).parts.last.plan.peak <= most * peak


def test_a_part_says_which_bytes_of_a_plan_exceed_its_share() -> None:
    model = rematplan.apply(Iterating(), "100%", strategy="approx_dp", costs="roofline", refine=False)
    model(torch.randn(ROWS, WIDTH)).backward()
    part = next(iter(runner_of(model).parts.last.plan.parts.values()))
    own = part.figures
    kept = replace(own.held, kept=own.held.kept - 8)
    more = replace(own.transients, backward=own.transients.backward + 1024)
    assert part.excess(own) == part.excess(replace(own, held=kept)) == ""
    assert part.excess(replace(own, held=kept, transients=more)) == (
        f"needs {show_bytes(more.backward)} in its backward, not {show_bytes(own.transients.backward)}"
    )
