"""Arithmetic of symbolic sizes during a capture with open sizes, computed once for each pair of operands.

For each tensor that is traced, PyTorch computes with its sizes again whether it is contiguous, how many elements it
has, and so on: 110,000 operations with 1,200 different pairs of operands for a BERT of 6 layers, which were more than a
third of the capture's time. For each of them SymPy searches the operands again for symbols.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

from torch.fx.experimental.sym_node import SymNode

from rematplan.runtime.graph.compat import TorchDispatchModeKey, get_dispatch_mode

OPERATIONS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "sym_max")
"""The operations of two sizes whose results are kept. None of them makes an assumption about the sizes (a guard): only
the evaluation of a condition does."""


@contextmanager
def sizes_computed_once() -> Iterator[None]:
    """Inside the block, compute each of `OPERATIONS` on sizes once for each pair of expressions and each tracer, and
    return the same result later. Operations of other threads are not changed. Whether an expression is a number is also
    found once; that is so for all threads, since expressions never change.

    A tracer records the operation in its graph when it is computed first, which is before all later uses. The operand
    for an integer (`SymNode.wrap_int`) is also made once for each integer and tracer's sizes.
    """
    tracing = get_ident()

    def kept(name: str) -> Any:
        original, results = getattr(SymNode, name), dict[Any, Any]()

        def operation(a: Any, b: Any) -> Any:
            if get_ident() != tracing:
                return original(a, b)
            key = a._expr, b._expr, get_dispatch_mode(TorchDispatchModeKey.PROXY)
            found = results.get(key)
            if found is None:
                found = results[key] = original(a, b)
            return found

        return operation

    make, operands = SymNode.wrap_int, dict[Any, Any]()

    def wrapped(node: Any, number: int) -> Any:
        if get_ident() != tracing:
            return make(node, number)
        key = node.shape_env, type(number), number
        found = operands.get(key)
        if found is None:
            found = operands[key] = make(node, number)
        return found

    expressions: Any = sys.modules["sympy"].Expr  # PyTorch has loaded it
    search = expressions.is_number.fget
    numbers = dict[Any, bool]()

    def is_number(expression: Any) -> bool:
        found = numbers.get(expression)
        if found is None:
            found = numbers[expression] = search(expression)
        return found

    with ExitStack() as stack:
        stack.enter_context(patch.object(expressions, "is_number", property(is_number)))
        stack.enter_context(patch.object(SymNode, "wrap_int", wrapped))
        for name in OPERATIONS:
            stack.enter_context(patch.object(SymNode, name, kept(name)))
        yield
