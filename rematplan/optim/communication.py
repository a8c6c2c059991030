"""The communication between processes in a step of the optimizer, as an interface; and its form for one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rematplan.optim.assignment import FactorKey, Part
from rematplan.optim.layer import BOTH, Layer


class Exchange(Protocol):
    """What processes send each other in a step, in the order of the methods. Each process calls each method, for
    equal layers.

    Each factor has one owner: the process that averages and inverts it. Each layer has workers, among them the
    owner of at least one of its factors: the processes that multiply its gradient by the inverses. All processes
    hold its weights.
    """

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Choose the owners and the workers of each layer; ``layers`` by weight name."""

    def parts(self) -> Collection[Part]:
        """Return all factors of all layers, those of a layer together if they have one owner."""

    def owned(self) -> Collection[FactorKey]:
        """Return the factors that this process owns."""

    def worked(self) -> Collection[str]:
        """Return the names of the layers that this process is a worker of."""

    @property
    def early(self) -> bool:
        """Whether `begin` sends statistics; then `sums` returns what it has sent."""

    def begin(self, part: Part, sums: Tensor, step: int) -> None:
        """Start to add the statistics of one part of one backward, while the backward still runs.

        Args:
            part: one of `parts`.
            sums: this process's sums, a vector that is overwritten.
            step: the number of the training step.
        """

    def sums(self, sums: Iterable[tuple[Part, Tensor]]) -> Iterable[tuple[Part, Tensor]]:
        """Add the statistics of all processes.

        Args:
            sums: this process's sums, as vectors, by part.

        Returns:
            The sums over all processes, of the parts that this process owns.
        """

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send new inverses from each factor's owner to the layer's other workers.

        ``made``: the factors that this process has just inverted, by layer name (0: of the inputs, 1: of the outputs'
        gradients). Inverses that this process receives are put into its layers.
        """

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Average gradients over the processes.

        Args:
            gradients: this process's gradients, by layer name.
            rows: the weight of this process in the mean.

        Returns:
            The means, of the layers that this process is a worker of.
        """

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Collect the updates of all layers from their workers.

        Args:
            names: the layers to update.
            updates: the updates that this process has computed.
            product: a number (a tensor) of this process.

        Returns:
            The updates of all layers in ``names``, and the sum of ``product`` over all layers.
        """

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Replace gradients of parameters without factors by their means over the processes, in place.

        ``rows``: the weight of this process in the mean.
        """


class Alone:
    """The exchange of a single process: it sends nothing."""

    def __init__(self) -> None:
        self._names: Collection[str] = ()

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Remember the layers: this process owns all."""
        self._names = tuple(layers)

    def parts(self) -> Collection[Part]:
        """Return both factors of each layer together."""
        return [(name, BOTH) for name in self._names]

    def owned(self) -> Collection[FactorKey]:
        """Return all factors."""
        return [(name, at) for name in self._names for at in BOTH]

    def worked(self) -> Collection[str]:
        """Return the names of all layers."""
        return self._names

    early = False

    def begin(self, part: Part, sums: Tensor, step: int) -> None:
        """Do nothing."""

    def sums(self, sums: Iterable[tuple[Part, Tensor]]) -> Iterable[tuple[Part, Tensor]]:
        """Return the sums unchanged."""
        return sums

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: the inverses are in this process already."""

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the gradients unchanged."""
        del rows
        return gradients

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the updates and the product unchanged."""
        del names
        return updates, product

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Do nothing."""
