"""What one step of an optimizer hands from process to process; here, the case of one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rematplan.optim.layer import Layer


class Exchange(Protocol):
    """The communication of a step, in the order of its methods. Every process calls each with the same layer names.

    A layer has one owner, who averages and inverts its factors, and workers, the owner among them, who multiply its
    gradient by the inverses; all processes have its weights.
    """

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Choose the owners and workers of all layers."""

    def owned(self) -> Collection[str]:
        """The layers whose owner this process is."""

    def worked(self) -> Collection[str]:
        """The layers that this process is a worker of."""

    def sums(self, sums: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """This process's sums by layer → those of all processes together, of the layers owned here."""

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Give the inverses that this process has just made, sides by layer, to the other workers, and get theirs."""

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """This process's gradients by layer → means over the processes, of the layers worked on here.

        ``rows``: the weight of this process in the mean.
        """

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """The updates made here → those of all layers named; and the sum over all layers of a number each."""

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Replace gradients of parameters without factors by their mean over the processes, ``rows`` as above."""


class Alone:
    """One process: nothing to hand over."""

    def __init__(self) -> None:
        self._names: Collection[str] = ()

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """All layers are owned here."""
        self._names = tuple(layers)

    def owned(self) -> Collection[str]:
        """All of them."""
        return self._names

    def worked(self) -> Collection[str]:
        """All of them."""
        return self._names

    def sums(self, sums: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """As they are."""
        return sums

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """They are where they are needed."""

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """As they are."""
        del rows
        return gradients

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """As they are."""
        del names
        return updates, product

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """As they are."""
