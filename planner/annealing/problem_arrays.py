"""The planning problem as arrays for simulated annealing: which ops may run, and the arrays that the annealer's loops
read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.annealing.state import Flow, Problem
from rematplan.planner.arrays.csr import compressed_rows
from rematplan.planner.arrays.precedence import must_run, needed_ops
from rematplan.planner.core.array_types import Ints

EXACT = 2**52
"""Sizes are summed in float64, which is exact for whole numbers up to twice this. Problems with more bytes than this
are counted in units of several bytes: sizes are rounded up, budgets down."""


@dataclass(frozen=True)
class Recipes:
    """The ops and inverses that a schedule may run."""

    rows: tuple[Op, ...]
    """Ops that every schedule without inverses runs, then ops for inverses, then inverses."""
    least: tuple[int, ...]
    """By row: how often every schedule must run it, 0 or 1."""


def recipes(graph: TrainingGraph, keep_order: bool = False) -> Recipes:
    """Return the ops and inverses that may be useful. Those of `must_run` must run; all needed ops must if no inverse
    is useful or ``keep_order`` is set. With ``keep_order``, inverses read only inputs and results of needed ops."""
    base = needed_ops(graph)
    inverses = _useful_inverses(graph, base, keep_order) if graph.inverses else []
    if not inverses:
        return Recipes(tuple(base), (1,) * len(base))
    wanted = {t for op in (*base, *inverses) for t in op.reads}
    chosen = {op.name for op in base}
    extra: list[Op] = []
    for op in reversed(graph.ops):
        if op.name not in chosen and not wanted.isdisjoint(op.writes):
            extra.append(op)
            wanted.update(op.reads)
    must = chosen if keep_order else must_run(graph)
    rows = (*base, *reversed(extra), *inverses)
    return Recipes(rows, tuple(int(op.name in must) for op in rows))


def _useful_inverses(graph: TrainingGraph, base: Sequence[Op], keep_order: bool) -> list[Op]:
    """Return the inverses that an output, a needed op (``base``) or another useful inverse needs; what an inverse reads
    is removed from its writes. Inverses that write inputs are left out. With ``keep_order``, so are inverses that read
    anything other than inputs and results of ``base``."""
    inputs = set(graph.inputs)
    known = inputs | {t for op in base for t in op.writes}
    waiting = [
        replace(i, writes=tuple(t for t in i.writes if t not in i.reads))
        for i in graph.inverses
        if inputs.isdisjoint(i.writes) and (not keep_order or known.issuperset(i.reads))
    ]
    wanted = {*graph.outputs, *(t for op in base for t in op.reads)}
    kept: list[Op] = []
    while new := [i for i in waiting if not wanted.isdisjoint(i.writes)]:
        kept += new
        waiting = [i for i in waiting if i not in new]
        wanted.update(t for i in new for t in i.reads)
        for op in reversed(graph.ops):
            if not wanted.isdisjoint(op.writes):
                wanted.update(op.reads)
    return kept


def problem_arrays(graph: TrainingGraph, known: Recipes, unit: int, keep_order: bool) -> Problem:
    """Return a problem as arrays, with ops numbered as in ``known.rows`` and a virtual last op that reads
    outputs.

    ``unit``: the bytes that count as 1.
    """
    inputs = set(graph.inputs)
    ops = known.rows
    names = list(dict.fromkeys(t for op in ops for t in op.writes))
    tensor = {t: i for i, t in enumerate(names)}
    reads = [[tensor[t] for t in dict.fromkeys(op.reads) if t not in inputs] for op in ops]
    reads.append([tensor[t] for t in graph.outputs if t not in inputs])
    writes = [[tensor[t] for t in op.writes] for op in ops] + [[]]
    makers = _turned(writes, len(names))
    size = np.array([-(-graph.size[t] // unit) for t in names], dtype=np.float64)
    percent = 100.0 / graph.base_cost if graph.base_cost else 0.0
    base = {op.name for op in graph.ops}
    ordered = base if keep_order else set(graph.ordered)
    once = set(graph.never_rerun)
    return Problem(
        *compressed_rows(reads),
        *compressed_rows(writes),
        Flow(
            *compressed_rows(_turned(reads, len(names))),
            *compressed_rows(makers),
            producer=np.array([row[0] if len(row) == 1 else -1 for row in makers], dtype=np.int64),
        ),
        least=np.array([*known.least, 1], dtype=np.int64),
        once=np.array([int(op.name in once) for op in ops] + [1], dtype=np.int64),
        several=any(len(row) > 1 for row in makers),
        plain=not graph.has_phases,
        size=size,
        cost=np.array([op.cost * percent for op in ops] + [0.0]),
        workspace=np.array([float(-(-op.workspace // unit)) for op in ops] + [0.0]),
        written=np.array([float(size[row].sum()) if row else 0.0 for row in writes]),
        before=_neighbours(range(len(ops)), ops, ordered),
        after=_neighbours(reversed(range(len(ops))), ops, ordered),
    )


def _turned(rows: Sequence[Sequence[int]], columns: int) -> list[list[int]]:
    """Transpose a sparse matrix. ``rows``: for each row, the columns in it. Return, for each of ``columns`` columns,
    the rows that contain it, ascending."""
    turned: list[list[int]] = [[] for _ in range(columns)]
    for i, row in enumerate(rows):
        for x in row:
            turned[x].append(i)
    return turned


def _neighbours(places: Iterable[int], ops: Sequence[Op], ordered: set[str]) -> Ints:
    """Return, for each op in ``ordered``, the last such op before it in ``places``; -1 if there is none, and
    for others.
    """
    found, last = np.full(len(ops) + 1, -1, dtype=np.int64), -1
    for i in places:
        if ops[i].name in ordered:
            found[i], last = last, i
    return found
