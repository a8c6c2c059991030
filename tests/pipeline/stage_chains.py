"""Small stages for tests: chains of layers with a boundary, and the actions of a rank with k of them in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.planner.pipeline.actions import Action, RankActions
from rematplan.planner.pipeline.stage_problem import StageProblem

LOSS = "(loss)"
WEIGHTS = "(weights)"


class WithoutStarts:
    """A planner of stages that begins from no plans of its own."""

    def starts(self, _graph: TrainingGraph, _effort: Effort) -> Sequence[Plan]:
        return ()


def chain_stage(
    sizes: Sequence[int], costs: Sequence[float], weight: int = 3, inner: int = 2, split: bool = False
) -> StageProblem:
    """A layer of each size: its forward makes a tensor of that size and one ``inner`` times as large that its backward
    reads too. Gradients of weights go as soon as they are made. ``split``: they are made after a second boundary."""
    tensors = [Tensor("x0", sizes[0]), Tensor("g", sizes[-1]), Tensor(LOSS, 0), Tensor(WEIGHTS, 0)]
    ops, back, late, marks = [], [], [], {}
    upstream = "g"
    last = len(sizes) - 1
    for i, (size, cost) in enumerate(zip(sizes, costs, strict=True), 1):
        sized = {f"w{i}": weight, f"x{i}": size, f"h{i}": inner * size, f"dw{i}": weight, f"m{i}": 0}
        sized[f"g{i}"] = sizes[max(0, i - 2)]
        tensors += [Tensor(name, bytes_) for name, bytes_ in sized.items()]
        ops.append(Op(f"f{i}", (f"x{i - 1}", f"w{i}"), (f"x{i}", f"h{i}"), cost, 0, "forward"))
        marks[f"m{i}"] = f"dw{i}"
    for i in range(last + 1, 0, -1):
        own, cost = (LOSS,) if i == last + 1 else (), costs[i - 1]
        back.append(Op(f"b{i}", (upstream, f"h{i}", f"w{i}", *own), (f"g{i}",), cost, 0, "backward"))
        after = (WEIGHTS,) if split else own
        late.append(Op(f"v{i}", (upstream, f"x{i - 1}", *after), (f"dw{i}", f"m{i}"), cost, 0, "backward"))
        upstream = f"g{i}"
    out = f"x{last + 1}"
    boundary = Op(LOSS, (out,), (LOSS,), 0.0, 0, "backward")
    second = [Op(WEIGHTS, (upstream, out), (WEIGHTS,), 0.0, 0, "backward")] if split else []
    order = [*back, *second, *late] if split else [op for pair in zip(back, late, strict=True) for op in pair]
    inputs = ("x0", "g", *(f"w{i}" for i in range(1, last + 2)))
    used = {t for op in (*ops, boundary, *order) for t in (*op.reads, *op.writes)} | set(inputs)
    graph = TrainingGraph(
        name="stage",
        tensors=tuple(t for t in tensors if t.name in used),
        inputs=inputs,
        outputs=(*marks, *(() if split else (upstream, out))),
        ops=(*ops, boundary, *order),
        never_rerun=(f"f{last + 1}", LOSS, *((WEIGHTS, *(op.name for op in back)) if split else ())),
    )
    return StageProblem(
        graph,
        LOSS,
        states=tuple(f"w{i}" for i in range(1, last + 2)),
        per_microbatch=("x0",),
        tangents=("g",),
        weights=WEIGHTS if split else None,
        gradients=marks,
    )


def in_turn(k: int, microbatches: int, stage: int = 0) -> RankActions:
    """One forward, one backward, with k micro-batches in flight."""
    first = [Action("F", stage, m) for m in range(min(k, microbatches))]
    rest: list[Action] = []
    for m in range(microbatches):
        rest += [Action("B", stage, m), *([Action("F", stage, m + k)] if m + k < microbatches else [])]
    return (*first, *rest)


def overwritable(stage: StageProblem) -> dict[str, str]:
    """The operand that each op may overwrite: its first one, if the first result is as large, and the caller does not
    hold it."""
    graph = stage.graph
    held = {*graph.inputs, *graph.outputs}
    sizes = graph.size
    first = {op.name: (op.reads[0], op.writes[0]) for op in graph.ops if op.name not in (LOSS, WEIGHTS)}
    return {op: t for op, (t, made) in first.items() if t not in held and sizes[t] == sizes[made]}


def overwriting(stage: StageProblem) -> StageProblem:
    """The stage, whose ops overwrite an operand that a schedule frees directly afterwards."""
    operand, sizes = overwritable(stage), stage.graph.size

    def reused(schedule: Schedule) -> list[int]:
        found = [0] * len(schedule)
        for at, step in enumerate(schedule):
            if isinstance(step, Run) and step.op in operand:
                end = at + 1
                while end < len(schedule) and isinstance(schedule[end], Free):
                    end += 1
                if Free(operand[step.op]) in schedule[at:end]:
                    for k in range(at, schedule.index(Free(operand[step.op]), at)):
                        found[k] += sizes[operand[step.op]]
        return found

    return replace(stage, reused=reused, reusable={op: sizes[t] for op, t in operand.items()})
