"""The planning strategies (algorithms that choose a plan) by name, and their construction from options."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from rematplan.ir import UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.ilp import ILP
from rematplan.planner.strategies.nested_dp import NestedDP
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import StoreAll

STRATEGIES: Mapping[str, type[Strategy]] = {
    kind.name: kind
    for kind in (Auto, StoreAll, ChenSqrt, ChenGreedy, ApproxDP, ExactDP, NestedDP, Anneal, ILP, Reversible)
}
LIMIT = "time_limit"
"""The option that limits the search time in seconds. Every strategy accepts it; strategies that do not search ignore
it."""


SWITCHES = {"on": True, "off": False}
"""The texts for the values of an option that is on or off."""


def strategy(name: str, **options: object) -> Strategy:
    """Return a strategy (an algorithm that chooses a plan) by name; `UsageError` for an unknown name or option, or a
    wrong value. Values may be text. A time limit is ignored by strategies that have none."""
    kind = STRATEGIES.get(name)
    if kind is None:
        raise UsageError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    hints = typing.get_type_hints(kind)
    known = {f.name: hints[f.name] for f in fields(kind)}
    if LIMIT not in known:
        options = {option: value for option, value in options.items() if option != LIMIT}
    for option in options:
        if option not in known:
            raise UsageError(f"{name}: no option is named {option!r}; its options are {', '.join(known)}")
    stated: dict[str, Any] = {
        option: _fit(name, option, value, known[option]) for option, value in options.items()
    }
    return kind(**stated)


def checked(one: Strategy) -> Strategy:
    """Return ``one``, a strategy made in Python; `UsageError` if a number, switch or choice among its fields has
    another type or range."""
    hints = typing.get_type_hints(type(one))
    for f in fields(one):
        kind, value = hints[f.name], getattr(one, f.name)
        if kind in (bool, int, float) and isinstance(value, str):  # which is read on the command line only
            raise UsageError(f"{type(one).name}: {f.name} is {value!r}, not of type {kind.__name__}")
        if typing.get_origin(kind) is Literal or kind in (bool, int, float):
            _fit(type(one).name, f.name, value, kind)
    return one


def _fit(name: str, option: str, value: object, kind: Any) -> object:
    """Return an option's value, read from text if necessary. `UsageError` for another type or choice, a limit not above
    0, a number that is not finite or, except for ``gap``, below 0, and a ``lane_speed`` other than 0 or 0.5 to 1.
    ``name``: of the strategy, for messages. ``kind``: the option's type."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise UsageError(
                f"{name}: {option} is {value!r}; it must be one of {', '.join(map(str, choices))}"
            )
        return value
    if isinstance(value, str) and kind is bool:
        value = SWITCHES.get(value, value)
    if isinstance(value, str) and kind in (int, float):
        try:
            value = kind(value)
        except ValueError:
            raise UsageError(f"{name}: {option} is {value!r}, not of type {kind.__name__}") from None
    if isinstance(value, bool) is not (kind is bool) or not isinstance(
        value, (int, float) if kind is float else kind
    ):
        expected = " or ".join(SWITCHES) if kind is bool else f"of type {kind.__name__}"
        raise UsageError(f"{name}: {option} is {value!r}, not {expected}")
    if kind is float and not -math.inf < value < math.inf:
        raise UsageError(f"{name}: {option} is {value!r}, not a finite number")
    if option == LIMIT and not value > 0:
        raise UsageError(f"{name}: {option} is {value!r}; it must be above 0")
    if option == "lane_speed" and value != 0 and not 0.5 <= value <= 1:
        raise UsageError(f"{name}: {option} is {value!r}; it must be from 0.5 to 1")
    if kind is float and option != "gap" and value < 0:  # a negative gap means: search until the time limit
        raise UsageError(f"{name}: {option} is {value!r}; it must be at least 0")
    return value
