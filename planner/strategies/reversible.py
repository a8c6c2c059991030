"""The strategy `reversible`: free what inverses recover, as reversible networks do (Gomez et al., NeurIPS
2017, arXiv:1707.04585), for any graph.

A recovery recomputes intermediates, which the backward then reads too: a residual function costs 4 forwards
instead of 3, or 5 with a second recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rematplan.ir import Op, TrainingGraph, UsageError
from rematplan.ir.recoverable import Recovery, last_forward_read, recoveries
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.arrays.phases import phase_views
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import without_idle
from rematplan.planner.core.strategy import FamilyStrategy, Progress, silent


@dataclass(frozen=True)
class Reversible(FamilyStrategy):
    """Plans that keep no tensor that inverses (ops that compute an input from an output) can recover, if recovering it
    frees memory, as reversible networks do (Gomez et al. 2017).

    One plan recovers all these tensors, one recovers none, and each of the others recovers those that are written
    first, up to some number. If no tensor can be recovered, the only plan executes every op once.

    Options: ``shares``: the number of plans that recover tensors.
    """

    shares: int = 8

    name: ClassVar[str] = "reversible"
    summary: ClassVar[str] = "keep no tensor that an inverse recovers (Gomez et al. 2017)"

    def __post_init__(self) -> None:
        if self.shares < 1:
            raise UsageError(f"{self.name}: shares is {self.shares}; it must be at least 1")

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield candidate plans: one that recovers nothing, then ``shares`` plans that recover more and more of the
        recoverable tensors, in the order in which they are written, up to all of them. If no tensor can be recovered,
        the first is the only one.

        If the stated phases contradict the graph, this is done for the inferred and for the stated phases
        (`phase_views`).
        """
        for view in phase_views(graph):
            found = recoveries(view) if view.has_phases else {}
            order = sorted(found, key=view.producer.__getitem__)
            for k in range(self.shares + 1):
                progress(k / (self.shares + 1), f"{len(order)} tensors can be recovered")
                few = {t: found[t] for t in order[: -(-len(order) * k // self.shares)]}
                yield plan_from_runs(graph, _Sequence(view, few).runs(), self.name)
                if not order:
                    break


class _Sequence:
    """Builds the runs in which the backward half recovers the tensors ``back``, each by its `Recovery`."""

    def __init__(self, graph: TrainingGraph, back: dict[str, Recovery]) -> None:
        """Find the tensors to recover by themselves (``back``, without those that another recovery computes on the way)
        and those that are freed meanwhile (``gone``)."""
        self.graph = graph
        # For each tensor that a recovery computes on the way: the tensor to recover, and the op.
        self.intermediates: dict[str, tuple[str, Op]] = {}
        for target, recovery in back.items():
            for recipe in recovery.steps[:-1]:
                for t in recipe.writes:
                    self.intermediates.setdefault(t, (target, recipe))
        # A tensor that another recovery computes on the way needs no inverse.
        self.back = {t: recovery for t, recovery in back.items() if t not in self.intermediates}
        last = last_forward_read(graph)
        # Small tensors that recoveries read stay resident, because they may depend on the recovered tensor.
        stay = {t for s, r in self.back.items() for t in r.needed if last.get(t, -1) <= last[s]}
        self.gone = {*self.back, *self.intermediates}.difference(stay, graph.outputs)
        self.done: list[str] = []

    def runs(self) -> list[str]:
        """Return the names of the runs: forward ops, then backward ops, each after the steps that recover
        what it reads.
        """
        halves = list(zip(self.graph.ops, indexed(self.graph).forward, strict=True))
        late = [op for op, forward in halves if not forward]
        self.done = [op.name for op, forward in halves if forward]
        for op in late:
            self._recover(op.reads)
            self.done.append(op.name)
        # A tensor may have been recovered although only intermediates of its recovery were needed.
        seen, stays = {inverse.name for inverse in self.graph.inverses}, []
        for name in self.done:
            stays.append(name not in seen)  # the first run of an op
            seen.add(name)
        return without_idle(self.graph, self.done, stays)

    def _recover(self, tensors: Sequence[str]) -> None:
        """Append the steps that recover those of ``tensors`` that were freed, and what these steps need."""
        # A stack, because the dependencies may be deep.
        stack: list[tuple[Op | None, tuple[str, ...]]] = [(None, tuple(tensors))]
        pending: set[str] = set()
        while stack:
            recipe, wanted = stack[-1]
            missing = next((t for t in wanted if t in self.gone and t not in pending), None)
            if missing is None:
                stack.pop()
                if recipe is not None:
                    self.done.append(recipe.name)
                    self.gone.difference_update(recipe.writes)
                    pending.difference_update(recipe.writes)
                continue
            # If an intermediate of a recovery is needed, the whole recovery runs first, while everything that it
            # reads is still resident.
            if missing in self.back:
                step = self.back[missing].inverse
            else:
                target, step = self.intermediates[missing]
                if target in self.back and target in self.gone and target not in pending:
                    step = self.back[target].inverse
            pending.update(step.writes)
            stack.append((step, step.reads))
