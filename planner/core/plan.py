"""The plan, which is the result of a strategy, and its JSON format ``rematplan.plan/1``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rematplan.ir import ProblemError, TrainingGraph, show_bytes
from rematplan.ir.files import read_as, write_whole
from rematplan.ir.problem_json import problem_from_json, problem_to_json
from rematplan.planner.core.lane_memory import checked_lanes
from rematplan.planner.core.lane_schedule import Lanes, lanes_from_json
from rematplan.planner.core.schedule import Free, Run, Schedule, with_frees
from rematplan.planner.core.simulator import Estimate, simulate

PLAN_FORMAT = "rematplan.plan/1"
EMBEDDED = "problem_data"
"""The key of a plan file under which it has the plan's problem, if it has it."""
STEPS: dict[str, type[Run] | type[Free]] = {"run": Run, "free": Free}
Status = Literal["optimal", "feasible", "refining"]

CLOSED = 1e-6
"""A plan counts as optimal if its overhead is at most this much above the lower bound: one ten-thousandth of a
percent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with its predicted peak and cost, for one planning problem.

    ``problem``, ``strategy``: the names of the problem and of the strategy that made the plan. ``schedule``: its runs
    and frees. ``estimate``: its simulated peak and cost. ``budget``: bytes, or None if planned without one.
    ``lower_bound``: a proven lower bound of the overhead of *any* schedule of the problem within the budget, or None.
    ``status``: ``optimal`` if the lower bound proves that no schedule has a smaller overhead (up to 1e-6);
    ``refining`` while another process searches for a better plan; else ``feasible``. ``blocks``: for strategies that
    divide the forward into blocks V₁..V_k, the names of each block's ops; else None. ``fingerprint``:
    `TrainingGraph.fingerprint` of the problem, or empty. ``lanes``: how the runs are divided into two lanes (streams
    or threads); None for one lane.
    """

    problem: str
    strategy: str
    schedule: Schedule
    estimate: Estimate
    budget: int | None = None
    lower_bound: float | None = None
    status: Status = "feasible"
    blocks: tuple[tuple[str, ...], ...] | None = None
    fingerprint: str = ""
    lanes: Lanes | None = None
    near: tuple[tuple[int, float], ...] = ()
    """For a plan near the smallest peak: peaks and overheads of other plans found from there up (`peak_ladder`)."""

    @property
    def peak(self) -> int:
        """The bytes that the plan never exceeds. For a plan on two lanes (streams or threads) this holds at any
        relative speed of the lanes; otherwise it is the simulated peak."""
        return self.lanes.peak if self.lanes else self.estimate.peak

    @property
    def gap(self) -> float | None:
        """The overhead minus its proven lower bound (a fraction, at least 0), or None without a bound."""
        return None if self.lower_bound is None else max(0.0, self.estimate.overhead - self.lower_bound)

    def __str__(self) -> str:
        e = self.estimate
        bound = "no bound"
        if self.lower_bound is not None and self.gap is not None:
            bound = f"bound {100 * self.lower_bound:.2f} %, gap {100 * self.gap:.2f} points"
        budget = "no budget" if self.budget is None else f"budget {show_bytes(self.budget)}"
        return (
            f"{self.strategy} plan of {self.problem}: {budget}, peak {show_bytes(e.peak)}, "
            f"overhead {100 * e.overhead:.2f} % ({bound}), {e.reruns} ops recomputed, {self.status}"
        )


def with_bound(plan: Plan, bound: float) -> Plan:
    """Return the plan with the lower bound ``bound``, reduced to its overhead if that is less. The status is
    ``optimal`` if the overhead is at most `CLOSED` above the bound, else ``feasible``. ``plan`` is returned unchanged
    if the bound exceeds the overhead by more than `CLOSED`, since it is wrong then."""
    overhead = plan.estimate.overhead
    if not bound <= overhead + CLOSED:
        return plan
    closed = overhead <= bound + CLOSED
    return replace(plan, lower_bound=min(bound, overhead), status="optimal" if closed else "feasible")


def by_cost(plan: Plan) -> tuple[float, int]:
    """Return a key that sorts plans by cost, and plans of equal cost by peak."""
    return plan.estimate.cost, plan.estimate.peak


def by_peak(plan: Plan) -> tuple[int, float]:
    """Return a key that sorts plans by simulated peak, and plans of equal peak by cost."""
    return plan.estimate.peak, plan.estimate.cost


