"""A stand-in for the process that searches for better plans, and first plans that leave something to improve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rematplan.ir.cache_folder import cache_folder
from rematplan.planner.core.plan import Plan
from rematplan.planner.strategies.approx_dp import ApproxDP


@dataclass
class Elsewhere:
    """Stands for the background process: it has the plans that a test gives, at the moments that a test says."""

    searches: list[tuple[Any, int, Callable[[Plan | None, bool], None]]] = field(default_factory=list)

    def submit(self, problem, budget, strategy, options, starts, heard) -> bool:
        """See `BackgroundSearch.submit`."""
        del strategy, options, starts
        self.searches.append((problem, budget, heard))
        return True

    def find(self, at: int = -1, rank: int = 0) -> Plan:
        """Have a search find the plan of that rank among those that fit, from the cheapest on."""
        problem, budget, heard = self.searches[at]
        fitting = [p for p in ApproxDP().curve(problem, ()) if p.estimate.peak <= budget]
        plan = fitting[min(rank, len(fitting) - 1)]
        heard(plan, False)
        return plan


def begin_with_the_leanest(set_attribute: Callable[[str, Any], None]) -> None:
    """Have a dear plan found before the first step, at once."""

    def least(graph):
        return min(ApproxDP().curve(graph, ()), key=lambda p: p.estimate.peak)

    def search(self, graph, budget, progress=None, starts=()):
        del self, progress, starts
        return replace(least(graph), budget=budget, strategy="auto")

    set_attribute("rematplan.planner.auto.auto_strategy.Auto.plan", search)
    set_attribute("rematplan.plans.first_plan.no_recompute", least)


def with_no_plans(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A folder of caches without plans. The machine code is everybody's: it takes a minute to compile."""
    (folder / "rematplan").mkdir()
    (folder / "rematplan" / "kernels").symlink_to(cache_folder() / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
