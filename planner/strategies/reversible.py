"""Reversible: keep no tensor that an inverse brings back, as reversible networks do by hand.

Gomez, Ren, Urtasun, Grosse, «The reversible residual network: backpropagation without storing activations», NeurIPS
2017, arXiv:1707.04585, on any graph: which tensors come back from which is found by `rematplan.ir.recoverable`.

The forward half runs once. In the backward half, in the base order, whatever an op reads that is gone comes back just
before: a recoverable tensor by its inverse, what was computed from recoverable tensors on the way by running it again,
all of which its own backward reads too. So each residual function is evaluated twice and differentiated once: 4 units
of its cost instead of 3, not 5. With every block reversible the activations held are those of one block, whatever the
depth. Everything else is kept, stage by stage: an ordinary stage between reversible ones costs what it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rematplan.ir import Op, TrainingGraph, UsageError
from rematplan.ir.recoverable import Recovery, last_forward_read, recoveries
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import without_idle
from rematplan.planner.core.strategy import FamilyStrategy, Progress, silent


@dataclass(frozen=True)
class Reversible(FamilyStrategy):
    """The plan that brings back all it can, and those that bring back the earlier tensors only.

    On a graph without inverses that is the plan that runs every op once. ``shares``: how many plans.
    """

    shares: int = 8

    name: ClassVar[str] = "reversible"
    summary: ClassVar[str] = "keep nothing that an inverse brings back (Gomez et al. 2017)"

    def __post_init__(self) -> None:
        if self.shares < 1:
            raise UsageError(f"{self.name}: shares is {self.shares}; it must be at least 1")

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """One plan a share of the recoverable tensors, from none to all; the earliest made come first."""
        found = recoveries(graph) if graph.has_phases else {}
        order = sorted(found, key=lambda t: graph.producer[t])
        for k in range(self.shares + 1):
            progress(k / (self.shares + 1), f"{len(order)} tensors can be brought back")
            few = {t: found[t] for t in order[: -(-len(order) * k // self.shares)]}
            yield plan_from_runs(graph, _Sequence(graph, few).runs(), self.name)
            if not order:
                return


class _Sequence:
    """The run sequence that brings back some tensors."""

    def __init__(self, graph: TrainingGraph, back: dict[str, Recovery]) -> None:
        self.graph = graph
        self.way: dict[str, tuple[str, Op]] = {}  # what is computed on the way to a target, and how
        for target, recovery in back.items():
            for recipe in recovery.steps[:-1]:
                for t in recipe.writes:
                    self.way.setdefault(t, (target, recipe))
        # What is computed anew anyway needs no inverse of its own.
        self.back = {t: recovery for t, recovery in back.items() if t not in self.way}
        last = last_forward_read(graph)
        # Small tensors that count as held stay held, for they may depend on what they bring back.
        stay = {t for s, r in self.back.items() for t in r.held if last.get(t, -1) <= last[s]}
        self.gone = {*self.back, *self.way}.difference(stay, graph.outputs)
        self.done: list[str] = []

    def runs(self) -> list[str]:
        """Forward ops once, then each backward op with what it needs before it."""
        ops = self.graph.ops
        late = [op for op in ops if op.phase == "backward"]
        self.done = [op.name for op in ops if op.phase != "backward"]
        for op in late:
            self._bring(op.reads)
            self.done.append(op.name)
        # The first block's input comes back for its neighbour's sake, who may have needed only what lay on the way.
        seen, stays = {inverse.name for inverse in self.graph.inverses}, []
        for name in self.done:
            stays.append(name not in seen)  # the first run of an op
            seen.add(name)
        return without_idle(self.graph, self.done, stays)

    def _bring(self, tensors: Sequence[str]) -> None:
        """Append what must run for these to be there (an explicit stack: chains are long)."""
        stack: list[tuple[Op | None, tuple[str, ...]]] = [(None, tuple(tensors))]
        under_way: set[str] = set()
        while stack:
            recipe, wanted = stack[-1]
            missing = next((t for t in wanted if t in self.gone and t not in under_way), None)
            if missing is None:
                stack.pop()
                if recipe is not None:
                    self.done.append(recipe.name)
                    self.gone.difference_update(recipe.writes)
                    under_way.difference_update(recipe.writes)
                continue
            # What is computed on the way to a tensor is wanted when that tensor is: it comes back first, while all
            # of its way is at hand.
            if missing in self.back:
                step = self.back[missing].inverse
            else:
                target, step = self.way[missing]
                if target in self.back and target in self.gone and target not in under_way:
                    step = self.back[target].inverse
            under_way.update(step.writes)
            stack.append((step, step.reads))
