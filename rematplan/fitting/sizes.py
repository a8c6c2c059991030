"""The planning problems of a model at any size, their plans, and the largest sizes that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from rematplan.fitting.question import BATCH, DEPTH, Question, SizedModel, optimizer_bytes
from rematplan.ir import InfeasibleBudget, ModelError, TrainingGraph, UsageError
from rematplan.module.captures import capture_call
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress
from rematplan.planner.family.interpolated_problems import Between
from rematplan.planner.family.repeated_layers import SHALLOW, RepeatedLayers, repeated_layers
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budget_searches import plan_within
from rematplan.plans.held_by_others import OtherBytes
from rematplan.plans.options import PlanOptions
from rematplan.plans.size_ranges import interpolations
from rematplan.plans.sized_costs import SizedCosts
from rematplan.plans.step_problems import RESERVED, StepProblems
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.problem.as_plain_autograd import PlainAutograd
from rematplan.runtime.problem.loss_boundary import OPTIMIZER

GUESSES = 4
"""How many sizes are tried where the memory is expected to be used up, before a search that halves the range."""
GROWTH = 32
"""The largest factor by which activations grow from a size that fits to the next one that is tried."""
BEYOND = 1.05
"""The factor by which a size is chosen above the one at which the memory is expected to be used up, as long as no
size is known at which it is: sizes between captured ones need no capture."""
PRECISION = 100
"""The search for the largest size with a plan ends at one part in so many: each size takes seconds, and another search
might find another plan."""
MOST_OPS = 40_000
"""Larger numbers of layers are not tried: a problem of more ops takes minutes."""
AHEAD = 4
"""How many steps of that precision a search goes at first beyond the sizes at which known plans fit."""
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class AtSize:
    """What a training step needs at one size, in bytes. Peaks include the margin."""

    size: int
    without: int
    """The peak without recomputation."""
    planned: int
    """The peak of the plan: the cheapest that fits, or the smallest found if none fits. It recomputes nothing if that
    fits."""
    overhead: float
    """The plan's extra time as a share of the step's time without recomputation."""
    least: int
    """No plan has a smaller peak; proven, without the margin."""
    seconds: float
    """The time of the planned step, as the costs say."""
    fits: bool
    """Whether the step fits the memory without recomputation, or the plan does with at most the stated overhead."""
    samples: int | None = None
    """The samples of a batch; None if unknown."""

    @property
    def rate(self) -> float | None:
        """The samples per second, as the costs say; None if unknown."""
        return self.samples / self.seconds if self.samples and self.seconds else None


@dataclass(frozen=True)
class LargestSizes:
    """The largest sizes that fit. None: not even the smallest one fits."""

    without: AtSize | None
    """The largest size that fits without recomputation."""
    planned: AtSize | None
    """With the plans that were found."""
    impossible: int | None
    """From this size on it is proven that no plan fits; None if no such size was met."""
    tried: int
    """The largest size that was considered: the model has no larger one, or the search ends there."""
    fastest: AtSize | None = None
    """The batch with the most samples per second among those that were planned and fit."""


class SizeSearch:
    """The planning problems of a model at any size, and their plans. A size between captured ones is interpolated, if
    the bytes of all tensors are found to be polynomials of the size. If the number of layers varies and the layers are
    equal, problems are built from those with 5, 6 and 7 layers. Otherwise the step is captured."""

    def __init__(self, model: SizedModel, asked: Question, progress: Progress) -> None:
        """Begin without problems. The budget is the memory of the question ``asked`` without its margins."""
        self.model, self.asked, self.progress = model, asked, progress
        self.budget = asked.memory - sum(asked.margin.values())
        self._store, self._sized = PlanStore(), SizedCosts()
        self._captured: dict[int, TrainingGraph] = {}
        self._exact: dict[int, TrainingGraph] = {}
        self._rounded: dict[int, TrainingGraph] = {}
        self._plans: dict[int, Plan] = {}
        self._bases: dict[int, Plan] = {}
        self._rows: dict[int, AtSize] = {}
        self._autograd: dict[str, PlainAutograd] = {}  # by the problem's fingerprint
        self._spans: list[Between] = []
        self._optimizers: dict[int, OtherBytes] = {}

    def captured(self, size: int) -> TrainingGraph:
        """Return the problem of the step at a size, which is captured once; each capture renews the interpolations."""
        if size not in self._captured:
            self.progress(0.2, f"capturing {self.model.dimension} {size}")
            made = self.model.at(size)
            with made.mode:
                _, step = capture_call(made.module, made.batch, {}, self.model.name)
                reserved = optimizer_bytes(made, self.asked)
            self._optimizers[size] = reserved.on(CUDA, {})
            options = PlanOptions(budget="100%", costs=self.asked.costs, reserved=reserved, refine=False)
            self._captured[size] = graph = StepProblems(options, sized=self._sized).inverting_problem(step)
            self._autograd[graph.fingerprint] = PlainAutograd.of(step)
            self._captured = dict(sorted(self._captured.items()))
            self._spans = interpolations(self._without_optimizer())
        return self._captured[size]

    def exact(self, size: int) -> TrainingGraph:
        """Return the problem at a size, interpolated or of repeated layers if possible, else captured."""
        if size not in self._captured and size not in self._exact:
            if self.model.dimension == DEPTH and size > SHALLOW[-1] and self._layers:
                self._exact[size] = self._repeated(self._layers, size)
            for span in self._spans:
                if span.sizes[0] < size < span.sizes[-1]:
                    self._exact[size] = self._with_optimizer(span.problem(size), size, span.sizes[0])
                    break
        graph = self._exact[size] if size in self._exact else self.captured(size)
        return self._autograd[graph.fingerprint].losses_apart(graph) if self.asked.accelerator else graph

    @cached_property
    def _layers(self) -> RepeatedLayers | None:
        """The equal layers of the model; None if they differ, or it cannot have so few."""
        with suppress(ModelError, UsageError):
            return repeated_layers([self.captured(depth) for depth in SHALLOW])
        return None

    def _repeated(self, layers: RepeatedLayers, size: int) -> TrainingGraph:
        more = size - SHALLOW[0]
        graph = layers.problem(more)
        graph = self._with_optimizer(graph, size, SHALLOW[0])
        known = self._autograd[layers.graph.fingerprint]
        self._autograd[graph.fingerprint] = known.repeated(lambda name: layers.copies(name, more))
        return graph

    def _without_optimizer(self) -> dict[int, TrainingGraph]:
        """Return the captured problems without the optimizer's bytes, which grow in steps if parameters grow."""
        if len({self._optimizers[size] for size in self._captured}) == 1:
            return self._captured
        return {size: _with_reserved(graph, 0) for size, graph in self._captured.items()}

    def _with_optimizer(self, graph: TrainingGraph, size: int, captured: int) -> TrainingGraph:
        """Return a problem at ``size`` with the optimizer's bytes there, from one that has them at ``captured``."""
        if self._without_optimizer() is self._captured and self.model.dimension != DEPTH:
            return graph
        here, there = self._optimizer(size), self._optimizers[captured]
        more = here.stepping - there.stepping
        known = self._captured[captured].op.get(OPTIMIZER)
        ops = (
            replace(op, workspace=max(0, known.workspace + more)) if known and op.name == OPTIMIZER else op
            for op in graph.ops
        )
        return _with_reserved(replace(graph, ops=tuple(ops)), here.always)

    def _optimizer(self, size: int) -> OtherBytes:
        """Return the bytes of the optimizer at a size."""
        if size not in self._optimizers:
            made = self.model.at(size)
            with made.mode:
                self._optimizers[size] = optimizer_bytes(made, self.asked).on(CUDA, {})
        return self._optimizers[size]

    def problem(self, size: int) -> TrainingGraph:
        """Return the problem at a size, with the sizes of tensors as the device's allocator rounds them."""
        if not self.asked.accelerator:
            return self.exact(size)
        if size not in self._rounded:
            graph = self.exact(size)
            tensors = tuple(
                t if t.name == RESERVED else replace(t, bytes=allocated(t.bytes, CUDA)) for t in graph.tensors
            )
            self._rounded[size] = replace(graph, tensors=tensors)
        return self._rounded[size]

    def plain(self, graph: TrainingGraph) -> TrainingGraph:
        """Return a problem of this model as plain autograd runs it."""
        autograd = self._autograd[graph.fingerprint]
        if self.asked.accelerator:
            return autograd.problem(graph, wide_masks=False)
        return autograd.problem(autograd.losses_apart(graph), wide_masks=True)

    def base(self, size: int) -> Plan:
        """Return the schedule without recomputation at a size, with the peak of plain autograd."""
        if size not in self._bases:
            self._bases[size] = no_recompute(self.plain(self.problem(size)))
        return self._bases[size]

    def least(self, size: int) -> int:
        """Return a proven lower bound of the peak of all plans at a size, without any margin."""
        return min_peak_bound(self.exact(size)).bytes

    def plan(self, size: int) -> Plan:
        """Return the cheapest plan found that fits at a size; if none is found, the one of the smallest peak."""
        if size not in self._plans:
            own = no_recompute(self.problem(size))
            fits = min(own.peak, self.base(size).peak) <= self.budget
            self._plans[size] = own if fits else self._searched(size)
        return self._plans[size]

    def _searched(self, size: int) -> Plan:
        self.progress(0.5, f"planning {self.model.dimension} {size}")
        try:
            return plan_within(
                self.asked.strategy, self.problem(size), self.budget, store=self._store, hurried=True
            )
        except InfeasibleBudget as error:
            return error.plan or no_recompute(self.problem(size))

    def row(self, size: int) -> AtSize:
        """Return what the step needs at a size."""
        if size not in self._rows:
            self._rows[size] = self._row(size)
        return self._rows[size]

    def _row(self, size: int) -> AtSize:
        """Return the figures at a size: bytes with the margin, seconds, and whether the step fits, without
        recomputation or with the plan."""
        margin = sum(self.asked.margin.values())
        plan, base = self.plan(size), self.base(size)
        return AtSize(
            size,
            base.peak + margin,
            plan.peak + margin,
            plan.estimate.overhead,
            self.least(size),
            plan.estimate.cost / 1e6,
            base.peak <= self.budget or self._fits(plan),
            self.model.samples_at(size),
        )

    def largest(self) -> LargestSizes:
        """Return the largest sizes that fit without and with a plan, the size from which on none can fit, and the
        fastest size."""
        without = self._last(lambda n: self.base(n).peak, self.budget)
        proven = self._last(self.least, self.asked.memory)
        top = self._top
        planned = self._planned(without, proven)
        return LargestSizes(
            self.row(without) if without else None,
            self.row(planned) if planned else None,
            proven + self.model.unit if proven < top else None,
            top,
            self._fastest(),
        )

    def _planned(self, without: int, proven: int) -> int:
        """Return the largest size at which a plan is found that fits, from ``without`` to ``proven``; 0 if there is
        none. The bounds are often tight, and each search takes seconds. So ``proven`` is tried first, then where plans
        found so far cease to fit."""
        rows, unit, ahead = self._rows.items(), self.model.unit, 0
        low, high = max([without, *(n for n, row in rows if row.fits)]), proven + unit
        size = min([proven, *(n for n, row in rows if n > low)])
        while size > low:
            low, high = (size, high) if self.row(size).fits else (low, size)
            step = max(unit, low // PRECISION // unit * unit)
            if high - low <= step:
                break
            known = self._bisected(low, high, self._known_to_fit)
            if known - low > step:
                size, ahead = known, AHEAD
            else:
                size, ahead = min(self._middle(low, high), low + ahead * step if ahead else high), 2 * ahead
        return low

    def _known_to_fit(self, size: int) -> bool:
        """Return whether a plan that was found at another size fits at this one."""
        found = self._store.serving(self.problem(size), self.budget)
        return found is not None and self._fits(found)

    def _fits(self, plan: Plan) -> bool:
        return plan.peak <= self.budget and plan.estimate.overhead <= self.asked.max_overhead

    def _fastest(self) -> AtSize | None:
        rows = [self.row(size) for size in self._plans] if self.model.dimension == BATCH else []
        return max((row for row in rows if row.fits), key=lambda row: row.rate or 0.0, default=None)

    @cached_property
    def _top(self) -> int:
        most = self.model.most
        if self.model.dimension == DEPTH and self._layers:
            few, more = len(self._layers.graph.ops), len(self._layers.deeper.ops)
            most = min(most, SHALLOW[0] + (MOST_OPS - few) // (more - few))
        return most // self.model.unit * self.model.unit

    def _last(self, bytes_at: Callable[[int], int], limit: int) -> int:
        """Return the largest size with at most ``limit`` bytes, which grow with the size; 0 if there is none."""
        unit, top = self.model.unit, self._top
        known, guesses = {n: bytes_at(n) for n in {*self._captured, self.model.size} if n <= top}, 0
        high = min((n for n in known if known[n] > limit), default=top + unit)
        low = max((n for n in known if n < high), default=0)
        while high - low > unit and guesses < GUESSES:
            size = self._next(low, high, known, limit)
            known[size] = bytes_at(size)
            low, high = (size, high) if known[size] <= limit else (low, size)
            guesses += high <= top  # a size that is too large is known
        return self._bisected(low, high, lambda n: bytes_at(n) <= limit)

    def _next(self, low: int, high: int, known: Mapping[int, int], limit: int) -> int:
        """Return the size to try next, where the bytes are expected to reach ``limit``, between ``low``, which fits,
        and ``high``. It is an odd number of units where the bounds allow it, so that tensors whose sizes are rounded
        are noticed. ``known``: bytes by size."""
        unit, power, open_ = self.model.unit, self.model.power, high > self._top
        points = known if len(known) > 1 else {0: self._held, **known}
        a, b = sorted(sorted(points, key=lambda n: abs(points[n] - limit))[:2])
        if points[a] < points[b]:
            # 10 GiB at 4 and 16 GiB at 8, if bytes grow with the size itself: 24 GiB are expected at 13.3.
            slope = (points[b] - points[a]) / (b**power - a**power)
            there = math.pow(max(0, a**power + (limit - points[a]) / slope), 1 / power)
            guess = math.floor(there * (BEYOND if open_ else 1))
        else:  # the bytes may be constant below a size, and grow above it
            guess = 2 * low if open_ else (low + high) // 2
        if low and open_:
            guess = min(guess, math.floor(low * math.pow(GROWTH, 1 / power)))
        return max(low + unit, min(high - unit, (guess // unit | 1) * unit))

    @property
    def _held(self) -> int:
        """The bytes of parameters, the optimizer's state and gradients at the size in question."""
        graph = self.problem(self.model.size)
        kept = (graph.size[name] for name in graph.outputs)
        return sum(kept) + sum(graph.fixed_split.get(kind, 0) for kind in ("parameter", RESERVED))

    def _bisected(self, low: int, high: int, holds: Callable[[int], bool]) -> int:
        """Return the largest size that holds, from ``low``, which does, and below ``high``, which does not."""
        while high - low > self.model.unit:
            size = self._middle(low, high)
            low, high = (size, high) if holds(size) else (low, size)
        return low

    def _middle(self, low: int, high: int) -> int:
        unit = self.model.unit
        return max(low + unit, (low + high) // 2 // unit * unit)


def _with_reserved(graph: TrainingGraph, always: int) -> TrainingGraph:
    tensors = tuple(replace(t, bytes=always) if t.name == RESERVED else t for t in graph.tensors)
    split = {kind: always if kind == RESERVED else n for kind, n in graph.fixed_split.items()}
    return replace(graph, tensors=tensors, fixed_split=split)
