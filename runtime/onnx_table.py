"""The op table: a row for each (domain, op, since_version), gathered from the themes."""

from __future__ import annotations

from collections.abc import Mapping

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.graph import Node
from rematplan.runtime import (
    onnx_attention,
    onnx_gradient,
    onnx_index,
    onnx_loss,
    onnx_math,
    onnx_nn,
    onnx_pool,
    onnx_quantise,
    onnx_recurrent,
    onnx_reduce,
    onnx_resize,
    onnx_sequence,
    onnx_shape,
    onnx_signal,
    onnx_spatial,
    onnx_stateful,
    onnx_text,
)
from rematplan.runtime.onnx_rows import Row

THEMES = (
    onnx_attention,
    onnx_gradient,
    onnx_index,
    onnx_loss,
    onnx_math,
    onnx_nn,
    onnx_pool,
    onnx_quantise,
    onnx_recurrent,
    onnx_reduce,
    onnx_resize,
    onnx_sequence,
    onnx_signal,
    onnx_shape,
    onnx_spatial,
    onnx_stateful,
    onnx_text,
)


def _table() -> dict[tuple[str, str], dict[int, Row]]:
    table: dict[tuple[str, str], dict[int, Row]] = {}
    for theme in THEMES:
        for row in theme.ROWS.rows:
            versions = table.setdefault((row.domain, row.op), {})
            if row.since in versions:
                raise ValueError(f"two rows for {row.op} of opset {row.since}")
            versions[row.since] = row
    return table


TABLE: Mapping[tuple[str, str], Mapping[int, Row]] = _table()


def row_of(node: Node) -> Row:
    """The row that gives the node its meaning: of its op's rows the newest that its opset knows.

    Raises:
        ModelError: the table has no such row, or the row cannot do what the node's attributes ask for.
    """
    versions = TABLE.get((node.domain, node.op), {})
    known = [since for since in versions if since <= node.version]
    if not known:
        where = f"domain {node.domain or 'ai.onnx'!r}, opset {node.version}"
        raise ModelError(f"node {node.name!r}: the op {node.op} is not supported ({where})")
    row = versions[max(known)]
    if row.check is not None:
        row.check(node)
    return row
