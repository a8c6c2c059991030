"""The saved states of random number generators in a planning problem, from which an op that runs again draws the
same numbers.

An op without cost writes the state; the drawing op reads it.
"""

from __future__ import annotations

from dataclasses import replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.generator_states import states_of

PREFIX = "(random state) "


def state_of(op: str) -> str:
    """Return the name of the generator's state with which an op draws, and of the op that saves it."""
    return f"{PREFIX}{op}"


def drawing_op(name: str) -> str:
    """Return the op whose state an op saves; ``name`` itself if the op saves none."""
    return name.removeprefix(PREFIX)


def saves_state(name: str) -> bool:
    """Return whether an op or a tensor of a problem is the saved state of a generator."""
    return name.startswith(PREFIX)


def random_state_bytes(step: CapturedStep) -> int:
    """Return the bytes of the largest state of the generators from which a step draws; 0 if it draws no numbers."""
    return max((state.numel() for state in states_of(step.drawing_devices).values()), default=0)


def with_random_states(step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
    """Return the step's problem in which each random op reads the generator's state with which it drew first. An op
    whose results are no larger than a state runs only once instead, and its state has 0 bytes."""
    seeded = [op for op in graph.ops if op.name in step.call and step.call[op.name].seeded]
    size = random_state_bytes(step)
    once = [op.name for op in seeded if sum(graph.size[t] for t in op.writes) <= size]
    states = {state_of(op.name): 0 if op.name in once else size for op in seeded}
    ops: list[Op] = []
    for op in graph.ops:
        state = state_of(op.name)
        if state in states:
            # The state is written at any time before the op: the compiled plan saves it at the op's first run.
            ops.append(Op(state, (), (state,), 0.0, 0, op.phase))
            op = replace(op, reads=(*op.reads, state))
        ops.append(op)
    # The present state, restored after a repeated op, needs no more: the op's results are larger than a
    # state, and are not allocated while the states change places.
    return replace(
        graph,
        tensors=(*graph.tensors, *(Tensor(name, size) for name, size in states.items())),
        ops=tuple(ops),
        never_rerun=graph.once(*once, *states),
    )


def without_unused_states(graph: TrainingGraph) -> TrainingGraph:
    """Return a problem in which the states of ops that may run only once have 0 bytes; the same problem if there are
    none."""
    gone = set(map(state_of, graph.never_rerun))
    if gone.isdisjoint(graph.size):
        return graph
    return replace(graph, tensors=tuple(replace(t, bytes=0) if t.name in gone else t for t in graph.tensors))


def without_random_states(graph: TrainingGraph) -> TrainingGraph:
    """Return a problem in which ops draw without saved states: they run once, or can seed the generator anew."""

    ops = (op for op in graph.ops if not saves_state(op.name))
    return replace(
        graph,
        tensors=tuple(t for t in graph.tensors if not saves_state(t.name)),
        ops=tuple(replace(op, reads=tuple(t for t in op.reads if not saves_state(t))) for op in ops),
        never_rerun=tuple(name for name in graph.never_rerun if not saves_state(name)),
    )
