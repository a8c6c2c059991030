"""The turn of a step from forward to backward, where its outputs leave, as a part of the planning problem."""

from __future__ import annotations

from dataclasses import replace

from rematplan.ir import Op, TrainingGraph
from rematplan.runtime.captured_step import CapturedStep


def turning_problem(step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
    """The problem of a step whose outputs and new buffers leave before its tangents come.

    Whatever reads a tangent also reads all of them, and they are made once: so they are resident from the turn on,
    as their owner holds them. No inverse brings them back.
    """
    early = dict.fromkeys(
        step.values[o.value].storage for o in step.outputs if o.kind in ("output", "buffer")
    )
    tangents = {step.values[i.value].storage for i in step.inputs if i.kind == "tangent"}
    late = step.after_turn

    def turned(op: Op) -> Op:
        return (
            op
            if tangents.isdisjoint(op.reads)
            else replace(op, reads=tuple(dict.fromkeys((*op.reads, *early))))
        )

    made = [graph.ops[graph.producer[t]].name for t in early if t in graph.producer]
    return replace(
        graph,
        ops=tuple(map(turned, sorted(graph.ops, key=lambda op: op.name in late))),
        inverses=tuple(i for i in graph.inverses if not early.keys() & set(i.writes)),
        never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *made))),
    )
