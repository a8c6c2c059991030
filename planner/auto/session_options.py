"""The options of the strategy ``auto`` for the planning of one problem."""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.planner.core.search_rules import SearchRules


@dataclass(frozen=True)
class SessionOptions:
    """The options, which are explained in `Auto`. ``name``: the strategy's name."""

    name: str
    time_limit: float
    moves: int
    rules: SearchRules
    gap: float
