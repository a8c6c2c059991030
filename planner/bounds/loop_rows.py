"""Find loops in integer solutions: tensors computed from each other alone, which inverses make possible (Lin,
Zhao 2004).

The program says what runs between two cuts, but not in which order. Rows that exclude pairs exist from the
start, others after they occur.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import networkx as nx

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import Precedence
from rematplan.planner.bounds.multi_cut_program import CutProgram, Loop
from rematplan.planner.ilp.sparse_rows import is_set


def pairs(graph: TrainingGraph, order: Precedence) -> list[Loop]:
    """Return the sorted pairs of tensors that can be computed from each other, by an inverse and an op or inverse."""
    found = {
        (min(t, source), max(t, source))
        for inverse in graph.inverses
        for t in inverse.writes
        for source in inverse.reads
        if any(t in order.recipes[u].reads for u in order.makers.get(source, ()))
    }
    return sorted(found)


def violated(program: CutProgram, values: Sequence[float]) -> list[Loop]:
    """Return the sorted loops of a solution: smallest sets of tensors computed from each other alone between
    two cuts.

    ``values``: by number of the variable.
    """
    return sorted(
        set(chain.from_iterable(_loops_between_cuts(program, values, i) for i in range(program.last + 1)))
    )


def _loops_between_cuts(program: CutProgram, values: Sequence[float], i: int) -> Iterator[Loop]:
    """Yield the loops of a solution in interval ``i`` between two cuts, as sorted tuples of names."""
    recipes = program.order.recipes
    there = {t for t in program.tracked if is_set(values, program.h[t, i])}
    tracked = set(program.tracked)
    waiting = [v for v in range(len(recipes)) if is_set(values, program.x[v, i])]
    while True:
        missing = {v: [t for t in recipes[v].reads if t in tracked and t not in there] for v in waiting}
        ready = [v for v in waiting if not missing[v]]
        if not ready:
            break
        there.update(t for v in ready for t in recipes[v].writes)
        waiting = [v for v in waiting if missing[v]]
    made = nx.DiGraph()
    for v in waiting:
        made.add_edges_from(
            (source, t) for source in missing[v] for t in recipes[v].writes if t in tracked - there
        )
    for loop in nx.strongly_connected_components(made):
        if len(loop) > 1 and all(source in loop for t in loop for source in made.predecessors(t)):
            yield tuple(sorted(loop))
