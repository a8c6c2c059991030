"""Constant folding: find the values of a step that are computed only from parameters, buffers and constants."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rematplan.runtime.graph.captured_step import CapturedStep

LARGEST_CONSTANT = 2**20
"""The number of elements above which a value is not computed. The values that rematplan needs (scales, indices) are
smaller."""
DEEPEST = 24
"""The largest number of calls in a chain from parameters, buffers and constants to a value that is computed."""


class KnownValues:
    """The real tensors of a captured step's values that depend on parameters, buffers and constants alone, computed on
    demand and cached. Unknown are parameters and buffers that ``named`` lacks, and results of random calls and
    collectives. So are results of more than `LARGEST_CONSTANT` elements, or of more than `DEEPEST` calls in a chain. A
    value found unknown stays unknown."""

    def __init__(self, step: CapturedStep, named: Mapping[str, torch.Tensor]) -> None:
        self.step = step
        self.known: dict[str, torch.Tensor | None] = dict(step.constants)
        for i in step.inputs:
            if i.kind in ("parameter", "buffer") and i.target in named:
                self.known[i.value] = named[i.target].detach()

    def __call__(self, value: str) -> torch.Tensor | None:
        """Return the real tensor of a value; None if it is unknown. ``value``: the value's name."""
        return self._find(value, DEEPEST)

    def _find(self, value: str, depth: int) -> torch.Tensor | None:
        if value not in self.known:
            self.known[value] = None
            self._compute(self.step.values[value].call, depth)
        return self.known[value]

    def _compute(self, name: str | None, depth: int) -> None:
        """Add the results of the call ``name`` to `known`. Nothing if it is None or ordered, if a result exceeds
        `LARGEST_CONSTANT` elements, or if an operand is not known within ``depth - 1`` further calls."""
        call = self.step.call.get(name or "")
        if call is None or call.ordered or not depth:
            return
        wanted = [self.step.values[r].fake for r in call.made]
        if any(fake.numel() > LARGEST_CONSTANT for fake in wanted):
            return
        values = {r: self._find(r, depth - 1) for r in call.operands}
        if any(t is None for t in values.values()):
            return
        with torch.no_grad():
            found = call.run(values.__getitem__)
        for result, tensor in zip(call.results, found, strict=True):
            if result:
                self.known[result] = tensor
