"""The interface through which the optimizer gets Kronecker factors: sums of outer products by weight name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rematplan.runtime.statistics.factors import Factors, Statistics


@runtime_checkable
class Source(Protocol):
    """An object that provides Kronecker statistics to `KFAC`."""

    def layers(self) -> Mapping[str, Factors]:
        """Return the factors that the statistics will have, by weight name, as tensors of the device ``meta``."""

    def statistics(self) -> Statistics | None:
        """Return the sums over the micro-batches since the last update of the weights.

        None, or statistics whose ``step`` the optimizer has read before, mean that there is nothing new.
        """

    def state(self) -> Any:
        """Return what must be saved, after a step of the optimizer, so that later statistics are the same after
        `load`.
        """

    def load(self, state: Any) -> None:
        """Restore the state that `state` returned."""
