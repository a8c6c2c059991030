"""From a solution of the multi-cut program to a run sequence: what the program asks for, in an order of our own.

The program limits memory at its cuts only, so the sequence may be over the budget between them. Where it is, further
cuts are worth trying, and nowhere else: with a cut at which the sequence is within the budget it is a solution still.
As a start it is near the optimum, and annealing has only the overfull places to mend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.bounds.multi_cut_program import CutProgram
from rematplan.planner.core.schedule import Run, with_frees
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.ilp.rows import is_set


def rounded_runs(program: CutProgram, values: Sequence[float]) -> list[str]:
    """The run sequence, always valid, of a solution's values.

    In each interval the cut runs first; then, in the base order, what has not run before. What runs again does so
    just before it is read, what nothing reads at the end of the interval.
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
    """Runs so far. ``early``: those that the program asks for later or not at all, although what they write is read
    before: it takes tensors of no weight to be resident always, and may make one from itself, by an inverse."""

    def __init__(self, program: CutProgram) -> None:
        self.recipes, self.makers = program.order.recipes, program.order.makers
        self.written = set(program.graph.inputs)
        self.ran: set[int] = set()
        self.early: set[int] = set()
        self.runs: list[int] = []

    def write(self, left: set[int], order: Iterable[int]) -> None:
        """Run each recipe of ``left`` once: in ``order``, preceded by those of them that it reads from."""
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
        """Whether a run that is asked for has been made already; of the next it is not so."""
        was = v in self.early
        self.early.discard(v)
        return was

    def _source(self, v: int, left: set[int]) -> int | None:
        """What must run before v can."""
        for t in self.recipes[v].reads:
            asked = next((u for u in self.makers.get(t, ()) if u in left), None)
            if asked is not None:
                return asked
            if t not in self.written:
                self.early.add(self.makers[t][0])  # the op, not an inverse: it needs nothing that comes later
                return self.makers[t][0]
        return None

    def _run(self, v: int) -> None:
        self.runs.append(v)
        self.ran.add(v)
        self.written.update(self.recipes[v].writes)


def first_held(graph: TrainingGraph, runs: Sequence[str]) -> dict[str, int]:
    """Bytes that a run sequence holds while each op runs for the first time, its workspace included."""
    schedule = with_frees(graph, runs)
    held: dict[str, int] = {}
    for step, bytes_ in zip(schedule, resident_bytes(graph, schedule), strict=True):
        if isinstance(step, Run):
            held.setdefault(step.op, bytes_)
    return held
