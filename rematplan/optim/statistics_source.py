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
        """Return, by weight name, the Kronecker factors as tensors of the device ``meta``.

        They have the shapes and data types of the factors that `statistics` will return, but no values.
        """

    def statistics(self) -> Statistics | None:
        """Return the Kronecker factors (sums of outer products) over the micro-batches since the last update of the
        weights.

        The optimizer adds them to its averages only once: it ignores a result whose ``step`` it has read before. None:
        there are no statistics.
        """

    def state(self) -> Any:
        """Return what a checkpoint must contain so that later statistics are the same after `load`.

        The optimizer calls this method after an update of the weights.
        """

    def load(self, state: Any) -> None:
        """Continue as after the call of `state` that returned ``state``."""
