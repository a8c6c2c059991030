"""Reversible: keep no tensor that an inverse recovers, as reversible networks do by hand.

Gomez, Ren, Urtasun, Grosse, «The reversible residual network: backpropagation without storing activations», NeurIPS
2017, arXiv:1707.04585, on any graph: `rematplan.ir.recoverable` finds which tensors are recovered from which.

The forward half runs once. The backward half runs in the base order. Just before an op reads a tensor that is gone,
the tensor is recovered by its inverse; tensors that were computed from recoverable ones on the way are computed
again, and their own backward ops read them too. So each residual function is evaluated twice and differentiated
once: 4 units of its cost instead of 3, and not 5. If every block is reversible, the activations held are those of
one block at any depth. Everything else is kept: an ordinary stage between reversible ones holds what it always
does.
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
    """Plans that keep no tensor that an inverse can recover, as reversible networks do (Gomez et al. 2017). One plan
    recovers all such tensors; the other plans recover only a part of them, the tensors written first.

    Without inverses the only plan runs every op once. Options: ``shares``: the number of plans that recover tensors.
    """

    shares: int = 8

    name: ClassVar[str] = "reversible"
    summary: ClassVar[str] = "keep no tensor that an inverse recovers (Gomez et al. 2017)"

    def __post_init__(self) -> None:
        if self.shares < 1:
            raise UsageError(f"{self.name}: shares is {self.shares}; it must be at least 1")

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield the plan that recovers nothing, then one for each of ``shares`` steps up to all recoverable tensors,
        the earliest-written tensors first; so for each of the problem's `phase_views`."""
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
    """The sequence of runs that recovers some tensors."""

    def __init__(self, graph: TrainingGraph, back: dict[str, Recovery]) -> None:
        self.graph = graph
        # By tensor that a recovery computes as an intermediate: the recovered tensor, and the op.
        self.intermediates: dict[str, tuple[str, Op]] = {}
        for target, recovery in back.items():
            for recipe in recovery.steps[:-1]:
                for t in recipe.writes:
                    self.intermediates.setdefault(t, (target, recipe))
        # What a recovery recomputes anyway needs no inverse.
        self.back = {t: recovery for t, recovery in back.items() if t not in self.intermediates}
        last = last_forward_read(graph)
        # Small tensors that recoveries read stay resident, because they may depend on the recovered tensor.
        stay = {t for s, r in self.back.items() for t in r.needed if last.get(t, -1) <= last[s]}
        self.gone = {*self.back, *self.intermediates}.difference(stay, graph.outputs)
        self.done: list[str] = []

    def runs(self) -> list[str]:
        """Return the runs: each forward op once, then each backward op, preceded by what makes its reads resident."""
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
        """Append the runs that make ``tensors`` resident. An explicit stack is used, because chains are long."""
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
