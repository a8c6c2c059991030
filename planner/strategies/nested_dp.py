"""The strategy `nested_dp`: blocks that run as often as needed, by splitting ranges of blocks again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.blocks.block_chain import BlockChain, block_chain, narrow_places
from rematplan.planner.blocks.forward_graph import forward_graph
from rematplan.planner.blocks.interval_dp import Intervals, Table, in_units, intervals, solve
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.array_types import Ints
from rematplan.planner.core.schedule import without_idle
from rematplan.planner.core.strategy import Progress
from rematplan.planner.strategies.block_strategy import Candidate, CandidateStrategy

BLOCKS = 1000
"""The largest number of blocks into which the forward half is divided."""
PLACES = (BLOCKS, 40)
"""A range of more than a few blocks can be split only in front of some blocks. These are all blocks or, if that takes
more than ``WORK``, the second number of blocks. Fewer split points increase the overhead only a little."""
WORK = 5e8
"""The largest number of splits of all ranges, times memory units, for which all split points are tried."""
SCALES = (64, 16, 4, 1)
"""Each table of the dynamic program covers the bytes that the whole forward needs, divided by one of these numbers. The
smaller the range, the finer its units of memory."""
SLACK = 1.3
"""A plan's simulated peak may be smaller than its table assumes, by up to about this factor."""
LONGEST = 20
"""The largest number of steps of a plan, per block of the chain. Longer plans are discarded."""


@dataclass(frozen=True)
class NestedDP(CandidateStrategy):
    """Plans for little memory, in which blocks of the forward run as often as needed (Beaumont et al. 2019, here for
    any graph). A range of blocks is split at a boundary between two blocks; the tensors that later blocks read across
    the boundary stay resident. Then both halves are split again.

    In deep networks the smallest peak of these plans is far below that of plans that run each block at most twice.

    The dynamic program is solved several times, with memory units of different sizes in bytes. Each solution is a
    table: the least cost within each number of units.

    Options: ``units``: the number of memory units in each table. ``plans``: the largest number of plans taken from each
    table. ``near``: a budget in bytes, or 0. With a budget, plans are taken from one table only: the one with the
    smallest units that reaches this budget and has plans. With 0, they are taken from all tables.
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
        """Yield candidate plans, of each table those with small peaks first; with ``near``, of one table only. The ops
        must be marked as forward or backward; none is yielded if no op belongs to the forward half."""
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
            for k, m in enumerate(rooms := self._rooms(table), 1):  # the smallest peak first
                steps = table.steps(m, LONGEST * len(chain))
                if len(steps):
                    yield Candidate(_runs(graph, chain, steps))
                    progress((at + k / len(rooms)) / len(SCALES), text)
            if self.near and rooms:
                return

    def _chain(self, graph: TrainingGraph) -> tuple[BlockChain, Intervals]:
        """Return the forward half as a chain of blocks, with the ranges of blocks that the dynamic program visits."""
        chain = block_chain(graph, BLOCKS)
        for most in PLACES:
            alike = intervals(chain, narrow_places(chain, most))
            if alike.splits * self.units <= WORK:
                break
        return chain, alike

    def _rooms(self, table: Table) -> list[int]:
        """Return the memory limits, in units, for which plans are taken from a table: at most ``plans``. They are
        evenly chosen among the limits that need less recomputation than a limit of one unit less."""
        costs = table.whole
        falls = np.flatnonzero(costs < np.concatenate([[np.inf], costs[:-1]]))
        picks = np.linspace(0, len(falls) - 1, min(self.plans, len(falls)))
        return [int(falls[round(p)]) for p in picks]


def _runs(graph: TrainingGraph, chain: BlockChain, steps: Ints) -> Ints:
    """Return the positions of the ops to run, in order, for steps over blocks: k is block k, -1 - k its backward.
    Useless and forbidden repeats are left out."""
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
