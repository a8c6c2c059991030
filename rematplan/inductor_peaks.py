"""Plans whose budget holds for the code that Inductor makes of them: its peak is counted, and planned again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx

from rematplan.ir import InfeasibleBudget, TrainingGraph, show_bytes
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run
from rematplan.planner.core.simulator import resident_bytes
from rematplan.plans.planner import Planner
from rematplan.runtime.fuse.fusible_ops import is_fusible
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import (
    OrderedSet,
    functorch_config,
    inductor_config,
    inductor_graph,
    inductor_memory,
)
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.problem.loss_boundary import LOSS, LOSS_VALUE

COMPILATIONS = 4
"""A graph is compiled at most this many times, and once more if an earlier plan was the best."""
NEAR = 0.97
"""Code that needs this share of its budget is not compiled again to recompute less."""

T = TypeVar("T")
LibraryCall: TypeAlias = tuple[str, tuple[tuple[int, ...], ...]]
"""An op, and the shapes of its results."""
MakePlan: TypeAlias = Callable[[Planner, CapturedStep], Plan]


class CodePeaks:
    """The peaks of the code that Inductor makes of a graph's forward and backward, in bytes, as its scheduler counts.

    They hold a half's own buffers, its results, and in the backward what the forward saved.
    """

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self.workspaces: Mapping[LibraryCall, int] = {}
        """The temporary bytes of library calls."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the peaks of the code that is compiled in the context, which compiles the backward at once, too."""
        # A pass without a key for Inductor's cache: code from there would not be counted.
        with (
            inductor_config.patch(_post_fusion_custom_pass=self._ordered),
            functorch_config.patch(force_non_lazy_backward_lowering=True),
        ):
            yield

    def _ordered(self, kernels: list[Any]) -> list[Any]:
        """Order the kernels of a half as Inductor does after this pass, and count its peak."""
        if not kernels:
            return kernels
        half, scheduler = inductor_graph.graph, kernels[0].scheduler
        results = OrderedSet(half.get_output_names())
        given = OrderedSet(half.graph_inputs)
        named = scheduler.name_to_buf, scheduler.name_to_fused_node
        order: list[Any] = inductor_memory.reorder_for_peak_memory(kernels, *named, given, results)
        _, saved = inductor_memory.prepare_planning_info(order, *named, given, results)
        saved = {name: one for name, one in saved.items() if not name.startswith("tangents")}
        _, held = inductor_memory.estimate_peak_memory(order, saved, results)
        peaks = (at + self._workspace(kernel) for at, kernel in zip(held, order, strict=False))
        if half.is_backward:
            self.backward = max(self.backward, *peaks)
        else:
            self.forward = max(self.forward, *peaks)
        return order

    def _workspace(self, kernel: Any) -> int:
        """Return the temporary bytes of a kernel. An unknown library call counts as the largest known one."""
        if not kernel.is_extern():
            return 0
        nodes = [node for one in kernel.get_nodes() for node in one.node.origins]
        known = [self.workspaces[kind] for kind in map(_kind_of_node, nodes) if kind in self.workspaces]
        return max(known or self.workspaces.values(), default=0)


def _kind_of_node(node: fx.Node) -> LibraryCall:
    return _kind(node.target, node.meta.get("val"))


def _kind(target: object, results: object) -> LibraryCall:
    """Return the op of a call, and the shapes of its results."""
    several = results if isinstance(results, tuple | list) else (results,)
    return str(target), tuple(tuple(map(int, one.shape)) for one in several if isinstance(one, torch.Tensor))


def _workspaces(step: CapturedStep, graph: TrainingGraph) -> dict[LibraryCall, int]:
    """Return the temporary bytes of a step's calls of libraries, which Inductor does not fuse, by their op and the
    shapes of their results."""
    found: dict[LibraryCall, int] = {}
    for call in step.calls:
        if call.name in graph.op and not is_fusible(step, call):
            kind = _kind(call.target, tuple(step.values[r].fake for r in call.made))
            found[kind] = max(found.get(kind, 0), graph.op[call.name].workspace)
    return found


@dataclass(frozen=True)
class _Attempt:
    budget: int
    """The bytes within which the plan was made; if its code does not fit, the plan's own peak."""
    plan: Plan
    peak: int
    """The peak of the plan's compiled code, in bytes."""


