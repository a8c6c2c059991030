"""An effort counts what the search itself does: CPU seconds of its thread, or moves; never the time of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import problems
import pytest

from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.core import effort as module
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.strategy import Enough


def work(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_waiting_spends_nothing_and_work_of_other_threads_neither() -> None:
    effort = Effort(1.0)
    thread = threading.Thread(target=work, args=(0.2,))
    thread.start()
    thread.join()
    assert effort.spent() < 0.1
    work(0.2)
    assert effort.spent() >= 0.2


def test_counted_moves_read_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(moves=10)
    part = effort.part(4)
    monkeypatch.setattr(module, "time", None)
    part.charge(moves=3)
    assert (part.spent(), part.left, part.over) == (3, 1, False)
    part.charge(moves=2)
    assert part.over
    assert not effort.over
    assert effort.left == 5


def test_a_part_is_at_most_what_is_left_and_ends_with_the_whole() -> None:
    effort = Effort(moves=10)
    effort.charge(moves=8)
    part = effort.part(5)
    assert part.total == 2
    effort.stop()
    assert part.over


def test_an_interrupt_of_a_part_is_recorded_in_the_whole() -> None:
    effort, interrupt = Effort(moves=10), KeyboardInterrupt()
    other, part = effort.part(5), effort.part(5)
    part.part(2).interrupt(interrupt)
    assert (effort.interrupted, part.interrupted, other.interrupted) == (interrupt, interrupt, None)


def test_seconds_of_a_process_that_is_waited_for_count() -> None:
    effort = Effort(5.0)
    effort.part(1.0).charge(seconds=3.0)
    assert 3.0 <= effort.spent() < 4.0


def test_the_wall_clock_ends_a_search_only_at_a_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    effort = Effort(100.0)
    now[0] = 399.0
    assert not effort.over
    now[0] = 401.0
    assert effort.over
    assert effort.left == 0


def test_a_search_can_be_extended_from_another_thread() -> None:
    effort = Effort(moves=10)
    effort.charge(moves=9)
    effort.extend(5)
    assert effort.left == 5


def test_no_search_follows_one_that_an_interrupt_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[Effort]()

    def run(_self: Search, _starts: Sequence[Sequence[str]], effort: Effort) -> None:
        effort.interrupt(Enough())
        ended.append(effort)

    monkeypatch.setattr(Search, "run", run)
    effort = Effort(moves=20_000)
    find_smallest_peak(problems.unet(3), effort)
    assert len(ended) == 1
    assert effort.interrupted
