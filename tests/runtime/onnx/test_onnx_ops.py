"""The op table against the standard: its own node cases, its list of versions, its rarer corners."""

import functools
import math
import re

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx.backend.test.case.node import collect_testcases

import rematplan.onnx_backend as backend
from rematplan.ir import ModelError
from rematplan.ir.onnx.fake_quantisation import FAKE_QUANTIZE
from rematplan.ir.onnx.load import graph_from_proto
from rematplan.runtime.onnx.module import OnnxModule
from rematplan.runtime.onnx.op_table import TABLE
from rematplan.runtime.onnx.ops.values import to_tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the standard's cases divide by zero

NOT_COMPARABLE = re.compile("test_training_dropout|test_bernoulli")  # draws of another generator


@functools.cache
def cases():
    found = {}
    for case in collect_testcases(None):
        nodes = case.model.graph.node if case.model else ()
        ops = {n.op_type for n in nodes if not n.domain}
        if (
            nodes
            and all((n.domain, n.op_type) in TABLE for n in nodes)
            and not NOT_COMPARABLE.match(case.name)
        ):
            for op in ops:
                found.setdefault(op, []).append(case)
    return found


@functools.cache
def by_name():
    return {case.name: case for found in cases().values() for case in found}


def values(data):
    return onnx_ir.from_proto(data).numpy() if isinstance(data, onnx.TensorProto) else np.asarray(data)


def module_of(case):
    """The case's model, or None if it is refused."""
    try:
        return OnnxModule(graph_from_proto(case.model), seed=None)
    except ModelError:
        return None


STANDARD = sorted(op for domain, op in TABLE if not domain and op != FAKE_QUANTIZE)


@functools.cache
def check(name) -> bool:
    """Whether the case is one we run; if so its outputs are right, to the type."""
    case = by_name()[name]
    try:
        ready = backend.prepare(case.model)
    except backend.Refused:
        return False
    for inputs, outputs in case.data_sets:
        for result, wanted in zip(ready.run([values(i) for i in inputs]), outputs, strict=True):
            wanted = values(wanted)
            assert result.dtype == wanted.dtype, case.name
            assert result.shape == wanted.shape, case.name
            if wanted.dtype == object:
                assert np.array_equal(result, wanted.astype(str)), case.name
                continue
            exact = wanted.dtype.kind in "biu"
            half = wanted.dtype.name == "bfloat16"  # the suite allows it two units in the last place
            close = {"rtol": 0 if exact else max(case.rtol, half * 2**-6), "atol": 0 if exact else case.atol}
            pair = [a.astype(np.float32) if a.dtype.name == "bfloat16" else a for a in (result, wanted)]
            np.testing.assert_allclose(*pair, equal_nan=True, err_msg=case.name, **close)
    return True


@pytest.mark.parametrize("op", STANDARD)
def test_the_cases_of_the_onnx_standard(op):
    ran = [check(case.name) for case in cases().get(op, [])]
    assert sum(ran) > 0 or WITHOUT_CASES.match(op)


# The standard keeps no cases of superseded ops, and no comparable ones of random ones; those of sequences have
# sequences as inputs too (its other cases, which tests/conformance runs, have not).
WITHOUT_CASES = re.compile(".*Sequence|Bernoulli|GlobalLpPool|Random|Scatter$")


def test_most_of_the_standard_is_covered():
    ran = [name for name in by_name() if check(name)]
    assert len(ran) >= 1530


@pytest.mark.parametrize("op", STANDARD)
def test_versions_are_those_of_the_standard(op):
    """A version that ONNX has and the table has not would silently get its predecessor's meaning."""
    stated = {
        s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op and not s.domain
    }
    rows = set(TABLE["", op])
    first = min(rows)
    assert {v for v in stated if v >= first} <= rows
    assert rows <= stated | {v for v in rows if v > onnx.defs.onnx_opset_version()}


def one_node(op, inputs, opset, **attributes):
    """A model of one node, and its inputs as arrays."""
    names = [f"i{k}" for k in range(len(inputs))]
    node = onnx.helper.make_node(op, names, ["y"], name="it", **attributes)
    infos = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
    ]
    graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_tensor_value_info("y", 1, None)])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)


def run(model, *arrays):
    (result,) = OnnxModule(graph_from_proto(model))(*(torch.from_numpy(a) for a in arrays))
    return result.numpy()


def against_reference(op, *arrays, opset=19, **attributes):
    model = one_node(op, arrays, opset, **attributes)
    reference = onnx.reference.ReferenceEvaluator(model)
    (wanted,) = reference.run(None, {f"i{k}": a for k, a in enumerate(arrays)})
    np.testing.assert_allclose(run(model, *arrays), wanted, rtol=1e-4, atol=1e-5)


