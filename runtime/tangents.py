"""The gradients of a step's outputs as a loss gives them, which may be laid out otherwise than when it was captured."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rematplan.runtime.captured_step import Call, CapturedStep, Ref, refs, substitute

Strides = tuple[int, ...]


class Tangent:
    """The gradient of the output ``at``, which the step knows as ``value``."""

    def __init__(self, step: CapturedStep, at: int, value: str) -> None:
        self.at, self.value = at, value
        self._step = step
        fake = step.values[value].fake
        self._shape, self._strides = tuple(fake.shape), fake.stride()
        self._taken = {self._strides: True}

    def lay_out(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """As it is given, where what reads it gives results that stand as they were captured: a kernel may add up in
        the order in which numbers stand, so that another order would give other bits than eager mode. Else as it was
        captured."""
        if given is None:
            return None
        strides = given.stride()
        if strides not in self._taken:
            self._taken[strides] = self._is_taken(strides)
        if self._taken[strides]:
            return given
        dense = torch.empty_strided(self._shape, self._strides, dtype=given.dtype, device=given.device)
        return dense.copy_(given)

    def _is_taken(self, strides: Strides) -> bool:
        readers = [c for c in self._step.calls if Ref(self.value) in refs((c.args, c.kwargs))]
        if any(c.is_view for c in readers):
            return False
        with FakeTensorMode(), torch.no_grad():
            return all(self._results(c, strides) == self._results(c, self._strides) for c in readers)

    def _results(self, call: Call, strides: Strides) -> list[Strides]:
        """How the results of a call stand if the tangent stands so."""

        def fake(name: str) -> torch.Tensor:
            like = self._step.values[name].fake
            stand = strides if name == self.value else like.stride()
            return torch.empty_strided(like.shape, stand, dtype=like.dtype, device=like.device)

        results: Any = call.target(*substitute(call.args, fake), **substitute(call.kwargs, fake))
        return [r.stride() for r in ((results,) if call.single else results) if r is not None]
