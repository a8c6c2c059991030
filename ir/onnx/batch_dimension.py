"""Find the batch dimension of an ONNX file's inputs, and the batch size for which its constants were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rematplan.ir.onnx.draft import Declared
from rematplan.ir.onnx.graph import Batch

NAME = "batch"  # the dimension's name, if the file has none


def with_batch(
    inputs: Sequence[Declared], dims: Mapping[str, int]
) -> tuple[tuple[Declared, ...], dict[str, int], Batch | None]:
    """Return the inputs, the sizes, and a `Batch` if ``dims`` states another batch size than the file's (1 if
    symbolic), else None. If all shapes are fixed and ``dims`` has ``batch``, equal first dimensions become the symbol
    ``batch``."""
    # The first dimension of the first input that is no scalar, and dimensions with the same symbol. If all
    # shapes are fixed: first dimensions of the same size, named ``batch``.
    first = next((d for d in inputs if d.shape), None)
    if first is None or not first.shape:
        return tuple(inputs), dict(dims), None
    lead = first.shape[0]
    if isinstance(lead, int):
        symbolic = any(not isinstance(n, int) for d in inputs for n in d.shape or ())
        size = dims.get(NAME)
        if symbolic or size is None or lead < 1:
            return tuple(inputs), dict(dims), None
        changed = [d for d in inputs if d.shape and d.shape[0] == lead]
        places = tuple((d.name, 0) for d in changed)
        named = tuple(replace(d, shape=(NAME, *(d.shape or ())[1:])) if d in changed else d for d in inputs)
        return named, dict(dims), Batch(places, size, lead, True) if size != lead else None
    places = tuple(
        (d.name, at)
        for d in inputs
        for at, n in enumerate(d.shape or ())
        if n == lead and (lead is not None or (d is first and at == 0))
    )
    size = dims.get(f"{first.name}.0", dims.get(lead or f"{first.name}.0"))
    return tuple(inputs), dict(dims), Batch(places, size, 1, False) if size is not None and size > 1 else None
