"""The loader finds the roles, constants, aliases, dimensions and external data of a file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rematplan.ir import ModelError, UsageError
from rematplan.ir.onnx.graph import Graph
from rematplan.ir.onnx.load import load_onnx

F = TensorProto.FLOAT
RNG = np.random.default_rng(0)


def info(name, shape, kind=F):
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name, *shape):
    return numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name)


def ints(name, *values):
    return numpy_helper.from_array(np.asarray(values, np.int64), name)


def write(folder: Path, nodes, inputs, outputs, weights=(), opset=17, **more) -> Path:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **more)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def load(folder: Path, *args, dims=None, **more) -> Graph:
    return load_onnx(write(folder, *args, **more), dims)


def roles(graph: Graph) -> dict[str, str]:
    return {w.name: w.role for w in graph.weights}


def node(op, inputs, outputs, **attributes):
    return helper.make_node(
        op, inputs.split(), outputs.split(), name=f"{op}_{outputs.split()[0]}", **attributes
    )


def test_batch_norm_statistics_are_buffers_and_the_rest_is_trained(tmp_path):
    graph = load(
        tmp_path,
        [node("Conv", "x w b", "c"), node("BatchNormalization", "c s t m v", "y nm nv", training_mode=1)],
        [info("x", [2, 3, 8, 8])],
        [info("y", [2, 4, 6, 6])],
        [weight("w", 4, 3, 3, 3), *(weight(n, 4) for n in "bstmv")],
    )
    assert roles(graph) == {
        "w": "parameter",
        **dict.fromkeys("bst", "parameter"),
        **dict.fromkeys("mv", "buffer"),
    }
    assert graph.nodes[1].outputs == ("y", "", "")  # nothing reads the new statistics in the graph


def test_values_load_as_the_file_states_them(tmp_path):
    w = weight("w", 3, 4)
    graph = load(tmp_path, [node("MatMul", "x w", "y")], [info("x", [2, 3])], [info("y", [2, 4])], [w])
    assert np.array_equal(graph.weights[0].load(), numpy_helper.to_array(w))
    assert graph.inputs[0].shape == (2, 3)
    assert graph.outputs[0].shape == (2, 4)


def test_a_tied_weight_is_one_weight_also_through_identity(tmp_path):
    graph = load(
        tmp_path,
        [node("Identity", "w", "alias"), node("MatMul", "x w", "h"), node("MatMul", "h alias", "y")],
        [info("x", [2, 3])],
        [info("y", [2, 3])],
        [weight("w", 3, 3)],
    )
    assert [w.name for w in graph.weights] == ["w"]
    assert [n.inputs for n in graph.nodes] == [("x", "w"), ("h", "w")]


def test_shape_arithmetic_on_constants_is_folded(tmp_path):
    graph = load(
        tmp_path,
        [
            node("Constant", "", "two", value=numpy_helper.from_array(np.asarray([2], np.int64))),
            node("Mul", "two three", "six"),
            node("Concat", "two six", "shape", axis=0),
            node("Reshape", "x shape", "y"),
        ],
        [info("x", [3, 4])],
        [info("y", [2, 6])],
        [ints("three", 3)],
    )
    assert [n.op for n in graph.nodes] == ["Reshape"]
    (shape,) = graph.weights
    assert (shape.role, shape.load().tolist()) == ("constant", [2, 6])


def test_absurd_constants_are_not_folded(tmp_path):
    graph = load(
        tmp_path,
        [node("ConstantOfShape", "huge", "c"), node("Expand", "c huge", "e"), node("Add", "x e", "y")],
        [info("x", [1])],
        [info("y", None)],
        [ints("huge", 10**6, 10**6)],
    )
    assert [n.op for n in graph.nodes] == ["ConstantOfShape", "Expand", "Add"]


def test_float_constants_are_constants_and_float_initialisers_parameters(tmp_path):
    half = numpy_helper.from_array(np.asarray(0.5, np.float32))
    graph = load(
        tmp_path,
        [
            node("Constant", "", "half", value=half),
            node("Mul", "x half", "a"),
            node("Mul", "a gain", "b"),
            node("Clip", "b low high", "c"),
            node("Shape", "unread", "n"),
            node("Cast", "n", "f", to=F),
            node("Add", "c f", "y"),
        ],
        [info("x", [2])],
        [info("y", [2])],
        [weight("gain", 2), weight("low"), weight("high"), weight("unread", 2, 2)],
    )
    assert roles(graph) == {
        "gain": "parameter",
        "low": "constant",
        "high": "constant",
        "unread": "constant",
        "half": "constant",
    }


def test_constant_nodes_that_a_tool_made_initialisers_are_no_weights(tmp_path):
    graph = load(
        tmp_path,
        [node("MatMul", "x w", "h"), node("Mul", "h /act/Constant_1_output_0", "y")],
        [info("x", [2, 3])],
        [info("y", [2, 3])],
        [weight("w", 3, 3), weight("/act/Constant_1_output_0")],
        producer_name="pytorch",
    )
    assert roles(graph) == {"w": "parameter", "/act/Constant_1_output_0": "constant"}


def fill(value):
    return helper.make_tensor("v", F, [1], [value])


def test_generated_weights_are_parameters_also_behind_views(tmp_path):
    graph = load(
        tmp_path,
        [
            node("ConstantOfShape", "ws", "w", value=fill(0.02)),
            node("ConstantOfShape", "gs", "g", value=fill(0.02)),
            node("ConstantOfShape", "ms", "mask", value=fill(0.0)),
            node("ConstantOfShape", "gs", "mean", value=fill(0.02)),
            node("Unsqueeze", "g axes", "g1"),
            node("Conv", "x w", "c"),
            node("BatchNormalization", "c s s mean mean", "n"),
            node("Mul", "n g1", "d"),
            node("Add", "d mask", "y"),
        ],
        [info("x", [1, 3, 8, 8])],
        [info("y", [1, 4, 6, 6])],
        [ints("ws", 4, 3, 3, 3), ints("gs", 4), ints("ms", 1, 4, 1, 1), ints("axes", 1, 2), weight("s", 4)],
    )
    generated = {w.name: w.role for w in graph.weights if w.generated}
    assert generated == {"w": "parameter", "g": "parameter", "mean": "buffer"}
    assert roles(graph)["mask"] == "constant"  # zeros added are a mask, not a weight
    assert "Unsqueeze" in [n.op for n in graph.nodes]
    w = next(w for w in graph.weights if w.name == "w")
    assert w.shape == (4, 3, 3, 3)
    assert np.all(w.load() == np.float32(0.02))


def test_weights_in_constant_nodes_are_trained_if_the_file_has_no_others(tmp_path):
    value = numpy_helper.from_array(np.ones((3, 4), np.float32))
    graph = load(
        tmp_path,
        [node("Constant", "", "w", value=value), node("MatMul", "x w", "y")],
        [info("x", [2, 3])],
        [info("y", [2, 4])],
    )
    assert roles(graph) == {"w": "parameter"}
    assert any("Constant nodes" in n for n in graph.notes)


def test_initialisers_among_the_inputs_are_weights(tmp_path):
    graph = load(
        tmp_path,
        [node("MatMul", "x w", "y")],
        [info("x", [2, 3]), info("w", [3, 4])],
        [info("y", [2, 4])],
        [weight("w", 3, 4), weight("unused", 7)],
    )
    assert [v.name for v in graph.inputs] == ["x"]
    assert roles(graph) == {"w": "parameter"}


def test_dead_nodes_go_and_a_wrong_order_is_sorted(tmp_path):
    graph = load(
        tmp_path,
        [node("Relu", "h", "y"), node("Exp", "x", "unread"), node("Neg", "x", "h")],
        [info("x", [2])],
        [info("y", [2])],
    )
    assert [n.op for n in graph.nodes] == ["Neg", "Relu"]


def relu(folder: Path, shape, dims=None):
    return load(folder, [node("Relu", "x", "y")], [info("x", shape)], [info("y", shape)], dims=dims)


def test_symbolic_dimensions_are_bound(tmp_path):
    graph = relu(tmp_path, ["batch", 3, "side", "side"], {"batch": 8, "side": 32})
    assert graph.inputs[0].shape == graph.outputs[0].shape == (8, 3, 32, 32)
    assert relu(tmp_path, ["batch", None], {"batch": 2, "x.1": 5}).inputs[0].shape == (2, 5)


@pytest.mark.parametrize(
    ("dims", "kind", "said"),
    [
        ({}, ModelError, "input 'x': dimension 0 (batch) is not bound; bind it with --dim batch=8"),
        (
            {"batch": 2, "depth": 3},
            UsageError,
            "--dim depth: no input has a dimension of that name (known: batch)",
        ),
        ({"batch": 0}, UsageError, "positive"),
        ({"batch": -4}, UsageError, "positive"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(tmp_path, dims, kind, said):
    with pytest.raises(kind) as error:
        relu(tmp_path, ["batch", 3], dims)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_local_functions_are_inlined(tmp_path):
    double = helper.make_function(
        "local", "Double", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 17)]
    )
    calls = [
        helper.make_node("Double", ["x"], ["h"], domain="local"),
        helper.make_node("Double", ["h"], ["y"], domain="local"),
    ]
    graph = helper.make_graph(calls, "g", [info("x", [2])], [info("y", [2])])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    path = tmp_path / "f.onnx"
    onnx.save(helper.make_model(graph, opset_imports=imports, functions=[double], ir_version=8), path)
    assert [(n.op, n.domain, n.version) for n in load_onnx(path).nodes] == [("Add", "", 17)] * 2


def test_local_functions_keep_an_opset_of_their_own(tmp_path):
    old = helper.make_function(
        "local", "Old", ["a"], ["b"], [node("Softmax", "a", "b")], [helper.make_opsetid("", 11)]
    )
    calls = [node("Relu", "x", "h"), helper.make_node("Old", ["h"], ["y"], domain="local")]
    graph = helper.make_graph(calls, "g", [info("x", [2, 3, 4])], [info("y", [2, 3, 4])])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    path = tmp_path / "f.onnx"
    onnx.save(helper.make_model(graph, opset_imports=imports, functions=[old], ir_version=8), path)
    assert [(n.op, n.version) for n in load_onnx(path).nodes] == [("Relu", 17), ("Softmax", 11)]


def test_external_data_are_read_when_asked_for(tmp_path):
    path = write(
        tmp_path,
        [node("MatMul", "x w", "y")],
        [info("x", [2, 300])],
        [info("y", [2, 400])],
        [weight("w", 300, 400)],
    )
    model = onnx.load(path)
    stated = numpy_helper.to_array(model.graph.initializer[0])
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (w,) = load_onnx(path).weights
    assert np.array_equal(w.load(), stated)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load_onnx(path)


def test_a_model_behind_a_link_finds_its_data_next_to_the_file(tmp_path):
    store, links = tmp_path / "store", tmp_path / "links"
    store.mkdir(), links.mkdir()
    path = write(
        store, [node("MatMul", "x w", "y")], [info("x", [2, 30])], [info("y", [2, 40])], [weight("w", 30, 40)]
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (links / "model.onnx").symlink_to(path)
    (links / "w.bin").symlink_to(store / "w.bin")
    (w,) = load_onnx(links / "model.onnx").weights
    assert w.load().shape == (30, 40)


def test_notes_say_what_a_person_should_know(tmp_path):
    graph = load(
        tmp_path,
        [node("Conv", "x w b", "h"), node("Conv", "h v b", "y")],
        [info("x", [1, 3, 8, 8])],
        [info("y", [1, 4, 4, 4])],
        [weight("w", 4, 3, 3, 3), weight("v", 4, 4, 3, 3), weight("b", 4)],
    )
    assert any("looks like a folded inference export" in n for n in graph.notes)


def test_equal_weights_are_trained_separately_and_named(tmp_path):
    nodes = [node("Gather", "table i", "e"), node("MatMul", "e head", "y"), node("Add", "y ones", "z")]
    table = weight("table", 6, 6)
    head = numpy_helper.from_array(numpy_helper.to_array(table), "head")
    ones = numpy_helper.from_array(np.ones((1, 6), np.float32), "ones")
    shape = [info("i", [3], TensorProto.INT64)], [info("z", [3, 6])]
    graph = load(tmp_path, nodes, *shape, [table, head, ones])
    assert [roles(graph)[n] for n in ("table", "head", "ones")] == ["parameter"] * 3
    assert any("weights with equal values are trained separately (table, head)" in n for n in graph.notes)
    other = load(tmp_path, nodes, *shape, [table, weight("head", 6, 6), ones])
    assert not any("equal" in n for n in other.notes)


def test_weights_that_an_export_computed_from_another_are_named(tmp_path):
    nodes = [node("Add", "x w", "h"), node("Mul", "h doubled", "y")]
    path = write(tmp_path, nodes, [info("x", [4])], [info("y", [4])], [weight("w", 4), weight("doubled", 4)])
    model = onnx.load(path)
    model.producer_name = "pytorch"
    for owner, key, value in (
        (
            model.graph,
            "pkg.torch.export.ExportedProgram.graph_signature",
            "# inputs\np_w: PARAMETER target='w'\n",
        ),
        (model.graph.initializer[1], "pkg.onnxscript.optimizer.folded_from", "['w', 'val_1']"),
    ):
        owner.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    graph = load_onnx(path)
    assert roles(graph) == {"w": "parameter", "doubled": "parameter"}
    assert any("from other weights are trained separately from these (doubled)" in n for n in graph.notes)
