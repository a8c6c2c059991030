"""Nested block plans: an interval of blocks is split at one boundary that is held, and both sides are split again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.arrays.csr import Ints
from rematplan.planner.blocks.block_chain import BlockChain, block_chain, narrow_places
from rematplan.planner.blocks.forward_graph import forward_graph
from rematplan.planner.blocks.interval_dp import Intervals, Table, in_units, intervals, solve
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.schedule import without_idle
from rematplan.planner.core.strategy import Progress
from rematplan.planner.strategies.block_strategy import Candidate, CandidateStrategy

BLOCKS = 1000
"""The largest number of blocks of a chain."""
PLACES = (BLOCKS, 40)
"""In front of how many blocks long passes may end: of all, or of so many if all need more than ``WORK``. Fewer cost
little overhead."""
WORK = 5e8
SCALES = (64, 16, 4, 1)
"""Each table covers this fraction of the bytes, so that small memories are resolved in small units."""
SLACK = 1.3
"""The factor by which a plan's peak may be below what the table assumes."""
LONGEST = 20
"""The largest number of runs of a plan, per op."""


@dataclass(frozen=True)
class NestedDP(CandidateStrategy):
    """Plans for scarce memory in which blocks of the forward run as often as needed: an interval of blocks is split
    at a boundary that is kept, and both parts are split again (Beaumont et al. 2019, for any graph).

    In deep networks its smallest peak is far below the smallest peak of plans that run each block at most twice.

    Options: ``units``: how many units of memory a table distinguishes. ``plans``: the number of plans for each
    table. ``near``: a budget in bytes; only the table with the finest units that covers it is used. 0: all tables
    are used.
    """

    name: ClassVar[str] = "nested_dp"
    summary: ClassVar[str] = "nested blocks, run as often as it takes (Beaumont et al. 2019, any graph)"

    units: int = 800
    plans: int = 40
    near: int = 0

    def __post_init__(self) -> None:
        for option, least in (("units", 1), ("plans", 1), ("near", 0)):
            if getattr(self, option) < least:
                value = getattr(self, option)
                raise UsageError(f"{self.name}: {option} is {value}; it must be at least {least}")

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterator[Candidate]:
        """Yield candidate sequences of runs for a problem with phases; none if no op belongs to the forward half."""
        if not len(forward_graph(graph)):
            return
        chain, alike = cached_on(graph, ("block chain", self.units), lambda: self._chain(graph))
        most = math.fsum(
            (*chain.saved, *chain.left, chain.stage.max(), chain.saving.max(), chain.passing.max())
        )
        for at, scale in enumerate(SCALES):
            if self.near and scale > 1 and most / scale < SLACK * (self.near - graph.input_bytes):
                continue
            text = f"{len(chain)} blocks, table {at + 1} of {len(SCALES)}"
            progress(at / len(SCALES), text)
            table = solve(in_units(chain, most / scale, self.units), alike)
            for k, m in enumerate(rooms := self._rooms(table)):
                progress((at + k / len(rooms)) / len(SCALES), text)
                steps = table.steps(m, LONGEST * len(chain))
                if len(steps):
                    yield Candidate(_runs(graph, chain, steps))
            if self.near and rooms:
                return

    def _chain(self, graph: TrainingGraph) -> tuple[BlockChain, Intervals]:
        chain = block_chain(graph, BLOCKS)
        for most in PLACES:
            alike = intervals(chain, narrow_places(chain, most))
            if alike.splits * self.units <= WORK:
                break
        return chain, alike

    def _rooms(self, table: Table) -> list[int]:
        """Return numbers of units, spread evenly over those at which the recomputation cost decreases."""
        costs = table.whole
        falls = np.flatnonzero(costs < np.concatenate([[np.inf], costs[:-1]]))
        picks = np.linspace(0, len(falls) - 1, min(self.plans, len(falls)))
        return [int(falls[round(p)]) for p in picks]


def _runs(graph: TrainingGraph, chain: BlockChain, steps: Ints) -> Ints:
    groups = [np.array(ops, dtype=np.int64) for ops in (*chain.forward, *reversed(chain.backward))]
    runs = np.concatenate([groups[step] for step in steps])  # stage k is -1 - k, from the end
    names, stays, seen, once = list[str](), list[bool](), set[str](), set(graph.never_rerun)
    for name in (graph.ops[at].name for at in runs):
        if name not in seen or name not in once:
            names.append(name)
            stays.append(name not in seen)
            seen.add(name)
    position = {op.name: at for at, op in enumerate(graph.ops)}
    return np.array([position[name] for name in without_idle(graph, names, stays)], dtype=np.int64)
