"""What the block strategies share: chains of lower sets in, priced plans out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.forward_graph import ForwardGraph, forward_graph
from rematplan.planner.lowering import lower, partition_of
from rematplan.planner.memo import remember
from rematplan.planner.plan import Plan, plan_from_runs
from rematplan.planner.strategy import FamilyStrategy, Progress, silent

Chain = Sequence[int]
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
        """Every candidate chain, lowered and priced.

        Raises:
            UsageError: the problem has no backward half, so that blocks mean nothing.
        """
        if not graph.has_phases:
            raise UsageError(
                f"{self.name}: no op of problem {graph.name!r} is marked backward, and blocks are chosen "
                f"in the forward half; try --strategy auto"
            )
        view = forward_graph(graph)
        # Where the halves are interleaved, no partition gives the base order back.
        yield plan_from_runs(graph, [op.name for op in graph.ops], self.name)
        seen = set()
        for chain in itertools.chain([(view.everything,)], self.chains(view, progress) if len(view) else ()):
            for lean in (False, True):
                partition = partition_of(graph, view, chain, lean)
                if partition not in seen:
                    seen.add(partition)
                    yield plan_from_runs(graph, lower(graph, partition), self.name, blocks=partition.blocks)

    def curve(
        self, graph: TrainingGraph, budgets: Sequence[int], progress: Progress = silent
    ) -> tuple[Plan, ...]:
        """See `FamilyStrategy.curve`; searched once a graph."""
        return remember(
            graph, (self.name, self), lambda: super(BlockStrategy, self).curve(graph, budgets, progress)
        )
