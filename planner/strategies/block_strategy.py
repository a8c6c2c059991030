"""Base classes of the strategies that divide the forward half into blocks and simulate the candidates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from rematplan.ir import LatticeTooLarge, TrainingGraph, UsageError
from rematplan.planner.arrays.phases import phase_views
from rematplan.planner.blocks.evaluate_runs import evaluate_runs
from rematplan.planner.blocks.forward_graph import ForwardGraph, forward_graph
from rematplan.planner.blocks.lowering import Partition, lower_to_positions, partition_of
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.array_types import Ints
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.strategy import Enough, FamilyStrategy, Progress, silent, undominated

Chain = tuple[int, ...]
"""An increasing sequence L₁ ⊂ … ⊂ L_k = V of lower sets of the forward graph, each as a bit mask of nodes. V is the set
of all nodes."""


class Candidate(NamedTuple):
    """A candidate plan: ``runs`` are positions in ``graph.ops``, ``blocks`` the op names of each block or None."""

    runs: Ints
    blocks: tuple[tuple[str, ...], ...] | None = None


class _Priced(NamedTuple):
    """A candidate plan with its simulated cost and its simulated peak in bytes."""

    cost: float
    peak: int
    candidate: Candidate


@dataclass(frozen=True)
class CandidateStrategy(FamilyStrategy):
    """Base class of strategies that compare candidates that do not depend on the budget. The problem's order is always
    a candidate; those on the Pareto front are cached on the problem."""

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterable[Candidate]:
        """Yield candidate plans for a problem whose ops are marked as forward or backward. The same plan may be yielded
        several times."""
        raise NotImplementedError

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield the candidates on the Pareto front as plans, by rising peak, until ``progress`` raises `Enough`."""
        front = self._front(graph, progress)
        with suppress(Enough):
            # The smallest peak first, because the others may not fit.
            for at, priced in enumerate(reversed(front), 1):
                yield self._plan(graph, priced)
                progress(1.0, f"plan {at} of {len(front)}")

    def around(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> tuple[Plan, ...]:
        """Return the cheapest candidate within ``budget`` bytes, then the one with the smallest peak; one plan if they
        are the same or none fits. Once ``progress`` raises `Enough`, these are chosen from the candidates so far."""
        front = self._front(graph, progress)
        fitting = [priced for priced in front if priced.peak <= budget]
        picks = {priced.peak: priced for priced in (*fitting[:1], front[-1])}
        return tuple(self._plan(graph, priced) for priced in picks.values())

    def _front(self, graph: TrainingGraph, progress: Progress) -> list[_Priced]:
        """Return the candidates on the Pareto front by rising cost: those so far if ``progress`` raises `Enough`, else
        all, which are then cached. `UsageError` if no op is marked or inferred as backward; `LatticeTooLarge` as in
        `_of_all`."""
        views = phase_views(graph)
        if not views[0].has_phases:
            raise UsageError(
                f"{self.name}: no op of problem {graph.name!r} is marked backward, and blocks are chosen "
                f"in the forward half; try --strategy auto"
            )
        front: list[_Priced] = []

        def search() -> list[_Priced]:
            # If forward and backward ops are interleaved, no division into blocks gives the problem's order.
            base = Candidate(np.arange(len(graph.ops)))
            for candidate in chain([base], self._of_all(views, progress)):
                peak, cost = evaluate_runs(graph, candidate.runs)
                front[:] = undominated(
                    [*front, _Priced(cost, peak, candidate)], lambda row: (row.cost, row.peak)
                )
            return front

        try:
            return cached_on(graph, (self.name, self, "front"), search)
        except Enough:
            return front

    def _of_all(self, views: Sequence[TrainingGraph], progress: Progress) -> Iterator[Candidate]:
        """Yield the candidates of each phase view (`phase_views`). If a view has too many lower sets, the first raises
        `LatticeTooLarge`, and later ones are skipped."""
        first, *others = views
        yield from self.candidates(first, progress)
        for view in others:
            with suppress(LatticeTooLarge):
                yield from self.candidates(view, progress)

    def _plan(self, graph: TrainingGraph, priced: _Priced) -> Plan:
        runs, blocks = priced.candidate
        return plan_from_runs(graph, [graph.ops[o].name for o in runs], self.name, blocks=blocks)


@dataclass(frozen=True)
class BlockStrategy(CandidateStrategy):
    """Base class of strategies that divide the forward half by chains of lower sets, whatever the budget. The
    undivided forward is always a candidate.
    """

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Yield chains of lower sets of the forward graph ``view``; each chain divides the forward into blocks. The
        same chain may be yielded several times."""
        raise NotImplementedError

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterable[Candidate]:
        """Yield the candidate plans of all chains of lower sets, each with the blocks into which it divides the
        forward."""
        for partition in self._partitions(graph, progress):
            yield Candidate(lower_to_positions(graph, partition), partition.blocks)

    def _partitions(self, graph: TrainingGraph, progress: Progress) -> Iterable[Partition]:
        """Yield the undivided forward, then each chain's partition, and its lean one (`partition_of`) if that keeps
        other tensors. Equal chains count once."""
        view = forward_graph(graph)
        yield partition_of(graph, (view.everything,))
        seen = set()
        for lower_sets in self.chains(view, progress) if len(view) else ():
            if lower_sets not in seen:
                seen.add(lower_sets)
                # All tensors of boundary nodes that are read outside of their node, or without large ones
                # that no later block reads.
                full, lean = (partition_of(graph, lower_sets, lean) for lean in (False, True))
                yield full
                if lean.kept != full.kept:
                    yield lean
