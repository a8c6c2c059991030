"""Planned modules under DistributedDataParallel and FSDP2, over gloo between two processes."""

from pathlib import Path

from forks import run_scripts

WAYS = (
    *("data_parallel", "sharded", "sharded_units"),
    *("copies, planned before", "copies, planned after", "shards, planned before", "shards, planned after"),
    "units, planned after",
)
HERE = Path(__file__).parent


def said_by_both(worker: str, folder: Path) -> list[str]:
    """What two processes of a worker print."""
    both = run_scripts([[HERE / worker, str(rank), folder / "rendezvous"] for rank in range(2)], folder)
    for one in both:
        assert one.status == 0, one.err
    return [one.out for one in both]


def test_steps_in_two_processes_have_equal_losses_and_weights(tmp_path: Path) -> None:
    for out in said_by_both("distributed_worker.py", tmp_path):
        assert out.splitlines() == [f"{how}: equal" for how in WAYS]


def test_layers_that_are_sharded_one_by_one_are_planned_under_one_budget(tmp_path: Path) -> None:
    cases = ("layers", "planned before", "kept", "groups", "accumulated", "a planned module", "lengths")
    for out in said_by_both("sharded_layers_worker.py", tmp_path):
        assert out.splitlines() == [f"{name}: equal" for name in cases]


def test_what_ddp_holds_is_within_a_budget_of_bytes(tmp_path: Path) -> None:
    for out in said_by_both("replicas_worker.py", tmp_path):
        assert out.splitlines() == [
            f"{name}: kept"
            for name in ("in place", "a planned module", "a percentage", "views", "summed", "parts")
        ]


def test_ranks_that_get_other_plans_at_other_steps_have_the_weights_of_eager_mode(tmp_path: Path) -> None:
    said = said_by_both("refining_worker.py", tmp_path)
    changes, plans, weights = zip(*(out.strip().split("|") for out in said), strict=True)
    assert changes[0] != changes[1]
    assert all(change.count(",") >= 3 for change in changes)
    assert all(int(count) >= 3 for count in plans)
    assert weights[0] == weights[1]
