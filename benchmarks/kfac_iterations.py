"""A model of the time and memory of data-parallel training iterations, with SGD and with K-FAC, on many devices.

    python benchmarks/kfac_iterations.py resnet50 --dim batch=32 --ranks 1 8 64 2048 --png breakdown.png

Computation is modelled by a device's roofline (`runtime.costs.roofline`), communication by the α-β model: a message
takes a latency α plus its bytes ÷ the bandwidth β. A reduce-scatter or an all-gather of n bytes between p processes
takes ⌈log₂ p⌉ α + (p − 1)/p n/β (recursive halving and doubling; Thakur et al. 2005), an all-reduce twice that.
Nothing overlaps. The times are not measured, and real kernels are slower than a roofline, above all small Cholesky
factorisations.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from matplotlib.figure import Figure

from rematplan import api
from rematplan.ir import show_bytes
from rematplan.optim.assignment import FactorKey, by_factor, homes, owners
from rematplan.optim.factor import AUTO, Factor
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.report.plot import COLOURS, save_png
from rematplan.runtime.costs.device_models import DeviceModel, device_model
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.statistics.factors import Factors
from rematplan.runtime.statistics.fisher_output_gradients import Draws
from rematplan.runtime.statistics.insert import with_statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import shapes

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
"""SGD with momentum reads three numbers per weight (weight, gradient, momentum) and writes two (weight, momentum)."""


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

    ``times``: microseconds of each part of the iteration; the keys are the names in `PARTS`. ``state``: bytes of the
    optimizer's state, in the process that has most.
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
    """A model of the time of training iterations of one network on one kind of device and link.

    All times are means over iterations: work that is done in every n-th iteration counts as 1/n of its time.

    ``plain``: the captured step of one process without statistics for Kronecker factors. ``counted``: the captured step
    with them. ``forms``: the Kronecker factors by weight name, on the device ``meta``. ``device``: the roofline of one
    device. ``link``: the network between processes. ``every``: statistics are taken in every so many iterations.
    ``inverse_every``: each factor is inverted in every so many iterations.
    """

    plain: CapturedStep
    counted: CapturedStep
    forms: Mapping[str, Factors]
    device: DeviceModel
    link: Link
    every: int
    inverse_every: int

    def sgd(self, ranks: int) -> Iteration:
        """Return the time and memory of an iteration of SGD with momentum on ``ranks`` processes.

        Gradients are averaged by an all-reduce.
        """
        times = self._step | {
            "gradient communication": 2 * self.link.half(self._gradient_bytes, ranks),
            "update": self._plain_update,
        }
        return Iteration(ranks, _ordered(times), self._gradient_bytes)

    def kfac(self, ranks: int) -> Iteration:
        """Return the time and memory of an iteration of K-FAC on ``ranks`` processes.

        Each Kronecker factor has an owner, which inverts it. Each layer has one worker, which multiplies its gradient
        by both inverses. A reduce-scatter sends statistics to the owners, another one sends gradients to the workers.
        An all-gather distributes the updates. If the worker does not own both factors of a layer, it receives the other
        inverse.
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
        """Return the microseconds to send the inverse of one Kronecker factor to another process.

        ``name``: the weight name. ``at``: 0 for the factor of the inputs, 1 for that of the outputs' gradients.
        """
        return self.link.latency + self._sides[name][at].inverse_bytes() / (self.link.bandwidth * 1e3)

    @cached_property
    def _costs(self) -> Mapping[str, float]:
        return {name: cost.time for name, cost in roofline_costs(self.counted, self.device).items()}

    @cached_property
    def _step(self) -> dict[str, float]:
        """The microseconds of ``forward``, ``backward`` and ``normalisation`` on one device, by these names.

        Normalisation ops of the forward and the backward count as ``normalisation`` only.
        """
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
        """The microseconds to invert each Kronecker factor: n³ operations, or n if only the diagonal is inverted.

        The factor is read, and the inverse is written: n² numbers each, or n for a diagonal. The keys are pairs of a
        weight name and 0 (the factor of the inputs) or 1 (the factor of the outputs' gradients).
        """
        return {
            (name, at): self.device.time(side.cost, 2 * side.inverse_bytes(), side.dtype)
            for name, sides in self._sides.items()
            for at, side in enumerate(sides)
        }

    @cached_property
    def _product_times(self) -> Mapping[str, float]:
        """The microseconds to multiply each layer's gradient, (outputs, inputs), by both inverses, by weight name.

        A product with an inverse of n rows takes 2 n operations for each entry of the gradient, or one if the inverse
        is diagonal.
        """
        times = {}
        for name, (a, g) in self._sides.items():
            entries = math.prod(a.blocks) * a.size * g.size
            each = sum(1 if side.diagonal else 2 * side.size for side in (a, g))
            moved = a.inverse_bytes() + g.inverse_bytes() + 4 * entries * a.dtype.itemsize
            times[name] = self.device.time(each * entries, moved, a.dtype)
        return times


