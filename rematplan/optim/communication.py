"""The communication between processes in a step of the optimizer, as an interface; and its form for one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rematplan.optim.assignment import FactorKey, Part
from rematplan.optim.layer import BOTH, Layer


class Exchange(Protocol):
    """What processes send each other in a step of K-FAC. Every process calls the methods in this order, with equal
    layers.

    Statistics are the sums of outer products that each process adds to the Kronecker factors. Each factor has one
    owner: the process that averages and inverts it. Each layer has workers: the processes that multiply its gradient by
    both inverses; an owner of one of its factors is among them. All processes hold all weights.
    """

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Choose the owners of the factors and the workers of each layer. ``layers``: by weight name."""

    def parts(self) -> Collection[Part]:
        """Return all factors of all layers: pairs of a weight name and the factors of this weight that have the same
        owner."""

    def owned(self) -> Collection[FactorKey]:
        """Return the factors that this process averages and inverts."""

    def worked(self) -> Collection[str]:
        """Return the weight names of the layers whose gradients this process multiplies by inverses."""

    @property
    def early(self) -> bool:
        """Whether statistics are sent by `begin`, while a backward runs. If so, `sums` returns what `begin` sent."""

    def begin(self, part: Part, sums: Tensor, step: int) -> None:
        """Start to send one layer's statistics of one backward to their owner, while the backward still runs.

        Args:
            part: an item of `parts`.
            sums: this process's statistics, a vector that is overwritten.
            step: the number of the training step.
        """

    def sums(self, sums: Iterable[tuple[Part, Tensor]]) -> Iterable[tuple[Part, Tensor]]:
        """Add the statistics of all processes, each at the owner of its factor.

        Args:
            sums: this process's statistics, as pairs of an item of `parts` and a vector.

        Returns:
            Such pairs with the sums over all processes, for the factors that this process owns.
        """

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send new inverses from each factor's owner to the layer's workers. Received inverses are put into the layers.

        ``made``: the factors that this process has just inverted, by weight name (0: of the inputs, 1: of the outputs'
        gradients).
        """

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Average gradients over the processes, each at the workers of its layer.

        Args:
            gradients: this process's gradients, by weight name.
            rows: the weight of this process in the mean, for example its number of samples.

        Returns:
            The means, for the layers of which this process is a worker.
        """

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Collect the updates of all layers from their workers.

        Args:
            names: the weight names of all layers to update.
            updates: the updates that this process has computed, by weight name.
            product: a number (a scalar tensor), to be added over the processes that computed different layers.

        Returns:
            The updates of all layers in ``names``, and the sum of ``product``.
        """

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Average the gradients of parameters without Kronecker factors over the processes, in place.

        ``rows``: the weight of this process in the mean, for example its number of samples.
        """


class Alone:
    """The implementation of `Exchange` for a single process: it sends nothing, and owns all factors."""

    def __init__(self) -> None:
        self._names: Collection[str] = ()

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Remember the layers, by weight name. This process owns all their factors."""
        self._names = tuple(layers)

    def parts(self) -> Collection[Part]:
        """Return each weight name with both factors of its layer."""
        return [(name, BOTH) for name in self._names]

    def owned(self) -> Collection[FactorKey]:
        """Return all factors: each weight name with 0 (of the inputs) and with 1 (of the outputs' gradients)."""
        return [(name, at) for name in self._names for at in BOTH]

    def worked(self) -> Collection[str]:
        """Return the weight names of all layers."""
        return self._names

    early = False

    def begin(self, part: Part, sums: Tensor, step: int) -> None:
        """Do nothing. It is never called, since `early` is false."""

    def sums(self, sums: Iterable[tuple[Part, Tensor]]) -> Iterable[tuple[Part, Tensor]]:
        """Return the statistics unchanged: they are already the sums over all processes."""
        return sums

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: the inverses are in this process already."""

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the gradients unchanged: they are already the means over all processes."""
        del rows
        return gradients

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the updates and the product unchanged: this process has computed those of all layers."""
        del names
        return updates, product

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Leave the gradients unchanged: one process has nothing to average."""
