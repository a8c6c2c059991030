"""The op table: by ONNX domain, op and opset version, the function that executes the op on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops import (
    attention,
    index,
    loss,
    math,
    nn,
    pool,
    quantise,
    recurrent,
    reduce,
    resize,
    sequence,
    shape,
    signal,
    slices,
    spatial,
    stateful,
)
from rematplan.runtime.onnx.ops.rows import ROWS, Row


def _table() -> dict[tuple[str, str], dict[int, Row]]:
    """Return the `ROWS` that the imported modules added, by (domain, op), then by first opset. `ValueError` for two of
    one opset."""
    table: dict[tuple[str, str], dict[int, Row]] = {}
    for row in ROWS:
        versions = table.setdefault((row.domain, row.op), {})
        if row.since in versions:
            raise ValueError(f"two rows for {row.op} of opset {row.since}")
        versions[row.since] = row
    return table


TABLE: Mapping[tuple[str, str], Mapping[int, Row]] = _table()


def row_of(node: Node) -> Row:
    """Return the newest entry for the node's op that is not newer than the node's opset, after its check; else raise
    `ModelError`."""
    versions = TABLE.get((node.domain, node.op), {})
    known = [since for since in versions if since <= node.version]
    if not known:
        where = f"domain {node.domain or 'ai.onnx'!r}, opset {node.version}"
        raise ModelError(f"node {node.name!r}: the op {node.op} is not supported ({where})")
    row = versions[max(known)]
    if row.check is not None:
        row.check(node)
    return row
