"""Row of the op table: ONNX's own Gradient. The module that holds the graph runs it; the row says that it can."""

from __future__ import annotations

from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx_rows import Row, Rows, refuse

DOMAIN = "ai.onnx.preview.training"


def _alone(node: Node, *tensors: Tensor) -> Tensor:  # noqa: ARG001
    raise refuse(node, "it means nothing without its graph")


ROWS = Rows([Row(DOMAIN, "Gradient", 1, _alone)])
