"""Recurrent ops against torch's own modules: directions, lengths, states, gradients; then planned."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from planned_steps import PlannedStep, verify
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rematplan import api
from rematplan.ir import ModelError
from rematplan.ir.onnx.load import graph_from_proto, load_onnx
from rematplan.runtime.onnx.module import OnnxModule

KINDS = {"RNN": (nn.RNN, [0]), "GRU": (nn.GRU, [1, 0, 2]), "LSTM": (nn.LSTM, [0, 3, 1, 2])}
T, B, INPUTS, HIDDEN = 5, 3, 4, 2  # ONNX's order of gates, as positions in torch's, stands with each kind


def gates(weight, order):
    return torch.cat([weight.chunk(len(order))[k] for k in order]).detach().numpy()


def model(op, module, directions, lengths, **attributes):
    order = KINDS[op][1]
    suffixes = ["l0", "l0_reverse"][:directions]
    stacked = {
        "w": np.stack([gates(getattr(module, f"weight_ih_{s}"), order) for s in suffixes]),
        "r": np.stack([gates(getattr(module, f"weight_hh_{s}"), order) for s in suffixes]),
        "b": np.stack(
            [
                np.concatenate([gates(getattr(module, f"bias_{k}_{s}"), order) for k in ("ih", "hh")])
                for s in suffixes
            ]
        ),
    }
    if op == "GRU":
        attributes["linear_before_reset"] = 1
    states = ["h", "c"] if op == "LSTM" else ["h"]
    direction = "bidirectional" if directions == 2 else "forward"
    inputs = ["x", "w", "r", "b", "lengths" if lengths is not None else "", *states]
    node = helper.make_node(op, inputs, ["y", "hn"], hidden_size=HIDDEN, direction=direction, **attributes)
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [T, B, INPUTS])]
    infos += [helper.make_tensor_value_info(s, TensorProto.FLOAT, [directions, B, HIDDEN]) for s in states]
    if lengths is not None:
        stacked["lengths"] = np.asarray(lengths, np.int32)
    graph = helper.make_graph(
        [node],
        "g",
        infos,
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "hn")],
        [numpy_helper.from_array(v, k) for k, v in stacked.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_as_torch_has_it(op, directions, lengths):
    torch.manual_seed(0)
    theirs = KINDS[op][0](INPUTS, HIDDEN, bidirectional=directions == 2)
    ours = OnnxModule(graph_from_proto(model(op, theirs, directions, lengths)))
    x = torch.randn(T, B, INPUTS)
    states = [torch.randn(directions, B, HIDDEN) for _ in range(2 if op == "LSTM" else 1)]
    begin = tuple(states) if op == "LSTM" else states[0]
    packed = x if lengths is None else pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    wanted, last = theirs(packed, begin)
    if lengths is not None:
        wanted = pad_packed_sequence(wanted, total_length=T)[0]
    y, hidden = ours(x, *states)
    torch.testing.assert_close(y.transpose(1, 2).reshape(T, B, -1), wanted)
    torch.testing.assert_close(hidden, last[0] if op == "LSTM" else last)
    wanted.square().sum().backward()
    y.square().sum().backward()
    grad = ours.get_parameter("r").grad
    for d, suffix in enumerate(["l0", "l0_reverse"][:directions]):
        stated = getattr(theirs, f"weight_hh_{suffix}").grad
        torch.testing.assert_close(grad[d], torch.from_numpy(gates(stated, KINDS[op][1])))


def test_a_recurrent_network_is_planned_like_any_other(tmp_path):
    path = tmp_path / "lstm.onnx"
    onnx.save(model("LSTM", nn.LSTM(INPUTS, HIDDEN), 1, None), path)
    loaded = api.load_step(path)
    graph = api.problem(loaded)
    plan = api.plan(graph, api.no_recompute(graph).estimate.peak, "chen_sqrt")
    assert verify(PlannedStep(loaded.module, loaded.step, plan.schedule), loaded.batch).bit_equal
    assert sum(w.role == "parameter" for w in load_onnx(path).weights) == 3


def test_activations_and_directions_that_are_unknown():
    proto = model("RNN", nn.RNN(INPUTS, HIDDEN), 1, None, activations=["Wobble"])
    with pytest.raises(ModelError, match="activation 'Wobble' is not supported"):
        OnnxModule(graph_from_proto(proto))
