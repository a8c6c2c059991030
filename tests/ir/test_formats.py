"""The formats ``rematplan.problem/1`` and ``rematplan.plan/1``: round trips, and refusals in one line."""

from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import (
    Op,
    ProblemError,
    RematplanError,
    Tensor,
    TrainingGraph,
    load_problem,
    problem_from_json,
    problem_to_json,
    save_problem,
)
from rematplan.planner.core.plan import load_plan, plan_from_json, plan_from_runs, plan_to_json, save_plan

PROFILE = settings(max_examples=60, deadline=None, derandomize=True)


def example() -> dict:
    return {
        "format": "rematplan.problem/1",
        "name": "small",
        "tensors": [{"name": n, "bytes": b} for n, b in (("x", 4), ("w", 8), ("h", 16), ("y", 2), ("dw", 8))],
        "inputs": ["x", "w"],
        "outputs": ["y", "dw"],
        "ops": [
            {
                "name": "f",
                "reads": ["x", "w"],
                "writes": ["h"],
                "cost": 12.5,
                "workspace": 3,
                "phase": "forward",
            },
            {"name": "g", "reads": ["h"], "writes": ["y"], "cost": 1, "phase": "forward"},
            {
                "name": "b",
                "reads": ["h", "x"],
                "writes": ["dw"],
                "cost": 2.0,
                "workspace": 0,
                "phase": "backward",
            },
        ],
        "inverses": [{"name": "i", "reads": ["y"], "writes": ["h"], "cost": 0.5}],
        "ordered": ["g"],
        "fixed_split": {"parameters": 8},
        "something else": {"is": "ignored"},
    }


def test_an_example_reads_as_it_says():
    graph = problem_from_json(example())
    assert graph.name == "small"
    assert graph.size == {"x": 4, "w": 8, "h": 16, "y": 2, "dw": 8}
    assert graph.ops[0] == Op("f", ("x", "w"), ("h",), 12.5, 3, "forward")
    assert graph.ops[1].workspace == 0
    assert graph.inverses == (Op("i", ("y",), ("h",), 0.5),)
    assert graph.ordered == ("g",)
    assert graph.fixed_split == {"parameters": 8}
    assert graph.input_bytes == 12
    assert graph.base_cost == 15.5
    assert graph.has_phases
    assert graph.producer == {"h": 0, "y": 1, "dw": 2}


def test_files_round_trip(tmp_path):
    graph = problem_from_json(example())
    for path in (tmp_path / "p.json", str(tmp_path / "p.json")):
        save_problem(graph, path)
        assert load_problem(path) == graph
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


names = st.text(min_size=1, max_size=8)


@st.composite
def graphs(draw: st.DrawFn) -> TrainingGraph:
    tensors = draw(st.lists(names, unique=True, max_size=8))
    first = draw(st.integers(0, len(tensors)))
    ops, known = [], tensors[:first]
    for i, t in enumerate(tensors[first:]):
        reads = draw(st.lists(st.sampled_from(known), unique=True, max_size=3)) if known else []
        cost = draw(st.just(0.0) | st.floats(1e-300, 1e12))
        phase = draw(st.sampled_from([None, "forward", "backward"]))
        ops.append(Op(f"op {i}", tuple(reads), (t,), cost, draw(st.integers(0, 2**40)), phase))
        known = [*known, t]
    sizes = [draw(st.integers(0, 2**59)) for _ in tensors]
    return TrainingGraph(
        name=draw(st.text(max_size=5)),
        tensors=tuple(map(Tensor, tensors, sizes)),
        inputs=tuple(tensors[:first]),
        outputs=tuple(draw(st.lists(st.sampled_from(tensors), unique=True))) if tensors else (),
        ops=tuple(ops),
        ordered=tuple(op.name for op in ops if draw(st.booleans())),
        fixed_split=draw(st.dictionaries(names, st.integers(0, 99), max_size=2)),
    )


