"""Laws of costs that are measured while the machine does something else."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs import profile
from rematplan.runtime.costs.profile import ProfileWarning, profile_costs
from rematplan.runtime.graph.captured_step import CapturedStep

QUIET = 0.006
"""Seconds of an op: one run a round is enough then."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(autouse=True)
def _may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_AGREE", 1.2)


@pytest.fixture
def step() -> CapturedStep:
    return capture(Net(), (torch.randn(4, 8),), "net")


def measured(
    step: CapturedStep,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    seconds: Iterator[float],
    watched: float = 0.0,
) -> tuple[dict[str, float], int, list[str]]:
    """Times by op, how many were taken, and what was said, where a clock shows these seconds, and ``watched`` for
    runs whose memory is watched."""
    taken, memory = 0, profile._memory

    def watch(*args: object) -> tuple[object, ...]:
        return (watched, *memory(*args)[1:])

    def clock(run: Callable[[], object], device: torch.device) -> float:
        nonlocal taken
        del run, device
        taken += 1
        return next(seconds)

    monkeypatch.setattr(profile, "seconds_of", clock)
    monkeypatch.setattr(profile, "_memory", watch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        costs = profile_costs(step, cache=cache)
    times = {name: cost.time for name, cost in costs.items()}
    return times, taken, [str(w.message) for w in said if issubclass(w.category, ProfileWarning)]


def test_a_quiet_machine_is_measured_in_two_rounds(
    step: CapturedStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, taken, said = measured(step, monkeypatch, tmp_path, itertools.repeat(QUIET))
    distinct = taken // profile._ROUNDS
    assert taken == distinct * profile._ROUNDS
    assert not said
    assert measured(step, monkeypatch, tmp_path, iter(()))[1] == 0  # what was measured is kept


def test_a_long_run_whose_memory_is_watched_is_a_timed_one(
    step: CapturedStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times, taken, said = measured(step, monkeypatch, tmp_path, iter(()), watched=QUIET)
    assert not taken
    assert set(times.values()) == {1e6 * QUIET}
    assert not said


def test_only_a_call_whose_times_differ_is_timed_a_third_time(
    step: CapturedStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = measured(step, monkeypatch, tmp_path / "count", itertools.repeat(QUIET))[1] // profile._ROUNDS
    first = itertools.chain([QUIET * 1.3], itertools.repeat(QUIET))
    times, taken, _ = measured(step, monkeypatch, tmp_path, first)
    assert taken == count * profile._ROUNDS + 1
    assert set(times.values()) == {1e6 * QUIET}


def test_a_busy_spell_is_measured_again(
    step: CapturedStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each round takes longer than the one before, as while something starts; from the fifth on all is quiet."""
    count = measured(step, monkeypatch, tmp_path / "count", itertools.repeat(QUIET))[1] // profile._ROUNDS
    rounds = [QUIET * factor for factor in (8, 5, 3, 2)]
    spell = [seconds for seconds in rounds for _ in range(count)]
    times, taken, said = measured(
        step, monkeypatch, tmp_path, itertools.chain(spell, itertools.repeat(QUIET))
    )
    assert set(times.values()) == {1e6 * QUIET}
    assert taken == count * (len(rounds) + 2)
    assert not said


def test_a_busy_machine_causes_a_warning_and_nothing_is_cached(
    step: CapturedStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def busier() -> Iterator[float]:
        return (QUIET * 1.001**k for k in itertools.count())

    def noisy() -> Iterator[float]:
        return (QUIET * 1.5 ** (k // count) for k in itertools.count())

    count = measured(step, monkeypatch, tmp_path / "count", busier())[1] // profile._ROUNDS
    for _ in range(2):
        _, taken, said = measured(step, monkeypatch, tmp_path, noisy())
        assert taken == count * profile._MOST_ROUNDS
        assert len(said) == 1
        assert "busy" in said[0]


def test_there_is_one_warning_for_all_ops_that_cannot_be_measured(
    step: CapturedStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_args: object) -> None:
        raise RuntimeError("mixed dtype")

    monkeypatch.setattr(profile, "_memory", refuse)
    times, _, said = measured(step, monkeypatch, tmp_path, itertools.repeat(QUIET))
    assert len(said) == 1
    assert "other ops" in said[0]
    assert "mixed dtype" in said[0]
    assert all(times.values())
