"""Build the planning problem of a captured step (the ATen calls of a forward and its backward) from the costs of its
calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.ir.training_graph import LIBRARIES, THREADS
from rematplan.runtime.graph.allocator_rounding import REST, allocated
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import Call, CapturedStep, InputKind
from rematplan.runtime.problem.random_states import random_state_bytes, with_random_states
from rematplan.runtime.problem.sum_states import with_sum_states

RNG_STATES = "rng_states"


def training_graph(step: CapturedStep, costs: Mapping[str, CallCost]) -> TrainingGraph:
    """Return a step's problem without a loss boundary. All views of a storage are one tensor; random ops read saved
    states or run once; collectives run once, in order. Saved states and libraries' workspaces may be further inputs,
    and measured results enlarge tensors. ``costs``: by name, of each call and inverse that is no view."""
    sizes = dict(step.storage_bytes)
    for name, cost in costs.items():
        for result, real in zip(step.call[name].results, cost.results, strict=False):
            if result:
                storage = step.values[result].storage
                sizes[storage] = max(sizes[storage], allocated(real, step.values[result].fake.device))
    inputs: dict[str, InputKind] = {}
    for i in step.inputs:
        inputs.setdefault(step.values[i.value].storage, i.kind)
    split: dict[str, int] = dict.fromkeys(inputs.values(), 0)
    for storage, kind in inputs.items():
        split[kind] += sizes[storage]
    # The generators' states at the start, for a forward that runs again as a whole, or that a failed check stops.
    states = len(step.drawing_devices) * (bool(step.left_out) + step.checks) * random_state_bytes(step)
    if states:
        sizes[RNG_STATES] = split[RNG_STATES] = states
    # Unused bytes of a cached block, beyond those that `allocated` counts.
    left_over = REST if step.device.type == "cuda" else 0
    library = THREADS * max((c.library for c in costs.values()), default=0) + left_over
    if library:
        sizes[LIBRARIES] = split[LIBRARIES] = library
    ops = tuple(_op(step, c, costs[c.name]) for c in step.calls if not c.is_view)
    inverses = tuple(replace(_op(step, c, costs[c.name]), phase=None) for c in step.inverses)
    used = dict.fromkeys(inputs) | dict.fromkeys(t for o in ops for t in (*o.reads, *o.writes))
    reserved = tuple(name for name in (RNG_STATES, LIBRARIES) if name in split)
    used |= dict.fromkeys(reserved)
    graph = TrainingGraph(
        name=step.name,
        tensors=tuple(Tensor(name, sizes[name]) for name in used),
        inputs=(*inputs, *reserved),
        outputs=tuple(step.returned()),
        ops=ops,
        inverses=inverses,
        ordered=tuple(c.name for c in step.calls if c.ordered),
        never_rerun=tuple(c.name for c in step.calls if c.collective),
        fixed_split=split,
    )
    return with_sum_states(step, with_random_states(step, graph))


def _op(step: CapturedStep, call: Call, cost: CallCost) -> Op:
    """Return the op of a call, with its cost, and the gain and noise by which it passes errors on. A call that states
    no noise gets its rounding (`_grain`)."""
    return Op(
        name=call.name,
        reads=step.reads(call),
        writes=step.writes(call),
        cost=cost.time,
        workspace=cost.workspace,
        phase="backward" if call.backward else "forward",
        gain=call.gain,
        noise=_grain(step, call) if call.noise is None else call.noise,
    )


def _grain(step: CapturedStep, call: Call) -> float:
    """Return the relative error of a call's rounding: its result type's epsilon if no argument is as coarse, else 0."""
    results = [step.values[r].fake.dtype for r in call.made]
    reads = [step.values[r].fake.dtype for r in call.operands]
    coarse = max((torch.finfo(d).eps for d in results if d.is_floating_point), default=0.0)
    fine = max((torch.finfo(d).eps for d in reads if d.is_floating_point), default=coarse)
    return coarse if coarse > fine else 0.0
