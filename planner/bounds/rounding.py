"""Convert a solution of the multi-cut integer program to an order of execution.

The program limits memory only at its cuts, so the order of execution may exceed the budget between them. A further
cut at an op where the order fits the budget would not exclude the solution. So further cuts help only where the
budget is exceeded. The order is also a good start for the annealer: it is near the optimum except where it exceeds
the budget.
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
    """Return the order of execution (names of ops and inverses, repeats included) that a solution of the multi-cut
    integer program describes. It may exceed the budget between cuts.

    The solution says what runs in each interval between cuts. In each interval, the cut's op runs first. Then follow
    the ops that have not run before, in the problem's order; after the first interval these are backward ops only.
    Everything else is placed just before an op that reads it, or at the end of the interval if nothing in the
    interval reads it.

    ``values``: the value of each variable in the solution, by the variable's number.
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
    """Builds an order of execution from what a solution of the integer program runs between cuts.

    ``recipes``: the problem's ops, then its inverses. ``runs``: the ops and inverses executed so far, in order, as
    positions in ``recipes``. ``early``: those that had to run although the solution runs them later or not at all. This
    happens because the program assumes that very small tensors are always resident, and because it may compute a tensor
    from itself by an inverse.
    """

    def __init__(self, program: CutProgram) -> None:
        self.recipes, self.makers = program.order.recipes, program.order.makers
        self.written = set(program.graph.inputs)
        self.ran: set[int] = set()
        self.early: set[int] = set()
        self.runs: list[int] = []

    def write(self, left: set[int], order: Iterable[int]) -> None:
        """Append each op or inverse of ``left`` to ``runs`` once, in ``order``. But before an op or inverse v come
        those of ``left`` whose results v reads. If v reads a tensor that nothing has written so far, the op that writes
        this tensor comes before v even if it is not in ``left``.

        ``left``, ``order``: positions in ``recipes`` (the ops, then the inverses). ``left`` is emptied.
        """
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
        """Return whether the op or inverse ``v`` has already run before the interval in which the solution of the
        integer program runs it. If so, ``v`` is removed from ``early``, so that the next interval that contains ``v``
        runs it."""
        was = v in self.early
        self.early.discard(v)
        return was

    def _source(self, v: int, left: set[int]) -> int | None:
        """Return an op or inverse that must run before ``v`` because ``v`` reads its result, or None if there is
        none.

        It is one of ``left``, or else the op that writes a tensor which was never written; that op is then marked in
        ``early``. All are positions in ``recipes`` (the ops, then the inverses).
        """
        for t in self.recipes[v].reads:
            asked = next((u for u in self.makers.get(t, ()) if u in left), None)
            if asked is not None:
                return asked
            if t not in self.written:
                self.early.add(self.makers[t][0])  # the op, since an inverse reads later tensors
                return self.makers[t][0]
        return None

    def _run(self, v: int) -> None:
        self.runs.append(v)
        self.ran.add(v)
        self.written.update(self.recipes[v].writes)


def bytes_at_first_run(graph: TrainingGraph, runs: Sequence[str]) -> dict[str, int]:
    """Return, by the name of each op and inverse that runs, the bytes that are resident during its first run,
    workspace included.

    ``runs``: the names of ops and inverses in order of execution, repeats included. Each tensor is freed as early as
    possible.
    """
    schedule = with_frees(graph, runs)
    resident: dict[str, int] = {}
    for step, bytes_ in zip(schedule, resident_bytes(graph, schedule), strict=True):
        if isinstance(step, Run):
            resident.setdefault(step.op, bytes_)
    return resident
