"""Statistics that are sent early: all processes send in one order, and nothing is lost or counted twice."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rematplan.optim.early_sums import EarlySums

NAMES = ("a", "b", "c", "d")


def parts() -> dict[Any, Any]:
    return dict.fromkeys(NAMES, lambda: torch.zeros(1))


class Sender:
    """Records what a process sends."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[float] = []

    def __call__(self, name: str, sums: Tensor) -> Any:
        self.names.append(name)
        self.values.append(float(sums))
        return SimpleNamespace(wait=lambda: None)


@given(st.integers(0, 3), st.randoms(use_true_random=False), st.sets(st.sampled_from(NAMES), max_size=3))
def test_any_order_of_completion_is_sent_in_one_order(
    backwards: int, draw: random.Random, without: set[str]
) -> None:
    sender = Sender()
    early = EarlySums(parts(), NAMES, sender)
    expected = dict.fromkeys(NAMES, 0.0)
    for backward in range(backwards):
        names = [name for name in NAMES if name not in without or backward == 0]
        draw.shuffle(names)
        for name in names:
            early.add(name, torch.tensor([value := draw.random()]), step=0)
            expected[name] += value
    found = early.finish()
    assert sender.names == list(reversed(NAMES)) * backwards
    assert set(found) == (set(NAMES) if backwards else set())
    for name, sums in found.items():
        assert abs(float(sums) - expected[name]) < 1e-6
    assert early.finish() == {}


def test_a_training_step_without_an_update_is_dropped() -> None:
    sender = Sender()
    early = EarlySums(parts(), ("a",), sender)
    early.add("d", torch.ones(1), step=0)
    for name in NAMES:
        early.add(name, torch.full((1,), 2.0), step=1)
    found = early.finish()
    assert found == {"a": torch.full((1,), 2.0)}
    assert sender.names == list(reversed(NAMES)) * 2
