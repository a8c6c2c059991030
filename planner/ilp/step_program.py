"""The exact integer program of a tiny problem, solved by CP-SAT: which op or inverse runs at each of T steps.

    R[v,k] = op or inverse v runs at step k     A[t,k] = tensor t is resident before step k (A[t,0] = 0)
    D[t,k] = t is resident during step k        must: the ops that every schedule must run

    min Σ_v c_v (Σ_k R[v,k] − [v in must])
    (one)     Σ_v R[v,k] ≤ 1
    (read)    R[v,k] ≤ A[t,k]                          t read by v
    (during)  D[t,k] ≥ A[t,k+1];  D[t,k] ≥ R[v,k], t read or written by v;  D[t,k] ≤ A[t,k] + Σ_{u writes t} R[u,k]
    (memory)  Σ m_t D[t,k] + Σ_v workspace_v R[v,k] ≤ B − inputs
    (end)     A[t,T] = 1 for outputs;  Σ_k R[v,k] ≥ 1 for v in must
    (once)    Σ_k R[v,k] ≤ 1 for ops that may run only once
    (idle)    R[v,k+1] ≤ Σ_u R[u,k]: steps without a run come last

The program covers any order, repetitions up to T runs in total, and inverses. So its optimum is the cheapest schedule
of at most T runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.arrays.precedence import must_run

COSTS = 10**7  # the cost without recomputation in the solver's objective, which is an integer
BYTES = 2**40  # beyond this budget the unit is several bytes: sizes are rounded up, the budget down


@dataclass(frozen=True)
class StepOptimum:
    """The result of `solve_steps`: the best schedule found.

    ``runs``: the names of the ops and inverses that it runs, in order; None if no schedule was found. ``proven``: if
    ``runs`` is not None, whether it is proven that no schedule of at most ``steps`` runs is cheaper, except for
    rounding costs to 10⁻⁷ of the cost without recomputation. If ``runs`` is None, whether it is proven that no schedule
    of at most ``steps`` runs fits the budget.
    """

    runs: tuple[str, ...] | None
    proven: bool


def solve_steps(graph: TrainingGraph, budget: int, steps: int, seconds: float) -> StepOptimum:
    """Search for the cheapest schedule of at most ``steps`` runs of ops and inverses within ``budget`` bytes, with the
    solver CP-SAT, for up to ``seconds``.

    All orders and repetitions are considered. The order of random ops (``graph.ordered``) is ignored.
    """
    if budget < graph.input_bytes:
        return StepOptimum(None, True)
    model = cp_model.CpModel()
    recipes, tensors, runs = _variables(model, graph, steps)
    unit = 1 + (budget - graph.input_bytes) // BYTES
    room = (budget - graph.input_bytes) // unit
    size = {t: -(-graph.size[t] // unit) for t in tensors}
    makers = {t: [v for v, op in enumerate(recipes) if t in op.writes] for t in tensors}
    for k in range(steps):
        model.add_at_most_one(runs[v, k] for v in range(len(recipes)))
        during = {t: model.new_bool_var("") for t in tensors}
        for v, op in enumerate(recipes):
            for t in (*op.reads, *op.writes):
                if t in during:
                    model.add_implication(runs[v, k], during[t])
            for t in op.reads:
                if t in during:
                    model.add_implication(runs[v, k], tensors[t][k])
        for t, row in tensors.items():
            model.add_implication(row[k + 1], during[t])
            model.add_bool_or(during[t].negated(), row[k], *(runs[v, k] for v in makers[t]))
        workspace = ((-(-op.workspace // unit), runs[v, k]) for v, op in enumerate(recipes))
        model.add(
            sum(size[t] * during[t] for t in tensors) + sum(w * run for w, run in workspace if w) <= room
        )
    for k in range(steps - 1):  # idle steps come last
        for v in range(len(recipes)):
            model.add_bool_or(runs[v, k + 1].negated(), *(runs[u, k] for u in range(len(recipes))))
    scale = COSTS / graph.base_cost if graph.base_cost else 0.0
    price = [round(op.cost * scale) for op in recipes]
    model.minimize(sum(price[v] * count for v, count in _counted(model, graph, recipes, steps, runs).items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = max(0.01, seconds)
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return StepOptimum(None, status == cp_model.INFEASIBLE)
    sequence = [
        recipes[v].name for k in range(steps) for v in range(len(recipes)) if solver.value(runs[v, k])
    ]
    return StepOptimum(tuple(sequence), status == cp_model.OPTIMAL)


def _counted(
    model: cp_model.CpModel,
    graph: TrainingGraph,
    recipes: Sequence[Op],
    steps: int,
    runs: Mapping[tuple[int, int], cp_model.IntVar],
) -> dict[int, cp_model.IntVar]:
    """Return, for the position of each op and inverse in ``recipes``, a variable that counts its runs; the first run of
    an op that every schedule must run is not counted.

    So the objective of a schedule without recomputation is 0, and the solver sees at once that it is optimal.

    ``model``: the program, to which the variables are added. ``recipes``: the ops and inverses that may run. ``steps``:
    the number of steps. ``runs``: for a position in ``recipes`` and a step, the variable «runs at this step».
    """
    must, counts = must_run(graph), {}
    for v, op in enumerate(recipes):
        counts[v] = model.new_int_var(0, steps, "")
        model.add(sum(runs[v, k] for k in range(steps)) == counts[v] + int(op.name in must))
    return counts


Row = list[cp_model.IntVar]


def _variables(
    model: cp_model.CpModel, graph: TrainingGraph, steps: int
) -> tuple[list[Op], dict[str, Row], dict[tuple[int, int], cp_model.IntVar]]:
    """Create the program's variables, and return three things: the ops and inverses that may run; for the name of each
    tensor, the variables «resident before step k» for k = 0 … ``steps``; and for each pair of a position among these
    ops and inverses and a step, the variable «runs at this step».

    Also add the rows that no tensor is resident before step 0, that the outputs are resident at the end, and that ops
    which may run only once do so. An inverse that would write an input of the problem may not run.
    """
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    recipes = [op for op in graph.recipes if inputs.isdisjoint(op.writes)]
    tensors = {t.name: [model.new_bool_var("") for _ in range(steps + 1)] for t in graph.tensors}
    for t in inputs:
        del tensors[t]
    for t, row in tensors.items():
        model.add(row[0] == 0)
        if t in outputs:
            model.add(row[steps] == 1)
    runs = {(v, k): model.new_bool_var("") for v in range(len(recipes)) for k in range(steps)}
    for v, op in enumerate(recipes):
        if op.name in graph.never_rerun:
            model.add_at_most_one(runs[v, k] for k in range(steps))
    return recipes, tensors, runs
