"""What a forward needs to run again, bit by bit the same, after it has run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rematplan.runtime.execute.codegen import load_rng, renewed_buffers, save_rng
from rematplan.runtime.graph.captured_step import CapturedStep


@dataclass(frozen=True, slots=True)
class Rerun:
    """``inputs``: of the step without tangents, the buffers that it gives new content as copies. ``versions``: of these
    inputs, to see whether somebody changes one. ``states``: of the generators that it draws from, by device."""

    inputs: Sequence[torch.Tensor]
    versions: Sequence[int]
    states: dict[torch.device, Any]

    @classmethod
    def before_forward(cls, step: CapturedStep, inputs: Sequence[torch.Tensor]) -> Rerun:
        """For a forward that is about to run on these inputs."""
        renewed = renewed_buffers(step)
        given = [step.values[i.value].storage for i in step.inputs if i.kind != "tangent"]
        kept = [t.clone() if s in renewed else t for t, s in zip(inputs, given, strict=True)]
        return cls(kept, [t._version for t in kept], {d: save_rng(d)() for d in step.drawing_devices})

    def check(self, name: str) -> None:
        """Raises where an input was changed since."""
        if any(t._version != version for t, version in zip(self.inputs, self.versions, strict=True)):
            raise RuntimeError(
                f"{name}: a parameter, buffer or input was changed in place between forward and backward"
            )

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A block that draws the numbers that the forward drew; those after it draw as if it had not been."""
        now = {device: save_rng(device)() for device in self.states}
        try:
            for device, state in self.states.items():
                load_rng(device)(state)
            yield
        finally:
            for device, state in now.items():
                load_rng(device)(state)
