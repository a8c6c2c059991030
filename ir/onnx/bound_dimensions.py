"""Replace the symbolic dimensions of an ONNX file's inputs by the sizes that the user states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rematplan.ir.errors import ModelError, UsageError
from rematplan.ir.onnx.draft import Declared
from rematplan.ir.onnx.graph import Value

MOST_ELEMENTS = 1 << 48  # the most elements of a tensor: 1000 times what any memory can store


def bound_inputs(
    inputs: Sequence[Declared], dims: Mapping[str, int]
) -> tuple[tuple[Value, ...], dict[str, int]]:
    """Replace the symbolic dimensions of the inputs by sizes. Return the inputs, and the size of each symbol by name.
    `UsageError` for an unknown name or a size that is no positive integer; `ModelError` for an input without a shape, a
    dimension without a size, or more than `MOST_ELEMENTS`."""
    for name, size in dims.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"--dim {name}={size}: a dimension is a positive whole number")
    known = {
        _dim_name(d, at): None for d in inputs for at, dim in enumerate(d.shape or ()) if not _fixed(dim)
    }
    places = {f"{d.name}.{at}" for d in inputs for at, dim in enumerate(d.shape or ()) if not _fixed(dim)}
    for name in dims:
        if name not in known and name not in places:
            listed = ", ".join(known) or "none, every input dimension is fixed"
            raise UsageError(f"--dim {name}: no input has a dimension of that name (known: {listed})")
    values = tuple(Value(d.name, d.dtype, _bound_shape(d, dims)) for d in inputs)
    bound = {
        dim: size
        for d, v in zip(inputs, values, strict=True)
        for dim, size in zip(d.shape or (), v.shape or (), strict=True)
        if isinstance(dim, str)
    }
    return values, bound


def _fixed(dim: int | str | None) -> bool:
    return isinstance(dim, int) and dim >= 0


def _dim_name(declared: Declared, at: int) -> str:
    dim = (declared.shape or ())[at]
    return dim if isinstance(dim, str) and dim else f"{declared.name}.{at}"


def _bound_shape(declared: Declared, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return an input's shape with the sizes ``dims``; a size stated by position has priority over one stated by name.
    `ModelError` if the shape or a size is unknown, or there are more than `MOST_ELEMENTS`."""
    if declared.shape is None:
        raise ModelError(f"input {declared.name!r} states no shape, so its dimensions cannot be bound")
    shape = []
    for at, dim in enumerate(declared.shape):
        name = _dim_name(declared, at)
        size = dim if isinstance(dim, int) and dim >= 0 else dims.get(f"{declared.name}.{at}", dims.get(name))
        if size is None:
            raise ModelError(
                f"input {declared.name!r}: dimension {at} ({name}) is not bound; bind it with --dim {name}=8"
            )
        shape.append(size)
    if math.prod(shape) > MOST_ELEMENTS:
        raise ModelError(
            f"input {declared.name!r}: shape {tuple(shape)} has more than {MOST_ELEMENTS} numbers"
        )
    return tuple(shape)


def known_shape(declared: Declared, bound: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the shape of a graph output with its symbols replaced by the sizes ``bound``; None if a size is
    unknown.
    """
    if declared.shape is None:
        return None
    sizes = [bound.get(d) if isinstance(d, str) else d for d in declared.shape]
    known = tuple(s for s in sizes if s is not None and s >= 0)
    return known if len(known) == len(sizes) else None
