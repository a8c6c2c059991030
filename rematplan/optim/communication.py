"""The interface for the communication between processes in a step of K-FAC, and an implementation for one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rematplan.optim.assignment import FactorKey, FactorPart
from rematplan.optim.layer import BOTH, Layer
from rematplan.optim.step_memory import Copies


class Exchange(Protocol):
    """What processes send each other in a step of K-FAC. A factor's owner averages and inverts it; a layer's
    workers use both inverses.

    `assign` is called first. In each step, all processes call, in this order: `begin` (if `early`), `sums`,
    `inverses`, `gradients`, `updates`, `others`.
    """

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Choose the owners of the Kronecker factors (which invert them) and the workers of the layers (which use both
        inverses).

        ``layers``: by weight name.
        """

    def parts(self) -> Collection[FactorPart]:
        """Return all Kronecker factors: pairs of a weight name and those of its factors, (0,), (1,) or (0,
        1), that have one owner.
        """

    def owned(self) -> Collection[FactorKey]:
        """Return the factors that this process averages and inverts: pairs of a weight name and 0 (inputs) or
        1 (outputs' gradients).
        """

    def worked(self) -> Collection[str]:
        """Return the weight names of the layers whose gradients this process multiplies by the inverses of Kronecker
        factors.
        """

    @property
    def early(self) -> bool:
        """Whether `begin` sends statistics while a backward runs. Then `sums` ignores its argument and
        returns the totals of these.
        """

    @property
    def copies(self) -> Copies:
        """The tensors that the methods allocate temporarily in a step."""

    def begin(self, part: FactorPart, sums: Tensor, step: int) -> None:
        """Start to send statistics of a running backward to the owner of ``part``, an item of `parts`. The
        vector ``sums`` is overwritten. ``step``: the number of the training step.
        """

    def sums(self, sums: Iterable[tuple[FactorPart, Tensor]]) -> Iterable[tuple[FactorPart, Tensor]]:
        """Add the statistics of all processes, as pairs (item of `parts`, vector). Return the totals of the
        factors that this process owns.
        """

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send the inverses that this process has just made (0 or 1, by weight name) to the layers' workers,
        and store received ones.
        """

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the mean gradients over the processes of the layers that this process works on. ``rows``:
        this process's weight.
        """

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the updates of all layers ``names``, and the sum of ``product`` = Σ lr² ⟨update, gradient⟩
        over all processes.

        ``updates``: those that this process has computed.
        """

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Average gradients without Kronecker factors over the processes, in place. ``rows``: this process's
        weight.
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
