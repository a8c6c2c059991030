"""The turn of a step from forward to backward, where its outputs leave, as a part of the planning problem."""

from __future__ import annotations

from dataclasses import replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.captured_step import CapturedStep
from rematplan.runtime.measure import allocated

OLD_BUFFERS = "old_buffers"
"""The tensor that stands for the copies of buffers as they were before the step."""
GIVEN_TANGENTS = "given_tangents"
"""The tensor that stands for copies of tangents that do not lie as when they were captured."""


def turning_problem(step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
    """The problem of a step whose outputs and new buffers leave before its tangents come.

    Whatever reads a tangent also reads all of them, so that they are there at the turn. The outputs are made once, and
    so stay from then on, as their owner holds them; no inverse brings them back. New buffers are copied at the turn,
    and what makes them (batch norm, say) may run again, from copies of what they were: these are charged as one more
    input. So are the tangents of outputs that are not contiguous, since a loss may give them laid out otherwise, and
    what was a view of them is a copy then.
    """
    early = dict.fromkeys(step.values[o.value].storage for o in step.outputs if "gradient" not in o.kind)
    tangents = {step.values[i.value].storage for i in step.inputs if i.kind == "tangent"}
    late = step.after_turn

    def turned(op: Op) -> Op:
        return (
            op
            if tangents.isdisjoint(op.reads)
            else replace(op, reads=tuple(dict.fromkeys((*op.reads, *early))))
        )

    held = dict.fromkeys(step.values[o.value].storage for o in step.outputs if o.kind == "output")
    made = [graph.ops[graph.producer[t]].name for t in held if t in graph.producer]
    fakes = (step.values[i.value].fake for i in step.inputs if i.kind == "tangent")
    beside = {
        OLD_BUFFERS: sum(step.storage_bytes[s] for s in early if s not in held),
        GIVEN_TANGENTS: sum(
            allocated(fake.nbytes, fake.device) for fake in fakes if not fake.is_contiguous()
        ),
    }
    beside = {name: size for name, size in beside.items() if size}
    charged = replace(
        graph,
        tensors=(*graph.tensors, *(Tensor(name, size) for name, size in beside.items())),
        inputs=(*graph.inputs, *beside),
        fixed_split={**graph.fixed_split, **beside},
    )
    return replace(
        charged,
        ops=tuple(map(turned, sorted(graph.ops, key=lambda op: op.name in late))),
        inverses=tuple(i for i in graph.inverses if not held.keys() & set(i.writes)),
        never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *made))),
    )
