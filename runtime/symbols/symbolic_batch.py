"""Give a tracer a batch with symbols for its sizes, and make the guard of what the trace assumes about these sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from traceback import walk_stack
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv, StatelessSymbolicContext

from rematplan.runtime.graph.code_line import code_line
from rematplan.runtime.graph.compat import FakeTensorMode, pytree
from rematplan.runtime.graph.storage_slices import is_dense
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, check_whole, parts

LONGEST = 300
"""The largest number of nodes of an assumption about sizes, as an expression tree. The longest of transformers and
U-Nets have about 50. Windows of images (Swin) double them from layer to layer; simplifying them took minutes."""


class FixedSize(NamedTuple):
    """A size of a batch that a trace assumes not to change."""

    at: int
    """The position of the tensor in the batch."""
    dim: int
    """The dimension."""
    size: int
    """The size."""
    line: str
    """The line of the model's code that needs it as a number; empty if that is not known."""


class _Outcomes(ShapeEnv):
    """A shape environment that keeps the outcomes of all conditions on sizes; PyTorch's own keeps the last 256."""

    def __init__(self) -> None:
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._outcomes: dict[Any, Any] = {}
        self.lines: dict[Any, str] = {}
        """The line of the model's code at which a symbol was replaced by a number or by another symbol."""

    def evaluate_sym_node(self, sym_node: SymNode, *how: Any, **named: Any) -> Any:
        """Return the outcome of a condition or the value of a size. The first time, what it assumes joins the guard
        unless suppressed."""
        key = sym_node.expr, how, tuple(named.items()), self._suppress_guards_tls()
        if key not in self._outcomes:
            before = len(self.replacements)
            self._outcomes[key] = super().evaluate_sym_node(sym_node, *how, **named)
            if len(self.replacements) > before:
                line = code_line(walk_stack(None))
                self.lines = {symbol: self.lines.get(symbol, line) for symbol in self.replacements}
        return self._outcomes[key]


