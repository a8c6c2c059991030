"""The op table as an ``onnx.backend.base.Backend``, so that ONNX's own test suite runs against it.

    import onnx.backend.test, rematplan.onnx_backend
    suite = onnx.backend.test.BackendTest(rematplan.onnx_backend, __name__)

A model outside the table is refused by name before anything runs; the suite counts it as skipped, not as passed.
"""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx.backend.base import Backend, BackendRep, Device, DeviceType

from rematplan.ir import ModelError
from rematplan.ir.graph import Graph
from rematplan.ir.onnx_loader import graph_from_proto
from rematplan.runtime.onnx_module import OnnxModule
from rematplan.runtime.onnx_table import row_of
from rematplan.runtime.onnx_values import to_array, to_tensor


class Refused(ModelError, unittest.SkipTest):
    """A model that the backend does not run; the message names the op, or whatever else it is."""


class OnnxModelRep(BackendRep):
    """A model ready to run, forward only."""

    def __init__(self, module: OnnxModule, device: torch.device) -> None:
        self.module, self.device = module.to(device), device

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """The outputs as arrays, in the graph's order.

        Args:
            inputs: arrays in the graph's order, or by name.

        Raises:
            ModelError: the inputs do not fit the model.
        """
        names = [v.name for v in self.module.graph.inputs]
        arrays = [inputs[n] for n in names] if isinstance(inputs, dict) else list(inputs)
        tensors = [to_tensor(np.asarray(a), "an input").to(self.device) for a in arrays]
        with torch.no_grad():
            return tuple(to_array(y) for y in self.module(*tensors))


class RematplanBackend(Backend):
    """Runs a model forward on torch; weights that the file fills with one value keep it."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> OnnxModelRep:
        """The model, ready to run.

        Raises:
            Refused: an op is not in the table, or a value is no tensor that torch computes with.
        """
        try:
            graph = graph_from_proto(model)
            _check_random(graph)
            module = OnnxModule(graph, seed=None)
        except ModelError as error:
            raise Refused(str(error)) from None
        kind = "cuda" if Device(device).type == DeviceType.CUDA else "cpu"
        return OnnxModelRep(module, torch.device(kind))

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Sequence[Any], device: str = "CPU", **options: Any
    ) -> tuple[Any, ...]:
        """Prepare and run once."""
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """``CPU`` always, ``CUDA`` where torch has one."""
        kind = Device(device).type
        return bool(kind == DeviceType.CPU or (kind == DeviceType.CUDA and torch.cuda.is_available()))


def _check_random(graph: Graph) -> None:
    """A backend's outputs are compared, so they are no random draws; torch's are not numpy's for the same seed.

    Whether dropout is on has to be known with the model, for it decides whether anything is drawn.
    """
    inputs = {v.name for v in graph.inputs}
    for node in graph.nodes:
        if row_of(node).random or (node.op == "Dropout" and inputs.intersection(node.inputs[2:3])):
            raise ModelError(f"node {node.name!r} ({node.op}): its result is random or may be")


prepare = RematplanBackend.prepare
run_model = RematplanBackend.run_model
supports_device = RematplanBackend.supports_device
