"""Convert an integer solution to an order of execution, which may exceed the budget between cuts.

Further cuts help there. The order is a good start for the annealer.
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
    """Return the names of the runs, in order, that an integer solution (``values`` by variable) describes.
    They may exceed the budget between cuts.
    """
    forward = indexed(program.graph).forward
    writer = _Writer(program)
    for i in range(program.last + 1):
        asked = [v for v in range(len(program.order.recipes)) if is_set(values, program.x[v, i])]
        asked = [v for v in asked if not writer.ran_early(v)]
        first = [v for v in asked if v < len(forward) and v not in writer.ran and not (i and forward[v])]
        # In an interval: the cut's op, ops that have not run before in the problem's order (after the first
        # interval backward ones), then the rest, each just before its reader if there is one.
        cut = [program.cuts[i - 1]] if i else []
        writer.write(set(cut), cut)
        writer.write(set(asked).difference(cut), (*first, *asked))
    return [program.order.recipes[v].name for v in writer.runs]


class _Writer:
    """Builds an order of execution from what an integer solution runs between cuts."""

    def __init__(self, program: CutProgram) -> None:
        self.recipes, self.makers = program.order.recipes, program.order.makers
        self.written = set(program.graph.inputs)
        self.ran: set[int] = set()
        # What had to run although the solution runs it later or not at all: the program counts very small
        # tensors as resident, and may compute a tensor from itself.
        self.early: set[int] = set()
        self.runs: list[int] = []

    def write(self, left: set[int], order: Iterable[int]) -> None:
        """Append the ops and inverses of ``left`` that ``order`` names, each after those that write what it reads. All
        that are appended leave ``left``."""
        for v in order:
            stack = [v] if v in left else []
            while stack:
                left.discard(stack[-1])
                # Also what writes a tensor that nothing has written, if it is not in ``left``.
                source = self._source(stack[-1], left)
                if source is None:
                    self._run(stack.pop())
                else:
                    stack.append(source)

    def ran_early(self, v: int) -> bool:
        """Return whether ``v`` ran before its interval. If so it is forgotten, so that the next interval with
        ``v`` runs it.
        """
        was = v in self.early
        self.early.discard(v)
        return was

    def _source(self, v: int, left: set[int]) -> int | None:
        """Return what must run before ``v`` because it writes what ``v`` reads: an op of ``left``, or one that has not
        run, which is then marked in ``early``. None if nothing must."""
        for t in self.recipes[v].reads:
            asked = next((u for u in self.makers.get(t, ()) if u in left), None)
            if asked is not None:
                return asked
            # Not in ``left``, but needed: marked in ``early``.
            if t not in self.written:
                self.early.add(self.makers[t][0])  # the op, since an inverse reads later tensors
                return self.makers[t][0]
        return None

    def _run(self, v: int) -> None:
        self.runs.append(v)
        self.ran.add(v)
        self.written.update(self.recipes[v].writes)


def bytes_at_first_run(graph: TrainingGraph, runs: Sequence[str]) -> dict[str, int]:
    """Return, by name of each op and inverse of ``runs``, the bytes resident during its first run, workspace
    included.
    """
    schedule = with_frees(graph, runs)
    resident: dict[str, int] = {}
    for step, bytes_ in zip(schedule, resident_bytes(graph, schedule), strict=True):
        if isinstance(step, Run):
            resident.setdefault(step.op, bytes_)
    return resident
