"""What the strategies that partition the forward half share: chains of lower sets in, priced plans out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.forward_graph import ForwardGraph, forward_graph
from rematplan.planner.lowering import Partition, lower_to_positions, partition_of
from rematplan.planner.strategies.candidates import Candidate, CandidateStrategy
from rematplan.planner.strategy import Progress

Chain = tuple[int, ...]
"""L₁ ⊂ … ⊂ L_k = V, as masks of forward nodes."""


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
        for chain in self.chains(view, progress) if len(view) else ():
            if chain not in seen:
                seen.add(chain)
                full, lean = (partition_of(graph, chain, lean) for lean in (False, True))
                yield full
                if lean.kept != full.kept:
                    yield lean
