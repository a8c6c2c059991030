"""Where an optimizer takes Kronecker factors from: anything that gives sums of outer products by weight name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rematplan.runtime.statistics.factors import Factors, Statistics


@runtime_checkable
class Source(Protocol):
    """What gives statistics."""

    def layers(self) -> Mapping[str, Factors]:
        """By weight name: the factors that statistics will have, as tensors of the device ``meta``."""

    def statistics(self) -> Statistics | None:
        """The sums over the micro-batches since the last update of the weights.

        None, or statistics whose ``step`` was read before, say that there is nothing new.
        """

    def state(self) -> Any:
        """What has to be saved for statistics to go on as they would have, after an optimizer's step."""

    def load(self, state: Any) -> None:
        """Continue from a `state`."""
