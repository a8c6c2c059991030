"""What all random searches of one planning have in common."""

from __future__ import annotations

from typing import NamedTuple


class SearchRules(NamedTuple):
    """The rules of a random search."""

    seed: int = 0
    """The seed of the random choices."""
    keep_order: bool = False
    """Whether the first runs of all ops keep the problem's order."""


ANY_ORDER = SearchRules()


def rules_of(strategy: object) -> SearchRules:
    """Return the rules that a strategy's options ``seed`` and ``keep_order`` state. Without these options, the seed is
    0 and any order is allowed."""
    return SearchRules(getattr(strategy, "seed", 0), getattr(strategy, "keep_order", False))
