"""Read and write planning problems (training steps as ops over storages) in the JSON format ``rematplan.problem/1``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from rematplan.ir.errors import ProblemError
from rematplan.ir.files import field_of, names_of, read_as, typed, write_whole
from rematplan.ir.training_graph import Op, Phase, Tensor, TrainingGraph

PROBLEM_FORMAT = "rematplan.problem/1"


def problem_to_json(graph: TrainingGraph) -> dict[str, Any]:
    """Convert a planning problem to plain JSON data in the format ``rematplan.problem/1``."""
    data: dict[str, Any] = {
        "format": PROBLEM_FORMAT,
        "name": graph.name,
        "tensors": [{"name": t.name, "bytes": t.bytes} for t in graph.tensors],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "ops": [_op_to_json(o) for o in graph.ops],
    }
    if graph.inverses:
        data["inverses"] = [_op_to_json(o) for o in graph.inverses]
    if graph.ordered:
        data["ordered"] = list(graph.ordered)
    if graph.never_rerun:
        data["never_rerun"] = list(graph.never_rerun)
    if graph.fixed_split:
        data["fixed_split"] = dict(graph.fixed_split)
    return data


def problem_from_json(data: object) -> TrainingGraph:
    """Build a planning problem from plain JSON data in the format ``rematplan.problem/1``; `ProblemError` for other
    data."""
    root = typed(data, dict, "the problem")
    if root.get("format") != PROBLEM_FORMAT:
        raise ProblemError(f"format is {root.get('format')!r}, not {PROBLEM_FORMAT!r}")
    tensors = tuple(
        Tensor(field_of(t, "name", str, f"tensor {i}"), field_of(t, "bytes", int, f"tensor {i}"))
        for i, t in enumerate(field_of(root, "tensors", list, "the problem"))
    )
    split = typed(root.get("fixed_split", {}), dict, "fixed_split")
    return TrainingGraph(
        name=typed(root.get("name", "problem"), str, "name"),
        tensors=tensors,
        inputs=names_of(field_of(root, "inputs", list, "the problem"), "inputs"),
        outputs=names_of(field_of(root, "outputs", list, "the problem"), "outputs"),
        ops=tuple(
            _op_from_json(o, f"op {i}") for i, o in enumerate(field_of(root, "ops", list, "the problem"))
        ),
        inverses=tuple(
            _op_from_json(o, f"inverse {i}")
            for i, o in enumerate(typed(root.get("inverses", []), list, "inverses"))
        ),
        ordered=names_of(typed(root.get("ordered", []), list, "ordered"), "ordered"),
        never_rerun=names_of(typed(root.get("never_rerun", []), list, "never_rerun"), "never_rerun"),
        fixed_split={typed(k, str, "fixed_split"): typed(v, int, "fixed_split") for k, v in split.items()},
    )


def save_problem(graph: TrainingGraph, path: str | Path) -> None:
    """Write a planning problem as a JSON file, completely or not at all.

    Raises:
        ProblemError: the folder or the file cannot be written.
    """
    write_whole(path, json.dumps(problem_to_json(graph)))


def load_problem(path: str | Path) -> TrainingGraph:
    """Read a planning problem from a JSON file.

    Raises:
        ProblemError: the file cannot be read, is not JSON, or does not describe a valid problem; the message names
            the file.
    """
    return read_as(path, problem_from_json)


def _op_to_json(op: Op) -> dict[str, Any]:
    """Return an op as JSON data; phase, gain and noise only if they differ from the defaults."""
    data: dict[str, Any] = {
        "name": op.name,
        "reads": list(op.reads),
        "writes": list(op.writes),
        "cost": op.cost,
        "workspace": op.workspace,
    }
    data |= {"phase": op.phase} if op.phase else {}
    data |= {"gain": op.gain} if op.gain != 1 else {}
    return data | ({"noise": op.noise} if op.noise else {})


def _op_from_json(data: object, where: str) -> Op:
    """Return an op or inverse of JSON data; `ProblemError` if a field is missing or wrong. ``where``: what messages
    call the op until its name is read."""
    name = field_of(data, "name", str, where)
    where = f"op {name!r}"
    row = typed(data, dict, where)
    phase = row.get("phase")
    if phase not in (None, "forward", "backward"):
        raise ProblemError(f"{where}: phase is {phase!r}, not forward or backward")
    return Op(
        name=name,
        # An op may list a read twice (x·x); it must be resident only once.
        reads=tuple(dict.fromkeys(names_of(field_of(row, "reads", list, where), where))),
        writes=names_of(field_of(row, "writes", list, where), where),
        cost=_number(field_of(row, "cost", (int, float), where), f"{where}: cost"),
        workspace=typed(row.get("workspace", 0), int, f"{where}: workspace"),
        phase=cast("Phase | None", phase),
        gain=_number(row.get("gain", 1.0), f"{where}: gain"),
        noise=_number(row.get("noise", 0.0), f"{where}: noise"),
    )


def _number(value: object, where: str) -> float:
    try:
        return float(typed(value, (int, float), where))
    except OverflowError:
        raise ProblemError(f"{where} is too large") from None
