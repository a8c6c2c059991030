"""The interface through which the optimizer gets Kronecker factors: sums of outer products by weight name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rematplan.runtime.statistics.factors import Factors, Statistics


@runtime_checkable
class Source(Protocol):
    """An object that provides Kronecker factors to `KFAC`: sums of outer products of inputs and of output gradients."""

    def layers(self) -> Mapping[str, Factors]:
        """Return the factors that statistics will have, by weight name, as tensors of the device ``meta``."""

    def statistics(self) -> Statistics | None:
        """Return the Kronecker factors (sums of outer products) over the micro-batches since the last update of the
        weights.

        Nothing is new if the result is None, or has a ``step`` that the optimizer has read before.
        """

    def state(self) -> Any:
        """Return what a checkpoint must contain for `load`, so that later statistics are the same. Called after an
        update."""

    def load(self, state: Any) -> None:
        """Restore what `state` returned."""
