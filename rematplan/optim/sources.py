"""The statistics of a planned module as a source."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from rematplan.ir import UsageError
from rematplan.optim.source import Source
from rematplan.runtime.module.planned_module import Planning
from rematplan.runtime.statistics.factors import Factors, Statistics


class PlannedSource:
    """What a planned module gives."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning

    def layers(self) -> Mapping[str, Factors]:
        """The factors that its statistics will have, on the device ``meta``."""
        return self._planning.statistics_layers()

    def statistics(self) -> Statistics | None:
        """Those of the present training step; None if it takes none."""
        found = self._planning.statistics()
        return found if found.factors else None

    def state(self) -> tuple[int, int]:
        """The number of the next training step, and of draws of labels so far."""
        step, draws = self._planning.statistics_state
        return step + 1, draws

    def load(self, state: tuple[int, int]) -> None:
        """Continue with that step."""
        self._planning.statistics_state = state


def source_of(model: nn.Module) -> Source:
    """The source that a planned module is.

    Raises:
        UsageError: the module is not planned with statistics.
    """
    try:
        planning = Planning(model)
        assert planning.statistics_options
    except UsageError as error:
        raise UsageError(
            f"a {type(model).__name__} gives no Kronecker statistics ({error}): name what does, source=…"
        ) from None
    return PlannedSource(planning)
