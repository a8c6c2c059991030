"""An ``onnx.backend.base.Backend`` on rematplan's ONNX ops, so that ONNX's test suite can run against them.

    import onnx.backend.test, rematplan.onnx_backend
    suite = onnx.backend.test.BackendTest(rematplan.onnx_backend, __name__)

A model with an unsupported op is refused before anything runs, and counted as skipped.
"""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx.backend.base import Backend, BackendRep, Device, DeviceType

from rematplan.ir import ModelError
from rematplan.ir.onnx.graph import Graph, Node, Weight
from rematplan.ir.onnx.load import graph_from_proto
from rematplan.runtime.onnx.module import OnnxModule
from rematplan.runtime.onnx.op_table import row_of
from rematplan.runtime.onnx.ops.values import to_array, to_tensor


class Refused(ModelError, unittest.SkipTest):
    """Raised for a model that the ONNX backend does not run, with the op or value that is the reason; counted as
    skipped."""


class OnnxModelRep(BackendRep):
    """An ONNX model that is ready to run its forward. With symbolic dimensions it is built again for each call's
    shapes."""

    def __init__(self, model: onnx.ModelProto, device: torch.device) -> None:
        self.model, self.device = model, device
        #: By symbolic dimension, the first ``INPUT.AXIS`` that has it. ``module`` is built with size 1 for
        #: them.
        self.symbolic = _symbolic(model)
        self.module = self._made(dict.fromkeys(self.symbolic, 1))

    def _made(self, dims: Mapping[str, int]) -> OnnxModule:
        graph = graph_from_proto(self.model, dims=dims)
        _check_comparable(graph)
        return OnnxModule(graph, seed=None).to(self.device)

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Run the model without gradients, and return its outputs as NumPy arrays, in the graph's order. ``inputs``:
        arrays in the graph's order, or by name."""
        values = self.module.graph.inputs
        arguments = [inputs[v.name] for v in values] if isinstance(inputs, dict) else list(inputs)
        arrays = [np.asarray(array) for array in arguments]
        if self.symbolic:
            places = [f"{v.name}.{at}" for v in values for at in range(len(v.shape or ()))]
            sizes = dict(zip(places, (n for a in arrays for n in a.shape), strict=True))
            module = self._made({name: max(1, sizes[place]) for name, place in self.symbolic.items()})
        else:
            module = self.module
        with torch.no_grad():
            results = module(*(to_tensor(array, "an input").to(self.device) for array in arrays))
        return tuple(to_array(y) if isinstance(y, torch.Tensor) else y for y in results)


class RematplanBackend(Backend):
    """An ``onnx.backend.base.Backend`` that runs an ONNX model's forward with torch, with the weights of the file."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> OnnxModelRep:
        """Return the model, ready to run on ``CPU`` or ``CUDA``; `Refused` if it cannot."""
        kind = "cuda" if Device(device).type == DeviceType.CUDA else "cpu"
        try:
            return OnnxModelRep(model, torch.device(kind))
        except ModelError as error:
            raise Refused(str(error)) from None

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Sequence[Any], device: str = "CPU", **options: Any
    ) -> tuple[Any, ...]:
        """Prepare a model for ``CPU`` or ``CUDA``, run it once on arrays, and return its outputs as NumPy arrays,
        both in the graph's order."""
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether a device can be used: ``CPU`` always, ``CUDA`` if torch has a CUDA device, others never."""
        kind = Device(device).type
        return bool(kind == DeviceType.CPU or (kind == DeviceType.CUDA and torch.cuda.is_available()))


def _symbolic(model: onnx.ModelProto) -> dict[str, str]:
    """Return, by name, the model's symbolic input dimensions, each with the first ``INPUT.AXIS`` that has it. A
    dimension without a name is called ``INPUT.AXIS``. Dimensions of weights do not count."""
    weights = {t.name for t in model.graph.initializer}
    found: dict[str, str] = {}
    for value in model.graph.input:
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            if value.name not in weights and not dim.HasField("dim_value"):
                found.setdefault(dim.dim_param or f"{value.name}.{at}", f"{value.name}.{at}")
    return found


def _check_comparable(graph: Graph) -> None:
    """Raise `ModelError` for a model with random results, or with an inverse two-sided DFT, whose expected results in
    ONNX's test suite are inexact."""
    constants = {w.name: w for w in graph.weights if w.role == "constant"}
    for node in graph.nodes:
        if row_of(node).random and not (node.op == "Dropout" and _is_off(node, constants)):
            raise ModelError(f"node {node.name!r} ({node.op}): its result is random, or may be random")
        if node.op == "DFT" and node.attributes.get("inverse") and not node.attributes.get("onesided"):
            why = "the standard's own results hold noise of single precision beyond what they are compared by"
            raise ModelError(f"node {node.name!r} (DFT, inverse): {why}")


def _is_off(node: Node, constants: Mapping[str, Weight]) -> bool:
    """Return whether a dropout surely returns its input: not in training mode, or by a constant ratio of 0."""
    if node.version < 12:
        return bool(node.attributes.get("is_test", 0))
    ratio, training = (constants.get(n) if n else None for n in (*node.inputs, "", "")[1:3])
    if len(node.inputs) < 3 or not node.inputs[2]:
        return True
    return any(w is not None and not w.load().any() for w in (ratio, training))


prepare = RematplanBackend.prepare
run_model = RematplanBackend.run_model
supports_device = RematplanBackend.supports_device