@PROFILE
@given(graph=graphs())
def test_problems_round_trip_through_text(graph):
    assert problem_from_json(json.loads(json.dumps(problem_to_json(graph)))) == graph


@PROFILE
@given(graph=graphs())
def test_plans_round_trip_through_text(graph):
    plan = plan_from_runs(graph, [op.name for op in graph.ops], "store_all", budget=2**63, lower_bound=0.0)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), graph) == plan


def test_a_read_stated_twice_is_one_read():
    data = example()
    data["ops"][1]["reads"] = ["h", "h"]
    assert problem_from_json(data).ops[1].reads == ("h",)


def put(*path_and_value):
    """An edit of the example: the value at a path."""
    *path, key, value = path_and_value

    def edit(data):
        at = data
        for step in path:
            at = at[step]
        at[key] = value

    return edit


def drop(*path):
    def edit(data):
        at = data
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return edit


REFUSED = {
    "not this format": (put("format", "rematplan.problem/2"), "format is 'rematplan.problem/2'"),
    "no format": (drop("format"), "format is None, not 'rematplan.problem/1'"),
    "no tensors": (drop("tensors"), "'tensors' is missing"),
    "no ops": (drop("ops"), "'ops' is missing"),
    "no inputs": (drop("inputs"), "'inputs' is missing"),
    "no outputs": (drop("outputs"), "'outputs' is missing"),
    "no name of a tensor": (drop("tensors", 0, "name"), "tensor 0: 'name' is missing"),
    "no bytes": (drop("tensors", 1, "bytes"), "tensor 1: 'bytes' is missing"),
    "no name of an op": (drop("ops", 0, "name"), "op 0: 'name' is missing"),
    "no reads": (drop("ops", 0, "reads"), "op 'f': 'reads' is missing"),
    "no writes": (drop("ops", 0, "writes"), "op 'f': 'writes' is missing"),
    "no cost": (drop("ops", 0, "cost"), "op 'f': 'cost' is missing"),
    "ops no list": (put("ops", {}), "ops is '{}', not of type list"),
    "op no object": (put("ops", 1, 7), "op 1 is '7', not of type dict"),
    "tensor no object": (put("tensors", 0, "x"), "tensor 0 is 'x', not of type dict"),
    "name a number": (put("ops", 0, "name", 3), "op 0: name is '3', not of type str"),
    "problem's name a number": (put("name", 3), "name is '3', not of type str"),
    "bytes a fraction": (put("tensors", 0, "bytes", 1.5), "bytes is '1.5', not of type int"),
    "bytes a whole float": (put("tensors", 0, "bytes", 4.0), "bytes is '4.0', not of type int"),
    "bytes a bool": (put("tensors", 0, "bytes", True), "bytes is 'True', not of type int"),
    "bytes a text": (put("tensors", 0, "bytes", "4"), "bytes is '4', not of type int"),
    "bytes null": (put("tensors", 0, "bytes", None), "bytes is 'None', not of type int"),
    "bytes negative": (put("tensors", 0, "bytes", -1), "tensor 'x': bytes is -1; it must be between 0"),
    "bytes huge": (put("tensors", 0, "bytes", 2**63), "tensor 'x': bytes is 9223372036854775808"),
    "bytes huge together": (
        lambda d: [t.update(bytes=2**62) for t in d["tensors"]],
        "sizes sum to more than 2\\^63",
    ),
    "workspace huge with the tensors": (put("ops", 0, "workspace", 2**63 - 1), "and a workspace sum to more"),
    "workspace negative": (put("ops", 0, "workspace", -5), "op 'f': workspace is -5"),
    "workspace a bool": (put("ops", 0, "workspace", False), "op 'f': workspace is 'False'"),
    "workspace a fraction": (put("ops", 0, "workspace", 0.5), "op 'f': workspace is '0.5'"),
    "workspace huge": (put("ops", 0, "workspace", 2**70), "op 'f': workspace is"),
    "cost negative": (
        put("ops", 0, "cost", -0.1),
        "op 'f': cost is -0.1; it must be finite and not negative",
    ),
    "cost not a number": (put("ops", 0, "cost", math.nan), "op 'f': cost is nan"),
    "cost infinite": (put("ops", 0, "cost", math.inf), "op 'f': cost is inf"),
    "cost huge": (put("ops", 0, "cost", 10**400), "op 'f': cost is too large"),
    "costs huge together": (
        lambda d: [o.update(cost=1.7e308) for o in d["ops"]],
        "costs sum to more than 1e\\+300",
    ),
    "ordered against the ops": (
        put("ordered", ["g", "f"]),
        "ordered: 'g' comes before 'f'; the list must have the order of the ops",
    ),
    "ordered twice": (put("ordered", ["f", "f"]), "ordered: 'f' comes before 'f'"),
    "never_rerun twice": (put("never_rerun", ["f", "f"]), "two never_rerun ops share the name 'f'"),
    "cost tiny": (put("ops", 0, "cost", 5e-324), "op 'f': cost is 5e-324; it must be 0 or at least 1e-300"),
    "cost a bool": (put("ops", 0, "cost", True), "op 'f': cost is 'True'"),
    "cost a text": (put("ops", 0, "cost", "1"), "op 'f': cost is '1'"),
    "phase unknown": (put("ops", 0, "phase", "sideways"), "op 'f': phase is 'sideways'"),
    "phase a list": (put("ops", 0, "phase", []), "op 'f': phase is \\[\\]"),
    "cycle": (
        put("ops", 0, "reads", ["y"]),
        "op 'f' reads 'y', which only 'g' writes, which is the same or a later op",
    ),
    "self-cycle": (put("ops", 0, "reads", ["h"]), "op 'f' reads 'h', which only 'f' writes"),
    "order": (
        lambda d: d["ops"].reverse(),
        "op 'b' reads 'h', which only 'f' writes, which is the same or a later op",
    ),
    "nothing writes": (put("inputs", ["x"]), "op 'f' reads 'w', which nothing writes"),
    "double write": (put("ops", 1, "writes", ["h"]), "tensor 'h' is written twice, by 'f' and by 'g'"),
    "double write in an op": (put("ops", 1, "writes", ["y", "y"]), "op 'g' writes a tensor twice"),
    "write of an input": (put("ops", 1, "writes", ["x"]), "op 'g' writes 'x', which is an input"),
    "read of an unknown tensor": (put("ops", 1, "reads", ["z"]), "op 'g' names 'z', which is not among"),
    "write of an unknown tensor": (put("ops", 1, "writes", ["z"]), "op 'g' names 'z', which is not among"),
    "reads not names": (put("ops", 1, "reads", [1]), "op 'g' is '1', not of type str"),
    "unknown input": (put("inputs", ["x", "w", "z"]), "input 'z' is not among the tensors"),
    "unknown output": (put("outputs", ["z"]), "output 'z' is not among the tensors"),
    "output never written": (
        lambda d: (d["tensors"].append({"name": "z", "bytes": 1}), d["outputs"].append("z")),
        "output 'z' is neither an input nor written by an op",
    ),
    "two tensors of a name": (put("tensors", 1, "name", "x"), "two tensors share the name 'x'"),
    "two ops of a name": (put("ops", 1, "name", "f"), "two ops share the name 'f'"),
    "an inverse of an op's name": (put("inverses", 0, "name", "f"), "two ops share the name 'f'"),
    "an input twice": (put("inputs", ["x", "x", "w"]), "two inputs share the name 'x'"),
    "an output twice": (put("outputs", ["y", "y"]), "two outputs share the name 'y'"),
    "an inverse of an unwritten tensor": (
        lambda d: (d["tensors"].append({"name": "z", "bytes": 1}), d["inverses"][0].update(writes=["z"])),
        "inverse 'i': no op writes 'z'",
    ),
    "ordered unknown": (put("ordered", ["z"]), "ordered op 'z' is not among the ops"),
    "ordered no list": (put("ordered", "g"), "ordered is 'g', not of type list"),
    "split no object": (put("fixed_split", []), "fixed_split is '\\[\\]', not of type dict"),
    "split not numbers": (put("fixed_split", {"a": "b"}), "fixed_split is 'b', not of type int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_in_one_line(case):
    edit, message = REFUSED[case]
    data = copy.deepcopy(example())
    edit(data)
    with pytest.raises(ProblemError, match=message) as caught:
        problem_from_json(data)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_a_message_about_a_very_long_name_stays_short():
    data = example()
    data["inputs"].append("n" * 10**7)
    with pytest.raises(ProblemError, match=r"^input 'nnn.* … .*nnn' is not among the tensors$") as caught:
        problem_from_json(data)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("data", [None, [], "text", 3, True, {}])
def test_what_is_no_problem_at_all(data):
    with pytest.raises(ProblemError):
        problem_from_json(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"format": NaN}', "NaN is not a number"),
        (b'{"cost": -Infinity}', "-Infinity is not a number"),
        (b"9" * 10_000, "is not JSON|is '9"),
    ],
)
def test_broken_files_are_named(tmp_path, text, message):
    path = tmp_path / "p.json"
    path.write_bytes(text)
    with pytest.raises(ProblemError, match=message) as caught:
        load_problem(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(ProblemError, match="cannot be read: No such file"):
        load_problem(tmp_path / "none.json")
    with pytest.raises(ProblemError, match="cannot be read"):
        load_problem(tmp_path)
    with pytest.raises(ProblemError, match="cannot be written"):
        save_problem(problem_from_json(example()), tmp_path / "none" / "p.json")


def test_plan_files_are_priced_anew(tmp_path):
    graph = problem_from_json(example())
    plan = plan_from_runs(graph, ["f", "g", "b"], "store_all", blocks=(("f", "g"),))
    assert (plan.estimate.peak, plan.estimate.cost) == (12 + 16 + 2 + 8, 15.5)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json", graph) == plan
    for stale in ({"peak": 1}, {"cost": 0.0}, {"lower_bound": 99.0}):
        data = plan_to_json(plan) | {"status": "optimal", "lower_bound": 0.0} | stale
        assert plan_from_json(data, graph) == plan  # which is not said to be proven


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("format", "rematplan.plan/9"), "not a rematplan.plan/1 file"),
        (put("budget", 10), "its peak, 38 bytes, is over its budget, 10 bytes"),
        (
            lambda data: data.update(budget=37, peak=36),
            "38 bytes, .*; when it was made its peak was 36 bytes",
        ),
        (put("steps", [["run", "g"]]), "'g' reads 'h', which is not resident"),
        (put("steps", [["run", "nothing"]]), "no op or inverse named 'nothing'"),
        (put("steps", [["run", "f"], ["free", "x"]]), "frees 'x', which is an input"),
        (put("steps", [["free", "h"]]), "frees 'h', which is not resident"),
        (put("steps", [["run", "f"], ["run", "g"]]), "at the end the output 'dw' is not resident"),
        (put("steps", [["jump", "f"]]), "."),
        (put("steps", [["run"]]), "."),
        (put("steps", [3]), "."),
        (put("steps", None), "."),
        (put("steps", [["run", ["f"]]]), "."),
        (put("budget", "much"), "."),
        (put("blocks", 3), "."),
        (drop("steps"), "steps"),
        (drop("status"), "status"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_in_one_line(edit, message):
    graph = problem_from_json(example())
    data = plan_to_json(plan_from_runs(graph, ["f", "g", "b"], "x"))
    edit(data)
    with pytest.raises(RematplanError, match=message) as caught:
        plan_from_json(data, graph)
    assert "\n" not in str(caught.value)


def test_a_file_may_have_as_long_a_name_as_the_system_takes(tmp_path):
    path = tmp_path / f"{'p' * 250}.json"
    save_problem(problem_from_json(example()), path)
    assert load_problem(path) == problem_from_json(example())
    assert list(tmp_path.iterdir()) == [path]
