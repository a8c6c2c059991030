"""The interface through which the optimizer `KFAC` gets Kronecker factors: sums of outer products by weight name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rematplan.runtime.statistics.factors import Factors, Statistics


@runtime_checkable
class StatisticsSource(Protocol):
    """An object that provides Kronecker factors to `KFAC`: sums of outer products of layers' inputs and of the
    gradients of their outputs."""

    def layers(self) -> Mapping[str, Factors]:
        """Return the factors by weight name, on the device ``meta``: shapes and types without values."""

    def statistics(self) -> Statistics | None:
        """Return the factors since the last update, or None. A ``step`` that was read before is ignored."""

    def state(self) -> Any:
        """Return what `load` needs to go on with the same statistics. It is called after an update of the weights."""

    def load(self, state: Any) -> None:
        """Continue as after the call of `state` that returned ``state``."""
