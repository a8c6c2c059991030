"""Broken and hostile files: always one line, never a traceback, never much time or memory."""

import contextlib
import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rematplan.ir import ModelError, RematplanError
from rematplan.ir.onnx.load import load_onnx

F = TensorProto.FLOAT


def info(name, shape):
    return helper.make_tensor_value_info(name, F, shape)


def small_model() -> onnx.ModelProto:
    w = numpy_helper.from_array(np.arange(108, dtype=np.float32).reshape(4, 3, 3, 3), "w")
    s = numpy_helper.from_array(np.ones(4, np.float32), "s")
    shape = numpy_helper.from_array(np.asarray([1, -1], np.int64), "shape")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "s", "s", "s"], ["n"], name="norm"),
        helper.make_node("Reshape", ["n", "shape"], ["y"], name="reshape"),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", [1, 3, 8, 8])], [info("y", [1, 144])], [w, s, shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_onnx(path)
    said = str(error.value)
    assert "\n" not in said
    assert str(path) in said
    return said


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "hostile.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def refused_model(folder: Path, model: onnx.ModelProto) -> str:
    return refused(saved(folder, model))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello, this is text\n" * 50,
        b"\x00" * 64,
        b"PK\x03\x04" + b"z" * 100,
        b'{"a": 1}',
        b"\x89PNG\r\n",
    ],
)
def test_files_that_are_no_models(tmp_path, content):
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    refused(path)


def test_missing_file_and_folder(tmp_path):
    assert "No such file" in refused(tmp_path / "missing.onnx")
    assert "directory" in refused(tmp_path)


def test_every_truncation_is_refused(tmp_path):
    data, path = small_model().SerializeToString(), tmp_path / "cut.onnx"
    for end in range(0, len(data), 3):
        path.write_bytes(data[:end])
        refused(path)


def test_random_damage_loads_or_is_refused(tmp_path):
    data, path, rng = small_model().SerializeToString(), tmp_path / "bad.onnx", random.Random(0)
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(bytes(damaged))
        with contextlib.suppress(RematplanError):
            load_onnx(path)


def test_duplicate_values(tmp_path):
    model = small_model()
    model.graph.node[1].output[0] = "c"
    assert "'c' is written twice" in refused_model(tmp_path, model)
    model = small_model()
    model.graph.initializer.append(model.graph.initializer[0])
    assert "share the name 'w'" in refused_model(tmp_path, model)


def test_cycle(tmp_path):
    model = small_model()
    model.graph.node[0].input[0] = "n"
    assert "cycle" in refused_model(tmp_path, model)


def test_missing_values(tmp_path):
    model = small_model()
    model.graph.node[0].input[0] = "ghost"
    assert "'ghost', which nothing writes" in refused_model(tmp_path, model)
    model = small_model()
    model.graph.output[0].name = "ghost"
    assert "'ghost'" in refused_model(tmp_path, model)


def test_domains_without_an_opset(tmp_path):
    model = small_model()
    model.graph.node[0].domain = "com.example"
    assert "'com.example'" in refused_model(tmp_path, model)


def test_versions_newer_than_known(tmp_path):
    model = small_model()
    model.ir_version = 99
    assert "its IR version is 99; the newest known is" in refused_model(tmp_path, model)
    model = small_model()
    model.opset_import[0].version = 99
    assert "its opset is 99; the newest known is" in refused_model(tmp_path, model)


@pytest.mark.parametrize("dims", [[10**15], [2**40, 2**40], [-1], [4, 3, 3, 4]])
def test_shapes_that_the_data_do_not_fill(tmp_path, dims):
    model = small_model()
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)
    assert "'w'" in refused_model(tmp_path, model)
    model.graph.initializer[0].ClearField("raw_data")
    assert "'w'" in refused_model(tmp_path, model)


def external(model: onnx.ModelProto, location: str, **more: int) -> onnx.ModelProto:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return model


@pytest.mark.parametrize("more", [{"offset": "x"}, {"offset": -4}, {"length": "4.0"}, {"length": 2**70}])
def test_external_data_with_offsets_that_are_no_numbers(tmp_path, more):
    (tmp_path / "w.bin").write_bytes(b"s" * 4096)
    (key,) = more
    assert f"the {key} of its external data is" in refused_model(
        tmp_path, external(small_model(), "w.bin", **more)
    )


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "", "."])
def test_external_data_outside_the_folder(tmp_path, location):
    (tmp_path / "secret.bin").write_bytes(b"s" * 4096)
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    said = refused_model(folder, external(small_model(), location))
    assert "external data" in said


def test_external_data_through_a_link_outside_the_folder(tmp_path):
    (tmp_path / "secret.bin").write_bytes(b"s" * 4096)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").symlink_to(tmp_path / "secret.bin")
    assert "outside of the model's folder" in refused_model(folder, external(small_model(), "w.bin"))


