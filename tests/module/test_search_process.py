"""Laws of the process that searches for better plans: its priority, its end, what it loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elsewhere import with_no_plans
from problems import residual

from rematplan.ir import TrainingGraph
from rematplan.planner.background import BackgroundSearch
from rematplan.planner.core.plan import Plan
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.worker import NICE


@pytest.fixture
def search() -> Any:
    """A background process of the test's own."""
    one = BackgroundSearch()
    yield one
    one.stop()


def searched(
    one: BackgroundSearch, problem: Any, budget: int, seconds: float = 0.5
) -> tuple[list[Plan], Any]:
    found: list[Plan] = []
    ended: list[bool] = []

    def heard(plan: Plan | None, last: bool) -> None:
        if plan is not None:
            found.append(plan)
        ended.extend([True] * last)

    assert one.submit(problem, budget, "auto", {"time_limit": seconds}, (), heard)
    return found, ended


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[TrainingGraph, int]:
    """A step, and a budget with which something has to be computed again."""
    with_no_plans(monkeypatch, tmp_path)
    graph = residual((3, 4, 6, 3))
    curve = ApproxDP().curve(graph, ())
    return graph, curve[len(curve) // 2].peak


def test_the_process_finds_plans_that_fit_and_has_low_priority_among_those_of_its_session(
    search: BackgroundSearch, problem: tuple[TrainingGraph, int]
) -> None:
    graph, budget = problem
    found, ended = searched(search, graph, budget)
    wait_for(lambda: ended)
    assert found
    assert all(plan.estimate.peak <= budget for plan in found)
    assert search.pid is not None
    assert os.getsid(search.pid) == os.getsid(0)  # Linux applies niceness within a session only
    assert os.getpgid(search.pid) != os.getpgid(0)  # Ctrl-C is not for it
    assert os.getpriority(os.PRIO_PROCESS, search.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)


def test_a_process_that_is_killed_ends_its_searches_and_another_takes_over(
    search: BackgroundSearch, problem: tuple[TrainingGraph, int]
) -> None:
    graph, budget = problem
    _, ended = searched(search, graph, budget, seconds=60.0)
    assert search.pid
    os.kill(search.pid, signal.SIGKILL)
    wait_for(lambda: ended)
    found, ended = searched(search, graph, budget)
    wait_for(lambda: ended)
    assert found


SCRIPT = """
import sys, torch, rematplan
from torch import nn
from rematplan.planner.background import shared
x = torch.randn(512, 64)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
planned = rematplan.plan_module(model, (x,), budget="60% of activations", costs="roofline",
    strategy=rematplan.Auto(gap=-1.0))
planned(x).sum().backward()
print(shared().pid, flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_its_parent_and_needs_no_main_guard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_no_plans(monkeypatch, tmp_path)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.communicate()

    def gone() -> bool:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        return state == "Z"

    wait_for(gone, 5.0)


def test_the_process_loads_no_torch() -> None:
    program = "import sys, rematplan.planner.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
