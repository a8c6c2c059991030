"""Apply the plans of a pipeline file to the stages that processes capture.

The plans in the file are for slices of the captured step of the whole model with its loss. A process captures only its
stages, without a loss, and their ops have other names. So ops of the two captures are paired by ATen op, in order. Each
pair must read results of paired ops and write equally many bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rematplan.ir import ProblemError, TrainingGraph, UsageError
from rematplan.pipeline.captured_stages import CapturedStage
from rematplan.pipeline.step_chain import WRAPPER, NamedChain, named_chain
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline
from rematplan.planner.pipeline.stage_slices import BOUNDARY, WEIGHTS, StageSlice
from rematplan.plans.op_costs import priced
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.problem import loss_boundary

Key = tuple[str, bool]
"""The ATen op of a call as text, and whether the call belongs to the backward."""


@dataclass(frozen=True)
class FilePlans:
    """The plans of a pipeline file, with the captured step of the whole model for which they were made.

    ``file``: the pipeline as read from the file. ``step``: the captured step of the whole model with its loss, which
    the file divides into stages. ``chain``: that step as a chain of blocks. Stages begin and end between blocks.
    """

    file: PlannedPipeline
    step: CapturedStep
    chain: NamedChain

    def plan(self, number: int, part: CapturedStage) -> Plan:
        """Convert the file's plan of a stage into a plan of that stage as this process captured it.

        Args:
            number: the stage's number, from 0.
            part: the stage as captured by this process.

        Raises:
            ProblemError: the captured stage has other ops than the file's stage. The message states the first
                difference.
        """
        bounds = list(pairwise((0, *self.file.cuts, len(self.chain.chain))))
        ops = StageSlice(self.chain.chain, *bounds[number]).ops
        graph = self.chain.chain.graph
        names = [graph.ops[o].name for o in ops]
        loss = loss_ops(self.step, graph, names) if number == len(bounds) - 1 else frozenset()
        own = [name for name in names if name not in loss]
        planned = {op.name for op in part.problem.graph.ops}
        others = [
            call.name for call in part.step.calls if call.name in planned
        ]  # the graph may order them anew
        try:
            copies = message_copies(part.step, others)
            pairs = matched(self.step, own, part.step, [o for o in others if o not in copies])
            runs = _runs(self.file, number, pairs, loss)
            for end, backward in ((loss_boundary.WEIGHTS, True), (loss_boundary.LOSS, False)):
                at = runs.index(end) if end in runs else len(runs)
                runs[at:at] = [o for o in others if o in copies and part.step.call[o].backward == backward]
            runs = _after_weights(part.problem.graph, runs)
            return plan_from_runs(
                part.problem.graph, runs, str(_plan(self.file, number).get("strategy", "file"))
            )
        except ProblemError as error:
            raise ProblemError(f"stage {number} is not the one that the file's plan is of: {error}") from None


def file_plans(file: PlannedPipeline, step: CapturedStep) -> FilePlans:
    """Return the captured step of the whole model that a pipeline file divides, with the file's plans.

    Args:
        file: the pipeline file's content.
        step: the captured step of the model with its loss, as the file's schedule runs it (`step_for`).

    Raises:
        ProblemError: the captured step cannot be divided at the cuts of the file.
    """
    graph = priced(step, "roofline")
    for wanted in ((), file.names):
        chain = named_chain(step, graph, wanted)
        try:
            found = chain.positions(file.names)
        except UsageError:
            continue
        if found == file.cuts:
            return FilePlans(file, step, chain)
    raise ProblemError(f"the step of {step.name} has other blocks than those that the file divides")


def message_copies(step: CapturedStep, names: Sequence[str]) -> frozenset[str]:
    """Return which of the ops ``names`` copy a tensor only to send it. The step of the whole model has no such op.

    A message must be contiguous, so the forward of a stage ends with a copy of each other output. Each gradient of an
    input needs a separate storage. So the backward copies it if it is another input's gradient, too, as with two inputs
    that the stage adds. No op reads such a copy.

    Args:
        step: the captured step of a stage.
        names: the names of its ops, in running order.
    """
    read = {t for call in step.calls for t in step.reads(call)}
    return frozenset(
        name
        for name in names
        if str(step.call[name].target) == "aten.clone.default"
        and read.isdisjoint(step.writes(step.call[name]))
    )


def loss_ops(step: CapturedStep, graph: TrainingGraph, names: Sequence[str]) -> frozenset[str]:
    """Return which of the ops ``names`` belong to the loss, in forward or backward. The loss is outside of the model.

    A forward op belongs to the loss if it is in none of the model's modules. A backward op belongs to it if, in
    addition, it reads no result of a backward op of the model.

    Args:
        step: the captured step of the model with its loss.
        graph: its planning problem.
        names: the ops to test, in running order.
    """
    found: set[str] = set()
    for name in names:
        call = step.call[name]
        if call.module == WRAPPER[:-1] or call.module.startswith(WRAPPER):
            continue
        before = {graph.ops[graph.producer[t]].name for t in graph.op[name].reads if t in graph.producer}
        if not call.backward or all(b in found for b in before if step.call[b].backward):
            found.add(name)
    return frozenset(found)


def matched(
    step: CapturedStep, names: Sequence[str], other: CapturedStep, other_names: Sequence[str]
) -> dict[str, str]:
    """Pair the ops of the same part of a model in two captures. Return the names in ``other`` by the names in ``step``.

    Ops are paired by ATen op and phase (forward or backward), in order. Paired ops must read results of paired ops and
    write equally many bytes.

    Args:
        step: a captured step.
        names: the names of the part's ops in ``step``, in order.
        other: the other captured step.
        other_names: the names of the part's ops in ``other``, in order.

    Raises:
        ProblemError: the ops cannot be paired.
    """
    mine, theirs = _by_key(step, names), _by_key(other, other_names)
    for key in sorted({*mine, *theirs}):
        few, many = len(mine.get(key, ())), len(theirs.get(key, ()))
        if few != many:
            raise ProblemError(f"it has {many} calls of {key[0]}, not {few}")
    pairs = {a: b for key, own in mine.items() for a, b in zip(own, theirs[key], strict=True)}
    known, makers = set(other_names), (_makers(step), _makers(other))
    for a, b in pairs.items():
        one, two = step.call[a], other.call[b]
        reads = {pairs[r] for t in step.reads(one) if (r := makers[0].get(t)) in pairs}
        if reads != known.intersection(makers[1].get(t, "") for t in other.reads(two)):
            raise ProblemError(f"{b} reads other results than {a}")
        sizes = [sorted(s.storage_bytes[t] for t in s.writes(c)) for s, c in ((step, one), (other, two))]
        if sizes[0] != sizes[1]:
            raise ProblemError(f"{b} writes other sizes than {a}")
    return pairs


def _runs(file: PlannedPipeline, number: int, pairs: Mapping[str, str], loss: Collection[str]) -> list[str]:
    """Return the ops that the file's plan of a stage runs, in order, by their names in the captured stage. Ops of the
    loss are left out.

    Args:
        file: the pipeline file's content.
        number: the stage's number, from 0.
        pairs: names of ops in the captured stage, by their names in the file.
        loss: names of the ops of the loss in the file.

    Raises:
        ProblemError: the plan runs an op that the captured stage lacks.
    """
    boundaries = {BOUNDARY: loss_boundary.LOSS, WEIGHTS: loss_boundary.WEIGHTS}
    runs = []
    for kind, name in _plan(file, number).get("steps", ()):
        if kind != "run" or name in loss:
            continue
        if name not in pairs and name not in boundaries:
            raise ProblemError(f"the file's plan runs {name}, which the stage lacks")
        runs.append(boundaries.get(name) or pairs[name])
    return runs


def _after_weights(graph: TrainingGraph, runs: Sequence[str]) -> list[str]:
    """Return the ops that a plan runs, in order, with those that read the second boundary op directly after it, if they
    are before it.

    In the file's stage, an op that reads a gradient that the stage returns runs before that boundary. A captured stage
    may return a copy of the gradient, and then runs the op after the boundary.

    Args:
        graph: the planning problem of the captured stage.
        runs: names of its ops.
    """
    if loss_boundary.WEIGHTS not in runs:
        return list(runs)
    end = runs.index(loss_boundary.WEIGHTS)
    late = [o for o in runs[:end] if o in graph.op and loss_boundary.WEIGHTS in graph.op[o].reads]
    return [*(o for o in runs[:end] if o not in late), runs[end], *late, *runs[end + 1 :]]


def _plan(file: PlannedPipeline, number: int) -> Mapping[str, Any]:
    return file.stages[number].plan or {}


def _by_key(step: CapturedStep, names: Sequence[str]) -> dict[Key, list[str]]:
    found: dict[Key, list[str]] = {}
    for name in names:
        call: Call = step.call[name]
        found.setdefault((str(call.target), call.backward), []).append(name)
    return found


def _makers(step: CapturedStep) -> dict[str, str]:
    """Return the name of the call that writes each storage, by the storage's name."""
    return {storage: call.name for call in step.calls for storage in step.writes(call)}
