"""Laws of quantisation-aware training: pairs of QuantizeLinear and DequantizeLinear are trained straight through."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import rematplan
from rematplan.ir.onnx.load import graph_from_proto
from rematplan.module.verification import verify
from rematplan.runtime.onnx.module import OnnxModule
from rematplan.runtime.onnx.op_table import row_of
from rematplan.runtime.onnx.ops.quantise import dequantize_linear, quantize_linear

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 4)).astype(np.float32)
X = torch.from_numpy(RNG.standard_normal((3, 6)).astype(np.float32))
BY_COLUMN = np.array([0.02, 0.01, 0.02, 0.03], np.float32)


BOTH = ("low", "high")


def pair(
    name: str, *grid: str, second: tuple[str, ...] = (), clip: tuple[str, ...] = (), **more: Any
) -> list[Any]:
    """The nodes of a pair that rounds a value; ``second``: scale and zero point of the DequantizeLinear."""
    clips = [helper.make_node("Clip", [f"{name}_q", *clip], [f"{name}_c"])] if clip else []
    return [
        helper.make_node("QuantizeLinear", [name, *grid], [f"{name}_q"], **more),
        *clips,
        helper.make_node(
            "DequantizeLinear", [f"{name}_{'c' if clip else 'q'}", *(second or grid)], [f"{name}_d"], **more
        ),
    ]


def model(nodes: list[Any], **arrays: Any) -> Any:
    """``y``: ``x`` times what the nodes make of the weight, ``w_d``."""
    arrays = {"w": WEIGHT, "scale": np.float32(0.01), "zero": np.int8(3)} | arrays
    known = [numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items()]
    nodes = [*nodes, helper.make_node("MatMul", ["x", "w_d"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3, k]) for n, k in (("x", 6), ("y", 4)))
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], known), opset_imports=opsets, ir_version=10
    )


CASES: dict[str, tuple[list[Any], dict[str, Any], tuple[Any, int, int, int]]] = {
    "one scale": (pair("w", "scale", "zero"), {}, (0.01, 3, -128, 127)),
    "no zero point": (pair("w", "scale"), {}, (0.01, 0, 0, 255)),
    "by columns": (
        pair("w", "scale", "zero", axis=1),
        {"scale": BY_COLUMN, "zero": np.zeros(4, np.int8)},
        (BY_COLUMN, 0, -128, 127),
    ),
    "a clip, and equal copies of the scale and zero point": (
        pair("w", "scale", "zero", second=("scale2", "zero2"), clip=BOTH),
        {"low": np.int8(0), "high": np.int8(100), "scale2": np.float32(0.01), "zero2": np.int8(3)},
        (0.01, 3, 0, 100),
    ),
    "a clip of one end": (
        pair("w", "scale", "zero", clip=("", "high")),
        {"high": np.int8(100)},
        (0.01, 3, -128, 100),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_rounded_and_the_gradient_passes_within_the_range(case: str) -> None:
    nodes, arrays, (scale, zero, low, high) = CASES[case]
    graph = graph_from_proto(model(nodes, **arrays))
    net = OnnxModule(graph)
    assert [name for name, _ in net.named_parameters()] == ["w"]
    assert any("trained straight through" in note for note in graph.notes)
    whole = torch.round(net.w / torch.as_tensor(scale)) + zero
    rounded = (whole.clamp(low, high) - zero) * torch.as_tensor(scale)
    (y,) = net(X)
    assert torch.equal(y, X @ rounded)
    y.square().sum().backward()
    inside = (whole >= low) & (whole <= high)
    assert not inside.all()
    assert torch.equal(net.w.grad, torch.where(inside, X.T @ (2 * y), 0))


def test_the_values_are_those_of_the_two_ops() -> None:
    (node,) = graph_from_proto(model(pair("w", "scale"))).nodes[:1]
    assert node.op == "FakeQuantize"
    quantised, dequantised = (
        replace(node, op=op, attributes={}) for op in ("QuantizeLinear", "DequantizeLinear")
    )
    x, scale = torch.randn(500) * 3, torch.tensor(0.017)
    two = dequantize_linear(dequantised, quantize_linear(quantised, x, scale), scale)
    assert torch.equal(row_of(node).run(node, x, scale), two)


def test_a_pair_of_two_scales_is_not_trained_and_a_note_says_so() -> None:
    other = np.float32(0.02)
    graph = graph_from_proto(model(pair("w", "scale", "zero", second=("other", "zero")), other=other))
    assert not [w for w in graph.weights if w.role == "parameter"]
    assert any("1 weights are not trained, because rounding" in note for note in graph.notes)


def test_integers_are_not_trained_and_a_note_says_so() -> None:
    nodes = [helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["w_d"])]
    graph = graph_from_proto(model(nodes, w=(WEIGHT * 50).astype(np.int8)))
    assert any("1 weights are not trained, because rounding" in note for note in graph.notes)


def test_a_planned_step_has_the_bits_of_eager_mode(tmp_path: Any) -> None:
    nodes = [*pair("w", "scale", "zero"), helper.make_node("Tanh", ["w_d"], ["w_t"])]
    nodes += [*pair("w_t", "scale", "zero"), helper.make_node("Identity", ["w_t_d"], ["again"])]
    file = tmp_path / "net.onnx"
    file.write_bytes(model(nodes).SerializeToString())
    step = rematplan.load_step(file)
    planned = rematplan.plan_module(
        step.module, tuple(step.batch), budget="min", strategy="approx_dp", costs="roofline"
    )
    assert verify(step.module, planned, step.batch).bit_equal
    step.module(*step.batch).backward()
    assert dict(step.module.named_parameters())["model.w"].grad.any()


def test_other_files_have_no_such_note() -> None:
    graph = graph_from_proto(model([helper.make_node("Tanh", ["w"], ["w_d"])]))
    assert not any("trained" in note for note in graph.notes)