def noise(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def windows(n, k, s, before, after, ceil):
    """Starts of the windows along one axis, as the operator's text has it."""
    span = (n + before + after - k) / s
    count = (math.ceil(span) if ceil else math.floor(span)) + 1
    return [i * s - before for i in range(count) if not ceil or i * s < n + before]


def pooled(x, pads, strides, ceil, take):
    """Pooling of 3×3 windows by enumeration; ``take(inside, stated)`` reduces the window's elements.

    ``inside``: the elements within the input; ``stated``: how many places lie within it or its padding.
    """
    n, m = x.shape[2:]
    rows, columns = (windows(x.shape[2 + a], 3, strides[a], pads[a], pads[2 + a], ceil) for a in (0, 1))
    y = np.zeros((*x.shape[:2], len(rows), len(columns)), x.dtype)
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            inside = x[:, :, max(r, 0) : r + 3, max(c, 0) : c + 3]
            stated = (min(r + 3, n + pads[2]) - r) * (min(c + 3, m + pads[3]) - c)
            y[:, :, i, j] = take(inside.reshape(*x.shape[:2], -1), stated)
    return y


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 2, 1], [2, 0, 0, 1]])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("strides", [[1, 1], [2, 3]])
def test_pooling_windows(pads, ceil, strides):
    x = noise(2, 3, 9, 8)
    shared = {"kernel_shape": [3, 3], "pads": pads, "strides": strides, "ceil_mode": ceil}
    takes = {
        ("MaxPool", None): lambda inside, stated: inside.max(-1),
        ("AveragePool", 0): lambda inside, stated: inside.mean(-1),
        ("AveragePool", 1): lambda inside, stated: inside.sum(-1) / stated,
    }
    for (op, counted), take in takes.items():
        more = {} if counted is None else {"count_include_pad": counted}
        wanted = pooled(x, pads, strides, ceil, take)
        np.testing.assert_allclose(
            run(one_node(op, [x], 19, **shared, **more), x), wanted, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 1, 2, 0]])
@pytest.mark.parametrize("group", [1, 2])
def test_uneven_convolutions(pads, group):
    shared = {"pads": pads, "strides": [2, 1], "dilations": [1, 2], "group": group}
    against_reference("Conv", noise(2, 4, 9, 8), noise(6, 4 // group, 3, 3), noise(6), **shared)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [1, 2])
def test_softmax_before_opset_13_flattens(op, axis):
    x = noise(2, 3, 4)
    flat = torch.from_numpy(x).reshape(int(np.prod(x.shape[:axis])), -1)
    wanted = (torch.softmax(flat, 1) if op == "Softmax" else torch.log_softmax(flat, 1)).reshape(x.shape)
    np.testing.assert_allclose(run(one_node(op, [x], 11, axis=axis), x), wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("sizes", [(12, 20), (11, 9)])
def test_a_kept_aspect_ratio_samples_by_its_scale_and_not_by_the_rounded_sizes(mode, policy, sizes):
    shared = {"axes": [2, 3], "keep_aspect_ratio_policy": policy, "mode": mode}
    x = noise(1, 2, 8, 9)
    model = one_node("Resize", [x], 19, **shared)
    model.graph.node[0].input.extend(["", "", "sizes"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(sizes), "sizes"))
    (wanted,) = onnx.reference.ReferenceEvaluator(model).run(None, {"i0": x})
    np.testing.assert_allclose(run(model, x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("reverse", "wanted"), [(0, [0.0, 1.0, 1e9]), (1, [1e9, 3.0, 0.0])])
def test_an_exclusive_sum_keeps_the_digits_of_small_elements(reverse, wanted):
    """A sum of all elements, minus the large one, would have lost them."""
    x = np.array([1.0, 1e9, 3.0], np.float32)

    def summed(x, axis):
        model = one_node("CumSum", [x, np.array(axis)], 14, exclusive=1, reverse=reverse)
        name = model.graph.input.pop().name
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(axis), name))
        return run(model, x)

    assert summed(x, 0).tolist() == wanted
    assert summed(np.zeros((2, 0), np.float32), 1).shape == (2, 0)


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_large_unsigned_integers_are_shifted_without_a_sign(direction):
    numbers = np.array([2**63 + 8, 2**63 + 8, 2**64 - 1, 5], np.uint64)
    against_reference("BitShift", numbers, np.array([0, 1, 63, 1], np.uint64), direction=direction)


def test_average_over_dilated_windows():
    shared = {"kernel_shape": [2, 2], "dilations": [2, 2], "pads": [1, 0, 1, 1]}
    against_reference("AveragePool", noise(1, 2, 8, 8), count_include_pad=1, **shared)


def test_unknown_ops_are_refused_before_anything_runs():
    model = one_node("Relu", [noise(2)], 17)
    model.graph.node[0].op_type = "Wobble"
    with pytest.raises(ModelError) as error:
        OnnxModule(graph_from_proto(model))
    assert "node 'it': the op Wobble is not supported (domain 'ai.onnx', opset 17)" in str(error.value)


def test_a_node_that_does_not_fit_is_named():
    with pytest.raises(ModelError, match="node 'it' \\(MatMul, opset 17\\)"):
        run(one_node("MatMul", [noise(2, 3), noise(2, 3)], 17), noise(2, 3), noise(2, 3))


@pytest.mark.parametrize(
    "op", ["Relu", "Add", "Clip", "Dropout", "Identity", "BatchNormalization", "Pad", "Slice"]
)
def test_inputs_are_never_changed(op):
    for case in cases()[op]:
        module = module_of(case)
        for inputs, _ in case.data_sets if module else ():
            tensors = [to_tensor(values(i)) for i in inputs]
            before = [t.clone() for t in tensors]
            module(*tensors)
            assert all(torch.equal(a, b) or (a != a).any() for a, b in zip(tensors, before, strict=True))
