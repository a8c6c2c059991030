"""A batch whose sizes are symbols, as a tracer takes it, and the guard of what the trace assumes of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import (
    SYMPY_INTERP,
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from rematplan.runtime.graph.compat import FakeTensorMode, pytree
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, check_whole


class BatchSymbols:
    """The symbols for the sizes of a batch, each dimension one of its own, also where two are equal now.

    ``shapes``: the environment of a tracer that knows no symbols but these: neither numbers that tensors hold nor
    shapes that depend on them.
    """

    def __init__(self) -> None:
        self.shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.fakes: list[torch.Tensor] = []
        self.places: dict[str, tuple[int, int]] = {}
        """By the name of a symbol, the tensor and its dimension."""
        self._now: dict[Any, int] = {}

    def begin(self, mode: FakeTensorMode, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The batch with symbols for its sizes. A size of 0 or 1 stays: other ops run for it.

        Raises:
            NotSymbolic: a tensor is not dense.
        """
        from rematplan.runtime.graph.compat import LocalSource  # loads TorchDynamo

        for at, tensor in enumerate(batch):
            if (
                type(tensor) is not torch.Tensor
                or not is_dense(tensor)
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                raise NotSymbolic(f"argument {at} is not a plain dense tensor")
            # In a storage of its own: that of the given one may be larger, and other another time.
            compact = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * tensor.ndim)
            fake = mode.from_tensor(compact, symbolic_context=context, source=LocalSource(f"t{at}"))
            fake.requires_grad_(tensor.requires_grad)
            self.fakes.append(fake)
            for dim, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt):
                    self.places[str(size.node.expr)] = at, dim
                    self._now[size.node.expr] = tensor.shape[dim]
        return self.fakes

    def table(self) -> ExpressionTable:
        """An empty table of expressions of the batch's sizes."""
        return ExpressionTable(tuple(self.places))

    def now(self, given: Any) -> Any:
        """Nested arguments with the sizes of the traced batch in the places of symbolic ones. Nothing is assumed by
        it."""
        return pytree.tree_map_only(torch.SymInt, self._value, given)

    def _value(self, size: torch.SymInt) -> int:
        return int(size.node.expr.xreplace(self._now))

    @property
    def fixed(self) -> tuple[tuple[int, int, int], ...]:
        """The sizes of which the trace holds for one only: tensor, dimension, size."""
        return tuple(
            (at, dim, int(size.node.expr if isinstance(size, torch.SymInt) else size))
            for at, fake in enumerate(self.fakes)
            for dim, size in enumerate(fake.shape)
            if not isinstance(size, torch.SymInt) or size.node.expr.is_number
        )

    def guard(self) -> SizeGuard:
        """What the trace assumes of the batch's sizes and strides.

        Raises:
            NotSymbolic: it depends on arithmetic that may round.
        """
        for assumed in self.shapes.guards:
            check_whole(assumed.expr)
        # With `ignore_static`, other sizes pass than those that a trace silently became specialised for.
        code = self.shapes.produce_guards_expression(self.fakes, ignore_static=False)  # type: ignore[arg-type]
        return SizeGuard(code or "True")


class SizeGuard:
    """A condition on the sizes and strides of a batch, compiled once. ``code``: in Python, with the tensors in a
    dictionary ``L``."""

    def __init__(self, code: str) -> None:
        self.code = code
        self._compiled: CodeType = compile(code, "<guard of sizes>", "eval")
        self._names = dict(SYMPY_INTERP)

    def __getstate__(self) -> str:
        return self.code

    def __setstate__(self, code: str) -> None:
        self.__init__(code)  # type: ignore[misc]

    def holds(self, batch: Sequence[torch.Tensor]) -> bool:
        """Whether what was traced is the step of a batch of these sizes."""
        given = {f"t{at}": _Sizes(tensor) for at, tensor in enumerate(batch)}
        return bool(eval(self._compiled, self._names, {"L": given}))


class _Sizes:
    """What a guard asks of a tensor. Where it begins in its storage does not matter; see `OpenStep.at`."""

    __slots__ = ("size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride = tensor.size, tensor.stride

    def storage_offset(self) -> int:
        return 0


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether nothing lies between a tensor's numbers, and none stands for two."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return not tensor.numel()
        expected *= size
    return True
