"""The interface for the communication between processes in a step of K-FAC, and an implementation for one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rematplan.optim.assignment import FactorKey, FactorPart
from rematplan.optim.layer import BOTH, Layer
from rematplan.optim.step_memory import Copies


class Exchange(Protocol):
    """What processes send each other in a step of K-FAC. The layers are the same in all processes.

    Statistics are the sums of outer products that each process adds to the Kronecker factors. Each factor has one
    owner: the process that averages and inverts it. Each layer has workers: the processes that multiply its gradient by
    both inverses. The owner of the layer's larger inverse is one of them.

    `assign` is called first, once. In each step, every process calls the methods that communicate in the order of their
    definition: `begin` (only if `early`), `sums`, `inverses`, `gradients`, `updates`, `others`.
    """

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Choose the owners of the Kronecker factors (which invert them) and the workers of the layers (which use both
        inverses).

        ``layers``: by weight name.
        """

    def parts(self) -> Collection[FactorPart]:
        """Return all Kronecker factors of all layers: pairs of a weight name and a tuple of factors that have the same
        owner.

        The tuple is (0,) for the factor of the inputs, (1,) for that of the outputs' gradients, (0, 1) for both.
        """

    def owned(self) -> Collection[FactorKey]:
        """Return the Kronecker factors that this process averages and inverts.

        Each is a pair of a weight name and 0 (the factor of the inputs) or 1 (the factor of the
        outputs' gradients).
        """

    def worked(self) -> Collection[str]:
        """Return the weight names of the layers whose gradients this process multiplies by the inverses of Kronecker
        factors.
        """

    @property
    def early(self) -> bool:
        """Whether statistics (sums of outer products) are sent by `begin`, while a backward runs, instead of by `sums`.

        If they are, `sums` ignores its argument and returns the totals of the statistics that `begin` sent.
        """

    @property
    def copies(self) -> Copies:
        """The tensors that the methods allocate temporarily in a step."""

    def begin(self, part: FactorPart, sums: Tensor, step: int) -> None:
        """Start to send statistics that a backward has just computed to the owner of their factors, while the backward
        runs.

        Args:
            part: the weight name and the factors to which the statistics belong, an item of `parts`.
            sums: this process's statistics (sums of outer products), as a vector. It is overwritten.
            step: the number of the training step.
        """

    def sums(self, sums: Iterable[tuple[FactorPart, Tensor]]) -> Iterable[tuple[FactorPart, Tensor]]:
        """Add the statistics (sums of outer products) of all processes. The owner of a factor receives its total.

        Args:
            sums: this process's statistics: pairs of an item of `parts` (a weight name and factors) and a vector.

        Returns:
            Pairs of an item of `parts` and the total over all processes, for the factors that this process owns.
        """

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send new inverses of Kronecker factors from their owners to the processes that multiply gradients by them.

        The inverses that this process receives are stored in its layers.

        ``made``: the factors that this process has just inverted, by weight name: 0 stands for the factor of the
        inputs, 1 for that of the outputs' gradients.
        """

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Average the gradients over the processes. The workers of a layer receive the mean of its gradient.

        Args:
            gradients: this process's gradients, by weight name.
            rows: the weight of this process in the mean, for example its number of samples.

        Returns:
            The mean gradients by weight name, for the layers that this process is to multiply by inverses.
        """

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Collect the updates of all layers from the processes that computed them.

        Args:
            names: the weight names of all layers to update.
            updates: the updates that this process has computed, by weight name.
            product: Σ lr² ⟨update, gradient⟩ over the layers in ``updates``, a scalar tensor.

        Returns:
            The updates of all layers in ``names``, and the sum of ``product`` over all these layers.
        """

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Average the gradients of parameters without Kronecker factors over the processes, in place.

        ``rows``: the weight of this process in the mean, for example its number of samples.
        """


class Alone:
    """The implementation of `Exchange` for a single process, which sends nothing and inverts all Kronecker factors
    itself.
    """

    def __init__(self) -> None:
        self._names: Collection[str] = ()

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Remember the layers, by weight name. The only process averages and inverts all their Kronecker factors."""
        self._names = tuple(layers)

    def parts(self) -> Collection[FactorPart]:
        """Return a pair (weight name, (0, 1)) for each layer: both its Kronecker factors belong to this process."""
        return [(name, BOTH) for name in self._names]

    def owned(self) -> Collection[FactorKey]:
        """Return all Kronecker factors: each weight name with 0 (of the inputs) and 1 (of the outputs' gradients)."""
        return [(name, at) for name in self._names for at in BOTH]

    def worked(self) -> Collection[str]:
        """Return the weight names of all layers, since the only process multiplies all gradients by inverses."""
        return self._names

    early = False
    copies = Copies()

    def begin(self, part: FactorPart, sums: Tensor, step: int) -> None:
        """Do nothing. It is not called: a single process sends no statistics during a backward (`early` is false)."""

    def sums(self, sums: Iterable[tuple[FactorPart, Tensor]]) -> Iterable[tuple[FactorPart, Tensor]]:
        """Return the statistics unchanged: with a single process they are already the sums over all processes."""
        return sums

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: the only process has inverted all Kronecker factors itself."""

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the gradients unchanged: with a single process they are already the means over all processes."""
        del rows
        return gradients

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return ``updates`` and ``product`` unchanged: the only process has computed the updates of all layers."""
        del names
        return updates, product

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Leave the gradients unchanged: one process has nothing to average."""
