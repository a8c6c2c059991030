"""Find loops in solutions of the multi-cut integer program: sets of tensors that a solution computes only from each
other.

The program (`multi_cut_program`) states what runs between two cuts, but not in which order. An inverse computes an
op's input from its output, and the op computes the output from the input. So a solution could run both between two
cuts although neither tensor is there to start from. Rows of the program exclude this for a set of tensors: one of
them must be resident at the first of the two cuts, or be written by an op or inverse that reads none of them.

Source: loop formulas of logic programs (Lin, Zhao 2004). Sets of two tensors are excluded from the start, larger sets
after a solution contains them.
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
    """Return the pairs of tensors that can be computed from each other: one is read by an inverse that writes the
    other, and written by an op or inverse that reads the other. The pairs are sorted.

    ``order``: which ops and inverses write each tensor.
    """
    found = {
        (min(t, source), max(t, source))
        for inverse in graph.inverses
        for t in inverse.writes
        for source in inverse.reads
        if any(t in order.recipes[u].reads for u in order.makers.get(source, ()))
    }
    return sorted(found)


def violated(program: CutProgram, values: Sequence[float]) -> list[Loop]:
    """Return the loops in a solution of the multi-cut integer program: sets of tensors that the solution computes
    only from each other between two consecutive cuts. Each set is as small as possible. The sets are sorted.

    ``values``: the value of each variable in the solution, by the variable's number.
    """
    return sorted(set(chain.from_iterable(_unfounded(program, values, i) for i in range(program.last + 1))))


def _unfounded(program: CutProgram, values: Sequence[float], i: int) -> Iterator[Loop]:
    """Yield the sets of tensors that a solution computes only from each other in the interval ``i`` between two cuts.
    Each set is a sorted tuple of names.

    ``values``: the value of each variable in the solution, by the variable's number.
    """
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