class BatchSymbols:
    """Symbols for the sizes of a batch, a separate one for each varying dimension and for each of ``counts``."""

    def __init__(
        self, varying: Collection[tuple[int, int]] | None = None, counts: tuple[int, ...] = ()
    ) -> None:
        # : ``varying``: the dimensions with a symbol, as (position in the batch, dimension); None for all. :
        # ``counts``: numbers of elements that the forward selects by values, such as by a mask.
        self.varying, self.counts = varying, counts
        # : The shape environment. It has only these symbols: none for values of tensors, or shapes that depend on
        # values.
        self.shapes = _Outcomes()
        #: The batch as fake tensors with symbolic sizes; empty before `begin`.
        self.fakes: list[torch.Tensor] = []
        self.inputs = 0
        """The number of tensors in the batch. Further ones in ``fakes`` carry ``counts``."""
        self.places: dict[str, tuple[int, int]] = {}
        """For each symbol, by name: the position of its tensor in the batch, and the dimension."""
        self._now: dict[Any, int] = {}
        self._checked = 0

    def begin(self, mode: FakeTensorMode, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return fake tensors for the batch and its ``counts``, with symbols for ``varying`` sizes except 0 and 1.
        Raises `NotSymbolic` for a tensor that is not plain and dense."""
        from rematplan.runtime.graph.compat import LocalSource  # loads TorchDynamo

        self.inputs = len(batch)
        for at, tensor in enumerate(with_counts(batch, self.counts)):
            if (
                type(tensor) is not torch.Tensor
                or not is_dense(tensor)
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                raise NotSymbolic(f"argument {at} is not a plain dense tensor")
            # With a new storage: that of the given tensor may be larger, and may differ in another call.
            compact = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            context: Any = StatelessSymbolicContext(
                [
                    DimDynamic.DYNAMIC
                    if self.varying is None or (at, dim) in self.varying or at >= self.inputs
                    else DimDynamic.STATIC
                    for dim in range(tensor.ndim)
                ]
            )
            fake = mode.from_tensor(compact, symbolic_context=context, source=LocalSource(f"t{at}"))
            fake.requires_grad_(tensor.requires_grad)
            self.fakes.append(fake)
            for dim, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt):
                    self.places[str(size.node.expr)] = at, dim
                    self._now[size.node.expr] = tensor.shape[dim]
        return self.fakes

    def check_lengths(self) -> None:
        """Raise `NotSymbolic` if an assumption that the trace made since the last check is longer than `LONGEST`."""
        for assumed in self.shapes.guards[self._checked :]:
            length = sum(1 for _ in parts(assumed.expr))
            if length > LONGEST:
                raise NotSymbolic("the expressions of its sizes become too long")
        self._checked = len(self.shapes.guards)

    def without_counts(self, size: Any) -> Any:
        """Return a symbolic size unchanged; `NotSymbolic` if it depends on one of ``counts``."""
        counts = {name for name, (at, _) in self.places.items() if at >= self.inputs}
        if any(str(symbol) in counts for symbol in size.node.expr.free_symbols):
            raise NotSymbolic("a number of selected elements depends on another one")
        return size

    def table(self) -> ExpressionTable:
        """Return an empty `ExpressionTable` whose symbols are the batch's sizes."""
        return ExpressionTable(tuple(self.places))

    def now(self, value: Any) -> Any:
        """Return a nested value with the sizes of the traced batch instead of symbolic sizes. This adds no assumption
        to the guard."""
        return pytree.tree_map_only(torch.SymInt, self._value, value)

    def _value(self, size: torch.SymInt) -> int:
        return int(size.node.expr.xreplace(self._now))

    @property
    def fixed(self) -> tuple[FixedSize, ...]:
        """The sizes of the batch that the trace assumes not to change."""
        return tuple(
            FixedSize(at, dim, int(expression), self.shapes.lines.get(symbol, ""))
            for at, fake in enumerate(self.fakes[: self.inputs])
            for dim, size in enumerate(fake.shape)
            for symbol, expression in [
                (size.node._expr, size.node.expr) if isinstance(size, torch.SymInt) else (None, size)
            ]
            if symbol is None or expression.is_number
        )

    def guard(self) -> SizeGuard:
        """Return the guard, a condition that all assumptions of the trace about the batch's sizes and strides are
        true; `NotSymbolic` if one may round."""
        for assumed in self.shapes.guards:
            check_whole(assumed.expr)
        # `ignore_static=True` would drop the conditions for sizes that the trace was silently specialised for.
        code = self.shapes.produce_guards_expression(self.fakes, ignore_static=False)  # type: ignore[arg-type]
        return SizeGuard(code or "True")


def with_counts(batch: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Return a batch with a further tensor for each of ``counts``, whose first size is that number. It has no
    elements."""
    return [*batch, *(torch.empty(count, 0) for count in counts)]


class SizeGuard:
    """A compiled condition on the sizes and strides of a batch, under which one captured step is valid for the batch.
    ``code``: a Python expression of ``L``, the batch's tensors by the names ``t0``, ``t1`` …."""

    def __init__(self, code: str) -> None:
        self.code = code
        self._compiled: CodeType = compile(code, "<guard of sizes>", "eval")
        self._names = dict(SYMPY_INTERP)

    def __getstate__(self) -> str:
        return self.code

    def __setstate__(self, code: str) -> None:
        self.__init__(code)  # type: ignore[misc]

    def holds(self, batch: Sequence[torch.Tensor]) -> bool:
        """Return whether the condition is true for the sizes and strides of this batch. The captured step is then valid
        for the batch."""
        sizes = {f"t{at}": _Sizes(tensor) for at, tensor in enumerate(batch)}
        return bool(eval(self._compiled, self._names, {"L": sizes}))


class _Sizes:
    """What a guard reads of a tensor: sizes and strides. The offset is 0: a step is valid for all offsets
    (`OpenStep.at`)."""

    __slots__ = ("size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride = tensor.size, tensor.stride

    def storage_offset(self) -> int:
        return 0
