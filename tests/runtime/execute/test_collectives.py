"""Laws of collectives inside a planned step: each runs once, in one order in all processes, whatever their plans."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forks import PATIENCE
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as collectives

import rematplan
from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Run, runs_of
from rematplan.runtime.execute.compile import compile_halves

WORKER = Path(__file__).parent / "collective_worker.py"


def test_steps_with_other_budgets_are_equal_and_communicate_in_one_order(tmp_path: Path) -> None:
    # Interpreters, not forks: each has an order of its own for sets of strings.
    logs = [[tmp_path / f"{name}{rank}.log" for name in ("out", "err")] for rank in range(2)]
    ranks = []
    for rank, (out, err) in enumerate(logs):
        command = [sys.executable, WORKER, str(rank), tmp_path / "rendezvous"]
        with out.open("w") as said, err.open("w") as errors:
            ranks.append(subprocess.Popen(command, stdout=said, stderr=errors))
    try:
        status = [process.wait(PATIENCE) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        print(*(path.read_text() for paths in logs for path in paths), sep="\n")
    assert status == [0, 0]
    (reruns, order, equal), (other_reruns, other_order, other_equal) = (
        out.read_text().splitlines() for out, _ in logs
    )
    assert reruns != other_reruns
    assert order == other_order
    assert equal == other_equal == "equal"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Shares(nn.Module):
    """Communicates between two layers that a plan would run again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(nn.Linear(16, 16) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).exp()
            if self.kind == "in place":
                mean = x.detach().mean(0)
                distributed.all_reduce(mean)
                x = x - mean
            else:
                x = collectives.all_reduce(x, "sum", distributed.group.WORLD).sin()
        return x


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("strategy", ["chen_sqrt", "approx_dp", "anneal", "auto"])
def test_no_collective_runs_again(strategy: str) -> None:
    torch.manual_seed(0)
    model, x = Shares("functional"), torch.randn(64, 16)
    limited = {"anneal": rematplan.Anneal(moves=4000), "auto": rematplan.Auto(time_limit=0.2)}
    planned = rematplan.plan_module(
        copy.deepcopy(model), (x,), budget="min", strategy=limited.get(strategy, strategy), costs="roofline"
    )
    step, plan = planned._rematplan.last.compiled.step, planned.plan
    ordered = [c.name for c in step.calls if c.collective]
    assert len(ordered) == 2 * len(model.layers)
    assert [op for op in runs_of(plan.schedule) if op in ordered] == ordered
    assert plan.estimate.reruns > 0
    for one in (planned, model):
        one(x).square().mean().backward()
    for ours, eager in zip(planned.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


@pytest.mark.usefixtures("alone")
def test_what_waits_for_a_collective_is_not_charged_twice() -> None:
    planned = rematplan.plan_module(
        Shares("functional"), (torch.randn(64, 16),), budget="100%", costs="roofline"
    )
    step = planned._rematplan.last.compiled.step
    waits = [c for c in step.calls if c.waits]
    assert waits
    assert all(c.is_view for c in waits)


@pytest.mark.usefixtures("alone")
def test_a_schedule_that_communicates_again_or_in_another_order_is_refused() -> None:
    planned = rematplan.plan_module(
        Shares("functional"), (torch.randn(64, 16),), budget="100%", strategy="store_all", costs="roofline"
    )
    step, schedule = planned._rematplan.last.compiled.step, planned.plan.schedule
    first, second = [c.name for c in step.calls if c.collective][:2]
    at, later = schedule.index(Run(first)), schedule.index(Run(second))
    with pytest.raises(ProblemError, match=f"the collective {first} again"):
        compile_halves(step, (*schedule[: at + 1], *schedule[at:]))
    swapped = list(schedule)
    swapped[at], swapped[later] = swapped[later], swapped[at]
    with pytest.raises(ProblemError, match="another order"):
        compile_halves(step, tuple(swapped))


@pytest.mark.usefixtures("alone")
def test_a_step_with_a_collective_in_place_has_no_plan() -> None:
    with pytest.warns(UserWarning, match="functional_collectives"):
        rematplan.plan_module(Shares("in place"), (torch.randn(64, 16),), budget="100%", costs="roofline")
