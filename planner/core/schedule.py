"""A schedule: one sequence of ``run`` and ``free`` steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rematplan.ir import TrainingGraph


@dataclass(frozen=True, slots=True)
class Run:
    """A step of a schedule that runs the op or inverse named ``op``. Every run of an op after its first is
    recomputation."""

    op: str


@dataclass(frozen=True, slots=True)
class Free:
    """A step of a schedule that frees the resident tensor named ``tensor``. Inputs cannot be freed."""

    tensor: str


Step: TypeAlias = Run | Free
Schedule: TypeAlias = tuple[Step, ...]


def runs_of(schedule: Iterable[Step]) -> list[str]:
    """Return the names of the ops and inverses that a schedule runs, in order, repeats included."""
    return [step.op for step in schedule if isinstance(step, Run)]


def with_frees(graph: TrainingGraph, runs: Sequence[str]) -> Schedule:
    """Return the schedule of ``runs`` (names) that frees each tensor as soon as it is not read again before it is next
    written. Inputs are never freed, and outputs are resident at the end. No other frees have a lower peak."""
    inputs = set(graph.inputs)
    # One backward scan. A result that nothing reads is freed right after its run.
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
    """Return the names of ``runs`` in order, without those whose results are neither read by a later run that stays nor
    outputs at the end. A run also stays if its entry in ``stays`` is True."""
    wanted, kept = set(graph.outputs), []
    for name, stay in zip(reversed(runs), reversed(stays), strict=True):
        recipe = graph.op[name]
        if stay or not wanted.isdisjoint(recipe.writes):
            wanted.difference_update(recipe.writes)
            wanted.update(recipe.reads)
            kept.append(name)
    return kept[::-1]
