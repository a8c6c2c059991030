"""Nested block plans: of an interval of blocks, one boundary is held, and either side is an interval again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.block_chain import BlockChain, block_chain, narrow_places
from rematplan.planner.forward_graph import forward_graph
from rematplan.planner.lowering import kept_always
from rematplan.planner.nested_dp import Intervals, Table, in_units, intervals, solve
from rematplan.planner.strategies.candidates import Candidate, CandidateStrategy
from rematplan.planner.strategy import Progress
from rematplan.planner.traffic import Ints, traffic_of
from rematplan.planner.useful_runs import useful_runs

BLOCKS = 1000
"""The most of a chain."""
PLACES = (1000, 250, 60, 30)
"""For long passes to end at most; the first number that asks for no more than ``WORK`` is taken, or else the last."""
WORK = 5e8
SCALES = 4
"""Tables, each over a quarter of the bytes of the one before: little memory is told in small units."""
LONGEST = 20
"""The most runs of a plan for each op."""


@dataclass(frozen=True)
class NestedDP(CandidateStrategy):
    """Where memory is so scarce that a block must run more than twice: what `planner.nested_dp` finds, in the base
    order of the forward half. In deep networks its least peak is far below any that block partitions have.

    ``units``: of memory in a table. ``plans``: how many are made of each of its tables.
    """

    name: ClassVar[str] = "nested_dp"
    summary: ClassVar[str] = "nested blocks, run as often as it takes (Beaumont et al. 2019, any graph)"

    units: int = 800
    plans: int = 40

    def __post_init__(self) -> None:
        for option in ("units", "plans"):
            if getattr(self, option) < 1:
                raise UsageError(f"{self.name}: {option} is {getattr(self, option)}; it must be at least 1")

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterator[Candidate]:
        """See `CandidateStrategy.candidates`."""
        if not len(forward_graph(graph)):
            return
        chain = block_chain(graph, BLOCKS)
        alike = self._intervals(chain)
        room = math.fsum(
            (*chain.saved, *chain.left, chain.stage.max(), chain.saving.max(), chain.passing.max())
        )
        for scale in range(SCALES):
            text = f"{len(chain)} blocks, table {scale + 1} of {SCALES}"
            progress(scale / SCALES, text)
            table = solve(in_units(chain, room / 4**scale, self.units), alike)
            for at, m in enumerate(rooms := self._rooms(table)):
                progress((scale + at / len(rooms)) / SCALES, text)
                steps = table.steps(m, LONGEST * len(chain))
                if len(steps):
                    yield Candidate(_runs(graph, chain, steps))
            if not rooms or rooms[0] > self.units // 4:
                return

    def _intervals(self, chain: BlockChain) -> Intervals:
        for most in PLACES:
            alike = intervals(chain, narrow_places(chain, most))
            if alike.splits * self.units <= WORK:
                break
        return alike

    def _rooms(self, table: Table) -> list[int]:
        """Numbers of units from the least that is enough on, at which what runs again gets less, spread evenly."""
        costs = table.whole
        falls = np.flatnonzero(costs < np.concatenate([[np.inf], costs[:-1]]))
        picks = np.linspace(0, len(falls) - 1, min(self.plans, len(falls)))
        return [int(falls[round(p)]) for p in picks]


def _runs(graph: TrainingGraph, chain: BlockChain, steps: Ints) -> Ints:
    groups = [np.array(ops, dtype=np.int64) for ops in (*chain.forward, *reversed(chain.backward))]
    runs = np.concatenate([groups[step] for step in steps])  # stage k is -1 - k, from the end
    return useful_runs(traffic_of(graph), runs, kept_always(graph))
