"""The HiGHS solver in another process gives right answers, and ends when asked."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from random import Random

import pytest

from rematplan.planner.core.effort import Effort
from rematplan.planner.ilp.highs_process import CPU_SECONDS, read_message, write_message
from rematplan.planner.ilp.solver import Answer, Solver
from rematplan.planner.ilp.sparse_rows import Rows


def cover(floor=3.0):
    """min x + 2y + 3z with 2x + 2y + 2z >= floor."""
    rows = Rows()
    columns = [rows.variable(cost) for cost in (1.0, 2.0, 3.0)]
    rows.at_least([(j, 2.0) for j in columns], floor)
    return rows


def hard(seed=0, size=60):
    """A program that takes HiGHS far longer than a test may: multidimensional covering with random numbers."""
    rng, rows = Random(seed), Rows()
    columns = [rows.variable(1000.0 + rng.randint(0, 999)) for _ in range(size)]
    for _ in range(30):
        factors = [float(rng.randint(500, 999)) for _ in columns]
        rows.at_least(list(zip(columns, factors, strict=True)), math.floor(sum(factors) / 2) + 0.5)
    return rows


def test_programs_and_their_relaxations_are_solved():
    with Solver() as solver:
        whole = solver.solve(cover(), Effort(10), integer=True, gap=0.0)
        assert whole == Answer(pytest.approx(3.0), (1.0, 1.0, 0.0), True)
        assert solver.solve(cover(), Effort(10), integer=False, gap=0.0).dual == pytest.approx(2.0)
        hinted = solver.solve(cover(), Effort(10), integer=True, gap=0.0, hint={0: 1.0, 1: 0.0, 2: 1.0})
        assert hinted.dual == pytest.approx(3.0)


def test_a_program_without_solution_has_infinite_cost():
    with Solver() as solver:
        assert solver.solve(cover(7.0), Effort(10), integer=True, gap=0.0) == Answer(math.inf, None, True)


def test_a_time_limit_holds_and_a_bound_is_returned():
    with Solver() as solver:
        for seconds in (1, 4, 16):  # on a busy machine, a second may pass before there is a bound
            began = time.monotonic()
            answer = solver.solve(hard(), Effort(seconds), integer=True, gap=0.0)
            assert time.monotonic() - began < 5 * seconds
            assert not answer.done
            if answer.dual > 0:
                break
    assert answer.dual > 0


def test_a_solve_is_ended_from_another_thread():
    with Solver() as solver:
        threading.Timer(0.5, solver.stop).start()
        began = time.monotonic()
        assert solver.solve(hard(), Effort(60), integer=True, gap=0.0) == Answer()
        assert solver.solve(cover(), Effort(60), integer=True, gap=0.0) == Answer()
        assert time.monotonic() - began < 5


def test_a_new_process_replaces_a_lost_one():
    with Solver() as solver:
        solver.solve(cover(), Effort(10), integer=True, gap=0.0)
        solver._process.kill()
        for _ in range(2):
            assert solver.solve(cover(), Effort(10), integer=True, gap=0.0).dual == pytest.approx(3.0)


def test_no_pipes_are_left_open():
    with Solver() as solver:
        solver.solve(cover(), Effort(10), integer=True, gap=0.0)
        process = solver._process
    assert process.stdin.closed
    assert process.stdout.closed


def test_programs_are_solved_in_this_process_if_no_other_can_start(monkeypatch):
    def refuse(*_args, **_more):
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with Solver() as solver:
        assert solver.solve(cover(), Effort(10), integer=True, gap=0.0).dual == pytest.approx(3.0)


def test_output_of_highs_does_not_disturb_answers():
    prints = (
        "import os; from rematplan.planner.ilp import highs_process as p; "
        "p.respond = lambda request: (os.write(1, b'HighsMipSolverData'), request)[1]; p.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", prints],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        for body in (b"one", b"another"):
            write_message(process.stdin, body)
            assert (read_message(process.stdout) or b"")[CPU_SECONDS.size :] == body
        process.stdin.close()
        assert process.stdout.read() == b""


def test_counted_moves_end_before_a_program_that_needs_more():
    large = hard(size=600)  # 18,000 factors count as 421,200 moves
    effort, small = Effort(moves=400_000), Effort(moves=10_000)
    with Solver() as solver:
        assert solver.solve(large, effort, integer=True, gap=0.0) == Answer()
        assert effort.over
        assert solver.solve(cover(), small, integer=True, gap=0.0).done
        assert small.over