def test_external_data_of_a_constant_node_outside_the_folder(tmp_path):
    model = external(small_model(), "../secret.bin")
    value = helper.make_node("Constant", [], ["w"], name="hidden", value=model.graph.initializer[0])
    del model.graph.initializer[0]
    model.graph.node.insert(0, value)
    assert "outside of the model's folder" in refused_model(tmp_path, model)


@pytest.mark.parametrize(
    "more", [{"offset": 0, "length": 10**9}, {"offset": 10**12}, {"offset": -8}, {"length": 3}]
)
def test_external_data_that_do_not_fit(tmp_path, more):
    (tmp_path / "w.bin").write_bytes(b"\0" * 432)
    refused_model(tmp_path, external(small_model(), "w.bin", **more))


def test_sparse_constants_are_refused_by_name(tmp_path):
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "places")
    sparse = helper.make_sparse_tensor(values, places, [4])
    model = small_model()
    model.graph.node.insert(0, helper.make_node("Constant", [], ["s"], name="thin", sparse_value=sparse))
    assert "node 'thin' (Constant) holds a sparse tensor" in refused_model(tmp_path, model)


def test_subgraphs_are_refused_by_name(tmp_path):
    model = small_model()
    body = helper.make_graph([helper.make_node("Relu", ["c"], ["r"])], "body", [], [info("r", None)])
    branch = helper.make_node("If", ["flag"], ["y2"], name="branch", then_branch=body, else_branch=body)
    model.graph.node.append(branch)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    model.graph.output[0].name = "y2"
    said = refused_model(tmp_path, model)
    assert "'branch'" in said
    assert "If" in said


def test_functions_that_expand_without_end(tmp_path):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    bodies = [
        helper.make_function(
            "f", "F0", ["a"], ["b"], [helper.make_node("F0", ["a"], ["b"], domain="f")], imports
        )
    ]
    model = small_model()
    model.opset_import.append(imports[1])
    model.functions.extend(bodies)
    model.graph.node.append(helper.make_node("F0", ["y"], ["z"], domain="f"))
    assert "calls itself" in refused_model(tmp_path, model)

    del model.functions[:]
    for k in range(40):
        inner = f"F{k + 1}" if k < 39 else "Relu"
        domain = "f" if k < 39 else ""
        nodes = [
            helper.make_node(inner, ["a"], ["h"], domain=domain),
            helper.make_node(inner, ["h"], ["b"], domain=domain),
        ]
        model.functions.append(helper.make_function("f", f"F{k}", ["a"], ["b"], nodes, imports))
    assert "expand to more than" in refused_model(tmp_path, model)


def test_inputs_that_are_no_tensors(tmp_path):
    model = small_model()
    model.graph.input[0].type.CopyFrom(helper.make_sequence_type_proto(helper.make_tensor_type_proto(F, [1])))
    assert "'x' is not a tensor" in refused_model(tmp_path, model)


def test_outputs_that_are_no_tensors(tmp_path):
    model = small_model()
    scores = helper.make_tensor_type_proto(F, [])
    mapped = helper.make_map_type_proto(TensorProto.INT64, scores)
    model.graph.output.append(helper.make_value_info("y", mapped))
    assert "the graph output 'y' is not a tensor, but of type map" in refused_model(tmp_path, model)


def test_inputs_without_a_shape(tmp_path):
    model = small_model()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert "states no shape" in refused_model(tmp_path, model)


def test_absurd_sizes(tmp_path):
    model = small_model()
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 1 << 60
    assert "has more than" in refused_model(tmp_path, model)
    model = small_model()
    shape = numpy_helper.from_array(np.asarray([4, 3, 1 << 50, 3], np.int64), "ws")
    model.graph.initializer[0].CopyFrom(shape)
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["ws"], ["w"], name="fill"))
    assert "'fill'" in refused_model(tmp_path, model)


def test_op_types_that_would_break_the_line(tmp_path):
    model = small_model()
    model.graph.node[0].op_type = "Co\nnv"
    assert "is not a name" in refused_model(tmp_path, model)


def test_nodes_that_their_op_does_not_allow(tmp_path):
    model = small_model()
    del model.graph.node[1].input[3:]
    assert "node 'norm' (BatchNormalization) has 3 inputs" in refused_model(tmp_path, model)
    model = small_model()
    model.graph.node[0].input[1] = ""
    assert "node 'conv' (Conv) lacks an input" in refused_model(tmp_path, model)
    model = small_model()
    model.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("kernel_shape", "big"))
    assert "attribute 'kernel_shape' is of kind STRING, not INTS" in refused_model(tmp_path, model)
