"""The captured step of a cache entry, before planning. It is made when something needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rematplan.runtime.capture.left_out_tangents import with_expected_tangents
from rematplan.runtime.graph.captured_step import CapturedStep


@dataclass(eq=False)
class UnplannedStep:
    """A captured step before planning: `whole` takes all outputs' gradients, `captured` those that a training loop
    is expected to supply."""

    make: Callable[[], CapturedStep]
    """A function that makes `whole`."""
    arrived: frozenset[str] = frozenset()
    """Positions, as text, of outputs that received a gradient in an earlier backward, so that it is expected."""

    @staticmethod
    def of(whole: CapturedStep, captured: CapturedStep) -> UnplannedStep:
        """Return an `UnplannedStep` whose two versions exist already."""
        step = UnplannedStep(lambda: whole)
        step.__dict__["captured"] = captured
        return step

    @cached_property
    def whole(self) -> CapturedStep:
        """The step that takes the gradients of all outputs (tangents)."""
        return self.make()

    @cached_property
    def captured(self) -> CapturedStep:
        """The step that takes only those gradients of outputs that a training loop is expected to supply
        (`with_expected_tangents`)."""
        return with_expected_tangents(self.whole, self.arrived)
