"""The steps in which each factor is inverted."""

from fractions import Fraction

import torch
from hook_source import HookSource
from hypothesis import given, settings
from hypothesis import strategies as st
from small_networks import batch
from torch import nn

from rematplan.optim.assignment import longest_first
from rematplan.optim.kfac import KFAC


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_no_slot_has_more_than_four_thirds_of_the_best(costs: list[int], slots: int) -> None:
    found = longest_first(dict(enumerate(costs)), slots)
    fullest = max(sum(c for job, c in enumerate(costs) if found[job] == slot) for slot in range(slots))
    best = {tuple([0] * slots)}
    for cost in sorted(costs, reverse=True):
        best = {
            tuple(sorted((*load[:at], load[at] + cost, *load[at + 1 :])))
            for load in best
            for at in range(slots)
        }
    assert fullest <= Fraction(4 * slots - 1, 3 * slots) * min(max(loads) for loads in best)


def made_by_step(steps: int, **options: int) -> tuple[KFAC, list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)), nn.Linear(6, 5)).double()
    make = lambda: model  # noqa: E731
    make.shape = (6,)
    kfac = KFAC(model, 0.1, source=HookSource(model), **options)
    counts = []
    for step in range(steps):
        before = sum(side.made for layer in kfac.layers.values() for side in layer.sides)
        kfac.zero_grad()
        x, y = batch(make, step)
        nn.functional.cross_entropy(model(x), y).backward()
        kfac.step()
        counts.append(sum(side.made for layer in kfac.layers.values() for side in layer.sides) - before)
    return kfac, counts


def test_inversions_are_spread_evenly_over_the_steps() -> None:
    _, counts = made_by_step(15, inverse_every=7, early_steps=3)
    assert counts[:3] == [14, 14, 14]
    assert counts[3:] == [2] * 12


def test_early_inverses_include_the_newest_batch() -> None:
    kfac, _ = made_by_step(3, inverse_every=7, early_steps=3)
    assert not any(side.changed for layer in kfac.layers.values() for side in layer.sides)


def test_an_inverse_is_not_made_again_without_new_statistics() -> None:
    _, counts = made_by_step(12, inverse_every=3, early_steps=0, factors_every=6)
    assert counts[0] == 14
    assert sum(counts[1:6]) == 0
    assert sum(counts[6:]) == 14
