"""ONNX's own suite through the backend, except the node cases, which the runtime's tests run op by op."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import rematplan.onnx_backend as backend
from rematplan.ir import ModelError

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "conformance.py"


@pytest.fixture(scope="module")
def conformance():
    spec = importlib.util.spec_from_file_location("conformance", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The other 6 of the 23 simple cases normalise strings, which nothing is trained on.
@pytest.mark.parametrize(
    ("kind", "least"), [("Real", 9), ("Simple", 17), ("PyTorchConverted", 82), ("PyTorchOperator", 35)]
)
def test_the_standards_suite(conformance, kind, least, capsys):
    tally = conformance.run((kind,))
    counts = tally.counts[kind]
    conformance.show(tally, refusals=True)
    assert counts["failed"] == 0, capsys.readouterr().out
    assert counts["passed"] >= least
    assert all(tally.reasons)


def model(op="Relu"):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], name="it")], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_runs():
    x = np.asarray([-1, 0, 2], np.float32)
    (y,) = backend.run_model(model(), [x])
    assert y.tolist() == [0, 0, 2]
    (y,) = backend.prepare(model()).run({"x": x})
    assert y.tolist() == [0, 0, 2]


def test_an_unknown_op_is_refused_before_it_runs():
    with pytest.raises(ModelError, match=r"node 'it': the op Wobble is not supported") as error:
        backend.prepare(model("Wobble"))
    assert isinstance(error.value, backend.Refused)


def test_devices():
    assert backend.supports_device("CPU")
