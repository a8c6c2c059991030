"""If, Loop and Scan with known conditions and lengths become plain nodes; others are refused by name."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rematplan.ir import ModelError
from rematplan.ir.onnx import control_flow as onnx_control
from rematplan.ir.onnx.load import load_onnx

F, INT, FLAG = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name, shape=None, kind=F):
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name, value):
    return numpy_helper.from_array(np.asarray(value), name)


def node(op, inputs, outputs, **attributes):
    return helper.make_node(
        op, inputs.split(), outputs.split(), name=f"{op}_{outputs.split()[0]}", **attributes
    )


def load(folder, nodes, weights=(), inputs=(("x", [4, 3]),), outputs=("y",)):
    graph = helper.make_graph(
        nodes,
        "g",
        [i if isinstance(i, onnx.ValueInfoProto) else info(*i) for i in inputs],
        [info(o) for o in outputs],
        list(weights),
    )
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return load_onnx(path)


def branch(op, weight=None):
    made = [numpy_helper.from_array(np.ones(3, np.float32), "w")] if weight else []
    body = [node(op, "x w" if weight else "x", "r")]
    return helper.make_graph(body, op, [], [info("r")], made)


def body(nodes, inputs, outputs, weights=()):
    return helper.make_graph(nodes, "body", inputs, [info(o) for o in outputs], list(weights))


STEP = [info("i", [], INT), info("go", [], FLAG), info("h", [4, 3])]


def loop_model(*nodes, weights=(), outputs="go_on h2"):
    return body([node("Identity", "go", "go_on"), *nodes], STEP, outputs.split(), weights)


def ops(graph):
    return [n.op for n in graph.nodes if n.op != "Identity"]


@pytest.mark.parametrize(("flag", "wanted"), [(True, ["Relu"]), (False, ["Add"])])
def test_a_known_condition_leaves_one_branch(tmp_path, flag, wanted):
    choice = node("If", "flag", "y", then_branch=branch("Relu"), else_branch=branch("Add", weight=True))
    graph = load(tmp_path, [choice], [constant("flag", flag)])
    assert ops(graph) == wanted
    assert [w.role for w in graph.weights] == ([] if flag else ["parameter"])
    assert any("1 subgraphs of known conditions" in n for n in graph.notes)


def test_conditions_on_the_inputs_shape(tmp_path):
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Equal", "n four", "flag"),
        node("If", "flag", "y", then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]
    assert ops(load(tmp_path, nodes, [constant("zero", 0), constant("four", 4)])) == ["Relu"]


def test_a_loop_repeats_its_body_with_the_same_weights(tmp_path):
    w = numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    step = loop_model(node("MatMul", "h w", "h2"), weights=[w], outputs="go_on h2 h2")
    loop = helper.make_node("Loop", ["n", "", "x"], ["y", "seen"], name="loop", body=step)
    graph = load(tmp_path, [loop], [constant("n", 3)], outputs=("y", "seen"))
    assert ops(graph).count("MatMul") == 3
    assert ops(graph)[-1] == "Concat"
    assert [(v.name, v.role) for v in graph.weights if v.dtype == "float32"] == [("loop/w", "parameter")]


def test_a_loop_ends_when_its_condition_does(tmp_path):
    step = body(
        [node("Less", "i two", "go_on"), node("Relu", "h", "h2")],
        STEP,
        ["go_on", "h2"],
        [constant("two", np.int64(2))],
    )
    loop = helper.make_node("Loop", ["", "flag", "x"], ["y"], name="loop", body=step)
    assert ops(load(tmp_path, [loop], [constant("flag", True)])) == ["Relu"] * 3


def test_a_condition_may_compare_with_a_real_number(tmp_path):
    compared = [node("Cast", "i", "real", to=F), node("Less", "real two", "go_on")]
    step = body([*compared, node("Relu", "h", "h2")], STEP, ["go_on", "h2"])
    loop = helper.make_node("Loop", ["", "flag", "x"], ["y"], name="loop", body=step)
    known = [constant("flag", True), constant("two", np.float32(2))]
    assert ops(load(tmp_path, [loop], known)) == ["Relu"] * 3


def test_nested_loops_read_what_is_around_them(tmp_path):
    inner = body(
        [node("Identity", "go2", "on2"), node("Add", "k outer", "k2")],
        [info("j", [], INT), info("go2", [], FLAG), info("k")],
        ["on2", "k2"],
    )
    step = loop_model(
        node("Relu", "h", "outer"), helper.make_node("Loop", ["m", "", "h"], ["h2"], name="in", body=inner)
    )
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], name="out", body=step)
    graph = load(tmp_path, [loop], [constant("n", 2), constant("m", 3)])
    assert ops(graph) == (["Relu"] + ["Add"] * 3) * 2


def scan(**attributes):
    step = body([node("Add", "h e", "h2"), node("Neg", "h2", "o")], [info("h"), info("e")], ["h2", "o"])
    return helper.make_node(
        "Scan", ["z", "x"], ["y", "o"], name="scan", body=step, num_scan_inputs=1, **attributes
    )


@pytest.mark.parametrize("attributes", [{}, {"scan_input_directions": [1], "scan_output_directions": [1]}])
def test_a_scan_is_as_long_as_its_input(tmp_path, attributes):
    graph = load(tmp_path, [scan(**attributes)], inputs=(("x", [4, 3]), ("z", [3])), outputs=("y", "o"))
    assert [ops(graph).count(op) for op in ("Gather", "Add", "Neg", "Concat")] == [4, 4, 4, 1]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: node("If", "flag", "y", then_branch=branch("Relu"), else_branch=branch("Neg")),
            "node 'If_y': its condition ('flag') depends on data; If cannot be planned",
        ),
        (
            lambda: helper.make_node(
                "Loop", ["count", "", "x"], ["y"], name="loop", body=loop_model(node("Relu", "h", "h2"))
            ),
            "node 'loop': its trip count ('count') depends on data; Loop cannot be planned",
        ),
        (
            lambda: helper.make_node(
                "Loop", ["", "", "x"], ["y"], name="loop", body=loop_model(node("Relu", "h", "h2"))
            ),
            "node 'loop': the Loop runs more than 10000 times",
        ),
        (
            lambda: helper.make_node(
                "Loop", ["many", "", "x"], ["y"], name="loop", body=loop_model(node("Relu", "h", "h2"))
            ),
            "node 'loop': the Loop runs more than 10000 times",
        ),
        (
            lambda: helper.make_node(
                "Loop",
                ["zero", "", "x"],
                ["q", "y"],
                name="loop",
                body=loop_model(node("Relu", "h", "h2"), outputs="go_on h2 h2"),
            ),
            "node 'loop': the Loop never runs, so 'y' has no shape",
        ),
        (
            lambda: helper.make_node(
                "Loop", ["two", "", "x"], ["y"], name="loop", body=loop_model(node("Add", "h ghost", "h2"))
            ),
            "reads 'ghost', which nothing writes",
        ),
    ],
)
def test_what_depends_on_data_or_never_ends_is_refused(tmp_path, made, said):
    inputs = (("x", [4, 3]), info("flag", [], FLAG), info("count", [], INT))
    with pytest.raises(ModelError) as error:
        load(tmp_path, [made()], [constant("zero", 0), constant("two", 2), constant("many", 10_001)], inputs)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_loops_in_loops_do_not_explode(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_control, "MAX_NODES", 20_000)
    inner = body(
        [node("Identity", "go2", "on2"), node("Relu", "k", "k2")],
        [info("j", [], INT), info("go2", [], FLAG), info("k")],
        ["on2", "k2"],
    )
    step = loop_model(helper.make_node("Loop", ["n", "", "h"], ["h2"], name="in", body=inner))
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], name="out", body=step)
    with pytest.raises(ModelError, match="its unrolled loops have more than 20000 nodes"):
        load(tmp_path, [loop], [constant("n", 900)])
