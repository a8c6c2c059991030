"""What the block strategies share: chains of lower sets in, priced plans out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.forward_graph import ForwardGraph, forward_graph
from rematplan.planner.lowering import Partition, lower, lower_to_positions, partition_of
from rematplan.planner.memo import remember
from rematplan.planner.plan import Plan, plan_from_runs
from rematplan.planner.run_price import price_runs
from rematplan.planner.strategy import Enough, FamilyStrategy, Progress, pareto, silent
from rematplan.planner.turn import with_turn

Chain = tuple[int, ...]
"""L₁ ⊂ … ⊂ L_k = V, as masks of forward nodes."""


@dataclass(frozen=True)
class BlockStrategy(FamilyStrategy):
    """A strategy that chooses chains of lower sets, whatever the budget.

    Each chain is lowered twice, with all tensors of its boundary nodes kept and with only those that pay
    (`partition_of`). The base order itself and the chain of one block, which recompute nothing, are in every
    family. What was worked out for a problem is remembered as long as the problem lives, so that many budgets
    cost one search.
    """

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """The candidate chains; repeats do no harm."""
        raise NotImplementedError

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """The candidate chains, lowered, that no other beats in both peak and cost.

        Raises:
            UsageError: the problem has no backward half, marked or plain to see (`turn`), so that blocks mean nothing.
        """
        graph = with_turn(graph)
        if not graph.has_phases:
            raise UsageError(
                f"{self.name}: no op of problem {graph.name!r} is marked backward, and blocks are chosen "
                f"in the forward half; try --strategy auto"
            )
        # Where the halves are interleaved, no partition gives the base order back.
        yield plan_from_runs(graph, [op.name for op in graph.ops], self.name)
        priced: list[tuple[float, int, Partition]] = []
        ended: Enough | None = None
        try:
            for partition in self._partitions(graph, progress):
                peak, cost = price_runs(graph, lower_to_positions(graph, partition))
                priced.append((cost, peak, partition))
        except Enough as enough:
            ended = enough
        least = math.inf
        front = []
        for _, peak, partition in sorted(priced, key=lambda row: row[:2]):
            if peak < least:
                least = peak
                front.append(partition)
        for at, partition in enumerate(reversed(front)):  # the leanest first: nothing else may fit
            if at:
                progress(1.0, f"plan {at} of {len(front)}")
            yield plan_from_runs(graph, lower(graph, partition), self.name, blocks=partition.blocks)
        if ended:
            raise ended

    def _partitions(self, graph: TrainingGraph, progress: Progress) -> Iterable[Partition]:
        view = forward_graph(graph)
        yield partition_of(graph, (view.everything,))
        seen = set()
        for chain in self.chains(view, progress) if len(view) else ():
            if chain not in seen:
                seen.add(chain)
                full, lean = (partition_of(graph, chain, lean) for lean in (False, True))
                yield full
                if lean.kept != full.kept:
                    yield lean

    def curve(
        self, graph: TrainingGraph, budgets: Sequence[int], progress: Progress = silent
    ) -> tuple[Plan, ...]:
        """See `FamilyStrategy.curve`; searched once a graph, unless it is told that it is enough."""
        del budgets
        found: list[Plan] = []

        def search() -> tuple[Plan, ...]:
            for plan in self.family(graph, progress):
                found.append(plan)
            return pareto(found)

        try:
            return remember(graph, (self.name, self), search)
        except Enough:
            return pareto(found)
