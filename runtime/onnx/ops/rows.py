"""Rows of the op table: the meaning of an ONNX op of one version, as a function on torch tensors.

A handler is called as ``handler(node, *inputs)`` with the node's inputs in order (None for an absent one),
and returns a tensor or a tuple of tensors. It never changes an input. Inputs at a row's ``known`` positions
(a shape, axes, pads) are numpy arrays. With ``scalars``, a known operand of one element is a Python number,
so that it is not a tensor in the captured graph.
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
    """The implementation of one ONNX op from one opset on.

    ``domain``, ``op``, ``since``: the op's domain, name and the opset version from which the implementation is valid.
    ``run``: the function, called with the node and its inputs. ``known``: positions of inputs whose values must be
    known when the op runs (shapes, axes). ``scalars``: whether known one-element operands become Python numbers.
    ``size``: a function of the known inputs that returns the number of elements of the result, if the inputs' sizes do
    not bound it; else None. ``random``: whether the op draws random numbers.
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
    """Positions of inputs that are passed as NumPy arrays if their values are known, otherwise as tensors."""
    check: Callable[[Node], None] | None = None
    """Refuses, before anything runs, a node whose attributes the handler does not support."""
    raw: bool = False
    """Whether inputs are passed unchanged: tensors, numpy arrays of known values, lists of tensors."""


@dataclass
class Rows:
    """The implementations of one module's ops (`Row`), collected by the decorator `add`."""

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
        """Return a decorator that registers a function as the implementation of ``op`` from each opset in ``since`` on.

        The other arguments are fields of `Row`.
        """

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
    """Return (do not raise) the error for a node that cannot run, with the node's name, op and opset. ``why``: the
    reason."""
    return ModelError(f"node {node.name!r} ({node.op}, opset {node.version}): {why}")


def stated(node: Node, at: int, value: Any) -> np.ndarray:
    """Return, as an array, the value of an input that determines a shape or an index.

    Args:
        node: the node, for messages.
        at: the input's position.
        value: the input.

    Raises:
        ModelError: the value depends on data, so it is not known during planning.
    """
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
    """Return a node's floating-point attribute ``name``, rounded by `intended`; ``default`` if it is absent."""
    return intended(node.attributes.get(name, default))  # type: ignore[arg-type]


def intended(value: float) -> float:
    """Return the shortest decimal that has the same float32 value: 0.9 for 0.89999998, which files contain in its
    place."""
    return float(str(np.float32(value)))


def known_ints(array: Known) -> tuple[int, ...] | None:
    """Return an input that is a known array as a flat tuple of integers; None if it is absent."""
    return None if array is None else tuple(int(v) for v in array.ravel())


def present(tensors: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that are not None: the inputs of an op with any number of inputs that are not absent."""
    return [t for t in tensors if t is not None]
