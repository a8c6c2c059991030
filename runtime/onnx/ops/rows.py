"""Rows of the op table: what an ONNX op of one version does, as a function on torch tensors.

A handler is called as ``handler(node, *inputs)`` with the node's inputs in order (None for an absent one)
and returns a tensor or a tuple of tensors. It never changes an input. Inputs at a row's ``known`` places
(a shape, axes, pads) arrive as numpy arrays; with ``scalars`` a known operand of one element arrives as a
Python number, so that it is no tensor in the captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    """One op at one since_version.

    ``known``: input places whose values must be known when the op runs. ``size``: the number of elements of
    the result, from known inputs, where the inputs' sizes do not bound it. ``random``: it draws numbers.
    """

    domain: str
    op: str
    since: int
    run: Handler
    known: frozenset[int] = frozenset()
    scalars: bool = False
    size: SizeRule | None = None
    random: bool = False
    literal: frozenset[int] = frozenset()
    """Input places that arrive as numpy arrays where they are known, and as tensors where not."""
    check: Callable[[Node], None] | None = None
    """Refuses a node whose attributes ask for what the handler cannot do, before anything runs."""
    raw: bool = False
    """Inputs arrive as they are: tensors, numpy arrays of known values, lists of tensors."""


@dataclass
class Rows:
    """The rows of one theme, collected by decoration."""

    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        op: str,
        *since: int,
        known: tuple[int, ...] = (),
        scalars: bool = False,
        size: SizeRule | None = None,
        random: bool = False,
        literal: tuple[int, ...] = (),
        check: Callable[[Node], None] | None = None,
        raw: bool = False,
    ) -> Callable[[H], H]:
        """Rows of ``op``, one for each since_version at which this handler is its meaning."""

        def collect(handler: H) -> H:
            for version in since:
                self.rows.append(
                    Row(
                        "",
                        op,
                        version,
                        handler,
                        frozenset(known),
                        scalars,
                        size,
                        random,
                        frozenset(literal),
                        check,
                        raw,
                    )
                )
            return handler

        return collect


def refuse(node: Node, why: str) -> ModelError:
    """The error for a node that says something its row cannot do."""
    return ModelError(f"node {node.name!r} ({node.op}, opset {node.version}): {why}")


def stated(node: Node, at: int, value: Any) -> np.ndarray:
    """The values of an input that decides a shape or place. They can be read only where tensors have values."""
    if isinstance(value, np.ndarray):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        raise refuse(node, f"its input {at} ({node.inputs[at]!r}) depends on data, but must be known to plan")
    return to_array(value)


def text(node: Node, name: str, default: str) -> str:
    """A string attribute."""
    value = node.attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def ints(node: Node, name: str) -> tuple[int, ...] | None:
    """A list attribute of whole numbers, or None if it is absent."""
    value = node.attributes.get(name)
    return None if value is None else tuple(int(v) for v in value)  # type: ignore[union-attr]


def integer(node: Node, name: str, default: int) -> int:
    """A whole-number attribute."""
    return int(node.attributes.get(name, default))  # type: ignore[arg-type]


def number(node: Node, name: str, default: float) -> float:
    """A float attribute."""
    return intended(node.attributes.get(name, default))  # type: ignore[arg-type]


def intended(value: float) -> float:
    """The decimal that a single-precision value was written from: 0.9, where the file says 0.89999998."""
    return float(str(np.float32(value)))


def known_ints(array: Known) -> tuple[int, ...] | None:
    """A known input as whole numbers, or None if it is absent."""
    return None if array is None else tuple(int(v) for v in array.ravel())


def given(tensors: tuple[Any, ...]) -> list[torch.Tensor]:
    """The inputs of a variadic op."""
    return [t for t in tensors if t is not None]
