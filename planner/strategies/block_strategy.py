"""What the strategies that partition the forward half share: chains of lower sets in, priced plans out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.arrays.csr import Ints
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.blocks.forward_graph import ForwardGraph, forward_graph
from rematplan.planner.blocks.lowering import Partition, lower_to_positions, partition_of
from rematplan.planner.blocks.price_runs import price_runs
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.strategy import Enough, FamilyStrategy, Progress, silent, undominated

Chain = tuple[int, ...]
"""L₁ ⊂ … ⊂ L_k = V, as masks of forward nodes."""


class Candidate(NamedTuple):
    """A run sequence by base positions, and the blocks that it came from, if it is of one partition."""

    runs: Ints
    blocks: tuple[tuple[str, ...], ...] | None = None


class _Priced(NamedTuple):
    cost: float
    peak: int
    candidate: Candidate


@dataclass(frozen=True)
class CandidateStrategy(FamilyStrategy):
    """What was worked out for a problem is remembered as long as the problem lives, so that many budgets cost one
    search. The base order itself is in every family."""

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterable[Candidate]:
        """Sequences for a problem with phases; repeats do no harm."""
        raise NotImplementedError

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """The candidates that no other beats in both peak and cost.

        Raises:
            UsageError: the problem has no backward half, marked or plain to see (`turn`), so that blocks mean nothing.
        """
        front = self._front(graph, progress)
        with suppress(Enough):
            for at, priced in enumerate(reversed(front), 1):  # the leanest first: nothing else may fit
                yield self._plan(graph, priced)
                progress(1.0, f"plan {at} of {len(front)}")

    def around(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> tuple[Plan, ...]:
        """See `FamilyStrategy.around`; makes no plans but these."""
        front = self._front(graph, progress)
        fitting = [priced for priced in front if priced.peak <= budget]
        picks = {priced.peak: priced for priced in (*fitting[:1], front[-1])}
        return tuple(self._plan(graph, priced) for priced in picks.values())

    def _front(self, graph: TrainingGraph, progress: Progress) -> list[_Priced]:
        """By rising cost. After `Enough` what was found until then, which is not remembered."""
        graph = infer_phases(graph)
        if not graph.has_phases:
            raise UsageError(
                f"{self.name}: no op of problem {graph.name!r} is marked backward, and blocks are chosen "
                f"in the forward half; try --strategy auto"
            )
        front: list[_Priced] = []

        def search() -> list[_Priced]:
            # Where the halves are interleaved, no candidate gives the base order back.
            base = Candidate(np.arange(len(graph.ops)))
            for candidate in chain([base], self.candidates(graph, progress)):
                peak, cost = price_runs(graph, candidate.runs)
                front[:] = undominated(
                    [*front, _Priced(cost, peak, candidate)], lambda row: (row.cost, row.peak)
                )
            return front

        try:
            return cached_on(graph, (self.name, self, "front"), search)
        except Enough:
            return front

    def _plan(self, graph: TrainingGraph, priced: _Priced) -> Plan:
        runs, blocks = priced.candidate
        return plan_from_runs(graph, [graph.ops[o].name for o in runs], self.name, blocks=blocks)


@dataclass(frozen=True)
class BlockStrategy(CandidateStrategy):
    """A strategy that chooses chains of lower sets, whatever the budget.

    Each chain is lowered twice, with all tensors of its boundary nodes kept and with only those that pay
    (`partition_of`). The chain of one block, which recomputes nothing, is in every family.
    """

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """The candidate chains; repeats do no harm."""
        raise NotImplementedError

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterable[Candidate]:
        """See `CandidateStrategy.candidates`."""
        for partition in self._partitions(graph, progress):
            yield Candidate(lower_to_positions(graph, partition), partition.blocks)

    def _partitions(self, graph: TrainingGraph, progress: Progress) -> Iterable[Partition]:
        view = forward_graph(graph)
        yield partition_of(graph, (view.everything,))
        seen = set()
        for lower_sets in self.chains(view, progress) if len(view) else ():
            if lower_sets not in seen:
                seen.add(lower_sets)
                full, lean = (partition_of(graph, lower_sets, lean) for lean in (False, True))
                yield full
                if lean.kept != full.kept:
                    yield lean
