"""How long an iteration of data-parallel training takes with SGD and with K-FAC, by a model of device and network.

Computation: the roofline of a device (`runtime.costs.roofline`). Communication: α-β, each message takes a latency α and
its bytes ÷ the bandwidth β; a reduce-scatter or an all-gather of n bytes between p processes takes
⌈log₂ p⌉ α + (p − 1)/p n/β (recursive halving and doubling; Thakur et al. 2005), an all-reduce both. Nothing overlaps.
It is a model, not a measurement: kernels, above all small Cholesky factorisations, reach a part of a roofline only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from rematplan.optim.side import AUTO, Side
from rematplan.optim.slots import longest_first
from rematplan.runtime.costs.device_models import DeviceModel
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.statistics.factors import Factors

PARTS = (
    "forward",
    "backward",
    "normalisation",
    "gradient communication",
    "factors",
    "factor communication",
    "inverses",
    "update",
)
"""What an iteration's time is split into, as in figure 4 of Osawa et al. (2019)."""
NORMALISATION = re.compile("(batch|layer|group|instance|rms)_?norm")
MOVED_BY_UPDATE = 5
"""Numbers that SGD with momentum reads and writes for each weight: weight, gradient, momentum; weight, momentum."""


@dataclass(frozen=True)
class Link:
    """``bandwidth``: 10⁹ bytes a second. ``latency``: microseconds."""

    bandwidth: float
    latency: float

    def half(self, size: float, ranks: int) -> float:
        """Microseconds of a reduce-scatter or an all-gather of ``size`` bytes."""
        rounds = math.ceil(math.log2(ranks))
        return rounds * self.latency + (ranks - 1) / ranks * size / (self.bandwidth * 1e3)


@dataclass(frozen=True)
class Iteration:
    """``times``: microseconds by part. ``state``: bytes of the optimizer's state in the process that has most."""

    ranks: int
    times: Mapping[str, float]
    state: int

    @property
    def total(self) -> float:
        """Microseconds of an iteration."""
        return sum(self.times.values())


@dataclass(frozen=True)
class IterationModel:
    """``plain``, ``counted``: the step of one process without statistics, and with them; ``forms``: its factors.

    ``every``, ``inverse_every``: iterations from one with statistics, or with a new inverse of a factor, to the next;
    times are means over iterations.
    """

    plain: CapturedStep
    counted: CapturedStep
    forms: Mapping[str, Factors]
    device: DeviceModel
    link: Link
    every: int
    inverse_every: int

    def sgd(self, ranks: int) -> Iteration:
        """With momentum; gradients are averaged by an all-reduce."""
        times = self._step | {
            "gradient communication": 2 * self.link.half(self._gradient_bytes, ranks),
            "update": self._plain_update,
        }
        return Iteration(ranks, _ordered(times), self._gradient_bytes)

    def kfac(self, ranks: int) -> Iteration:
        """With factors that go to their owners by a reduce-scatter, as gradients do; updates come by an all-gather."""
        owners = longest_first({n: sum(s.cost for s in sides) for n, sides in self._sides.items()}, ranks)
        times = self._step | {
            "gradient communication": 2 * self.link.half(self._gradient_bytes, ranks),
            "factors": self._factor_time / self.every,
            "factor communication": self.link.half(self._factor_bytes, ranks) / self.every,
            "inverses": _most(owners, self._inverse_times) / self.inverse_every,
            "update": self._plain_update + _most(owners, self._product_times),
        }
        held = {
            n: sum(s.average_bytes() + s.inverse_bytes() for s in sides) for n, sides in self._sides.items()
        }
        return Iteration(ranks, _ordered(times), self._gradient_bytes + int(_most(owners, held)))

    @cached_property
    def _costs(self) -> Mapping[str, float]:
        return {name: cost.time for name, cost in roofline_costs(self.counted, self.device).items()}

    @cached_property
    def _step(self) -> dict[str, float]:
        """Forward, backward and normalisation."""
        times = dict.fromkeys(PARTS[:3], 0.0)
        for call in self.plain.calls:
            if not call.is_view:
                part = "backward" if call.backward else "forward"
                times["normalisation" if NORMALISATION.search(str(call.target)) else part] += self._costs[
                    call.name
                ]
        return times

    @cached_property
    def _factor_time(self) -> float:
        known = {call.name for call in self.plain.calls}
        calls = (call for call in self.counted.calls if not call.is_view and call.name not in known)
        return sum(self._costs[call.name] for call in calls)

    @cached_property
    def _gradient_bytes(self) -> int:
        gradients = (self.plain.values[o.value].fake for o in self.plain.outputs if o.kind == "gradient")
        return sum(g.numel() * g.element_size() for g in gradients)

    @cached_property
    def _plain_update(self) -> float:
        size = self._gradient_bytes
        return self.device.time(size, MOVED_BY_UPDATE * size, torch.float32)

    @cached_property
    def _sides(self) -> Mapping[str, tuple[Side, Side]]:
        return {name: (_side(form, form.a), _side(form, form.g)) for name, form in self.forms.items()}

    @cached_property
    def _factor_bytes(self) -> int:
        return sum(side.average_bytes() for sides in self._sides.values() for side in sides)

    @cached_property
    def _inverse_times(self) -> Mapping[str, float]:
        """A factorisation and an inverse are n³ operations; the factor is read, the inverse written."""
        return {
            name: sum(
                self.device.time(
                    side.cost, 2 * math.prod(side.blocks) * side.size**2 * side.dtype.itemsize, side.dtype
                )
                for side in sides
            )
            for name, sides in self._sides.items()
        }

    @cached_property
    def _product_times(self) -> Mapping[str, float]:
        """Two products of a gradient (outputs, inputs) with the inverses."""
        times = {}
        for name, (a, g) in self._sides.items():
            entries = math.prod(a.blocks) * a.size * g.size
            moved = math.prod(a.blocks) * (a.size**2 + g.size**2) + 4 * entries
            times[name] = self.device.time(2 * entries * (a.size + g.size), moved * a.dtype.itemsize, a.dtype)
        return times


def _side(form: Factors, factor: torch.Tensor) -> Side:
    blocks = (form.groups,) if form.groups > 1 else ()
    return Side(factor.shape[-1], blocks, AUTO, factor.dtype)


def _most(owners: Mapping[str, int], amounts: Mapping[str, float]) -> float:
    """The amount of the owner that has most."""
    loads: dict[int, float] = {}
    for name, owner in owners.items():
        loads[owner] = loads.get(owner, 0.0) + amounts[name]
    return max(loads.values())


def _ordered(times: Mapping[str, float]) -> dict[str, float]:
    return {part: times.get(part, 0.0) for part in PARTS}
