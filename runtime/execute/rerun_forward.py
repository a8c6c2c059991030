"""Save inputs and random states of a forward, so that it can run again later with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.generator_states import set_states, states_of, states_restored


@contextmanager
def states_restored_if_it_fails(step: CapturedStep) -> Iterator[None]:
    """Restore the states of the random number generators that a step uses if the body of the ``with`` statement raises
    an error."""
    states = states_of(step.drawing_devices)
    try:
        yield
    except BaseException:
        set_states(states)
        raise


@dataclass(frozen=True, slots=True)
class Rerun:
    """The inputs and random states with which a forward ran, saved so that it can run again with the same bits."""

    inputs: Sequence[torch.Tensor]
    """The step's inputs without tangents (gradients of outputs). Buffers that get new content are copies."""
    versions: Sequence[int]
    """The version counters of the inputs, which show changes in place."""
    states: dict[torch.device, Any]
    """The states of the random number generators that the step uses, by device."""

    @classmethod
    def before_forward(cls, step: CapturedStep, inputs: Sequence[torch.Tensor]) -> Rerun:
        """Save the inputs and random states of a forward that is about to run. ``inputs``: without tangents, in the
        step's order."""
        renewed = step.renewed
        storages = [step.values[i.value].storage for i in step.inputs if i.kind != "tangent"]
        kept = [t.clone() if s in renewed else t for t, s in zip(inputs, storages, strict=True)]
        return cls(kept, [t._version for t in kept], states_of(step.drawing_devices))

    def check(self, name: str) -> None:
        """Raise RuntimeError, with the step's ``name``, if an input was changed in place since the forward."""
        if any(t._version != version for t, version in zip(self.inputs, self.versions, strict=True)):
            raise RuntimeError(
                f"{name}: a parameter, buffer or input was changed in place between forward and backward"
            )

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A context in which the random number generators start from their states before the forward. Afterwards their
        states from before the context are restored."""
        with states_restored(self.states):
            set_states(self.states)
            yield
