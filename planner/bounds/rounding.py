"""Convert a solution of the multi-cut program to a sequence of runs.

The program limits memory only at its cuts, so the sequence may exceed the budget between them. Further cuts help
only there: with a cut at a place where the sequence fits, it would still be a solution. As a start for the annealer
it is near the optimum, and only the places over the budget have to be repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.bounds.multi_cut_program import CutProgram
from rematplan.planner.core.schedule import Run, with_frees
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.ilp.sparse_rows import is_set


def rounded_runs(program: CutProgram, values: Sequence[float]) -> list[str]:
    """Return the sequence of runs (names) that a solution of the program describes. It is always valid, but may
    exceed the budget between cuts.

    In each interval between cuts, the cut's op runs first, then, in the problem's order, the ops that have not run
    before. A repeated run is placed just before it is read, or at the end of the interval if nothing in the interval
    reads it.

    ``values``: the solution, by variable.
    """
    forward = indexed(program.graph).forward
    writer = _Writer(program)
    for i in range(program.last + 1):
        asked = [v for v in range(len(program.order.recipes)) if is_set(values, program.x[v, i])]
        asked = [v for v in asked if not writer.ran_early(v)]
        first = [v for v in asked if v < len(forward) and v not in writer.ran and not (i and forward[v])]
        cut = [program.cuts[i - 1]] if i else []
        writer.write(set(cut), cut)
        writer.write(set(asked).difference(cut), (*first, *asked))
    return [program.order.recipes[v].name for v in writer.runs]


class _Writer:
    """The runs so far.

    ``early``: recipes that had to run although the program asks for them later or not at all. The program assumes
    that negligible tensors are always resident, and it may compute a tensor from itself by an inverse.
    """

    def __init__(self, program: CutProgram) -> None:
        self.recipes, self.makers = program.order.recipes, program.order.makers
        self.written = set(program.graph.inputs)
        self.ran: set[int] = set()
        self.early: set[int] = set()
        self.runs: list[int] = []

    def write(self, left: set[int], order: Iterable[int]) -> None:
        """Run each recipe of ``left`` once, in ``order``, each preceded by those of ``left`` that it reads from."""
        for v in order:
            stack = [v] if v in left else []
            while stack:
                left.discard(stack[-1])
                source = self._source(stack[-1], left)
                if source is None:
                    self._run(stack.pop())
                else:
                    stack.append(source)

    def ran_early(self, v: int) -> bool:
        """Return whether recipe v has run although the program asks for it only now. The next request for v is not
        affected."""
        was = v in self.early
        self.early.discard(v)
        return was

    def _source(self, v: int, left: set[int]) -> int | None:
        """Return a recipe that must run before v, or None."""
        for t in self.recipes[v].reads:
            asked = next((u for u in self.makers.get(t, ()) if u in left), None)
            if asked is not None:
                return asked
            if t not in self.written:
                self.early.add(self.makers[t][0])  # the op, not an inverse, because it needs nothing later
                return self.makers[t][0]
        return None

    def _run(self, v: int) -> None:
        self.runs.append(v)
        self.ran.add(v)
        self.written.update(self.recipes[v].writes)


def bytes_at_first_run(graph: TrainingGraph, runs: Sequence[str]) -> dict[str, int]:
    """Return the bytes that are resident during each op's first run in a sequence of runs, by op name, workspace
    included."""
    schedule = with_frees(graph, runs)
    resident: dict[str, int] = {}
    for step, bytes_ in zip(schedule, resident_bytes(graph, schedule), strict=True):
        if isinstance(step, Run):
            resident.setdefault(step.op, bytes_)
    return resident
