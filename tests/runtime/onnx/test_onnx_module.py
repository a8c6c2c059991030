"""ONNX graphs as torch modules: real graphs, training exports against their modules, batch norm, capture."""

import copy
import io
import re
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_names import onnx_name
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from rematplan.ir import ModelError
from rematplan.ir.onnx.load import graph_from_proto, load_onnx
from rematplan.runtime.onnx.module import OnnxModule, torch_name

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
# The others that ship with ONNX, VGG-19 and ZFNet, have the ops of AlexNet.
REAL = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet")


@pytest.mark.parametrize("name", REAL)
def test_real_graphs_run_and_train(name):
    graph = load_onnx(LIGHT / f"light_{name}.onnx")
    module = OnnxModule(graph)
    torch.manual_seed(0)
    (y,) = module(torch.randn(graph.inputs[0].shape))
    assert y.shape == graph.outputs[0].shape
    y.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_what_is_made_of_known_numbers_goes_where_the_rest_is():
    ends = [
        helper.make_tensor(k, TensorProto.FLOAT, [], [v]) for k, v in (("a", 0.0), ("b", 1e4), ("c", 1.0))
    ]
    nodes = [helper.make_node("Range", ["a", "b", "c"], ["r"]), helper.make_node("Mul", ["r", "x"], ["y"])]
    x, y = (helper.make_tensor_value_info(k, TensorProto.FLOAT, [10000]) for k in "xy")
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], ends))
    module = OnnxModule(graph_from_proto(model), device="meta")
    (result,) = module(torch.empty(10000, device="meta"))
    assert result.device.type == "meta"


