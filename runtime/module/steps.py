"""The step of a cache entry before planning, which is made when something needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rematplan.runtime.capture.left_out_tangents import with_expected_tangents
from rematplan.runtime.graph.captured_step import CapturedStep


@dataclass(eq=False)
class Steps:
    """A step before planning.

    ``make``: returns it with the tangents of all outputs. ``arrived``: as for `with_expected_tangents`.
    """

    make: Callable[[], CapturedStep]
    arrived: frozenset[str] = frozenset()

    @staticmethod
    def of(whole: CapturedStep, captured: CapturedStep) -> Steps:
        """Return a step that is made already: with the tangents of all outputs, and with the expected ones."""
        steps = Steps(lambda: whole)
        steps.__dict__["captured"] = captured
        return steps

    @cached_property
    def whole(self) -> CapturedStep:
        """The step with the tangents of all outputs."""
        return self.make()

    @cached_property
    def captured(self) -> CapturedStep:
        """The step with the expected tangents."""
        return with_expected_tangents(self.whole, self.arrived)