def _side(form: Factors, factor: torch.Tensor) -> Factor:
    blocks = (form.groups,) if form.groups > 1 else ()
    return Factor(factor.shape[-1], blocks, AUTO, factor.dtype)


def _most(owners: Mapping[Key, int], amounts: Mapping[Key, float]) -> float:
    """Return the largest sum of ``amounts`` that belongs to one owner. ``owners``: the owner's rank for each key."""
    loads: dict[int, float] = {}
    for key, amount in amounts.items():
        loads[owners[key]] = loads.get(owners[key], 0.0) + amount
    return max(loads.values(), default=0.0)


def _ordered(times: Mapping[str, float]) -> dict[str, float]:
    return {part: times.get(part, 0.0) for part in PARTS}


def breakdown(pairs: Sequence[tuple[Iteration, Iteration]]) -> str:
    """Return a table of the milliseconds of each part of an iteration, and of the bytes of the optimizer's state."""
    lines = [
        f"{'devices':>8} {'':5} {'total':>9} "
        + " ".join(f"{part[:12]:>12}" for part in PARTS)
        + "      state"
    ]
    for pair in pairs:
        for name, one in zip(("SGD", "K-FAC"), pair, strict=True):
            times = " ".join(f"{one.times[part] / 1000:12.2f}" for part in PARTS)
            lines.append(
                f"{one.ranks:8} {name:5} {one.total / 1000:9.2f} {times} {show_bytes(one.state):>10}"
            )
    return "\n".join(lines)


def draw(path: Path, title: str, pairs: Sequence[tuple[Iteration, Iteration]]) -> None:
    """Draw the time of an iteration by part: for each number of devices a bar of SGD (hatched) and one of K-FAC."""
    figure = Figure(figsize=(max(7.0, 1.0 * len(pairs) + 3), 5), layout="constrained")
    axes = figure.add_subplot()
    for side, offset in enumerate((-0.2, 0.2)):
        bottoms = [0.0] * len(pairs)
        for part, colour in zip(PARTS, (*COLOURS, "#BBBBBB"), strict=True):
            heights = [pair[side].times[part] / 1000 for pair in pairs]
            axes.bar(
                [at + offset for at in range(len(pairs))], heights, 0.38, bottoms, color=colour,
                hatch=None if side else "///", label=part if side else None, edgecolor="white", linewidth=0.3,
            )  # fmt: skip
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(pairs)), [str(pair[0].ranks) for pair in pairs])
    axes.set_xlabel("devices (left, hatched: SGD; right: K-FAC)")
    axes.set_ylabel("milliseconds an iteration")
    axes.set_title(title, parse_math=False)
    figure.legend(loc="outside right upper")
    save_png(figure, path)


def main() -> None:
    """Model iterations of a network of the zoo, print a table, and draw a picture if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--dim", nargs="*", default=[], metavar="NAME=SIZE")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2**k for k in range(12)])
    parser.add_argument("--device", default="v100")
    parser.add_argument("--link", nargs=2, type=float, default=(25, 5), metavar=("GB/s", "US"))
    parser.add_argument("--every", type=int, default=1, help="iterations from one statistic to the next")
    parser.add_argument("--inverse-every", type=int, default=1)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    sizes = {name: int(size) for name, size in (one.split("=") for one in args.dim)}
    loaded = api.load_step(args.model, sizes=api.Sizes(**sizes), weightless=True)
    options = Kronecker(fisher="empirical", approx="expand")
    counted = with_statistics(loaded.step, options, Draws(options.seed))
    link = Link(*args.link)
    model = IterationModel(
        loaded.step,
        counted.step,
        shapes(counted),
        device_model(args.device),
        link,
        args.every,
        args.inverse_every,
    )
    pairs = [(model.sgd(count), model.kfac(count)) for count in args.ranks]
    title = f"{args.model} on {args.device} (model, not measured)"
    print(title, breakdown(pairs), sep="\n")
    for name, step in (("SGD", loaded.step), ("K-FAC", counted.step)):
        peak = no_recompute(api.problem(replace(loaded, step=step), args.device)).estimate.peak
        print(f"peak of the step without recomputation, {name}: {show_bytes(peak)}")
    if args.png:
        draw(args.png, title, pairs)


if __name__ == "__main__":
    main()