class Net(nn.Module):
    """What training exports of image networks are made of."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8, momentum=0.2)
        self.drop = nn.Dropout(dropout)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.resize = nn.Upsample(scale_factor=2, mode="bilinear")
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        h = self.drop(torch.relu(self.norm(self.conv(x))))
        low = self.pool(h)
        h = torch.cat([self.up(low), h, self.resize(low)], 1)[:, 4:12]
        t = h.flatten(2).transpose(1, 2)
        t = t + self.attention(t, t, t)[0]
        t = t.view(x.shape[0], x.shape[2], -1, 8) / 3.0
        return self.head(t.mean((1, 2)))


def exported(module: nn.Module, *inputs: torch.Tensor) -> onnx.ModelProto:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            inputs,
            file,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=17,
            input_names=["x"],
            dynamic_axes={"x": {0: "batch"}},
        )
    return onnx.load_from_string(file.getvalue())


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """A module, its training export loaded, and a batch."""
    torch.manual_seed(0)
    module, x = Net().train(), torch.randn(4, 3, 8, 8)
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    onnx.save(exported(copy.deepcopy(module), x), path)
    graph = load_onnx(path, {"batch": 4})
    with torch.no_grad():  # exporting ran the module once more, on its own copy: take over the statistics
        for weight in graph.weights:
            if weight.role == "buffer":
                module.get_buffer(weight.name).copy_(torch.from_numpy(weight.load().copy()))
    return module, graph, x


def test_training_exports_compute_what_their_module_does(net):
    original, graph, x = net
    original, module = copy.deepcopy(original), OnnxModule(graph)
    for step in range(2):
        torch.manual_seed(step)
        wanted = original(x)
        wanted.square().sum().backward()
        torch.manual_seed(step)
        (y,) = module(x)
        y.square().sum().backward()
        assert torch.equal(y, wanted)
    theirs = dict(original.named_parameters())
    ours = {onnx_name(n): p for n, p in module.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter.grad, theirs[name].grad), name


def test_running_statistics_move_once_a_forward(net):
    original, graph, x = net
    original, module = copy.deepcopy(original), OnnxModule(graph)
    before = module.get_buffer(torch_name("norm.running_var")).clone()
    original(x), module(x)
    ours = {onnx_name(n): b for n, b in module.named_buffers()}
    assert torch.equal(ours["norm.running_mean"], original.norm.running_mean)
    # ONNX's running variance is over n, torch's over n − 1.
    n = x.numel() // x.shape[1]
    wanted = before * 0.8 + (original.norm.running_var - before * 0.8) * (n - 1) / n
    torch.testing.assert_close(ours["norm.running_var"], wanted)


def test_shape_arithmetic_leaves_nothing_in_the_captured_graph(net):
    _, graph, x = net
    module = OnnxModule(graph)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = module

        def forward(self, x):
            return self.net(x)[0].square().sum()

    assert sum(n.op in ("Shape", "Gather", "Concat") for n in graph.nodes) > 15
    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, Loss(), (x,))
        counts = Counter(str(n.target) for n in joint.graph_module.graph.nodes)
    assert counts["aten.native_dropout.default"] == 1
    assert counts["aten._native_batch_norm_legit_functional.default"] == 1
    assert counts["aten.convolution.default"] == 2
    assert not counts["aten.index_select.default"]
    assert not any("constant" in name for name in counts)


def test_seeds_decide_random_starts():
    graph = load_onnx(LIGHT / "light_bvlc_alexnet.onnx")
    first, again, other = (OnnxModule(graph, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)
    filled = OnnxModule(graph, seed=None).state_dict()
    assert all((v == np.float32(0.02)).all() for v in filled.values())


def test_weights_may_stay_unread():
    module = OnnxModule(load_onnx(LIGHT / "light_bvlc_alexnet.onnx"), device="meta")
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize(
    "name", ["w", "layer1.0.conv.weight", "a:b", "a%3Ab", "", "train", "graph", "x y/z", "é.ü", "%"]
)
def test_torch_names_are_converted_back_to_onnx_names(name):
    module = nn.Module()
    module.register_parameter(torch_name(name), nn.Parameter(torch.zeros(1)))
    assert onnx_name(torch_name(name)) == name


def test_names_stay_apart():
    names = ["a.b", "a:b", "a%3Ab", "a%2Eb", "a%253Ab", "train", "train%"]
    assert len({torch_name(n) for n in names}) == len(names)


def batch_norm(momentum=0.75, outputs=("y", "nm", "nv"), opset=15, shape=(4, 3, 5, 5)):
    node = helper.make_node("BatchNormalization", list("xsbmv"), list(outputs), momentum=momentum)
    if opset >= 14:
        node.attribute.append(helper.make_attribute("training_mode", 1))
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.random(shape[1]).astype(np.float32) + 0.5, n) for n in "sbmv"]
    infos = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs if o]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "g", [x], infos, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def test_exposed_statistics_are_also_the_buffers():
    model = batch_norm()
    module, x = OnnxModule(graph_from_proto(model)), torch.randn(4, 3, 5, 5)
    stated = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    y, mean, var = module(x)
    wanted = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    for ours, theirs in zip((y, mean, var), wanted, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(module.get_buffer("m"), mean)
    assert torch.equal(module.get_buffer("v"), var)
    assert not np.array_equal(mean.numpy(), stated["m"])


def test_one_value_a_channel_has_no_variance():
    module = OnnxModule(graph_from_proto(batch_norm(shape=(1, 3, 1, 1))))
    y, mean, var = module(torch.randn(1, 3, 1, 1))
    assert y.isfinite().all()
    assert mean.isfinite().all()
    torch.testing.assert_close(var, OnnxModule(graph_from_proto(batch_norm())).get_buffer("v") * 0.75)


def test_opset_9_trains_by_its_five_outputs():
    module = OnnxModule(graph_from_proto(batch_norm(outputs=("y", "nm", "nv", "sm", "sv"), opset=9)))
    x = torch.randn(4, 3, 5, 5)
    before = module.get_buffer("m").clone()
    y, mean, _, saved, _ = module(x)
    torch.testing.assert_close(saved, x.mean((0, 2, 3)))
    torch.testing.assert_close(mean, before * 0.75 + saved * 0.25)
    torch.testing.assert_close(y.mean((0, 2, 3)), module.get_parameter("b"))


def test_a_tied_weight_is_one_parameter():
    w = numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [w])
    module = OnnxModule(
        graph_from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    )
    assert len(list(module.parameters())) == 1
    module(torch.ones(2, 3))[0].sum().backward()
    assert torch.equal(module.get_parameter("w").grad, torch.full((3, 3), 4.0))


def test_weights_that_no_machine_holds_are_refused():
    shape = numpy_helper.from_array(np.asarray([1 << 24, 1 << 20], np.int64), "shape")
    fill = helper.make_tensor("f", TensorProto.FLOAT, [1], [0.02])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["w"], value=fill),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    infos = [helper.make_tensor_value_info("x", 1, [1, 1 << 24]), helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(ModelError, match=r"its weights take 65536\.00 GiB, this machine has"):
        OnnxModule(graph_from_proto(model))


@pytest.mark.parametrize(
    ("op", "inputs", "rank"),
    [("Reshape", ["x", "shape"], 1), ("NonZero", ["shape"], 2)],
    ids=["input", "result"],
)
def test_shapes_that_depend_on_data_are_named_under_capture(op: str, inputs: list[str], rank: int):
    nodes = [helper.make_node(op, inputs, ["y"], name="it")]
    infos = [helper.make_tensor_value_info("x", 1, [2, 3]), helper.make_tensor_value_info("shape", 7, [1])]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    module = OnnxModule(graph_from_proto(model))
    assert module(torch.zeros(2, 3), torch.tensor([6]))[0].dim() == rank
    with torch._subclasses.FakeTensorMode() as fake:
        x, shape = fake.from_tensor(torch.zeros(2, 3)), torch.empty(1, dtype=torch.int64)  # of no known value
        with pytest.raises((ModelError, DynamicOutputShapeException)) as refused:
            module(x, shape)
    assert re.search(r"node 'it' .* depends on data", str(getattr(refused.value, "refusal", refused.value)))
