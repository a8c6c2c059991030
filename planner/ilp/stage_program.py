"""The integer program of a schedule with recomputation: one stage per op, after Checkmate (Jain et al., MLSys
2020).

Stage k runs some earlier ops again, in the known schedule's order, then op k for the first time.

    R[v,k] = op v runs again in stage k      A[t,k] = tensor t is resident when stage k begins
    p: the op that writes t                  S_k: bytes resident when stage k+1 begins, except what op k reads or writes
    min Σ c_v R[v,k]
    (read)    R[v,k] ≤ A[t,k] + R[p,k]  for each t that v reads;   1 ≤ A[t,k] + R[p,k]  for each t that op k reads
    (hold)    A[t,k+1] ≤ A[t,k] + R[p,k]
    (memory)  S_k + bytes that op k reads and writes + its workspace ≤ budget − inputs

Variables R exist for the known schedule's repeats and, from the backward on, for the `DEPTH` ops nearest
upstream. Repeated runs above the budget are excluded by further rows, after the simulator finds them.
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
    """The integer program of a schedule with recomputation within ``budget`` bytes, with one stage for each op."""

    graph: TrainingGraph
    budget: int
    known: Sequence[str]
    """The names of the ops that the known schedule runs, in order, without inverses. Ops are numbered by
    their first run.
    """
    depth: int = DEPTH
    """How many ops upstream of op k may run again in stage k."""
    rows: Rows = field(default_factory=Rows)
    """Variables and rows; `forbid` adds rows between two solves."""

    def __post_init__(self) -> None:
        """Find the ops that each stage may run again, and create all variables and rows."""
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
        """Return, for each stage, the ops that the known schedule repeats before the stage's own op; the last set is
        for the end."""
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
        """Return a start for the solver: by variable «op v runs again in stage k», 1 if the known schedule
        does that, else 0.
        """
        return {j: float(v in self.repeats[k]) for (v, k), j in self.run.items()}

    def _upstream(self, k: int) -> tuple[int, ...]:
        """Return the ``depth`` ops nearest upstream of op k, or fewer, ascending. Only large tensors and ops that may
        run again are followed."""
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
        """Create the variables «tensor t is resident when stage k begins» (``entering[t][k]``) for stages that use or
        write t. They are `ONE` for small tensors and for outputs at the end."""
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
            # Small tensors, and outputs after the last stage, are always resident (`ONE`).
            fixed = t not in self.big
            self.entering[t] = {
                k: ONE if fixed or k == len(self.ops) else self.rows.variable(0.0) for k in ordered
            }
        self.stages = {t: sorted(row) for t, row in self.entering.items()}

    def _uses(self, tensor: str, k: int) -> bool:
        return tensor in self.reads[k] or any(tensor in self.reads[v] for v in self.again[k])

    def enters(self, tensor: str, k: int) -> int:
        """Return the variable «the tensor is resident when stage k begins»; `ONE` if it always is, `ZERO` if
        nothing uses it later.
        """
        for stage in self.stages[tensor]:
            if stage >= k:
                return self.entering[tensor][stage]
        return ZERO

    def _made(self, tensor: str, k: int) -> list[Term]:
        variable = self.run.get((self.producer[tensor], k))
        return [] if variable is None else [(variable, 1.0)]

    def _write_rows(self) -> None:
        """Add the rows (read) and (hold) that the module describes."""
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
        """Add the rows that keep each stage k within the budget while op k runs for the first time."""
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
            # The share of the budget that is resident at the stage's end, from that of the stage before and
            # the changes.
            total = self.rows.variable(0.0, integer=False)
            chained = [(total, 1.0), *((j, -a) for j, a in terms if j >= 0)]
            self._row(chained + ([(previous, -1.0)] if previous >= 0 else []), 0.0)
            previous = total
            own = {*self.reads[k], *op.writes}
            rest = [(self.enters(t, k + 1), size[t] / self.room) for t in own]
            fixed = constant + (op.workspace + sum(size[t] for t in own)) / self.room
            self._row([(total, -1.0), *rest], fixed - 1.0)

    def forbid(self, v: int, k: int, resident: Iterable[str], values: Sequence[float]) -> None:
        """Add a row that excludes the repeated run of op v in stage k together with what is ``resident`` during it.
        ``values``: the solution that has both."""
        op, size = self.ops[v], self.graph.size
        own = {t for t in (*op.reads, *op.writes) if t in self.producer}
        touched = op.workspace + sum(size[t] for t in own)
        terms: list[Term] = [(self.run[v, k], -touched / self.room)]
        for t in resident:
            if t not in own:
                # Each tensor counts by the variable that makes it resident; always, if there is none.
                terms.append((self._reason(t, v, k, values), -size[t] / self.room))
        self._row(terms, -1.0)

    def _reason(self, tensor: str, v: int, k: int, values: Sequence[float]) -> int:
        """Return the variable by which, in a solution, a tensor is resident while op v runs again in stage k; `ONE`
        if there is none."""
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
    """Add a row for each repeated run during which a solution exceeds the budget in simulation, and return their
    number."""
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
