"""Apply the plans of a pipeline file, made for slices of the whole step with its loss, to the stages that
processes capture.

Their ops are paired by ATen op, in order; pairs must read paired results and write equally many bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.pipeline.captured_stages import CapturedStage
from rematplan.pipeline.step_chain import WRAPPER
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline, StageOp
from rematplan.planner.pipeline.stage_chain import StageChain
from rematplan.planner.pipeline.stage_slices import BOUNDARY, WEIGHTS, StageSlice
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem import loss_boundary
from rematplan.runtime.problem.random_states import saves_state, with_saves

OpKey = tuple[str, bool]
"""The ATen op of a call as text, and whether the call belongs to the backward."""


def stages_ops(step: CapturedStep, chain: StageChain, cuts: Sequence[int]) -> tuple[tuple[StageOp, ...], ...]:
    """Return the ops of each stage of a pipeline, as a pipeline file states them."""
    bounds = list(pairwise((0, *cuts, len(chain))))
    stages = [
        [name for o in StageSlice(chain, *bound).ops if (name := chain.graph.ops[o].name) in step.call]
        for bound in bounds
    ]
    loss = loss_ops(step, chain.graph, stages[-1])
    return tuple(captured_ops(step, names, loss) for names in stages)


def captured_ops(
    step: CapturedStep, names: Sequence[str], loss: Set[str] = frozenset()
) -> tuple[StageOp, ...]:
    """Return a `StageOp` for each of the ops ``names`` of a captured step. ``loss``: the names of ops that belong to
    the loss."""
    maker = {storage: name for name in names for storage in step.writes(step.call[name])}
    found = []
    for name in names:
        call = step.call[name]
        reads = sorted({maker[t] for t in step.reads(call) if t in maker} - {name})
        writes = sorted(step.storage_bytes[t] for t in step.writes(call))
        found.append(
            StageOp(name, str(call.target), call.backward, name in loss, tuple(reads), tuple(writes))
        )
    return tuple(found)


def file_plan(file: PlannedPipeline, number: int, part: CapturedStage) -> Plan:
    """Convert a pipeline file's plan of a stage into a plan of that stage as this process captured it; `ProblemError`
    if the stages differ."""
    planned = {op.name for op in part.problem.graph.ops}
    others = [call.name for call in part.step.calls if call.name in planned]  # the graph may order them anew
    try:
        if not file.ops:
            raise ProblemError("the file does not state the stage's ops")
        loss = {op.name for op in file.ops[number] if op.loss}
        own = [op for op in file.ops[number] if not op.loss]
        copies = message_copies(part.step, others)
        pairs = matched(own, captured_ops(part.step, [o for o in others if o not in copies]))
        runs = _runs(file, number, pairs, loss)
        for end, backward in ((loss_boundary.WEIGHTS, True), (loss_boundary.LOSS, False)):
            at = runs.index(end) if end in runs else len(runs)
            runs[at:at] = [o for o in others if o in copies and part.step.call[o].backward == backward]
        runs = with_saves(part.problem.graph, _after_weights(part.problem.graph, runs))
        return plan_from_runs(part.problem.graph, runs, str(_plan(file, number).get("strategy", "file")))
    except ProblemError as error:
        raise ProblemError(f"stage {number} is not the one that the file's plan is of: {error}") from None


def message_copies(step: CapturedStep, names: Sequence[str]) -> frozenset[str]:
    """Return which of the ops ``names`` copy a tensor only to send it, which the step of the whole model does
    not do."""
    # Of an output that is not dense, or of an input's gradient with other strides or of two inputs. No op
    # reads such a copy.
    read = {t for call in step.calls for t in step.reads(call)}
    return frozenset(
        name
        for name in names
        if str(step.call[name].target) == "aten.clone.default"
        and read.isdisjoint(step.writes(step.call[name]))
    )


def loss_ops(step: CapturedStep, graph: TrainingGraph, names: Sequence[str]) -> frozenset[str]:
    """Return which of the ops ``names`` belong to the loss: forward ops outside of the model, and backward
    ops that read no model's backward op."""
    found: set[str] = set()
    for name in names:
        call = step.call[name]
        if call.module == WRAPPER[:-1] or call.module.startswith(WRAPPER):
            continue
        before = {graph.ops[graph.producer[t]].name for t in graph.op[name].reads if t in graph.producer}
        if not call.backward or all(b in found for b in before if b in step.call and step.call[b].backward):
            found.add(name)
    return frozenset(found)


def matched(ops: Sequence[StageOp], others: Sequence[StageOp]) -> dict[str, str]:
    """Return names in ``others`` by names in ``ops``, paired by ATen op and phase, in order. `ProblemError` if the two
    have different numbers of some op, or a pair reads other results or writes other sizes."""
    mine, theirs = _by_key(ops), _by_key(others)
    for key in sorted({*mine, *theirs}):
        few, many = len(mine.get(key, ())), len(theirs.get(key, ()))
        if few != many:
            raise ProblemError(f"it has {many} calls of {key[0]}, not {few}")
    found = [pair for key, own in mine.items() for pair in zip(own, theirs[key], strict=True)]
    pairs = {one.name: other.name for one, other in found}
    for one, other in found:
        if {pairs[r] for r in one.reads if r in pairs} != set(other.reads):
            raise ProblemError(f"{other.name} reads other results than {one.name}")
        if one.writes != other.writes:
            raise ProblemError(f"{other.name} writes other sizes than {one.name}")
    return pairs


def _runs(file: PlannedPipeline, number: int, pairs: Mapping[str, str], loss: Collection[str]) -> list[str]:
    """Return the captured names (``pairs``: by the file's) of the ops that a stage's plan runs, in order, without loss
    and saved random states. `ProblemError` for an op without a pair."""
    boundaries = {BOUNDARY: loss_boundary.LOSS, WEIGHTS: loss_boundary.WEIGHTS}
    runs = []
    for kind, name in _plan(file, number).get("steps", ()):
        if kind != "run" or name in loss or saves_state(name):
            continue
        if name not in pairs and name not in boundaries:
            raise ProblemError(f"the file's plan runs {name}, which the stage lacks")
        runs.append(boundaries.get(name) or pairs[name])
    return runs


def _after_weights(graph: TrainingGraph, runs: Sequence[str]) -> list[str]:
    """Return the runs with those that read the boundary before weight gradients moved behind that boundary."""
    if loss_boundary.WEIGHTS not in runs:
        return list(runs)
    end = runs.index(loss_boundary.WEIGHTS)
    # A captured stage may return a copy of a gradient, so its reader runs later than in the file's stage.
    late = [o for o in runs[:end] if o in graph.op and loss_boundary.WEIGHTS in graph.op[o].reads]
    return [*(o for o in runs[:end] if o not in late), runs[end], *late, *runs[end + 1 :]]


def _plan(file: PlannedPipeline, number: int) -> Mapping[str, Any]:
    return file.stages[number].plan or {}


def _by_key(ops: Sequence[StageOp]) -> dict[OpKey, list[StageOp]]:
    found: dict[OpKey, list[StageOp]] = {}
    for op in ops:
        found.setdefault((op.op, op.backward), []).append(op)
    return found
