"""Compile the ops of a region into kernels by Inductor, PyTorch's compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isqrt, prod
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch.compiler import config as compiler_config

from rematplan.runtime.fuse.open_sizes import SizeSymbols
from rematplan.runtime.graph import compat
from rematplan.runtime.graph.compat import TracingContext, inductor_config, make_fx, tracing

Compiled: TypeAlias = Callable[[list[Any]], Sequence[torch.Tensor]]
"""A compiled region: takes a list of its open sizes and inputs, which it empties, and returns its outputs."""

SETTINGS = {
    "layout_optimization": False,
    "comprehensive_padding": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "deterministic": True,
    "cpp_wrapper": False,
    "triton.cudagraphs": False,
}
"""Settings of Inductor under which a kernel returns the strides of the captured step, and the same bits in every
process. Versions that lack one do not need it."""

ROWS = 1024
"""More rows than this are added in two stages."""
OPEN_PARTS = 64
"""The number of parts in which rows of an open number, which is no product of sizes, are added first."""


def begin(
    ops: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    symbols: SizeSymbols | None = None,
) -> Callable[[], Compiled]:
    """Begin to compile ops into kernels, or load them from Inductor's cache. Return a function that waits for them.

    Inductor writes the source of the kernels now. Its compilers then run in threads, at most
    ``torch._inductor.config.compile_threads`` at a time. ``ops``: a function of tensors like ``inputs``. ``symbols``:
    those of the open sizes, which the kernels take before the tensors.

    Raises any exception of Inductor, or of a version of PyTorch without a private name; so does the returned function.
    """
    settings = {k: v for k, v in SETTINGS.items() if hasattr(inductor_config, k.split(".")[0])}
    symbols = symbols or SizeSymbols(None)
    mode, sizes = symbols.mode, symbols.given
    # Some ops take open sizes only so.
    with torch.no_grad(), mode, compat.enable_python_dispatcher() if sizes else nullcontext():
        fakes: list[Any] = [*sizes, *map(symbols.like, inputs)]
        table = {**compat.select_decomp_table(), **_InStages(symbols).ops()}
        graph = make_fx(lambda *given: ops(*given[len(sizes) :]), decomposition_table=table)(*fakes)
    # What Inductor writes may depend on the sizes, but its cache looks only at their symbols.
    tag = f"{compiler_config.cache_key_tag}{symbols.values or ''}"
    output = graph.graph.find_nodes(op="output")[0]
    results = [node.meta["val"] for node in output.args[0]]
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    output.meta["original_output_strides"] = [t.stride() for t in results]
    with (
        torch.no_grad(),
        tracing(TracingContext(mode)),
        inductor_config.patch(settings),
        compiler_config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
        _without_waiting() as waits,
    ):
        made = compat.compile_fx_inner(graph, fakes)
    run: Compiled = getattr(made, "current_callable", None) or made

    def end() -> Compiled:
        while waits:
            waits.pop()()
        return run

    return end


@contextmanager
def _without_waiting() -> Iterator[list[Callable[[], None]]]:
    """Keep Inductor, in this thread and inside of the block, from waiting for its compilers. The list that is yielded
    receives functions that wait for them."""
    waits: list[Callable[[], None]] = []
    before, here = compat.AsyncCompile.wait, get_ident()

    # ``scope``: the names of a module of kernels. Waiting gives them their values.
    def later(self: Any, scope: dict[str, Any]) -> None:
        if get_ident() == here:
            waits.append(partial(before, self, scope))
        else:
            before(self, scope)

    compat.AsyncCompile.wait = later  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        compat.AsyncCompile.wait = before  # type: ignore[method-assign]


class _InStages:
    """Sums and means of many rows in two stages. A kernel for a CPU adds row after row, which rounds more than eager
    mode does.

    ``symbols``: those of the kernel's open sizes.
    """

    def __init__(self, symbols: SizeSymbols) -> None:
        self.symbols = symbols
        self.within = False  # the stages are sums, too

    def ops(self) -> dict[Any, Callable[..., Any]]:
        """Return a decomposition for each op."""
        return {torch.ops.aten.sum.dim_IntList: self.sum, torch.ops.aten.mean.dim: self.mean}

    def sum(
        self, x: torch.Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Any:
        """Add rows over ``dims`` (empty: all) in two stages, in float32 or wider. `NotImplemented` if they are few or
        neighbours in memory, are no real numbers on a CPU, or are those of a stage."""
        kind = dtype or x.dtype
        reduced = sorted(d % x.dim() for d in dims or range(x.dim()))
        # Neighbouring numbers are added in a vector unit, several at a time.
        if (
            self.within
            or x.device.type != "cpu"
            or not kind.is_floating_point
            or any(x.stride(d) == 1 < x.shape[d] for d in reduced)
        ):
            return NotImplemented
        first, *others = reduced
        rows, parts = prod(x.shape[d] for d in reduced), 0
        if isinstance(rows, torch.SymInt):
            single = not others and self.symbols.factor(rows) is None
            if single and rows.node.hint <= OPEN_PARTS:
                return NotImplemented
        else:
            parts = max(n for n in range(1, isqrt(rows) + 1) if x.shape[first] % n == 0)
            if rows <= ROWS or parts == 1:
                return NotImplemented
        x = x.to(torch.promote_types(kind, torch.float32))
        self.within = True
        try:
            if not parts and others:
                total = x.sum(others, True).sum(first, True)
                return (total if keepdim else total.squeeze(reduced)).to(kind)
            x, parts = (x, parts) if parts else self._with_parts(x, first)
            split = x.unflatten(first, (parts, -1))
            return split.sum([first + 1, *(d + 1 for d in others)], keepdim).sum(first).to(kind)
        finally:
            self.within = False

    def _with_parts(self, x: torch.Tensor, first: int) -> tuple[torch.Tensor, Any]:
        """Return ``x``, whose number of rows is open, perhaps with further rows of zeros, and a number that divides the
        number of rows. ``first``: the dimension of the rows."""
        factor = self.symbols.factor(x.shape[first])
        if factor is not None:
            return x, factor
        missing = [0, 0] * (x.dim() - 1 - first) + [0, -x.shape[first] % OPEN_PARTS]
        return torch.ops.aten.constant_pad_nd(x, missing), OPEN_PARTS

    def mean(
        self, x: torch.Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Any:
        """Average rows over ``dims`` in two stages; `NotImplemented` where `sum` returns it."""
        kind = dtype or x.dtype
        total = self.sum(x, dims, keepdim, dtype=torch.promote_types(kind, torch.float32))
        return total if total is NotImplemented else (total / (x.numel() // total.numel())).to(kind)
