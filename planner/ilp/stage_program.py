"""The integer program of a whole schedule with recomputation, after Checkmate: one stage for each op.

A known schedule gives the order of the ops. Stage k first runs some earlier ops again, in this order, and then runs op
k for the first time.

    R[v,k] = op v runs again in stage k      A[t,k] = tensor t is resident when stage k begins
    p: the op that writes t                  S_k: bytes resident when stage k+1 begins, except what op k reads or writes

    min Σ c_v R[v,k]
    (read)    R[v,k] ≤ A[t,k] + R[p,k]  for each t that v reads;   1 ≤ A[t,k] + R[p,k]  for each t that op k reads
    (hold)    A[t,k+1] ≤ A[t,k] + R[p,k]
    (memory)  S_k + bytes that op k reads and writes + its workspace ≤ budget − inputs

R[v,k] exists where the known schedule runs op v again in stage k. From the first backward op on, it also exists for the
`DEPTH` ops nearest upstream of op k. So the known schedule is a solution, from which the solver starts, unless it
depends on freeing small tensors: these stay resident from their first run to their last use. One variable stands for
A[t,k] over consecutive stages in which t can be neither used nor written.

The program does not limit the memory during the repeated runs of a stage. If the simulator finds that such a run
exceeds the budget, a row that excludes it is added, and the program is solved again. HiGHS solves in time slices, each
with the last solution as a hint.

The stages are from Checkmate (Jain et al., MLSys 2020). Shared variables, and rows that are added when they are
violated, are additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rematplan.ir import TrainingGraph
from rematplan.planner.core.schedule import Run, with_frees
from rematplan.planner.ilp.sparse_rows import ONE, ZERO, Rows, Term

DEPTH = 24
"""How many ops upstream of op k may run again in stage k, before op k runs for the first time."""
SMALL_TENSOR_SHARE = 5e-4
"""A tensor is small if its bytes are at most this share of the budget without the inputs."""

Key = tuple[int, int]


@dataclass
class StageProgram:
    """The integer program of a schedule with recomputation for one problem and budget, with one stage for each op
    (Checkmate's stages). It is built from a known schedule.

    The ops are numbered in the order in which the known schedule first runs them. In stage k, some ops before op k may
    run again, and then op k runs for the first time.

    ``graph``: the problem. ``budget``: bytes. ``known``: the names of the ops that the known schedule runs, in order,
    repeats included, without inverses. ``depth``: how many ops upstream of op k may run again in stage k. ``rows``: the
    variables and rows of the program. Between two solves, `forbid` adds rows.
    """

    graph: TrainingGraph
    budget: int
    known: Sequence[str]
    depth: int = DEPTH
    rows: Rows = field(default_factory=Rows)

    def __post_init__(self) -> None:
        self.ops = [self.graph.op[name] for name in dict.fromkeys(self.known)]
        inputs = set(self.graph.inputs)
        self.room = max(1, self.budget - self.graph.input_bytes)
        self.producer = {t: k for k, op in enumerate(self.ops) for t in op.writes}
        self.reads = [tuple(dict.fromkeys(t for t in op.reads if t not in inputs)) for op in self.ops]
        self.big = {t for t in self.producer if self.graph.size[t] > SMALL_TENSOR_SHARE * self.room}
        boundary = next((k for k, op in enumerate(self.ops) if op.phase == "backward"), 0)
        self.repeats = self._repeats()
        self.again = [
            tuple(sorted({*(self._upstream(k) if k >= boundary else ()), *self.repeats[k]}))
            for k in range(len(self.ops))
        ]
        self.run: dict[Key, int] = {}
        for k, again in enumerate(self.again):
            for v in again:
                self.run[v, k] = self.rows.variable(1e6 * self.ops[v].cost / self.graph.base_cost)
        self._make_residency()
        self._write_rows()
        self._write_memory()

    def _repeats(self) -> list[set[int]]:
        """Return, for each stage k, the numbers of the ops that the known schedule runs again between the first run of
        op k − 1 and the first run of op k. The last of the sets is for the time after the last op."""
        number = {op.name: v for v, op in enumerate(self.ops)}
        repeats: list[set[int]] = [set() for _ in range(len(self.ops) + 1)]
        k = 0
        for name in self.known:
            if number[name] == k:
                k += 1
            else:
                repeats[k].add(number[name])
        return repeats

    def hint(self) -> dict[int, float]:
        """Return a start for the solver: for the number of each variable «op v runs again in stage k», 1 if the known
        schedule does that, else 0."""
        return {j: float(v in self.repeats[k]) for (v, k), j in self.run.items()}

    def _upstream(self, k: int) -> tuple[int, ...]:
        """Return the numbers of up to ``depth`` ops whose results op k reads, directly or through other ops, ascending.
        The nearest ones are chosen, by a breadth-first search. It follows only large tensors (more than
        `SMALL_TENSOR_SHARE` of the budget), and only to ops that may run again."""
        found: dict[int, None] = {}
        once = set(self.graph.never_rerun)
        queue = [k]
        while queue and len(found) < self.depth:
            for t in self.reads[queue.pop(0)]:
                v = self.producer[t]
                if (
                    t in self.big
                    and v not in found
                    and self.ops[v].name not in once
                    and len(found) < self.depth
                ):
                    found[v] = None
                    queue.append(v)
        return tuple(sorted(found))

    def _make_residency(self) -> None:
        """Create the variables «tensor t is resident when stage k begins», only for the stages in which t can be used
        or written. ``entering[t]`` maps each of these stages to the variable's number, or to `ONE` if t is always
        resident then: a small tensor, or an output of the step after the last stage."""
        events: dict[str, set[int]] = {t: set() for t in self.producer}
        for k, again in enumerate(self.again):
            for t in self.reads[k]:
                events[t].add(k)
            for v in again:
                for t in (*self.reads[v], *self.ops[v].writes):
                    events[t].add(k)
        outputs = set(self.graph.outputs)
        self.entering: dict[str, dict[int, int]] = {}
        for t, stages in events.items():
            if t in outputs:
                stages.add(len(self.ops))
            last = max((k for k in stages if k == len(self.ops) or self._uses(t, k)), default=-1)
            ordered = sorted(k for k in stages if self.producer[t] < k <= last)
            fixed = t not in self.big
            self.entering[t] = {
                k: ONE if fixed or k == len(self.ops) else self.rows.variable(0.0) for k in ordered
            }
        self.stages = {t: sorted(row) for t, row in self.entering.items()}

    def _uses(self, tensor: str, k: int) -> bool:
        return tensor in self.reads[k] or any(tensor in self.reads[v] for v in self.again[k])

    def enters(self, tensor: str, k: int) -> int:
        """Return the number of the variable «the tensor is resident when stage k begins». Return `ONE` if it is always
        resident then, and `ZERO` if no op uses it from stage k on."""
        for stage in self.stages[tensor]:
            if stage >= k:
                return self.entering[tensor][stage]
        return ZERO

    def _made(self, tensor: str, k: int) -> list[Term]:
        variable = self.run.get((self.producer[tensor], k))
        return [] if variable is None else [(variable, 1.0)]

    def _write_rows(self) -> None:
        for k, again in enumerate(self.again):
            for t in self.reads[k]:
                self._row([(self.enters(t, k), 1.0), *self._made(t, k)], 1.0)
            for v in again:
                for t in self.reads[v]:
                    self._row([(self.enters(t, k), 1.0), *self._made(t, k), (self.run[v, k], -1.0)], 0.0)
        for t, stages in self.stages.items():
            for before, after in pairwise(stages):
                resident = [(self.entering[t][before], 1.0), *self._made(t, before)]
                self._row([*resident, (self.entering[t][after], -1.0)], 0.0)

    def _write_memory(self) -> None:
        """Add the rows that keep each stage k within the budget while op k runs for the first time.

        A continuous variable for each stage k is the share of the budget (without inputs) that the tensors resident at
        the stage's end take. One row computes the variable of stage k from the variable of stage k − 1 and from the
        tensors that become resident or are freed. Another row limits the variable, with the workspace of op k and the
        tensors that op k reads or writes added.
        """
        previous, constant = -1, 0.0
        present: dict[str, int] = {}
        changes: dict[int, list[str]] = {}
        for t, stages in self.stages.items():
            for k in {self.producer[t], *stages}:
                changes.setdefault(k, []).append(t)
        size = self.graph.size
        for k, op in enumerate(self.ops):
            terms: list[Term] = []
            for t in changes.get(k, ()):
                old, new = present.get(t, ZERO), self.enters(t, k + 1)
                share = size[t] / self.room
                terms += [(new, share), (old, -share)]
                present[t] = new
            constant += sum(a for j, a in terms if j == ONE)
            total = self.rows.variable(0.0, integer=False)
            chained = [(total, 1.0), *((j, -a) for j, a in terms if j >= 0)]
            self._row(chained + ([(previous, -1.0)] if previous >= 0 else []), 0.0)
            previous = total
            own = {*self.reads[k], *op.writes}
            rest = [(self.enters(t, k + 1), size[t] / self.room) for t in own]
            fixed = constant + (op.workspace + sum(size[t] for t in own)) / self.room
            self._row([(total, -1.0), *rest], fixed - 1.0)

    def forbid(self, v: int, k: int, resident: Iterable[str], values: Sequence[float]) -> None:
        """Add a row that excludes a repeated run which exceeds the budget: that of op v in stage k, together with the
        tensors that are resident during this run in the solution ``values``.

        ``resident``: the names of these tensors. In the row, each tensor is represented by the variable that is the
        reason why it is resident: «the tensor is resident when stage k+1 begins», or «op w runs again in stage k» for
        an op w after v that reads the tensor. A tensor for which there is no such variable, such as one that op k
        reads, always counts.
        """
        op, size = self.ops[v], self.graph.size
        own = {t for t in (*op.reads, *op.writes) if t in self.producer}
        touched = op.workspace + sum(size[t] for t in own)
        terms: list[Term] = [(self.run[v, k], -touched / self.room)]
        for t in resident:
            if t not in own:
                terms.append((self._reason(t, v, k, values), -size[t] / self.room))
        self._row(terms, -1.0)

    def _reason(self, tensor: str, v: int, k: int, values: Sequence[float]) -> int:
        if tensor in self.reads[k]:
            return ONE
        entering = self.enters(tensor, k + 1)
        if entering == ONE or (entering >= 0 and values[entering] > 0.5):
            return entering
        for w in self.again[k]:
            if w > v and tensor in self.reads[w] and values[self.run[w, k]] > 0.5:
                return self.run[w, k]
        return ONE

    def _row(self, terms: list[Term], floor: float) -> None:
        floor -= sum(a for j, a in terms if j == ONE)
        self.rows.at_least([(j, a) for j, a in terms if j >= 0], floor)


def runs_at(program: StageProgram, values: Sequence[float]) -> list[str]:
    """Return the names of the ops that a solution runs, in order, repeats included. ``values``: the solution, one value
    for each variable of the program."""
    runs = []
    for k, again in enumerate(program.again):
        runs += [program.ops[v].name for v in again if values[program.run[v, k]] > 0.5]
        runs.append(program.ops[k].name)
    return runs


def add_violated(program: StageProgram, values: Sequence[float]) -> int:
    """Simulate the schedule of a solution, and add a row for each repeated run that exceeds the budget, to exclude this
    run. Return the number of rows added.

    ``values``: the solution, one value for each variable of the program.
    """
    graph, found, k = program.graph, 0, 0
    number = {op.name: v for v, op in enumerate(program.ops)}
    resident: set[str] = set()
    live = 0
    for step in with_frees(graph, runs_at(program, values)):
        if not isinstance(step, Run):
            resident.discard(step.tensor)
            live -= graph.size[step.tensor]
            continue
        op = graph.op[step.op]
        live += sum(graph.size[t] for t in op.writes if t not in resident)
        resident.update(op.writes)
        v = number[step.op]
        if v == k:
            k += 1
        elif live + op.workspace > program.room:
            program.forbid(v, k, resident, values)
            found += 1
    return found
