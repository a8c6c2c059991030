"""The entries (`Row`) of the table of ONNX ops, and helpers for their functions.

A function is called as ``run(node, *inputs)`` with None for an absent input, returns a tensor or a tuple, and
changes no input. Functions of sequences may return a list or a NumPy array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.values import to_array

Handler = Callable[..., Any]
SizeRule = Callable[..., int]
H = TypeVar("H", bound=Handler)
Known = np.ndarray | None


@dataclass(frozen=True, slots=True)
class Row:
    """How to run one ONNX op from one opset on. A known value depends on the inputs' shapes, not their content."""

    domain: str
    """The op's domain; empty for ONNX's own ops."""
    op: str
    """The op's name."""
    since: int
    """The first opset version for which the entry is valid."""
    run: Handler
    """The function that runs the op, called with the node and its inputs."""
    known: frozenset[int] = frozenset()
    """Positions of inputs that must be known, such as shapes and axes. They are passed as NumPy arrays."""
    scalars: bool = False
    """Whether known inputs of one element are passed as Python numbers."""
    size: SizeRule | None = None
    """An upper bound of the result's elements, from the inputs, all known; None if the inputs' sizes bound it."""
    random: bool = False
    """Whether the op draws random numbers."""
    literal: frozenset[int] = frozenset()
    """Positions of inputs that are passed as NumPy arrays if they are known, otherwise as tensors."""
    check: Callable[[Node], None] | None = None
    """A function that raises a ModelError for a node whose attributes ``run`` does not support; or None. It is called
    when the node is looked up in the op table, before anything runs."""
    raw: bool = False
    """Whether all inputs are passed as they are: tensors, NumPy arrays (known values), lists (sequences of tensors)."""


ROWS: list[Row] = []
"""The op table's entries, which the modules of this package add."""


def op(
    name: str,
    *since: int,
    known: tuple[int, ...] = (),
    scalars: bool = False,
    size: SizeRule | None = None,
    random: bool = False,
    literal: tuple[int, ...] = (),
    check: Callable[[Node], None] | None = None,
    raw: bool = False,
) -> Callable[[H], H]:
    """Return a decorator that adds an entry of ONNX's op ``name`` to `ROWS` for each opset in ``since``. Other
    arguments are fields of `Row`."""

    def collect(handler: H) -> H:
        """Add an entry with ``handler`` for each opset, and return ``handler``."""
        row = Row(
            "", name, 0, handler, frozenset(known), scalars, size, random, frozenset(literal), check, raw
        )
        ROWS.extend(replace(row, since=version) for version in since)
        return handler

    return collect


def by_attributes(run: Handler, *names: str) -> Handler:
    """Return the form of a handler for older opsets, in which all inputs but the first are attributes."""

    def older(node: Node, x: torch.Tensor) -> Any:
        given = [node.attributes.get(name) for name in names]
        return run(node, x, *(None if v is None else np.asarray(_meant(v)) for v in given))

    return older


def _meant(value: Any) -> Any:
    return intended(value) if isinstance(value, float) else value


def refuse(node: Node, why: str) -> ModelError:
    """Return, not raise, an error for a node that cannot run. Its message ends with ``why``."""
    return ModelError(f"node {node.name!r} ({node.op}, opset {node.version}): {why}")


def stated(node: Node, at: int, value: Any) -> np.ndarray:
    """Return an input that determines a shape or index as a NumPy array; `ModelError` for one that depends on data."""
    if isinstance(value, np.ndarray):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        raise refuse(node, f"its input {at} ({node.inputs[at]!r}) depends on data, but must be known to plan")
    return to_array(value)


def text(node: Node, name: str, default: str) -> str:
    """Return a node's string attribute ``name``; ``default`` if it is absent."""
    value = node.attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def ints(node: Node, name: str) -> tuple[int, ...] | None:
    """Return a node's attribute ``name``, a list of integers; None if it is absent."""
    value = node.attributes.get(name)
    return None if value is None else tuple(int(v) for v in value)  # type: ignore[union-attr]


def integer(node: Node, name: str, default: int) -> int:
    """Return a node's integer attribute ``name``; ``default`` if it is absent."""
    return int(node.attributes.get(name, default))  # type: ignore[arg-type]


def number(node: Node, name: str, default: float) -> float:
    """Return a node's floating-point attribute ``name``, rounded by `intended` to the decimal that was meant;
    ``default`` if it is absent."""
    return intended(node.attributes.get(name, default))  # type: ignore[arg-type]


def intended(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32: 0.9 for the 0.89999998 of an ONNX file."""
    return float(str(np.float32(value)))


def known_ints(array: Known) -> tuple[int, ...] | None:
    """Return the elements of an array as a flat tuple of integers; None for None (an absent input)."""
    return None if array is None else tuple(int(v) for v in array.ravel())


def present(tensors: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that are not None, in order. None represents an absent optional input of a node."""
    return [t for t in tensors if t is not None]
