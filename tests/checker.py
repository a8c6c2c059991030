#!/usr/bin/env python3
"""Replay a plan file against its problem file and report what the plan really does.

Independent of the package: standard library only, and no code is shared with the simulator. The two formats are
described in docs/formats.md.

Usage: checker.py PROBLEM.json PLAN.json

Prints one JSON object: peak (bytes), cost, overhead, runs, reruns, inversions. Exit status 0: the plan is valid, it
keeps its budget and its own figures are right. 1: it is not; standard error names the first fault. 2: a file cannot be
read.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TOLERANCE = 1e-6
"""Greatest relative difference between a stated and a replayed cost, as sums are rounded in different orders."""

Json = dict[str, Any]


class InvalidPlan(Exception):
    """The plan breaks a rule of the format, or states a figure that the replay contradicts."""


def replay(problem: Json, plan: Json) -> Json:
    """The figures of a plan, computed step by step from the problem.

    Raises:
        InvalidPlan: a step is impossible, or an output is missing at the end.
    """
    sizes = {tensor["name"]: tensor["bytes"] for tensor in problem["tensors"]}
    ops = {op["name"]: op for op in problem["ops"]}
    inverses = {op["name"]: op for op in problem.get("inverses", ())}
    if len(ops) + len(inverses) != len({*ops, *inverses}) or len(ops) != len(problem["ops"]):
        raise InvalidPlan("two ops or inverses share a name")
    fixed = frozenset(problem["inputs"])
    live = set(fixed)
    resident = sum(sizes[tensor] for tensor in live)
    peak, cost = resident, 0.0
    ran: Counter[str] = Counter()
    for index, (kind, name) in enumerate(plan["steps"]):
        where = f"step {index} ({kind} {name})"
        if kind == "run":
            op = ops.get(name, inverses.get(name))
            if op is None:
                raise InvalidPlan(f"{where}: there is no such op or inverse")
            for tensor in op["reads"]:
                if tensor not in live:
                    raise InvalidPlan(f"{where}: reads {tensor}, which is not resident")
            for tensor in op["writes"]:
                if tensor in fixed:
                    raise InvalidPlan(f"{where}: writes the input {tensor}")
                if tensor not in live:
                    live.add(tensor)
                    resident += sizes[tensor]
            ran[name] += 1
            cost += op["cost"]
            peak = max(peak, resident + op.get("workspace", 0))
        elif kind == "free":
            if name in fixed or name not in live:
                raise InvalidPlan(f"{where}: the tensor is {'an input' if name in fixed else 'not resident'}")
            live.remove(name)
            resident -= sizes[name]
        else:
            raise InvalidPlan(f"{where}: a step is a run or a free")
    for tensor in problem["outputs"]:
        if tensor not in live:
            raise InvalidPlan(f"the output {tensor} is not resident at the end")
    whole = sum(op["cost"] for op in problem["ops"])
    return {
        "peak": peak,
        "cost": cost,
        "overhead": cost / whole - 1 if whole else 0.0,
        "runs": sum(ran.values()),
        "reruns": sum(count - 1 for name, count in ran.items() if name in ops),
        "inversions": sum(count for name, count in ran.items() if name in inverses),
    }


def check(problem: Json, plan: Json) -> Json:
    """The replayed figures of a plan that is valid, keeps its budget and states its figures rightly.

    Raises:
        InvalidPlan: it is not such a plan; the message names the first fault.
    """
    for document, kind in ((problem, "problem"), (plan, "plan")):
        if document.get("format") != f"rematplan.{kind}/1":
            raise InvalidPlan(f"the {kind}'s format is {document.get('format')!r}")
    found = replay(problem, plan)
    if plan.get("budget") is not None and found["peak"] > plan["budget"]:
        raise InvalidPlan(f"peak {found['peak']} exceeds the budget {plan['budget']}")
    if plan["peak"] != found["peak"]:
        raise InvalidPlan(f"the plan states the peak {plan['peak']}; the replay finds {found['peak']}")
    for figure in ("cost", "overhead"):
        if abs(plan[figure] - found[figure]) > TOLERANCE * max(1.0, abs(found[figure])):
            raise InvalidPlan(f"the plan states {figure} {plan[figure]}; the replay finds {found[figure]}")
    bound = plan.get("lower_bound")
    if bound is not None and bound > found["overhead"] + TOLERANCE:
        raise InvalidPlan(f"the lower bound {bound} exceeds the overhead {found['overhead']}")
    return found


def read(*files: str | Path) -> list[Json]:
    """The JSON documents of some files."""
    return [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]


def check_files(problem: str | Path, plan: str | Path) -> Json:
    """As `check`, for files."""
    return check(*read(problem, plan))


def main(problem: str, plan: str) -> int:
    """Check two files, print the result and return the exit status."""
    try:
        documents = read(problem, plan)
    except (OSError, ValueError) as error:
        print(f"cannot read: {error}", file=sys.stderr)
        return 2
    try:
        print(json.dumps(check(*documents)))
    except InvalidPlan as fault:
        print(f"invalid: {fault}", file=sys.stderr)
        return 1
    except (LookupError, TypeError, ValueError, AttributeError) as fault:
        print(f"invalid: malformed file, {fault!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]) if len(sys.argv) == 3 else __doc__)
