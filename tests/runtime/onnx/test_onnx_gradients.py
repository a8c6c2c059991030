"""Rows whose gradient could go wrong while their values are right: compared with differences of values."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from rematplan.ir.onnx.load import graph_from_proto
from rematplan.runtime.onnx.module import OnnxModule

D = onnx.TensorProto.DOUBLE
RNG = np.random.default_rng(0)


def noise(*shape):
    return RNG.standard_normal(shape)


def ints(*values):
    return np.asarray(values, np.int64)


# op, opset, reals to differentiate by, further inputs by place, attributes
CASES = {
    "computed statistics": (
        "BatchNormalization",
        15,
        [noise(2, 3, 4), noise(3), noise(3), noise(3), noise(3) ** 2],
        {},
        {},
    ),
    "softmax": ("Softmax", 13, [noise(3, 4)], {}, {"axis": 1}),
    "attention": (
        "Attention",
        23,
        [noise(1, 2, 3, 4) for _ in range(3)],
        {},
        {"is_causal": 1, "softcap": 2.0},
    ),
    "blind attention": (
        "Attention",
        23,
        [noise(1, 1, 2, 4) for _ in range(3)],
        {3: np.asarray([[False, False], [True, False]])},
        {"softcap": 2.0},
    ),
    "linear attention": (
        "LinearAttention",
        27,
        [
            noise(2, 3, 8),
            noise(2, 3, 4),
            noise(2, 3, 4),
            noise(2, 1, 4, 4),
            -(noise(2, 3, 1) ** 2),
            noise(2, 3, 1),
        ],
        {},
        {"q_num_heads": 2, "kv_num_heads": 1},
    ),
    "causal convolution": (
        "CausalConvWithState",
        27,
        [noise(2, 3, 5), noise(3, 1, 4), noise(3), noise(2, 3, 3)],
        {},
        {"activation": "silu"},
    ),
    "swiglu": ("SwiGLU", 28, [noise(3, 4), noise(3, 4)], {}, {"alpha": 0.5}),
    "dft": ("DFT", 20, [noise(2, 6, 1)], {}, {"onesided": 1}),
    "inverse dft": ("DFT", 20, [noise(2, 6, 2)], {}, {"inverse": 1}),
    "stft": ("STFT", 17, [noise(2, 9, 1), noise(4)], {1: np.asarray(2)}, {"onesided": 1}),
    "max unpool": (
        "MaxUnpool",
        22,
        [noise(1, 2, 2, 2)],
        {1: ints(0, 3, 9, 14, 17, 20, 27, 30).reshape(1, 2, 2, 2), 2: ints(1, 2, 5, 4)},
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "col2im": ("Col2Im", 18, [noise(1, 8, 4)], {1: ints(3, 3), 2: ints(2, 2)}, {}),
    "center": ("CenterCropPad", 18, [noise(4, 3)], {1: ints(3, 6)}, {}),
    "reverse": ("ReverseSequence", 10, [noise(4, 3)], {1: ints(4, 2, 1)}, {"time_axis": 0, "batch_axis": 1}),
    "scatter": ("TensorScatter", 24, [noise(2, 4, 3), noise(2, 2, 3)], {2: ints(1, 2)}, {"axis": 1}),
    "dequantise": (
        "DequantizeLinear",
        21,
        [noise(4)],
        {0: RNG.integers(-9, 9, (3, 4)).astype(np.int8)},
        {"axis": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    op, opset, reals, others, attributes = CASES[name]
    waiting = [f"x{k}" for k in range(len(reals))]
    names = list(waiting)
    for at in sorted(others):
        names.insert(at, f"c{at}")
    node = helper.make_node(op, names, ["y"], **attributes)
    inputs = [helper.make_tensor_value_info(n, D, r.shape) for n, r in zip(waiting, reals, strict=True)]
    constants = [numpy_helper.from_array(v, f"c{at}") for at, v in others.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", D, None)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    net = OnnxModule(graph_from_proto(model))
    tensors = [torch.from_numpy(r).requires_grad_() for r in reals]
    assert torch.autograd.gradcheck(lambda *x: net(*x)[0], tensors)
