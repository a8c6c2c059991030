"""Sequences and ONNX's own Gradient: values of a graph that are no tensors, or no forward pass."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from rematplan.ir import ModelError
from rematplan.ir.onnx.load import graph_from_proto
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.with_loss import with_loss
from rematplan.runtime.onnx.module import OnnxModule

F, S = TensorProto.FLOAT, TensorProto.STRING
TRAINING = "ai.onnx.preview.training"
node = helper.make_node


def info(name, shape, kind=F):
    return helper.make_tensor_value_info(name, kind, shape)


def module(nodes, inputs, outputs, weights=(), opset=17):
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(TRAINING, 1)]
    return OnnxModule(graph_from_proto(helper.make_model(graph, opset_imports=imports, ir_version=8)))


def number(name, value):
    return numpy_helper.from_array(np.asarray(value), name)


def in_sequence():
    """x split, a part multiplied by a weight, put back elsewhere, all joined."""
    nodes = [
        node("SplitToSequence", ["x", "two"], ["parts"], axis=1),
        node("SequenceAt", ["parts", "last"], ["part"]),
        node("MatMul", ["part", "w"], ["made"]),
        node("SequenceErase", ["parts"], ["rest"]),
        node("SequenceInsert", ["rest", "made", "zero"], ["all"]),
        node("ConcatFromSequence", ["all"], ["y"], axis=1),
    ]
    weights = [
        number("two", np.int64(2)),
        number("last", np.int64(-1)),
        number("zero", np.int64(0)),
        number("w", np.random.default_rng(0).standard_normal((2, 2)).astype(np.float32)),
    ]
    return module(nodes, [info("x", [3, 6])], [info("y", [3, 6])], weights)


def test_a_sequence_is_computed_and_differentiated():
    net, x = in_sequence(), torch.randn(3, 6)
    (w,) = net.parameters()
    (y,) = net(x)
    torch.testing.assert_close(y, torch.cat([x[:, 4:] @ w, x[:, :4]], 1))
    assert torch.autograd.grad(y.sum(), w)[0].abs().sum() > 0


def test_a_sequence_leaves_no_trace_in_a_capture():
    net = in_sequence()
    step = capture(*with_loss(net, (torch.randn(3, 6),), "mse"), "sequence")
    assert any("mm" in str(call.target) for call in step.calls)


def test_lengths_of_sequences_are_known():
    nodes = [
        node("SplitToSequence", ["x"], ["parts"], axis=0, keepdims=0),
        node("SequenceLength", ["parts"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["shape"]),
        node("Expand", ["one", "shape"], ["y"]),
    ]
    net = module(
        nodes,
        [info("x", [5, 2])],
        [info("y", None)],
        [number("axes", np.asarray([0], np.int64)), number("one", np.float32(1))],
    )
    assert net(torch.zeros(5, 2))[0].shape == (5,)


def test_a_place_that_is_not_there_is_refused_by_name():
    nodes = [node("SequenceConstruct", ["x"], ["s"]), node("SequenceAt", ["s", "p"], ["y"], name="at")]
    net = module(nodes, [info("x", [2])], [info("y", [2])], [number("p", np.int64(1))])
    with pytest.raises(ModelError, match=r"node 'at' .*place 1 of 1"):
        net(torch.zeros(2))


def test_gradient_of_a_function_with_weights_that_nothing_else_reads():
    nodes = [
        node("Gradient", ["x", "z"], ["dx"], xs=["x"], zs=["z"], y="y", domain=TRAINING),
        node("MatMul", ["x", "w"], ["h"]),
        node("Mul", ["h", "z"], ["m"]),
        node("Tanh", ["m"], ["y"]),
    ]
    w = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    net = module(nodes, [info("x", [2, 3]), info("z", [2, 4])], [info("dx", [2, 3])], [number("w", w)])
    x, z = torch.randn(2, 3, requires_grad=True), torch.randn(2, 4)
    with torch.no_grad():
        (found,) = net(x, z)
    (wanted,) = torch.autograd.grad(torch.tanh(x @ torch.from_numpy(w) * z).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_second_derivatives():
    nodes = [
        node("Mul", ["x", "x"], ["x2"]),
        node("Mul", ["x2", "x"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y", domain=TRAINING),
        node("Gradient", ["x"], ["dd"], xs=["x"], y="d", domain=TRAINING),
    ]
    net = module(nodes, [info("x", [3])], [info("d", [3]), info("dd", [3])])
    x = torch.tensor([1.0, 2.0, -3.0])
    d, dd = net(x)
    torch.testing.assert_close(d, 3 * x * x)
    torch.testing.assert_close(dd, 6 * x)


def test_a_gradient_of_something_else_is_refused():
    nodes = [
        node("Mul", ["x", "z"], ["y"]),
        node("Gradient", ["x"], ["d"], name="grad", xs=["x"], y="y", domain=TRAINING),
    ]
    with pytest.raises(ModelError, match=r"node 'grad' .*'y' is not computed from"):
        module(nodes, [info("x", [3]), info("z", [3])], [info("d", [3])])


def test_strings_are_refused_by_name():
    with pytest.raises(ModelError, match=r"the graph input 't' .*string"):
        module([node("Identity", ["t"], ["y"], name="sum")], [info("t", [3], S)], [info("y", [3], S)])
