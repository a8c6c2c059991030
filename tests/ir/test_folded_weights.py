"""A weight whose parts an exporter repeated in constants becomes one weight again, and results are bit-equal."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from rematplan.ir.onnx.folded_weights import repetition_of
from rematplan.ir.onnx.load import graph_from_proto

RNG = np.random.default_rng(0)


def made(repetition):
    """The tensor that the recipe makes."""
    if repetition.rows is None:
        values = np.broadcast_to(repetition.weight, repetition.shape)
    else:
        values = np.moveaxis(repetition.weight[repetition.rows], -1, repetition.axis)
    return values if repetition.mask is None else (values + repetition.mask).astype(values.dtype)


def positions(heads, side=3, kind=np.float32):
    """A table of relative positions, looked up at every pair of places in a window: (heads, places, places)."""
    table = RNG.standard_normal(((2 * side - 1) ** 2, heads)).astype(kind)
    at = np.stack(np.meshgrid(range(side), range(side), indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None, :] + side - 1
    return table, table[apart[0] * (2 * side - 1) + apart[1]].transpose(2, 0, 1)


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_looked_up_tables(heads, kind):
    table, bias = positions(heads, kind=kind)
    repetition = repetition_of(bias)
    assert sorted(map(tuple, repetition.weight)) == sorted(map(tuple, table))
    assert np.array_equal(made(repetition), bias)
    assert repetition.mask is None


def test_a_mask_of_windows_is_taken_off():
    table, bias = positions(2)
    mask = np.where(RNG.random((4, 1, 9, 9)) < 0.3, np.float32(-100), np.float32(0))
    mask[0] = 0
    repetition = repetition_of(bias + mask)
    assert np.array_equal(made(repetition), bias + mask)
    assert repetition.weight.shape == table.shape
    assert np.unique(repetition.mask).tolist() == [-100, 0]


def test_a_mask_of_large_numbers_is_taken_off():
    _, bias = positions(2)
    causal = np.triu(np.full((9, 9), np.finfo(np.float32).min), 1)
    values = (bias + causal).astype(np.float32)
    assert np.array_equal(made(repetition_of(values)), values)
    assert np.abs(repetition_of(values).weight).max() < 100


def test_repeated_axes_are_broadcast():
    token = RNG.standard_normal((1, 1, 8)).astype(np.float32)
    repetition = repetition_of(np.repeat(token, 4, 0))
    assert np.array_equal(repetition.weight, token)
    assert repetition.rows is None


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_start_of_one_value_says_nothing_unless_it_was_expanded(value):
    values = np.full((2, 3, 8), value, np.float32)
    assert repetition_of(values) is None
    assert repetition_of(values, expanded=True).weight.shape == (1, 3, 8)


@pytest.mark.parametrize("shape", [(3, 4), (1, 12, 16), (2, 3, 4, 5)])
def test_what_nothing_repeats_in_stays(shape):
    assert repetition_of(RNG.standard_normal(shape).astype(np.float32)) is None


@pytest.mark.parametrize(
    "make", [lambda: positions(2)[1], lambda: np.repeat(RNG.standard_normal((1, 3, 4)), 2, 0)]
)
def test_the_file_computes_the_same(make):
    values = make().astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "onnx::Add_7"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, values.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, values.shape)],
        [numpy_helper.from_array(values, "onnx::Add_7")],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="pytorch"
    )
    loaded = graph_from_proto(model)
    (weight,) = (w for w in loaded.weights if w.role == "parameter")
    assert np.prod(weight.shape) < values.size / 1.5
    assert any("had repeated in larger constants are single weights again" in note for note in loaded.notes)
    rebuilt = helper.make_graph(
        [helper.make_node(n.op, n.inputs, n.outputs, **n.attributes) for n in loaded.nodes],
        "g",
        graph.input,
        graph.output,
        [numpy_helper.from_array(w.load(), w.name) for w in loaded.weights],
    )
    model = helper.make_model(rebuilt, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    x = RNG.standard_normal(values.shape).astype(np.float32)
    assert np.array_equal(ReferenceEvaluator(model).run(None, {"x": x})[0], x + values)
