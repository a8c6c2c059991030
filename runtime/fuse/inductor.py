"""Compile the ops of a region into kernels by Inductor, PyTorch's compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import isqrt, prod
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rematplan.runtime.graph import compat
from rematplan.runtime.graph.compat import FakeTensorMode, TracingContext, inductor_config, make_fx, tracing
from rematplan.runtime.graph.storage_slices import uninitialised_like

Compiled: TypeAlias = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled region: takes a list of its inputs, which it empties, and returns its outputs."""

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


def begin(
    ops: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> Callable[[], Compiled]:
    """Begin to compile ops into kernels, or load them from Inductor's cache. Return a function that waits for them.

    Inductor writes the source of the kernels now. Its compilers then run in threads, at most
    ``torch._inductor.config.compile_threads`` at a time. ``ops``: a function of tensors like ``inputs``.

    Raises any exception of Inductor, or of a version of PyTorch without a private name; so does the returned function.
    """
    settings = {k: v for k, v in SETTINGS.items() if hasattr(inductor_config, k.split(".")[0])}
    with torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()) as mode:  # the cache needs one
        fakes = [uninitialised_like(t) for t in inputs]
        graph = make_fx(ops, decomposition_table={**compat.select_decomp_table(), **IN_STAGES})(*fakes)
    output = graph.graph.find_nodes(op="output")[0]
    results = [node.meta["val"] for node in output.args[0]]
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    output.meta["original_output_strides"] = [t.stride() for t in results]
    with (
        torch.no_grad(),
        tracing(TracingContext(mode)),
        inductor_config.patch(settings),
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
    """Inductor does not wait for its compilers meanwhile in this thread. The list receives what waits for them."""
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


def _sum_in_stages(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Add many rows in two stages; NotImplemented where one is enough. A kernel for a CPU adds row after row, which
    rounds more than eager mode does."""
    kind = dtype or x.dtype
    if x.device.type != "cpu" or not kind.is_floating_point or x.numel() <= ROWS:
        return NotImplemented
    first, *others = reduced = sorted(d % x.dim() for d in dims or range(x.dim()))
    rows = prod(x.shape[d] for d in reduced)
    parts = max(n for n in range(1, isqrt(rows) + 1) if x.shape[first] % n == 0)
    # Neighbouring numbers are added in a vector unit, several at a time.
    if rows <= ROWS or parts == 1 or any(x.stride(d) == 1 < x.shape[d] for d in reduced):
        return NotImplemented
    split = x.to(torch.promote_types(kind, torch.float32)).unflatten(first, (parts, -1))
    return split.sum([first + 1, *(d + 1 for d in others)], keepdim).sum(first).to(kind)


def _mean_in_stages(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Average many rows by a sum in two stages."""
    kind = dtype or x.dtype
    total = _sum_in_stages(x, dims, keepdim, dtype=torch.promote_types(kind, torch.float32))
    return total if total is NotImplemented else (total / (x.numel() // total.numel())).to(kind)


IN_STAGES = {torch.ops.aten.sum.dim_IntList: _sum_in_stages, torch.ops.aten.mean.dim: _mean_in_stages}
