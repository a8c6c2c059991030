"""What processes send each other in a step of K-FAC. For one process that is nothing: `Exchange` itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from rematplan.optim.assignment import FactorKey, FactorPart
from rematplan.optim.layer import BOTH, Layer
from rematplan.optim.step_memory import Copies


class Exchange:
    """The communication of a single process, which does all work itself, and the base class of that of several. A
    factor's owner averages and inverts it; a layer's workers use both inverses. `assign` is called first. In each step,
    all processes call, in this order: `begin` (if `early`), `sums`, `inverses`, `gradients`, `updates`, `others`."""

    early = False
    """Whether `begin` sends statistics while a backward runs. Then `sums` ignores its argument and returns the totals
    of these."""
    copies = Copies()
    """The tensors that the methods allocate temporarily in a step."""

    def __init__(self) -> None:
        self._layers: Mapping[str, Layer] = {}

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Choose the owners of the Kronecker factors and the workers of the layers. ``layers``: by weight name."""
        self._layers = layers

    def parts(self) -> Collection[FactorPart]:
        """Return all Kronecker factors: pairs of a weight name and its factors with one owner, (0,), (1,) or (0, 1)."""
        return [(name, BOTH) for name in self._layers]

    def owned(self) -> Collection[FactorKey]:
        """Return the factors that this process averages and inverts: pairs of a weight name and 0 (inputs) or
        1 (outputs' gradients)."""
        return [(name, at) for name in self._layers for at in BOTH]

    def worked(self) -> Collection[str]:
        """Return the weight names of the layers whose gradients this process multiplies by inverses."""
        return tuple(self._layers)

    def begin(self, part: FactorPart, sums: Tensor, step: int) -> None:
        """Start to send statistics of a running backward to the owner of ``part``, an item of `parts`, if `early`. The
        vector ``sums`` is overwritten. ``step``: the number of the training step."""

    def sums(self, sums: Iterable[tuple[FactorPart, Tensor]]) -> Iterable[tuple[FactorPart, Tensor]]:
        """Add the statistics of all processes, as pairs (item of `parts`, vector). Return the totals of the
        factors that this process owns."""
        return sums

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send the inverses just made (0 or 1, by weight name) to the layers' workers, and store received ones."""

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the mean gradients over processes of the layers worked on here. ``rows``: this process's weight."""
        del rows
        return gradients

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the updates of all layers ``names``, and the sum of ``product`` = Σ lr² ⟨update, gradient⟩
        over all processes. ``updates``: those that this process has computed."""
        del names
        return updates, product

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Average gradients without Kronecker factors over the processes, in place. ``rows``: this process's weight."""
