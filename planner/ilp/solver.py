"""Solve mixed-integer programs with HiGHS in a process that is killed if it overruns its time limit.

If no process can be started, HiGHS runs in this one, where it may be late and cannot be stopped.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ortools.math_opt import model_pb2, parameters_pb2, result_pb2, rpc_pb2, solution_pb2

from rematplan.planner.core.effort import PATIENCE, Effort
from rematplan.planner.ilp import highs_process
from rematplan.planner.ilp.highs_process import CPU_SECONDS, read_message, respond, write_message
from rematplan.planner.ilp.sparse_rows import Rows

OVERRUN = 0.5
"""Seconds by which HiGHS may exceed its own limit before its process is killed."""
LONG = 0.05
"""CPU seconds from which on a solve shows how busy the machine is."""
MOVES, NODES = 20_000, 200
"""If moves are counted, a program counts as at least so many of them, and its search tree has at most so many nodes."""
MOVES_PER_SQUARE = {True: 1.3e-3, False: 4e-5}
"""By whether a program is integer: its moves per squared number of factors. For ResNet-50, an integer program of 37,000
factors takes 12 s, a continuous one 0.3 s."""


@dataclass(frozen=True)
class Answer:
    """The result of a solve; the defaults are the *empty answer*, which states nothing."""

    dual: float = -math.inf
    """A proven lower bound of any solution's cost, without `Rows.constant`; infinite: no solution exists,
    -infinite: nothing is proven.
    """
    values: tuple[float, ...] | None = None
    """The best solution found, by variable, or None."""
    done: bool = False
    """Whether ``values`` are optimal within the gap, or it is proven that there is no solution."""


class Solver:
    """Solves mixed-integer programs with HiGHS in another process, one program at a time. It must be closed: use it as
    a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False
        # HiGHS knows only the wall clock: its limit is the CPU seconds times this, which the last long solve needed.
        self._stretch = 1.0

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the process that solves. The current solve and later ones return an empty `Answer`. Any thread
        may call this.
        """
        self._stopped = True
        # A solve in this process is not interrupted.
        self._kill()

    def solve(
        self,
        rows: Rows,
        effort: Effort,
        *,
        integer: bool,
        gap: float,
        hint: Mapping[int, float] | None = None,
    ) -> Answer:
        """Minimise a program's cost within ``effort``, to which the work is charged. Return an empty `Answer` if
        stopped, too late, too large for the moves left, or HiGHS fails. ``integer``: False relaxes all variables.
        ``gap``: of the cost, absolute. ``hint``: a start, by variable."""
        if self._stopped:
            return Answer()
        moves = max(MOVES, int(MOVES_PER_SQUARE[integer] * len(rows.columns) ** 2))
        if effort.moves and moves > max(MOVES, effort.left):
            effort.charge(moves=moves)
            return Answer()
        seconds = math.inf if effort.moves else effort.left * self._stretch
        request = _request(rows, seconds, integer, gap, hint or {})
        began = time.monotonic()
        response = self._exchange(request.SerializeToString(), seconds + OVERRUN * self._stretch)
        if response is None:
            effort.charge(moves=moves, seconds=(time.monotonic() - began) / self._stretch)
            return Answer()
        cpu, answer = response
        effort.charge(moves=moves, seconds=cpu)
        if cpu >= LONG:
            self._stretch = min(PATIENCE, max(1.0, (time.monotonic() - began) / cpu))
        return _answer(answer, len(rows.cost))

    def _exchange(self, request: bytes, seconds: float) -> tuple[float, bytes] | None:
        """Return the CPU seconds and the response of the process that solves; None if it is stopped, or takes more than
        ``seconds`` on the wall clock. If it cannot be started or ends by itself, this process solves, and counts 0 CPU
        seconds."""
        process = self._running_process()
        if process is None:
            return 0.0, respond(request)
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), kill)
        timer.daemon = True
        timer.start()
        response = _ask(process, request)
        timer.cancel()
        if response is None:
            self._kill()
            if not late.is_set() and not self._stopped:  # the process ended by itself
                return 0.0, respond(request)
            return None
        return CPU_SECONDS.unpack_from(response)[0], response[CPU_SECONDS.size :]

    def _running_process(self) -> subprocess.Popen[bytes] | None:
        """Return the process that solves, and start it if it does not run; None if it cannot be started."""
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
                    start_new_session=True,  # Ctrl-C interrupts only this process, which then stops the other one
                )
            except (OSError, ValueError):
                return None
            return self._process

    def _kill(self) -> None:
        """Kill the process that solves, if it runs, and wait for its end."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            # Leaving the block closes the pipes and waits for the end.
            with (
                suppress(BrokenPipeError),
                process,
            ):
                pass


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """Send a request to a process, wait, and return the response; None if the process has ended."""
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
    """Return the message for HiGHS, with a limit: ``seconds`` or, if these are infinite, `NODES` nodes for an integer
    program, and none for a continuous one. ``gap``: of the cost, absolute. ``hint``: a start, by variable."""
    request = rpc_pb2.SolveRequest(solver_type=parameters_pb2.SOLVER_TYPE_HIGHS, model=_model(rows, integer))
    seconds = max(0.01, seconds)
    if math.isfinite(seconds):
        request.parameters.time_limit.seconds = int(seconds)
        request.parameters.time_limit.nanos = int(seconds % 1 * 1e9)
    elif integer:
        request.parameters.node_limit = NODES
    if integer:
        request.parameters.absolute_gap_tolerance = gap
        request.parameters.relative_gap_tolerance = 0.0
    if hint:
        hints = request.model_parameters.solution_hints.add().variable_values
        hints.ids.extend(sorted(hint))
        hints.values.extend(hint[j] for j in sorted(hint))
    return request


def _model(rows: Rows, integer: bool) -> model_pb2.ModelProto:
    """Convert a program to an OR-tools message. If ``integer`` is False, all variables are continuous: the linear
    relaxation."""
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
    """Return a serialised `SolveResponse` of OR-tools as an `Answer`. ``variables``: their number."""
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
    """Return the first feasible solution, by variable; None if there is none."""
    for solution in result.solutions:
        primal = solution.primal_solution
        if primal.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE:
            values = [0.0] * variables
            for j, value in zip(primal.variable_values.ids, primal.variable_values.values, strict=True):
                values[j] = value
            return tuple(values)
    return None
