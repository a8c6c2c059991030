"""What a plan does: one sequence of ``run`` and ``free`` steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rematplan.ir import TrainingGraph


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op (or an inverse). Running an op again is recomputation."""

    op: str


@dataclass(frozen=True, slots=True)
class Free:
    """Drop a resident tensor that is no input."""

    tensor: str


Step: TypeAlias = Run | Free
Schedule: TypeAlias = tuple[Step, ...]


def runs_of(schedule: Iterable[Step]) -> list[str]:
    """The run sequence of a schedule, repeats included."""
    return [step.op for step in schedule if isinstance(step, Run)]


def before_turn(
    graph: TrainingGraph, runs: Sequence[str], early: Iterable[str], late: Collection[str]
) -> tuple[list[str], int]:
    """The run sequence with all that the tensors ``early`` need run before the first of the ops ``late``, and the
    position of that op, the turn.

    First runs that stand after it are moved to just before it, in their order; nothing else changes.
    """
    turn = next((at for at, name in enumerate(runs) if name in late), len(runs))
    done, moved = set(runs[:turn]), []
    wanted = set(early)
    for op in reversed(graph.ops):
        if wanted.intersection(op.writes):
            wanted.update(op.reads)
            if op.name not in done:
                moved.append(op.name)
    moved.reverse()
    rest = list(runs[turn:])
    for name in moved:
        if name in rest:
            rest.remove(name)
    return [*runs[:turn], *moved, *rest], turn + len(moved)


def with_frees(
    graph: TrainingGraph, runs: Sequence[str], turn: int | None = None, at_turn: Iterable[str] = ()
) -> Schedule:
    """The run sequence with every tensor freed at its last use before it is written again, or at all.

    A plan is only its run sequence: a read is served by the latest run of a recipe that writes the tensor, and a copy
    lives from that run to its last read before the next one. No other choice of frees has a lower peak. One backward
    scan, linear in the reads and writes.

    ``at_turn``: tensors that must also be resident just before the run at position ``turn``, as if it read them.
    """
    inputs = set(graph.inputs)
    wanted = set(graph.outputs)  # tensors whose next event, looking forward from here, is a read
    steps: list[Step] = []
    for at, name in zip(reversed(range(len(runs))), reversed(runs), strict=True):
        op = graph.op[name]
        dead = [t for t in dict.fromkeys((*op.reads, *op.writes)) if t not in wanted and t not in inputs]
        steps.extend(Free(t) for t in reversed(dead))
        steps.append(Run(name))
        wanted.difference_update(op.writes)
        wanted.update(op.reads)
        if at == turn:
            wanted.update(at_turn)
    steps.reverse()
    return tuple(steps)