def plan_from_runs(graph: TrainingGraph, runs: Sequence[str], strategy: str, **more: Any) -> Plan:
    """Return the plan that runs ``runs`` in order and frees each tensor as early as possible; `ProblemError` if that is
    no valid schedule. ``more``: further fields of `Plan`."""
    schedule = with_frees(graph, runs)
    return Plan(graph.name, strategy, schedule, simulate(graph, schedule), **more)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain JSON data in the format ``rematplan.plan/1``. The status ``refining`` becomes
    ``feasible``; the field ``near`` is left out."""
    e = plan.estimate
    return {
        "format": PLAN_FORMAT,
        "problem": plan.problem,
        "strategy": plan.strategy,
        "budget": plan.budget,
        "status": "feasible" if plan.status == "refining" else plan.status,
        "peak": e.peak,
        "cost": e.cost,
        "overhead": e.overhead,
        "lower_bound": plan.lower_bound,
        "reruns": e.reruns,
        "steps": [["run", s.op] if isinstance(s, Run) else ["free", s.tensor] for s in plan.schedule],
    } | {
        key: value
        for key, value in (
            ("blocks", plan.blocks),
            ("fingerprint", plan.fingerprint),
            ("lanes", plan.lanes and asdict(plan.lanes)),
        )
        if value  # Absent values are omitted.
    }


def plan_from_json(data: object, graph: TrainingGraph) -> Plan:
    """Return a plan of ``graph`` from JSON data, simulated again. `ProblemError` if the data is malformed, the plan is
    invalid or over its budget, or its fingerprint is of another graph. It has no lower bound if the stated peak or cost
    differs from the simulated one."""
    if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
        raise ProblemError(f"not a {PLAN_FORMAT} file")
    fingerprint = str(data.get("fingerprint", ""))
    if fingerprint not in ("", graph.fingerprint):
        raise ProblemError(
            f"the plan was made for another graph, {str(data.get('problem', ''))[:99]!r}, not for {graph.name!r} "
            f"(fingerprint {fingerprint[:12]}, not {graph.fingerprint[:12]}): the model, its loss (which the "
            f"command line's plans contain), its mode, the version of PyTorch, or an option (split, kernels, "
            f"policy, reserved) differs"
        )
    try:
        schedule: Schedule = tuple(STEPS[kind](name) for kind, name in data["steps"])
        plan = Plan(
            problem=str(data["problem"]),
            strategy=str(data["strategy"]),
            schedule=schedule,
            estimate=simulate(graph, schedule),
            budget=None if data["budget"] is None else int(data["budget"]),
            blocks=tuple(tuple(b) for b in data["blocks"]) if "blocks" in data else None,
            fingerprint=fingerprint,
            lanes=lanes_from_json(data["lanes"]) if "lanes" in data else None,
        )
        bound = None if data["lower_bound"] is None else float(data["lower_bound"])
        closed = data["status"] == "optimal"
        same = (data["peak"], data["cost"]) == (plan.estimate.peak, plan.estimate.cost)
    except (KeyError, TypeError, ValueError) as error:
        raise ProblemError(f"a field is missing or of another type: {error!r}") from None
    if plan.lanes:
        plan = replace(plan, lanes=checked_lanes(graph, plan.schedule, plan.lanes))
    if plan.budget is not None and plan.peak > plan.budget:
        raise ProblemError(_over(plan, graph, data.get("peak")))
    # If costs or sizes have changed, the bound was proven for another problem.
    if not same or bound is None:
        return plan
    proven = with_bound(plan, bound)
    return proven if closed else replace(proven, status="feasible")


def ops_of_plan(data: object) -> frozenset[str]:
    """Return the names of the ops that a plan in JSON data runs; none if the data is no plan."""
    steps = data.get("steps") if isinstance(data, dict) else None
    return frozenset(str(one[1]) for one in steps or () if len(one) == 2 and one[0] == "run")


def _over(plan: Plan, graph: TrainingGraph, stated: object) -> str:
    """Return the error message for a plan, read from a file, that exceeds its budget. ``stated``: the peak that the
    file states."""
    over = f"its peak, {plan.peak} bytes, is over its budget, {plan.budget} bytes"
    if stated == plan.peak:
        return over
    workspaces = sum(op.workspace > 0 for op in graph.ops)
    return (
        f"{over}; when it was made its peak was {stated} bytes, with other sizes or workspaces ({workspaces} ops "
        f"have one here; with roofline costs none has): make a new plan for this problem"
    )


def save_plan(plan: Plan, path: str | Path, graph: TrainingGraph | None = None) -> None:
    """Write a plan to a JSON file. If writing fails, an existing file is not changed.

    ``graph``: the plan's problem, to be written into the file, too, so that the file can be reported on alone.

    Raises:
        ProblemError: the folder or the file cannot be written.
    """
    more = {} if graph is None else {EMBEDDED: problem_to_json(graph)}
    write_whole(path, json.dumps(plan_to_json(plan) | more))


def load_plan(path: str | Path, graph: TrainingGraph) -> Plan:
    """Read a plan of the problem ``graph`` from a JSON file.

    Raises:
        ProblemError: the file cannot be read, or a reason that `plan_from_json` lists; the message names the file.
    """
    return read_as(path, lambda data: plan_from_json(data, graph))


def load_plan_with_problem(path: str | Path) -> tuple[Plan, TrainingGraph] | None:
    """Return the plan and the problem of a JSON file; None if it is no plan. `ProblemError` if it cannot be read, has
    no problem, or `plan_from_json` refuses it."""

    def convert(data: object) -> tuple[Plan, TrainingGraph] | None:
        """Return the plan and the problem that JSON data have; None if they are no plan, `ProblemError` if they have no
        problem."""
        if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
            return None
        if EMBEDDED not in data:
            raise ProblemError(
                "the file has no planning problem: state the model, and this file as --plan; files that "
                "`rematplan plan -o` writes have one"
            )
        graph = problem_from_json(data[EMBEDDED])
        return plan_from_json(data, graph), graph

    return read_as(path, convert)


def peak_op(plan: Plan) -> str | None:
    """Return the name of the op or inverse at the plan's simulated peak; None if the inputs alone reach it."""
    step = plan.schedule[plan.estimate.peak_at] if plan.estimate.peak_at >= 0 else None
    return step.op if isinstance(step, Run) else None
