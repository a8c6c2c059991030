"""What a plan does: one sequence of ``run`` and ``free`` steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def with_frees(graph: TrainingGraph, runs: Sequence[str]) -> Schedule:
    """The run sequence with every tensor freed at its last use before it is written again, or at all.

    A plan is only its run sequence: a read is served by the latest run of a recipe that writes the tensor, and a copy
    lives from that run to its last read before the next one. No other choice of frees has a lower peak. One backward
    scan, linear in the reads and writes.
    """
    inputs = set(graph.inputs)
    wanted = set(graph.outputs)  # tensors whose next event, looking forward from here, is a read
    steps: list[Step] = []
    for name in reversed(runs):
        op = graph.op[name]
        dead = [t for t in dict.fromkeys((*op.reads, *op.writes)) if t not in wanted and t not in inputs]
        steps.extend(Free(t) for t in reversed(dead))
        steps.append(Run(name))
        wanted.difference_update(op.writes)
        wanted.update(op.reads)
    steps.reverse()
    return tuple(steps)


def without_idle(graph: TrainingGraph, runs: Sequence[str], stays: Sequence[bool]) -> list[str]:
    """The runs without those whose results nothing reads before they are written again, except where one ``stays``.

    One backward scan: what only an idle run reads is idle too.
    """
    wanted, kept = set(graph.outputs), []
    for name, stay in zip(reversed(runs), reversed(stays), strict=True):
        recipe = graph.op[name]
        if stay or not wanted.isdisjoint(recipe.writes):
            wanted.difference_update(recipe.writes)
            wanted.update(recipe.reads)
            kept.append(name)
    return kept[::-1]
