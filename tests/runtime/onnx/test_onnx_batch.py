"""Files made for a batch of one are planned for any: what their constants keep of it is undone, or refused by name."""

import warnings

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import rematplan
from rematplan.ir import ModelError, UsageError
from rematplan.ir.onnx.load import load_onnx
from rematplan.runtime.onnx.module import OnnxModule
from rematplan.runtime.onnx.rebatch import rebatched

WANTED = 5


class Attention(nn.Module):
    """A class token and self-attention with everything reshaped by numbers, as tracing leaves them."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.inner, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        n, t = int(x.shape[0]), int(x.shape[1]) + 1
        x = torch.cat([self.token.expand(n, -1, -1), x], 1)
        q, k, v = (p.reshape(n, t, 2, 4).transpose(1, 2) for p in self.inner(x).chunk(3, -1))
        scores = (q @ k.transpose(2, 3)).reshape(n * 2, t, t).softmax(-1).reshape(n, 2, t, t)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(n, t, 8))
        return self.head(x[:, 0])


class Windows(nn.Module):
    """Images cut into windows, each with a bias of its own, and put together again."""

    def __init__(self):
        super().__init__()
        self.bias, self.linear = nn.Parameter(torch.randn(4, 1, 3)), nn.Linear(3, 3)

    def forward(self, x):
        n = int(x.shape[0])
        x = x.permute(0, 2, 3, 1).reshape(n, 2, 2, 2, 2, 3).transpose(2, 3).reshape(n * 4, 4, 3)
        x = (self.linear(x).reshape(n, 4, 4, 3) + self.bias).reshape(n * 4, 4, 3)
        x = x.reshape(n, 2, 2, 2, 2, 3).transpose(2, 3).reshape(n, 4, 4, 3)
        return F.interpolate(x.permute(0, 3, 1, 2), size=(8, 8)).reshape(n, -1)


class Recurrent(nn.Module):
    """An LSTM with a stated start, steps before samples."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 4), nn.Linear(4, 2)
        self.register_buffer("start", torch.randn(1, 1, 4))

    def forward(self, x):
        start = self.start.expand(1, int(x.shape[0]), 4).contiguous()
        y, _ = self.lstm(x.transpose(0, 1), (start, start))
        return self.head(y[-1])


NETS = {"attention": (Attention, (4, 8)), "recurrent": (Recurrent, (5, 6)), "windows": (Windows, (3, 4, 4))}
EXPORTS = {"script": {"dynamo": False, "opset_version": 17}, "dynamo": {"dynamo": True, "opset_version": 18}}
SYMBOLIC = {"dynamic_axes": {"x": {0: "n"}}, "dynamo": False, "opset_version": 17}


def export(path, net, shape, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.randn(1, *shape),), path, input_names=["x"], verbose=False, **how)


def agree(net, path, dims, shape):
    graph = rebatched(load_onnx(path, dims))
    x = torch.randn(WANTED, *shape)
    torch.testing.assert_close(OnnxModule(graph)(x)[0], net(x), rtol=1e-4, atol=1e-5)
    assert any("made for a batch of 1 follow the batch now" in note for note in graph.notes)


@pytest.mark.parametrize("how", EXPORTS)
@pytest.mark.parametrize("name", NETS)
def test_a_file_with_a_fixed_batch_of_one(tmp_path, name, how):
    make, shape = NETS[name]
    net = make().eval()
    export(tmp_path / "net.onnx", net, shape, **EXPORTS[how])
    agree(net, tmp_path / "net.onnx", {"batch": WANTED}, shape)


@pytest.mark.parametrize("name", NETS)
def test_a_symbolic_batch_with_constants_for_one(tmp_path, name):
    make, shape = NETS[name]
    net = make().eval()
    export(tmp_path / "net.onnx", net, shape, **SYMBOLIC)
    agree(net, tmp_path / "net.onnx", {"n": WANTED}, shape)


def info(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def write(path, nodes, shape, weights):
    arrays = [numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items()]
    graph = helper.make_graph(nodes, "g", [info("x", shape)], [info("y", None)], arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


W = np.ones((4, 4), np.float32)


def test_what_cannot_follow_is_named(tmp_path):
    node, path = helper.make_node, tmp_path / "n.onnx"
    picks = [node("MatMul", ["x", "w"], ["h"]), node("Gather", ["h", "zero"], ["y"], name="pick", axis=0)]
    write(path, picks, [1, 4], {"w": W, "zero": np.int64(0)})
    with pytest.raises(
        ModelError, match=r"for a batch of 1 and cannot be adapted to 3: node 'pick' .*picks from the batch"
    ):
        rematplan.load_step(path, dims={"batch": 3})
    each = [node("Mul", ["x", "each"], ["h"], name="each"), node("MatMul", ["h", "w"], ["y"])]
    write(path, each, [2, 4], {"w": W, "each": np.ones((2, 4), np.float32)})
    with pytest.raises(ModelError, match=r"for a batch of 2 and cannot be adapted to 3: node 'each' \(Mul"):
        rematplan.load_step(path, dims={"batch": 3})
    mixed = [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("MatMul", ["t", "w"], ["y"], name="mix")]
    write(path, mixed, [1, 4], {"w": W[:1]})
    with pytest.raises(ModelError, match=r"for a batch of 1 and cannot be adapted to 3: node 'mix' \(MatMul"):
        rematplan.load_step(path, dims={"batch": 3})


def test_a_shape_that_depends_on_data_is_named_where_the_batch_is_symbolic(tmp_path):
    node = helper.make_node
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("NonZero", ["h"], ["i"], name="where")]
    nodes += [node("Transpose", ["i"], ["t"]), node("GatherND", ["h", "t"], ["y"])]
    path = write(tmp_path / "n.onnx", nodes, ["n", 4], {"w": W})
    with pytest.raises(ModelError, match=r"node 'where' \(NonZero.*depends on data"):
        rematplan.load_step(path, dims={"n": 3})


def test_other_dimensions_stay_fixed(tmp_path):
    path = write(tmp_path / "n.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [1, 4], {"w": W})
    with pytest.raises(UsageError, match=r"--dim width: .*fixed"):
        load_onnx(path, {"width": 2})
    assert load_onnx(path, {"batch": 1}).notes == load_onnx(path).notes
    assert rematplan.load_step(path, dims={"batch": 7}).batch[0].shape == (7, 4)


def test_a_graph_that_follows_by_itself_is_left_alone(tmp_path):
    nodes = [helper.make_node("Reshape", ["x", "s"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    path = write(tmp_path / "n.onnx", nodes, [1, 2, 2], {"w": W, "s": np.asarray([-1, 4])})
    graph = load_onnx(path, {"batch": 6})
    assert rebatched(graph) is graph
