"""The exact integer program of a tiny problem, for CP-SAT: which op or inverse runs at each of T steps.

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

It covers any order, repetitions and inverses: its optimum is the cheapest schedule of at most T runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortools.sat.python import cp_model

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.arrays.precedence import must_run

COSTS = 10**7  # the cost without recomputation in the solver's objective, which is an integer
BYTES = 2**40  # beyond this budget the unit is several bytes: sizes are rounded up, the budget down


def solve_steps(graph: TrainingGraph, budget: int, steps: int, seconds: float) -> tuple[str, ...] | None:
    """Return the names of the ops and inverses that the cheapest schedule found runs, in order; None if none is found.
    It has at most ``steps`` runs, in any order, within ``budget`` bytes. ``seconds``: of deterministic solver time.
    ``graph.ordered`` is ignored."""
    if budget < graph.input_bytes:
        return None
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
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    every = ((v, k) for k in range(steps) for v in range(len(recipes)))
    return tuple(recipes[v].name for v, k in every if solver.value(runs[v, k]))


def _counted(
    model: cp_model.CpModel,
    graph: TrainingGraph,
    recipes: Sequence[Op],
    steps: int,
    runs: Mapping[tuple[int, int], cp_model.IntVar],
) -> dict[int, cp_model.IntVar]:
    """Return, by position in ``recipes``, a new variable that counts runs, without the first run of an op
    that must run.
    """
    # So a schedule without recomputation has the objective 0, which is seen at once to be optimal.
    must, counts = must_run(graph), {}
    for v, op in enumerate(recipes):
        counts[v] = model.new_int_var(0, steps, "")
        model.add(sum(runs[v, k] for k in range(steps)) == counts[v] + int(op.name in must))
    return counts


Row = list[cp_model.IntVar]


def _variables(
    model: cp_model.CpModel, graph: TrainingGraph, steps: int
) -> tuple[list[Op], dict[str, Row], dict[tuple[int, int], cp_model.IntVar]]:
    """Return the ops and inverses that write no input, and new variables: «resident before step k» by tensor, «runs at
    step k» by (recipe, step). Outputs are resident at the end, nothing is at the start, and ops of ``never_rerun`` run
    at most once."""
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    # An inverse that would write an input may not run.
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
