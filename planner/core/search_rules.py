"""What all random searches of one planning have in common."""

from __future__ import annotations

from typing import NamedTuple


class SearchRules(NamedTuple):
    """The rules of a random search."""

    seed: int = 0
    """Of the random choices."""
    keep_order: bool = False
    """Whether the first runs of all ops keep the problem's order."""


ANY_ORDER = SearchRules()


def rules_of(strategy: object) -> SearchRules:
    """Return the rules that the options of a strategy state; for options that it lacks, the usual ones."""
    return SearchRules(getattr(strategy, "seed", 0), getattr(strategy, "keep_order", False))
