"""A model of the time of a data-parallel training iteration, with SGD and with K-FAC, on a given device and network.

Computation is modelled by the device's roofline (`runtime.costs.roofline`), communication by the α-β model: a message
takes a latency α plus its bytes ÷ the bandwidth β. A reduce-scatter or an all-gather of n bytes between p processes
takes ⌈log₂ p⌉ α + (p − 1)/p n/β (recursive halving and doubling; Thakur et al. 2005), an all-reduce twice that.
Nothing overlaps. The times are not measured, and real kernels are slower than a roofline, above all small Cholesky
factorisations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from rematplan.optim.factor import AUTO, Factor
from rematplan.optim.load_balancing import longest_first
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
"""The parts of an iteration's time, as in figure 4 of Osawa et al. (2019)."""
NORMALISATION = re.compile("(batch|layer|group|instance|rms)_?norm")
"""Matches the names of normalisation ops."""
MOVED_BY_UPDATE = 5
"""How many numbers SGD with momentum reads and writes per weight: weight, gradient, momentum; weight, momentum."""


@dataclass(frozen=True)
class Link:
    """A network link. ``bandwidth``: in 10⁹ bytes per second. ``latency``: in microseconds."""

    bandwidth: float
    latency: float

    def half(self, size: float, ranks: int) -> float:
        """Return the microseconds of half an all-reduce: a reduce-scatter or an all-gather.

        ``size``: bytes. ``ranks``: the number of processes.
        """
        rounds = math.ceil(math.log2(ranks))
        return rounds * self.latency + (ranks - 1) / ranks * size / (self.bandwidth * 1e3)


@dataclass(frozen=True)
class Iteration:
    """The modelled time of one iteration on ``ranks`` processes.

    ``times``: microseconds by the names of `PARTS`. ``state``: bytes of the optimizer's state, in the process with
    most.
    """

    ranks: int
    times: Mapping[str, float]
    state: int

    @property
    def total(self) -> float:
        """The microseconds of the iteration."""
        return sum(self.times.values())


@dataclass(frozen=True)
class IterationModel:
    """The model of one network on one device and link.

    ``plain``, ``counted``: the step of one process without statistics and with them. ``forms``: the factors by weight
    name, on the device ``meta``. ``every``, ``inverse_every``: in every so many iterations statistics are taken, and
    each factor is inverted. All times are means over iterations.
    """

    plain: CapturedStep
    counted: CapturedStep
    forms: Mapping[str, Factors]
    device: DeviceModel
    link: Link
    every: int
    inverse_every: int

    def sgd(self, ranks: int) -> Iteration:
        """Return an iteration of SGD with momentum, which averages gradients by an all-reduce."""
        times = self._step | {
            "gradient communication": 2 * self.link.half(self._gradient_bytes, ranks),
            "update": self._plain_update,
        }
        return Iteration(ranks, _ordered(times), self._gradient_bytes)

    def kfac(self, ranks: int) -> Iteration:
        """Return an iteration of K-FAC.

        Factors and gradients go to the owners of their layers by a reduce-scatter; an all-gather distributes the
        updates.
        """
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
        """The times of forward, backward and normalisation."""
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
    def _sides(self) -> Mapping[str, tuple[Factor, Factor]]:
        return {name: (_side(form, form.a), _side(form, form.g)) for name, form in self.forms.items()}

    @cached_property
    def _factor_bytes(self) -> int:
        return sum(side.average_bytes() for sides in self._sides.values() for side in sides)

    @cached_property
    def _inverse_times(self) -> Mapping[str, float]:
        """The time to invert both factors of each weight: n³ operations; the factor is read and the inverse
        written.
        """
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
        """The time to multiply each gradient (outputs, inputs) by both inverses."""
        times = {}
        for name, (a, g) in self._sides.items():
            entries = math.prod(a.blocks) * a.size * g.size
            moved = math.prod(a.blocks) * (a.size**2 + g.size**2) + 4 * entries
            times[name] = self.device.time(2 * entries * (a.size + g.size), moved * a.dtype.itemsize, a.dtype)
        return times


def _side(form: Factors, factor: torch.Tensor) -> Factor:
    blocks = (form.groups,) if form.groups > 1 else ()
    return Factor(factor.shape[-1], blocks, AUTO, factor.dtype)


def _most(owners: Mapping[str, int], amounts: Mapping[str, float]) -> float:
    """Return the largest sum of ``amounts`` over the layers of one owner."""
    loads: dict[int, float] = {}
    for name, owner in owners.items():
        loads[owner] = loads.get(owner, 0.0) + amounts[name]
    return max(loads.values())


def _ordered(times: Mapping[str, float]) -> dict[str, float]:
    return {part: times.get(part, 0.0) for part in PARTS}
