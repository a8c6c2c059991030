"""The content of memory into which several calls write (`Call.in_place`), in a planning problem.

A tensor of no bytes represents it after each write. So the calls run in order, and what reads the memory runs after
the last. None of them runs again: an earlier content does not exist any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.graph.captured_step import CapturedStep, refs

PREFIX = "(content) "


def is_content(name: str) -> bool:
    """Return whether a tensor of a problem represents the content of memory."""
    return name.startswith(PREFIX)


def with_sum_states(step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
    """Return a problem in which calls that read memory into which others write (`Call.in_place`) also read a tensor for
    its content. Calls that make, read or write such memory run once. Without any, the problem is the same."""
    written = {c.name: f"{PREFIX}{c.name}" for c in step.calls if c.in_place}
    if not written:
        return graph
    content = dict(_contents(step, written))
    read = {c.name: dict.fromkeys(content[r] for r in c.operands if r in content) for c in step.priced_calls}
    first = {
        graph.ops[graph.producer[step.values[c.results[0] or ""].storage]].name
        for c in step.calls
        if c.in_place
    }

    def changed(op: Op) -> Op:
        writes = (*op.writes, written[op.name]) if op.name in written else op.writes
        return replace(op, reads=(*op.reads, *read.get(op.name, ())), writes=writes)

    once = [op.name for op in graph.ops if op.name in first or op.name in written or read.get(op.name)]
    outputs = dict.fromkeys(content[o.value] for o in step.outputs if o.value in content)
    return replace(
        graph,
        tensors=(*graph.tensors, *(Tensor(name, 0) for name in written.values())),
        outputs=(*graph.outputs, *outputs),
        ops=tuple(map(changed, graph.ops)),
        inverses=tuple(map(changed, graph.inverses)),
        never_rerun=graph.once(*once),
    )


def _contents(step: CapturedStep, written: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield, for each value in memory into which calls write, from the first write on, the tensor that stands for its
    content. ``written``: by call that writes, the tensor for the content that it leaves."""
    found: dict[str, str] = {}
    for call in step.calls:
        state = written.get(call.name)
        if call.is_view:
            state = next((found[r.value] for r in refs(call.args) if r.value in found), None)
        if state:
            found |= dict.fromkeys(call.made, state)
    yield from found.items()
