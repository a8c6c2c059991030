"""Dataflow pipelines in four gloo processes, against one process with the same micro-batches."""

from __future__ import annotations

import time
from typing import Any

import couplings
import pytest
from gloo_workers import Workers

EACH = 8
"""Rows of a micro-batch."""
MIXED = {"dropout": 0.2, "frozen": (2, 3), "ordinary": (4, 5)}


def plans(**sizes: Any) -> dict[str, Any]:
    """A pipeline's plans, which hold for any number of micro-batches, and what they are of."""
    pipe = couplings.planned(couplings.flow(**sizes), 4 * EACH, microbatches=4, budget="1GiB")
    return {"plans": {one.stage: one.plan for one in pipe.stage_plans}, "budget": pipe.budget}


@pytest.fixture(scope="module")
def plain_plans() -> dict[str, Any]:
    return plans()


def run(workers: Workers, task: Any, microbatches: int, asked: dict[str, Any], **more: Any) -> list[Any]:
    return workers.run(task, rows=EACH * microbatches, microbatches=microbatches, **asked, **more)


def test_gradients_are_those_of_one_process_and_peaks_as_promised(
    workers: Workers, plain_plans: dict[str, Any]
) -> None:
    found = run(workers, couplings.run_flow, 32, plain_plans, sizes={})
    for rank, one in enumerate(found):
        assert one["missing"] == [], f"rank {rank}"
        assert max(one["wrong"]) <= min(2e-6, one["expected"] or 1.0), f"rank {rank}"
        assert 0.99 * one["promise"] <= one["peak"] <= one["promise"], f"rank {rank}"
    assert [one["kept"] for one in found[:-1]] == [0, 0, 0]
    assert [one["crossing"] for one in found[:-1]] == [0, 0, 0]
    assert found[-1]["losses"]


def test_steps_of_training(workers: Workers, plain_plans: dict[str, Any]) -> None:
    found = run(workers, couplings.train_flow, 4, plain_plans, steps=20, rate=0.01)
    assert max(one["wrong"] for one in found) <= 1e-4
    losses = found[-1]["losses"]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_updates_once_a_step_are_those_of_one_process(workers: Workers, plain_plans: dict[str, Any]) -> None:
    found = run(workers, couplings.train_flow, 4, plain_plans, steps=3, rate=0.05, every=4)
    assert max(one["wrong"] for one in found) <= 1e-5


def test_dropout_frozen_and_ordinary_stages_for_three_steps(workers: Workers) -> None:
    found = run(workers, couplings.run_flow, 8, plans(**MIXED), sizes=MIXED, steps=3)
    for rank, one in enumerate(found):
        assert one["missing"] == [], f"rank {rank}"
        assert max(one["wrong"], default=0.0) <= 2e-6, f"rank {rank}"
        assert one["peak"] <= one["promise"], f"rank {rank}"
    assert found[1]["wrong"] == []  # nothing in it is trained
    message = 2 * EACH * 16 * 4
    assert [one["kept"] for one in found[:-1]] == [0, 0, message]  # what cannot be inverted keeps its input
    assert found[-1]["losses"]


def test_dataflows_side_by_side_share_their_gradients(workers: Workers) -> None:
    found = workers.run(couplings.run_data_parallel, microbatches=3)
    assert all(len(wrong) > 10 and max(wrong) <= 2e-6 for wrong in found)


def test_updates_in_the_middle_of_a_step_make_recovered_inputs_drift(
    workers: Workers, plain_plans: dict[str, Any]
) -> None:
    found = run(workers, couplings.train_flow, 8, plain_plans, steps=30, rate=0.002, every=2)
    assert all(1e-6 < one["drift"] < 0.1 for one in found[1:3])
    losses = found[-1]["losses"]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


def test_a_rank_that_ends_since_its_inputs_drift_takes_all_with_it_in_seconds(
    workers: Workers, plain_plans: dict[str, Any]
) -> None:
    began = time.monotonic()
    asked = {"rows": 64, "microbatches": 8, "steps": 3, "rate": 30.0, "every": 1, **plain_plans}
    answers = workers.answers(couplings.train_flow, **asked)
    assert time.monotonic() - began < 60
    told = [answer for good, answer in answers if not good]
    assert len(told) == 4, answers
    refused = [one for one in told if one.startswith("ModelError: stage")]
    assert refused
    assert all(" of micro-batch " in one for one in refused)
    ended = [one for one in told if one not in refused]
    assert all(
        one.startswith("ProcessEnded: rank ") and "of the pipeline has ended" in one for one in ended
    ), told
    assert not any("\n" in one for one in told)
