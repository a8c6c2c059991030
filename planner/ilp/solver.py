"""Solve mixed-integer programs with HiGHS, within a time limit that holds.

Each `Solver` has a process of its own (`highs_process`), started at the first solve. The process is killed if a
solve overruns its limit, or if `Solver.stop` is called from any thread; that solve then proves nothing. If no
process can be started, HiGHS runs in this process and takes the time it takes.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ortools.math_opt import model_pb2, parameters_pb2, result_pb2, rpc_pb2, solution_pb2

from rematplan.planner.ilp import highs_process
from rematplan.planner.ilp.highs_process import read_message, respond, write_message
from rematplan.planner.ilp.sparse_rows import Rows

OVERRUN = 0.5
"""Seconds by which HiGHS may exceed its own limit before its process is killed."""


@dataclass(frozen=True)
class Answer:
    """What a solver found out about a program.

    ``dual``: a proven lower bound of the cost of any solution; infinite if there is no solution, -infinite if
    nothing was proven. ``values``: the best solution found, by variable, or None. ``done``: whether the solver
    finished: either ``values`` are optimal within the requested gap, or it is proven that there is no solution.
    """

    dual: float = -math.inf
    values: tuple[float, ...] | None = None
    done: bool = False


class Solver:
    """Solves programs with HiGHS in another process, one at a time. It must be closed; use it as a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the current solve now. That solve, and later ones, return an empty answer. May be called from any
        thread."""
        self._stopped = True
        self._kill()

    def solve(
        self,
        rows: Rows,
        seconds: float,
        *,
        integer: bool,
        gap: float,
        hint: Mapping[int, float] | None = None,
    ) -> Answer:
        """Minimise the cost of a program for at most about ``seconds``, and return the best solution and the bound.

        After `stop`, if the process had to be killed, or if the solver fails, the answer is empty.

        Args:
            rows: the program.
            seconds: the time limit.
            integer: whether to solve the integer program; if not, its linear relaxation.
            gap: a solution within this of the optimum, in the unit of cost, counts as optimal.
            hint: values of some variables to start from, by the variable's number.
        """
        if self._stopped:
            return Answer()
        request = _request(rows, seconds, integer, gap, hint or {})
        response = self._exchange(request.SerializeToString(), seconds + OVERRUN)
        return Answer() if response is None else _answer(response, len(rows.cost))

    def _exchange(self, request: bytes, seconds: float) -> bytes | None:
        """Return the response, or None if it was late or the solve was stopped."""
        process = self._begun()
        if process is None:
            return respond(request)
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        response = _ask(process, request)
        timer.cancel()
        if response is None:
            self._kill()
            if not late.is_set() and not self._stopped:  # it did not even start
                return respond(request)
        return response

    def _begun(self) -> subprocess.Popen[bytes] | None:
        """Return the process, started if there is none; None if none can be started."""
        with self._lock:
            if self._process is not None:
                return self._process
            try:
                self._process = subprocess.Popen(
                    # -P: the folder of the script must not hide modules
                    [sys.executable, "-P", highs_process.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C is for this process, which then stops it
                )
            except (OSError, ValueError):
                return None
            return self._process

    def _kill(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(BrokenPipeError), process:  # which closes the pipes and waits
                pass


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """Return the process's response, or None if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        write_message(process.stdin, request)
        return read_message(process.stdout)
    except (OSError, ValueError):
        return None


def _request(
    rows: Rows, seconds: float, integer: bool, gap: float, hint: Mapping[int, float]
) -> rpc_pb2.SolveRequest:
    request = rpc_pb2.SolveRequest(solver_type=parameters_pb2.SOLVER_TYPE_HIGHS, model=_model(rows, integer))
    seconds = max(0.01, seconds)
    request.parameters.time_limit.seconds = int(seconds)
    request.parameters.time_limit.nanos = int(seconds % 1 * 1e9)
    if integer:
        request.parameters.absolute_gap_tolerance = gap
        request.parameters.relative_gap_tolerance = 0.0
    if hint:
        hints = request.model_parameters.solution_hints.add().variable_values
        hints.ids.extend(sorted(hint))
        hints.values.extend(hint[j] for j in sorted(hint))
    return request


def _model(rows: Rows, integer: bool) -> model_pb2.ModelProto:
    """Return the program as an OR-tools message; with ``integer`` off, its linear relaxation."""
    model = model_pb2.ModelProto()
    n = len(rows.cost)
    model.variables.ids.extend(range(n))
    model.variables.lower_bounds.extend([0.0] * n)
    model.variables.upper_bounds.extend([1.0] * n)
    model.variables.integers.extend([integer and kind for kind in rows.integers])
    priced = [j for j in range(n) if rows.cost[j]]
    model.objective.linear_coefficients.ids.extend(priced)
    model.objective.linear_coefficients.values.extend([rows.cost[j] for j in priced])
    count = len(rows.floors)
    model.linear_constraints.ids.extend(range(count))
    model.linear_constraints.lower_bounds.extend(rows.floors)
    model.linear_constraints.upper_bounds.extend([math.inf] * count)
    matrix = model.linear_constraint_matrix
    for r in range(count):
        terms: dict[int, float] = {}
        for k in range(rows.starts[r], rows.starts[r + 1]):
            terms[rows.columns[k]] = terms.get(rows.columns[k], 0.0) + rows.factors[k]
        for column in sorted(terms):
            if terms[column]:
                matrix.row_ids.append(r)
                matrix.column_ids.append(column)
                matrix.coefficients.append(terms[column])
    return model


def _answer(response: bytes, variables: int) -> Answer:
    result = rpc_pb2.SolveResponse.FromString(response).result
    reason = result.termination.reason
    if reason == result_pb2.TERMINATION_REASON_INFEASIBLE:
        return Answer(math.inf, None, True)
    dual = result.termination.objective_bounds.dual_bound
    return Answer(
        dual if math.isfinite(dual) else -math.inf,
        _values(result, variables),
        reason == result_pb2.TERMINATION_REASON_OPTIMAL,
    )


def _values(result: result_pb2.SolveResultProto, variables: int) -> tuple[float, ...] | None:
    for solution in result.solutions:
        primal = solution.primal_solution
        if primal.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE:
            values = [0.0] * variables
            for j, value in zip(primal.variable_values.ids, primal.variable_values.values, strict=True):
                values[j] = value
            return tuple(values)
    return None
