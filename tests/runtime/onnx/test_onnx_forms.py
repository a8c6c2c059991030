"""Batch norm and dropout put into training or inference form, against modules in that mode."""

import copy
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_names import onnx_name
from torch import nn

from rematplan import api
from rematplan.ir import ModelError, UsageError
from rematplan.ir.onnx.load import load_onnx
from rematplan.ir.onnx.training_form import Forms
from rematplan.runtime.onnx.module import OnnxModule

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def net():
    """Batch norms that no exporter can fold: they follow no convolution."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(0.4))


def export(module, x, path, training=False, **more):
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folding = {} if more.get("dynamo") else {"do_constant_folding": not training, "dynamo": False}
        torch.onnx.export(
            copy.deepcopy(module).train(training), (x,), path, training=mode, verbose=False, **folding, **more
        )
    return path


def grads(module, x):
    torch.manual_seed(1)
    out = module(x)
    y = out[0] if isinstance(out, tuple) else out
    y.square().sum().backward()
    return y, {onnx_name(n): p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("how", [{"opset_version": 13}, {"opset_version": 17}, {"dynamo": True}])
def test_inference_exports_train(tmp_path, how):
    module, x = net(), torch.randn(8, 6)
    path = export(module, x, tmp_path / "n.onnx", **how)
    ours = OnnxModule(load_onnx(path, forms=Forms(bn="train")))
    for dropout in module.modules():
        if isinstance(dropout, nn.Dropout):
            dropout.p = 0.0  # an inference export has none
    wanted, theirs = grads(module.train(), x)
    y, found = grads(ours, x)
    torch.testing.assert_close(y, wanted)
    for name, grad in theirs.items():
        if name in found:  # the linear weight is stored transposed under another name by TorchScript
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5)
    assert len(found) == len(theirs)
    buffers = {onnx_name(n): b for n, b in ours.named_buffers()}
    means = sorted(b[0].item() for n, b in buffers.items() if "mean" in n)
    torch.testing.assert_close(means, sorted(module[k].running_mean[0].item() for k in (0, 3)))


def test_training_exports_freeze(tmp_path):
    module, x = net(), torch.randn(8, 6)
    module.train()(x)
    path = export(module, x, tmp_path / "n.onnx", training=True)
    graph = load_onnx(path, forms=Forms(bn="frozen", dropout="off"))
    ours = OnnxModule(graph)
    stated = {w.name: torch.from_numpy(w.load().copy()) for w in graph.weights if w.role == "buffer"}
    module.eval().load_state_dict(stated, strict=False)
    wanted, theirs = grads(module, x)
    y, found = grads(ours, x)
    torch.testing.assert_close(y, wanted)
    assert found.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(found[name], grad)
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, stated[onnx_name(name)])
    assert {
        "2 batch norms were put into the form 'frozen'",
        "1 dropouts were put into the form 'off'",
    } <= set(graph.notes)


def test_dropout_is_switched_on(tmp_path):
    module, x = net(), torch.randn(8, 6)
    path = export(module, x, tmp_path / "n.onnx", training=True)
    on, asis = (OnnxModule(load_onnx(path, forms=Forms(dropout=d))) for d in ("on", "as-is"))
    assert torch.equal(grads(on, x)[0], grads(asis, x)[0])
    eager = OnnxModule(load_onnx(LIGHT / "light_squeezenet.onnx", forms=Forms(dropout="on")))
    dropouts = [n for n in eager.graph.nodes if n.op == "Dropout"]
    assert dropouts
    assert all(n.version >= 13 for n in dropouts)
    image = torch.randn(eager.graph.inputs[0].shape)
    with torch.no_grad():
        assert not torch.equal(eager(image)[0], eager(image)[0])


def test_a_real_graph_trains_its_batch_norms(tmp_path):
    model, count = onnx.load(LIGHT / "light_resnet50.onnx"), 7  # those of the stem and of two blocks
    graph = model.graph
    last = [at for at, node in enumerate(graph.node) if node.op_type == "BatchNormalization"][count - 1]
    del graph.node[last + 1 :], graph.output[:]
    graph.output.append(helper.make_tensor_value_info(graph.node[last].output[0], TensorProto.FLOAT, None))
    onnx.save(model, tmp_path / "begin.onnx")
    loaded = api.load_step(tmp_path / "begin.onnx", bn="train")
    moved = [o.target for o in loaded.step.outputs if o.kind == "buffer"]
    assert len(moved) == 2 * count
    targets = [str(c.target) for c in loaded.step.calls]
    assert sum("batch_norm_backward" in t for t in targets) == count
    assert f"{count} batch norms were put into the form 'train'" in loaded.notes


@pytest.mark.parametrize("how", [{"opset_version": 17}, {"dynamo": True}])
def test_folded_batch_norms_are_put_back(tmp_path, how):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 8, 8)
    module.train()(x)
    path = export(module, x, tmp_path / "n.onnx", **how)
    graph = load_onnx(path, forms=Forms(bn="train"))
    assert [n.op for n in graph.nodes] == ["Conv", "BatchNormalization", "Relu", "Conv"]
    assert sum(w.role == "buffer" for w in graph.weights) == 2
    assert any(
        "1 batch norms that the export had folded into Conv are batch norms again" in n for n in graph.notes
    )
    OnnxModule(graph)(x)[0].sum().backward()


def norm_model(outputs, read):
    node = helper.make_node("BatchNormalization", list("xsbmv"), list(outputs), training_mode=1, name="it")
    weights = [numpy_helper.from_array(np.ones(3, np.float32), n) for n in "sbmv"]
    infos = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in read]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])
    graph = helper.make_graph([node], "g", [x], infos, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_frozen_statistics_are_what_the_outputs_say(tmp_path):
    onnx.save(norm_model(["y", "nm", "nv"], ["y", "nm"]), tmp_path / "n.onnx")
    module = OnnxModule(load_onnx(tmp_path / "n.onnx", forms=Forms(bn="frozen")))
    _, mean = module(torch.randn(4, 3))
    assert torch.equal(mean, torch.ones(3))


def test_shared_statistics_part(tmp_path):
    """Two norms that share their statistics move them apart in training form."""
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "s", "m", "v"], ["h"], name="one"),
        helper.make_node("BatchNormalization", ["h", "s", "s", "m", "v"], ["y"], name="two"),
    ]
    values = np.asarray([1, 2, 3], np.float32)
    weights = [numpy_helper.from_array(values, n) for n in "smv"]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 3]) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "n.onnx")
    trained = load_onnx(tmp_path / "n.onnx", forms=Forms(bn="train"))
    assert sum(w.role == "buffer" for w in trained.weights) == 4


@pytest.mark.parametrize(("option", "form"), [("bn", "training"), ("dropout", "yes")])
def test_unknown_forms(option, form):
    with pytest.raises(UsageError, match=f"--{option} {form}: known forms are as-is, "):
        Forms(**{option: form})


def test_forms_are_for_files():
    with pytest.raises(UsageError, match="only be used with ONNX files"):
        api.load_step("unet", bn="train")


def test_saved_statistics_cannot_be_frozen(tmp_path):
    model = norm_model(["y", "nm", "nv", "sm", "sv"], ["y", "sm"])
    del model.graph.node[0].attribute[:]
    model.opset_import[0].version = 9
    onnx.save(model, tmp_path / "n.onnx")
    with pytest.raises(ModelError, match="node 'it': its batch's statistics are read"):
        load_onnx(tmp_path / "n.onnx", forms=Forms(bn="frozen"))
