"""Base classes of the strategies that partition the forward half: from chains of lower sets to plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from rematplan.ir import LatticeTooLarge, TrainingGraph, UsageError
from rematplan.planner.arrays.csr import Ints
from rematplan.planner.arrays.phases import phase_views
from rematplan.planner.blocks.evaluate_runs import evaluate_runs
from rematplan.planner.blocks.forward_graph import ForwardGraph, forward_graph
from rematplan.planner.blocks.lowering import Partition, lower_to_positions, partition_of
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.strategy import Enough, FamilyStrategy, Progress, silent, undominated

Chain = tuple[int, ...]
"""A chain of lower sets L₁ ⊂ … ⊂ L_k = V of the forward graph, as bit masks of its nodes."""


class Candidate(NamedTuple):
    """A sequence of runs, as positions in ``graph.ops``. ``blocks``: the names of the ops of each block, if the runs
    come from a partition of the forward into blocks; else None."""

    runs: Ints
    blocks: tuple[tuple[str, ...], ...] | None = None


class _Priced(NamedTuple):
    cost: float
    peak: int
    candidate: Candidate


@dataclass(frozen=True)
class CandidateStrategy(FamilyStrategy):
    """Base class of strategies that compare candidate sequences of runs that do not depend on the budget.

    The candidates of a problem are cached with it, so a second budget costs no second search. The order of
    ``graph.ops`` (no recomputation) is always a candidate.
    """

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterable[Candidate]:
        """Yield candidate sequences of runs for a problem with phases. The same sequence may be yielded several
        times."""
        raise NotImplementedError

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield as plans the candidates that no other candidate beats or equals in both peak and cost, by rising
        peak.

        Raises:
            UsageError: the problem has no backward half, neither marked nor recognisable (`phase_views`), so blocks
                are undefined.
        """
        front = self._front(graph, progress)
        with suppress(Enough):
            for at, priced in enumerate(
                reversed(front), 1
            ):  # the leanest first, because the others may not fit
                yield self._plan(graph, priced)
                progress(1.0, f"plan {at} of {len(front)}")

    def around(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> tuple[Plan, ...]:
        """Return the cheapest candidate within ``budget`` bytes, then the candidate with the smallest peak, as
        plans.

        The tuple has one plan if both are the same, or if no candidate fits: then it is the one with the smallest
        peak.

        Raises:
            UsageError: the problem has no backward half.
        """
        front = self._front(graph, progress)
        fitting = [priced for priced in front if priced.peak <= budget]
        picks = {priced.peak: priced for priced in (*fitting[:1], front[-1])}
        return tuple(self._plan(graph, priced) for priced in picks.values())

    def _front(self, graph: TrainingGraph, progress: Progress) -> list[_Priced]:
        """Return the undominated candidates by increasing cost. If `Enough` is raised, these are those found so far,
        and they are not cached."""
        views = phase_views(graph)
        if not views[0].has_phases:
            raise UsageError(
                f"{self.name}: no op of problem {graph.name!r} is marked backward, and blocks are chosen "
                f"in the forward half; try --strategy auto"
            )
        front: list[_Priced] = []

        def search() -> list[_Priced]:
            # If the halves are interleaved, no partition is lowered to the base order.
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
        """Yield the candidates of each view of a problem. Only the first may be refused as too large."""
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
    """Base class of strategies that divide the forward into blocks by chains of lower sets, independent of the
    budget.

    Each chain becomes two candidates: with all tensors of its boundary nodes kept, and with large ones left out that
    only the backward reads (``lean`` of `partition_of`). The chain of one block, which recomputes nothing, is always
    a candidate.
    """

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Yield candidate chains of lower sets. The same chain may be yielded several times."""
        raise NotImplementedError

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterable[Candidate]:
        """Yield the sequences of runs of all chains of lower sets, each with its blocks."""
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