class InductorPlans:
    """Plans of one graph, each within other bytes, until the code that Inductor makes of one fits the budget.

    ``make``: plans a step as a planner's options say.
    """

    def __init__(self, make: MakePlan) -> None:
        self.make = make
        self.attempts: list[_Attempt] = []
        self.chosen: Plan | None = None
        """The best of the compiled plans, to be compiled at last."""
        self.limit: int | None = None
        """The budget in bytes; None if it depends on the smallest peak found, or if nothing was planned."""

    def plan(self, planner: Planner, step: CapturedStep) -> Plan:
        """Return the plan to compile next: at first the planner's, then a further one that was not compiled yet. If
        there is none, set `chosen` to the best plan so far; once that is set, return it."""
        self.step, self.graph = step, planner.problem(step)
        self.peaks.workspaces = _workspaces(step, self.graph)
        if not self.attempts:
            stated = planner.limit(self.graph)
            self.limit = None if stated.is_lean else stated.of(self.graph)
            self.budget, self.last = self.limit or 0, self.make(planner, step)
        elif self.chosen is None and not self._another(planner):
            self.chosen = self._best().plan
        return self.chosen or self.last

    def compiled(self, compile_with: Callable[[MakePlan], T]) -> T:
        """Compile, at most `COMPILATIONS` times and once more, until the code fits the budget and uses `NEAR` of it or
        recomputes nothing. Return the best result of ``compile_with``; warn if no code fits. Without a backward or a
        budget in bytes, compile once."""
        for _ in range(COMPILATIONS):
            self.peaks = peaks = CodePeaks()
            with peaks.counting():
                run = compile_with(self.plan)
            if self.limit is None or not peaks.backward:
                return run
            if self.chosen:
                break
            peak = code_peak(self.step, self.graph, self.last, peaks)
            self.attempts.append(self._attempt(self.budget, self.last, peak))
            if peak <= self.limit and (peak >= NEAR * self.limit or not self.last.estimate.reruns):
                return run
        best = self._best()
        assert self.limit is not None
        if best.peak > self.limit:
            warn(
                f"rematplan: Inductor's code for {self.step.name} takes {show_bytes(best.peak)} by its own count, "
                f"more than the budget of {show_bytes(self.limit)}, with every plan that was tried. State a larger "
                f"budget, or use compiler='eager', whose peak is the plan's"
            )
        if self.chosen or best.plan is self.last:
            return run
        self.chosen = best.plan
        return compile_with(self.plan)

    def _another(self, planner: Planner) -> bool:
        """Find a plan that was not compiled yet, and set ``budget`` and ``last``. Return whether there is one."""
        for _ in range(COMPILATIONS):
            self.budget = self._next_budget()
            try:
                plan = planner.within(self.budget).planned(self.step)
            except InfeasibleBudget:
                return False
            same = [one for one in self.attempts if one.plan.schedule == plan.schedule]
            if not same:
                self.last = plan
                return True
            self.attempts.append(self._attempt(self.budget, same[0].plan, same[0].peak))
        return False

    def _attempt(self, budget: int, plan: Plan, peak: int) -> _Attempt:
        return _Attempt(budget if peak <= (self.limit or 0) else plan.peak, plan, peak)

    def _best(self) -> _Attempt:
        limit = self.limit or 0
        return min(self.attempts, key=lambda one: (max(one.peak - limit, 0), one.plan.estimate.cost))

    def _next_budget(self) -> int:
        """Return the bytes for the next plan: in proportion to what the last code took, and between those of attempts
        that fit and those that do not."""
        limit, fixed, last = self.limit or 0, self.graph.input_bytes, self.attempts[-1]
        low = max((one.budget for one in self.attempts if one.peak <= limit), default=0)
        high = min((one.budget for one in self.attempts if one.peak > limit), default=None)
        wanted = fixed + (last.budget - fixed) * (limit - fixed) // max(last.peak - fixed, 1)
        if not low < wanted < (high or wanted + 1):
            wanted = (low + (high or 2 * low)) // 2
        return max(wanted, 1)


def code_peak(step: CapturedStep, graph: TrainingGraph, plan: Plan, peaks: CodePeaks) -> int:
    """Return the peak in bytes of a step whose halves Inductor compiled, with all that the problem holds in addition to
    the halves' buffers."""
    outputs = step.returned("output")
    held = sum(step.storage_bytes[one] for one in outputs) + graph.size.get(LOSS_VALUE, 0)
    series = resident_bytes(graph, plan.schedule)
    loss = max((at for run, at in zip(plan.schedule, series, strict=True) if run == Run(LOSS)), default=0)
    return max(loss, graph.input_bytes + peaks.forward, graph.input_bytes + held + peaks.backward)
