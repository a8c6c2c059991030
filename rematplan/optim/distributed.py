"""K-FAC on several processes: each inverts the factors of some layers (Osawa et al. 2019, 2020).

A step: a reduce-scatter adds statistics (with ``early``, a reduce per layer during the backward); owners
invert; a reduce-scatter averages gradients for the workers; broadcasts distribute updates. If torch has
averaged the gradients, they are not sent again.

With ``grad_workers`` (KAISA, Pauloski et al. 2021) a layer's workers are a column of a grid of consecutive
ranks. One worker per layer needs the least memory.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from rematplan.optim.assignment import FactorKey, FactorPart, by_factor, homes, owners
from rematplan.optim.communication import Exchange
from rematplan.optim.early_sums import EarlySums
from rematplan.optim.grid import Grid
from rematplan.optim.inverse_routes import InverseRoutes
from rematplan.optim.layer import Layer
from rematplan.optim.step_memory import Copies

Key = TypeVar("Key")
ROWS = "(rows)"


class Ranks(Exchange):
    """What several processes of K-FAC send each other in a step.

    Args:
        group: the process group; None for all processes.
        grad_workers: for each layer, the number of processes that multiply its gradient by the inverses; a divisor of
            the number of processes.
        reduce_gradients: True if each process has gradients of its own batch only. They are then averaged here,
            weighted by the ``rows`` of `KFAC.step`. False if DistributedDataParallel or FSDP2 has averaged them.
        early: whether to send the statistics of a planned module layer by layer while the backward runs, and not in
            `KFAC.step`. The statistics of each micro-batch are then sent separately, and all processes need the same
            number of backwards in a training step.

    Raises:
        UsageError: there is no process group, or ``grad_workers`` is no divisor of the number of processes.
        ProcessEnded: from any method, if another process has ended or cannot be reached.
    """

    copies = Copies(sums=3, inverses=1, gradients=3, others=1)
    """The buffers of the collectives, and what is copied into and out of them."""

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        grad_workers: int = 1,
        reduce_gradients: bool = True,
        early: bool = False,
    ) -> None:
        super().__init__()
        self._grid = Grid(group, grad_workers)
        self.early, self._reduce = early, reduce_gradients
        # A separate group, since DistributedDataParallel communicates at the same time, in an order that may differ.
        self._early_group = self._grid.subgroup([range(self._grid.size)]) if early else None
        self._early_sums: EarlySums | None = None
        self._parts: Mapping[FactorPart, int] = {}  # the rank of the owner
        self._places: Mapping[str, int] = {}  # the positions of layers' workers in each block
        self._routes: InverseRoutes | None = None
        self._dtype = torch.float32

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Choose the processes that invert the factors of ``layers`` (by weight name) in about equal times,
        and the layers' workers."""
        self._layers = layers
        sides = {name: layer.sides for name, layer in layers.items()}
        self._parts = owners(sides, self._grid.size)
        self._places = {n: home % self._grid.width for n, home in homes(sides, self._parts).items()}
        self._routes = InverseRoutes(self._grid, layers, self._parts, self._places)
        self._dtype = functools.reduce(torch.promote_types, (layer.a.dtype for layer in layers.values()))
        if self.early:
            nothing = {
                (name, at): functools.partial(layers[name].no_sums, None, at) for name, at in self._parts
            }
            mine = [part for part, owner in self._parts.items() if owner == self._grid.rank]
            self._early_sums = EarlySums(nothing, mine, self._start)

    def parts(self) -> Collection[FactorPart]:
        """Return all Kronecker factors: pairs of a weight name and those of its factors, (0,), (1,) or (0,
        1), that have one owner."""
        return self._parts

    def owned(self) -> Collection[FactorKey]:
        """Return the factors that this process averages and inverts: pairs of a weight name and 0 (inputs) or
        1 (outputs' gradients)."""
        return tuple(factor for factor, owner in by_factor(self._parts).items() if owner == self._grid.rank)

    def worked(self) -> Collection[str]:
        """Return the weight names of the layers whose gradients this process multiplies by inverses."""
        return tuple(name for name in self._places if self._places[name] == self._grid.here)

    def begin(self, part: FactorPart, sums: Tensor, step: int) -> None:
        """Start to add the statistics of a running backward for the owner of ``part``. The vector ``sums`` is
        overwritten. All processes must call this equally often for each item of `parts`."""
        assert self._early_sums
        self._early_sums.add(part, sums.to(self._dtype), step)

    def _start(self, part: FactorPart, sums: Tensor) -> distributed.Work:
        owner = self._grid.everywhere(self._parts[part])
        started: distributed.Work | None = self._grid.call(
            distributed.reduce, sums, owner, group=self._early_group, async_op=True
        )
        assert started is not None  # this process is in the group
        return started

    def sums(self, sums: Iterable[tuple[FactorPart, Tensor]]) -> Iterable[tuple[FactorPart, Tensor]]:
        """Return the totals of statistics of the factors that this process owns: those that `begin` sent, if
        any, else of ``sums``."""
        if self._early_sums and (found := self._grid.call(self._early_sums.finish)):
            return found.items()
        parts = dict(sums)
        grid = self._grid
        return self._reduce_scatter(parts, self._parts, range(grid.size), grid.rank, grid.group).items()

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send the inverses just made (0 or 1, by weight name) to the layers' workers, and store received ones."""
        assert self._routes
        self._routes.send(made)

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the mean gradients, weighted by ``rows``, of the layers that this process works on. Without
        ``reduce_gradients``, return their gradients as given."""
        places = {name: self._places[name] for name in gradients}
        here = self._grid.here
        if not self._reduce:
            return {name: gradients[name] for name, place in places.items() if place == here}
        # In addition to its layers, each position in the block receives the sum of the weights.
        weights = {f"{ROWS} {place}": torch.full((1,), rows) for place in range(self._grid.width)}
        parts = {name: gradient * rows for name, gradient in gradients.items()} | weights
        places |= {name: place for place, name in enumerate(weights)}
        summed = self._reduce_scatter(parts, places, range(self._grid.width), here, self._grid.block)
        if self._grid.width < self._grid.size:
            self._all_reduce(list(summed.values()), self._grid.column)
        total = summed.pop(f"{ROWS} {here}")
        return {name: part / total for name, part in summed.items()}

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the updates of all layers ``names``, exchanged by broadcasts within the block, and the sum of
        ``product`` over the block's processes. A block of one process has both already."""
        # A block of one process has computed all updates.
        if self._grid.width == 1:
            return updates, product
        at = {place: [n for n in names if self._places[n] == place] for place in range(self._grid.width)}
        buffers: list[Tensor] = []
        started: list[Any] = []
        for place, here in at.items():
            if place == self._grid.here:
                buffer = self._flat([*(updates[name] for name in here), product.view(1)])
            else:
                size = sum(self._layers[name].shape.numel() for name in here)
                buffer = torch.empty(size + 1, dtype=self._dtype, device=product.device)
            source = self._grid.everywhere(self._grid.in_block(place))
            started.append(
                self._grid.call(distributed.broadcast, buffer, source, self._grid.block, async_op=True)
            )
            buffers.append(buffer)
        for work in started:
            self._grid.call(work.wait)
        found: dict[str, Tensor] = {}
        for here, buffer in zip(at.values(), buffers, strict=True):
            like = [self._layers[name].empty() for name in here]
            found |= dict(zip(here, _split(buffer[:-1], like), strict=True))
        return found, torch.stack([buffer[-1] for buffer in buffers]).sum()

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Average gradients in place by one all-reduce, weighted by ``rows``; unchanged without
        ``reduce_gradients``."""
        if not self._reduce or not gradients:
            return
        total = torch.full((1,), rows, dtype=self._dtype, device=next(iter(gradients)).device)
        for gradient in gradients:
            gradient.mul_(rows)
        self._all_reduce([*gradients, total], self._grid.group)
        for gradient in gradients:
            gradient.div_(total.to(gradient.dtype))

    def _reduce_scatter(
        self,
        parts: Mapping[Key, Tensor],
        places: Mapping[Key, int],
        among: range,
        here: int,
        group: ProcessGroup | None,
    ) -> dict[Key, Tensor]:
        """Add tensors over a group of processes, and return the sums for this process, by key. ``places``: the index in
        ``among`` of each sum's receiver; ``here``: of this process. All processes have the same keys and shapes."""
        mine = {name: part for name, part in parts.items() if places[name] == here}
        if len(among) == 1:
            return mine
        buffers = [self._flat([p for name, p in parts.items() if places[name] == place]) for place in among]
        total = torch.empty_like(buffers[here])
        self._grid.call(distributed.reduce_scatter, total, buffers, group=group)
        return dict(zip(mine, _split(total, list(mine.values())), strict=True))

    def _all_reduce(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
        """Replace each tensor by its sum over the processes of a group, in place. One buffer contains all tensors."""
        buffer = self._flat(tensors)
        self._grid.call(distributed.all_reduce, buffer, group=group)
        for tensor, total in zip(tensors, _split(buffer, tensors), strict=True):
            tensor.copy_(total)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors into one vector, in the data type of the Kronecker factors and on the device of the
        weights."""
        device = next(iter(self._layers.values())).weight.device
        nothing = torch.empty(0, dtype=self._dtype, device=device)  # there may be no tensors
        return torch.cat([nothing, *(t.reshape(-1).to(self._dtype) for t in tensors)])


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors with the shapes and types of ``like``."""
    parts = vector.split([t.numel() for t in like])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, like, strict=True)]
