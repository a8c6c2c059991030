"""The open sizes of a region: expressions of the batch's sizes, symbols for Inductor, and the sizes that one kernel
serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, cast

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from rematplan.runtime.graph.compat import FakeTensorMode
from rematplan.runtime.graph.storage_slices import uninitialised_like
from rematplan.runtime.graph.tracked_sizes import OpenSizes, TrackedSize, shape_of, stride_of
from rematplan.runtime.symbols.expressions import condition, values_of

Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""
SIZES = 64
"""The largest number of sizes of one kernel for which the layouts of its inputs are remembered."""


class RegionSizes:
    """The sizes of the batch on which the tensors and arguments of a region depend.

    ``opened``: those of the step. ``used``: the region's tracked sizes, in an order that equal regions share.
    """

    def __init__(self, opened: OpenSizes, used: Iterable[TrackedSize]) -> None:
        by_position = tuple(opened.expressions)
        self.expressions = {size.at: by_position[size.at] for size in used}
        place = opened.expressions
        found = (sorted(e.free_symbols, key=place.__getitem__) for e in self.expressions.values())
        #: The symbols in these expressions.
        self.symbols = tuple(dict.fromkeys(symbol for some in found for symbol in some))
        #: Their values, which a kernel takes before its tensors.
        self.given = tuple(TrackedSize(opened.values[place[s]], place[s]) for s in self.symbols)
        self._own = {s: type(s)(f"n{k}", integer=True) for k, s in enumerate(self.symbols)}

    def text(self, size: int) -> str:
        """Return a size as text, equal for equal regions of several captures."""
        return str(self._own_expression(size))

    def layouts(self, inputs: Sequence[torch.Tensor]) -> Callable[..., tuple[Layout, ...]]:
        """Return a function from the values of the symbols to the layouts of ``inputs``."""
        names = [str(s) for s in self._own.values()]
        ends = [(shape_of(t), stride_of(t)) for t in inputs]
        flat = values_of([self._own_expression(n) for pair in ends for end in pair for n in end], names)

        @lru_cache(SIZES)
        def found(*sizes: int) -> tuple[Layout, ...]:
            left = iter(flat(*sizes))
            return tuple(
                (tuple(next(left) for _ in shape), tuple(next(left) for _ in stride))
                for shape, stride in ends
            )

        return found

    def _own_expression(self, size: int) -> Any:
        if isinstance(size, TrackedSize):
            return self.expressions[size.at].xreplace(self._own)
        return int(size)


class SizeSymbols:
    """Symbols for a kernel's open sizes while it is compiled, with what the compiler assumes about them.

    ``sizes``: None if it has none.
    """

    def __init__(self, sizes: RegionSizes | None) -> None:
        from rematplan.runtime.graph.compat import LocalSource  # loads TorchDynamo

        self.sizes, self.env = sizes, ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        #: The symbols' values in the trace.
        self.given: list[torch.SymInt] = []
        open_: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        for at, size in enumerate(sizes.given if sizes else ()):
            carrier = torch.empty(int(size), 0)  # it has no elements
            fake = self.mode.from_tensor(carrier, symbolic_context=open_, source=LocalSource(f"n{at}"))
            self.given.append(cast(torch.SymInt, fake.shape[0]))

    @property
    def values(self) -> tuple[int, ...]:
        """The sizes for which the kernel is compiled."""
        return tuple(map(int, self.sizes.given)) if self.sizes else ()

    def of(self, size: int) -> Any:
        """Return the expression of these symbols of which a size is the value; a plain integer as it is."""
        if self.sizes is None or not isinstance(size, TrackedSize):
            return int(size)
        expression = self.sizes.expressions[size.at].xreplace(self._symbol)
        return self.env.create_symintnode(expression, hint=int(size))

    def factor(self, size: Any) -> torch.SymInt | None:
        """Return a symbol that divides an open size; None if the size is no product of symbols."""
        expression = size.node.expr
        factors = expression.args if expression.is_Mul else ()
        return next((symbol for symbol in self.given if symbol.node.expr in factors), None)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the layout of another one, in the fake mode."""
        shape, stride = [[*map(self.of, end)] for end in (shape_of(tensor), stride_of(tensor))]
        if all(isinstance(n, int) for n in (*shape, *stride)):
            return uninitialised_like(tensor)
        made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        # Whether the first element is aligned may depend on the sizes.
        return made.as_strided(shape, stride, 1) if tensor.storage_offset() else made

    def holds(self) -> Callable[..., bool]:
        """Return a function from the values of the symbols to whether all that was assumed is true of them.

        Raises `NotSymbolic` if something else than integers was assumed.
        """
        symbols = list(self._symbol.values())
        ranges = {s: self.env.var_to_range[s] for s in symbols}
        assumed = [
            *(guard.expr for guard in self.env.guards),
            *(one for s, e in self.env.replacements.items() if s in ranges for one in (s >= e, s <= e)),
            *(s >= r.lower for s, r in ranges.items()),
            *(s <= r.upper for s, r in ranges.items() if r.upper.is_Integer),
        ]
        return condition(assumed, [str(s) for s in symbols])

    @cached_property
    def _symbol(self) -> dict[Any, Any]:
        """By symbol of the batch, that of the compilation."""
        old = self.sizes.symbols if self.sizes else ()
        return {a: b.node._expr for a, b in zip(old, self.given, strict=True)}
