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
from typing import TypeVar

import torch

from rematplan.optim.assignment import FactorKey, by_factor, homes, owners
from rematplan.optim.factor import AUTO, Factor
from rematplan.runtime.costs.device_models import DeviceModel
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.statistics.factors import Factors

Key = TypeVar("Key")

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
        """Return the microseconds of a reduce-scatter or an all-gather, which is half an all-reduce.

        ``size``: bytes. ``ranks``: the number of processes.
        """
        rounds = math.ceil(math.log2(ranks))
        return rounds * self.latency + (ranks - 1) / ranks * size / (self.bandwidth * 1e3)


@dataclass(frozen=True)
class Iteration:
    """The modelled time and memory of one training iteration on ``ranks`` processes.

    ``times``: microseconds by the names of `PARTS`. ``state``: bytes of the optimizer's state, in the process with
    most.
    """

    ranks: int
    times: Mapping[str, float]
    state: int

    @property
    def total(self) -> float:
        """The microseconds of the whole iteration: the sum of its parts."""
        return sum(self.times.values())


@dataclass(frozen=True)
class IterationModel:
    """The model of training iterations of one network on one kind of device and link.

    ``plain``, ``counted``: the captured step of one process without statistics and with them. ``forms``: the Kronecker
    factors by weight name, on the device ``meta``. ``device``: the roofline of one device. ``link``: the network
    between processes. ``every``: statistics are taken in every so many iterations. ``inverse_every``: each factor is
    inverted in every so many iterations. All times are means over iterations.
    """

    plain: CapturedStep
    counted: CapturedStep
    forms: Mapping[str, Factors]
    device: DeviceModel
    link: Link
    every: int
    inverse_every: int

    def sgd(self, ranks: int) -> Iteration:
        """Return the times of an iteration of SGD with momentum on ``ranks`` processes. Gradients are averaged by an
        all-reduce."""
        times = self._step | {
            "gradient communication": 2 * self.link.half(self._gradient_bytes, ranks),
            "update": self._plain_update,
        }
        return Iteration(ranks, _ordered(times), self._gradient_bytes)

    def kfac(self, ranks: int) -> Iteration:
        """Return the times of an iteration of K-FAC on ``ranks`` processes.

        Factors and gradients go to the processes that own the layers by a reduce-scatter; an all-gather distributes the
        updates. If the two factors of a layer have different owners, one sends its inverse to the other.
        """
        parts = owners(self._sides, ranks)
        owner, home = by_factor(parts), homes(self._sides, parts)
        sent = {(n, at): self._message(n, at) for (n, at), rank in owner.items() if rank != home[n]}
        times = self._step | {
            "gradient communication": 2 * self.link.half(self._gradient_bytes, ranks),
            "factors": self._factor_time / self.every,
            "factor communication": self.link.half(self._factor_bytes, ranks) / self.every
            + _most(owner, sent) / self.inverse_every,
            "inverses": _most(owner, self._inverse_times) / self.inverse_every,
            "update": self._plain_update + _most(home, self._product_times),
        }
        held = dict.fromkeys(range(ranks), 0)
        for (name, at), rank in owner.items():
            side = self._sides[name][at]
            held[rank] += side.average_bytes()
            for holder in {rank, home[name]}:
                held[holder] += side.inverse_bytes()
        return Iteration(ranks, _ordered(times), self._gradient_bytes + max(held.values()))

    def _message(self, name: str, at: int) -> float:
        """Return the microseconds to send one inverse to another process."""
        return self.link.latency + self._sides[name][at].inverse_bytes() / (self.link.bandwidth * 1e3)

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
    def _inverse_times(self) -> Mapping[FactorKey, float]:
        """The time to invert each factor: n³ operations; the factor is read and the inverse written."""
        return {
            (name, at): self.device.time(
                side.cost, 2 * math.prod(side.blocks) * side.size**2 * side.dtype.itemsize, side.dtype
            )
            for name, sides in self._sides.items()
            for at, side in enumerate(sides)
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


def _most(owners: Mapping[Key, int], amounts: Mapping[Key, float]) -> float:
    """Return the largest sum of ``amounts`` over those of one owner."""
    loads: dict[int, float] = {}
    for key, amount in amounts.items():
        loads[owners[key]] = loads.get(owners[key], 0.0) + amount
    return max(loads.values(), default=0.0)


def _ordered(times: Mapping[str, float]) -> dict[str, float]:
    return {part: times.get(part, 0.0) for part in PARTS}
