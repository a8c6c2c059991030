"""Arithmetic of symbolic sizes during a capture, computed once for each pair of operands.

PyTorch computes with the sizes of each traced tensor again: 110,000 operations of 1,200 different pairs for a BERT
of 6 layers, more than a third of the capture's time.
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
    """Inside the block and in this thread, compute each of `OPERATIONS` on sizes once for each pair of expressions and
    tracer. Whether an expression is a number is also found once, for all threads."""
    tracing = get_ident()

    def kept(name: str) -> Any:
        """Return the operation ``name`` of symbolic sizes. In the tracing thread it computes a result once for each
        pair of expressions and tracer."""
        original, results = getattr(SymNode, name), dict[Any, Any]()

        def operation(a: Any, b: Any) -> Any:
            if get_ident() != tracing:
                return original(a, b)
            # A tracer records the operation when it is computed first, which is before all later uses.
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
