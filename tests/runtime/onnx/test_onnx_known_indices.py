"""Gathers and scatters whose indices a file states give what they give for indices that come as an input."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import rematplan.onnx_backend as backend
from rematplan.ir.onnx.load import graph_from_proto
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.onnx.module import OnnxModule

aten = torch.ops.aten
GRID = np.array([[[i, j] for j in (1, 3)] for i in range(4)])
"""Places of every other column, as exporters write them out."""
CASES = {
    "a range": ("Gather", np.arange(1, 4), {"axis": 1}, True),
    "every other, from the end": ("Gather", np.array([-4, -2]), {"axis": 0}, True),
    "one": ("Gather", np.array([2]), {"axis": 1}, True),
    "a range as a matrix": ("Gather", np.array([[0, 1], [2, 3]]), {"axis": 1}, False),
    "backwards": ("Gather", np.array([2, 1]), {"axis": 1}, False),
    "rows": ("GatherND", np.array([[2], [0]]), {}, False),
    "all rows from the end": ("GatherND", np.array([[[-1]], [[0]]]), {}, False),
    "columns": ("ScatterND", GRID, {}, True),
    "whole rows": ("ScatterND", np.array([[1], [2]]), {}, True),
    "columns backwards": ("ScatterND", GRID[:, ::-1].copy(), {}, False),
    "added": ("ScatterND", GRID, {"reduction": "add"}, False),
    "elements of columns": ("ScatterElements", np.array([[1, 3]] * 4), {"axis": 1}, True),
    "elements of rows": ("ScatterElements", np.array([[-2] * 5, [-1] * 5]), {"axis": 0}, True),
    "elements of a part of rows": ("ScatterElements", np.array([[2] * 3, [3] * 3]), {"axis": 0}, False),
    "elements anywhere": ("ScatterElements", np.array([[1, 3], [0, 1]]), {"axis": -1}, False),
    "elements added": ("ScatterElements", np.array([[1, 3]] * 4), {"axis": 1, "reduction": "add"}, False),
}


def model(
    op: str, indices: np.ndarray, options: dict, known: bool
) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    given = {"x": x, "indices": indices.astype(np.int64)}
    if op.startswith("Scatter"):
        depth = indices.shape[-1]
        shape = indices.shape if op == "ScatterElements" else (*indices.shape[:-1], *x.shape[depth:])
        given["updates"] = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    types = {n: TensorProto.INT64 if n == "indices" else TensorProto.FLOAT for n in given}
    inputs = [
        helper.make_tensor_value_info(n, types[n], t.shape)
        for n, t in given.items()
        if not (known and n == "indices")
    ]
    constants = [numpy_helper.from_array(given["indices"], "indices")] if known else []
    node = helper.make_node(op, list(given), ["y"], **options)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "one", inputs, [output], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return made, [t for n, t in given.items() if not (known and n == "indices")]


@pytest.mark.parametrize("name", CASES)
def test_known_indices(name: str) -> None:
    op, indices, options, sliced = CASES[name]
    results = []
    for known in (False, True):
        made, given = model(op, indices, options, known)
        results.append(backend.prepare(made).run(given)[0])
    assert np.array_equal(*results)

    class Trained(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weight = OnnxModule(graph_from_proto(made)), torch.nn.Parameter(torch.ones(4, 5))

        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.weight, *more)[0].square().mean()

    step = capture(Trained(), tuple(map(torch.from_numpy, given)), "one")
    kinds = {getattr(c.target, "overloadpacket", None) for c in step.calls if not c.backward}
    assert bool(kinds & {aten.slice, aten.slice_scatter}) == sliced
