"""Read options of pipelines: the budget, the speed of the network, and the size of an optimizer's state."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rematplan.ir import UsageError
from rematplan.planner.pipeline.timeline import FREE_LINK, Link
from rematplan.plans.budgets import UNITS, Budget, parse_budget

OPTIMIZERS: Mapping[str, float] = {
    "none": 0,
    "sgd": 0,
    "momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "adam": 2,
    "adamw": 2,
}
"""For each optimizer of torch, the size of its state in copies of the trained parameters."""
_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "ns": 1e-3}
_BANDWIDTH = re.compile(r"([0-9.]{1,20}) ?([a-z]+)/s", re.IGNORECASE)
_LATENCY = re.compile(r"([0-9.]{1,20}) ?(s|ms|us|µs|ns)")


def parse_rank_budget(text: str) -> Budget:
    """Read the budget of a pipeline's ranks from text: bytes such as ``4GiB``, or ``60%`` of the largest peak of a rank
    without recomputation."""
    return parse_budget(text, ("bytes", "share"))


def parse_link(text: str | None) -> Link:
    """Read a link from text such as ``25GB/s,5us``: bandwidth, latency or both, else `UsageError`. What is not stated
    takes no time."""
    link = FREE_LINK
    for part in text.split(",") if text else ():
        speed, delay = _BANDWIDTH.fullmatch(part.strip()), _LATENCY.fullmatch(part.strip())
        if speed and speed[2].lower() in UNITS and _number(speed[1]) > 0:
            link = Link(link.latency, _number(speed[1]) * UNITS[speed[2].lower()] / 1e6)
        elif delay and _number(delay[1]) >= 0:
            link = Link(_number(delay[1]) * _MICROSECONDS[delay[2]], link.bandwidth)
        else:
            raise UsageError(
                f"link {text!r} is not understood; write bandwidth and latency, such as 25GB/s,5us"
            )
    return link


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def optimizer_copies(name: str) -> float:
    """Return the size of an optimizer's state ÷ the size of the trained parameters, such as 2 for ``adam`` and 0 for
    ``sgd``; `UsageError` for an unknown one."""
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
