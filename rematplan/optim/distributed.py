"""K-FAC on several processes: each inverts the factors of some layers (Osawa et al. 2019, 2020).

Every process runs forward and backward on its part of the batch. Then

1. a reduce-scatter adds the packed factors of all processes, each factor's at its owner, after the backward or,
   layer by layer, while it runs (``early``);
2. owners average, damp and invert them;
3. a reduce-scatter averages the gradients, each layer's at its workers, which multiply it by the inverses;
4. an all-gather distributes the updates to all processes.

Steps 3 and 4 together move as many bytes as the all-reduce of gradients in plain data parallelism, so only step 1 is
additional. If `torch.nn.parallel.DistributedDataParallel` or FSDP2 has already averaged the gradients, step 3 is left
out.

Both factors of a layer have one owner, unless their inversion takes longer than an even share of the time: then
each has its owner (`assignment`). The owner of the larger inverse multiplies the gradient, and gets the smaller
inverse from the other owner when that is new. These numbers are communicated in addition.

A layer may have several workers (``grad_workers``; Pauloski et al. 2021, KAISA). The processes then form a grid:
each row is a block of consecutive ranks, there are ``grad_workers`` blocks, and a column contains the ranks with
the same position in their blocks. The workers of a layer are the column of the owner of its larger inverse. New
inverses are sent along columns; updates are sent within blocks, in every step. One worker per layer needs the least
memory; if every process is a worker of every layer, step 4 is not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from rematplan.optim.assignment import FactorKey, Part, by_factor, homes, owners
from rematplan.optim.early_sums import EarlySums, Pending
from rematplan.optim.grid import Grid
from rematplan.optim.inverse_routes import InverseRoutes
from rematplan.optim.layer import Layer

Key = TypeVar("Key")
ROWS = "(rows)"


class Ranks:
    """The implementation of `Exchange` for the processes of a group: what K-FAC's processes send each other in a step.

    Args:
        group: the process group; None for all processes.
        grad_workers: for each layer, the number of processes that multiply its gradient by the inverses; a divisor of
            the number of processes.
        reduce_gradients: whether gradients are those of each process alone. They are then averaged here, weighted by
            the ``rows`` of `KFAC.step`. False if DistributedDataParallel or FSDP2 has averaged them.
        early: whether the statistics of a planned module are sent while the backward still runs, layer by layer, and
            not in `KFAC.step`. Each micro-batch then sends its own, and all processes need the same number of backwards
            in a training step.

    Raises:
        UsageError: there is no process group, or ``grad_workers`` is no divisor of the number of processes.
        ProcessEnded: from any method, if another process has ended or cannot be reached.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        grad_workers: int = 1,
        reduce_gradients: bool = True,
        early: bool = False,
    ) -> None:
        self._grid = Grid(group, grad_workers)
        self.early, self._reduce = early, reduce_gradients
        # A group of their own: DistributedDataParallel communicates at the same time, in an order that may differ.
        self._early_group = self._grid.subgroup([range(self._grid.size)]) if early else None
        self._early_sums: EarlySums | None = None
        self._layers: Mapping[str, Layer] = {}
        self._parts: Mapping[Part, int] = {}  # with their owners
        self._places: Mapping[str, int] = {}  # the positions of layers' workers in each block
        self._routes: InverseRoutes | None = None
        self._dtype = torch.float32

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Assign the layers' factors to owners, so that the time of inversions is divided evenly. ``layers``: by weight
        name."""
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

    def parts(self) -> Collection[Part]:
        """Return all factors of all layers: pairs of a weight name and the factors of this weight that have the same
        owner."""
        return self._parts

    def owned(self) -> Collection[FactorKey]:
        """Return the factors that this process averages and inverts, as `assign` has chosen them."""
        return tuple(factor for factor, owner in by_factor(self._parts).items() if owner == self._grid.rank)

    def worked(self) -> Collection[str]:
        """Return the weight names of the layers whose gradients this process multiplies by inverses."""
        return tuple(name for name in self._places if self._places[name] == self._grid.here)

    def begin(self, part: Part, sums: Tensor, step: int) -> None:
        """Start to add one layer's statistics of one backward, of all processes, at their owner.

        Args:
            part: an item of `parts`.
            sums: this process's statistics, a vector that is overwritten.
            step: the number of the training step.
        """
        assert self._early_sums
        self._early_sums.add(part, sums.to(self._dtype), step)

    def _start(self, part: Part, sums: Tensor) -> Pending:
        owner = self._grid.everywhere(self._parts[part])
        started: Pending | None = self._grid.call(
            distributed.reduce, sums, owner, group=self._early_group, async_op=True
        )
        assert started is not None  # this process is in the group
        return started

    def sums(self, sums: Iterable[tuple[Part, Tensor]]) -> Iterable[tuple[Part, Tensor]]:
        """Return the statistics added over all processes, for the factors that this process owns.

        If `begin` has sent statistics, the result is what it sent, and ``sums`` is ignored. Otherwise ``sums``, pairs
        of an item of `parts` and a vector, are added by a reduce-scatter.
        """
        if self._early_sums and (found := self._grid.call(self._early_sums.finish)):
            return found.items()
        parts = dict(sums)
        grid = self._grid
        return self._reduce_scatter(parts, self._parts, range(grid.size), grid.rank, grid.group).items()

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send new inverses from each factor's owner to the layer's workers, and put received ones into the layers.

        ``made``: the factors that this process has just inverted, by weight name (0: of the inputs, 1: of the outputs'
        gradients).
        """
        assert self._routes
        self._routes.send(made)

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the mean gradients of the layers whose gradients this process multiplies by inverses, by weight name.

        They are averaged by a reduce-scatter and an all-reduce, with the weight ``rows`` for this process. If
        ``reduce_gradients`` is False, gradients are not averaged.
        """
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
        """Return the updates of all layers in ``names``, and the sum of ``product`` over processes with different
        layers.

        Each process broadcasts, within its block of consecutive ranks, the updates that it has computed and its
        ``product``.
        """
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
        """Average gradients over the processes, in place, by one all-reduce. ``rows``: the weight of this process in
        the mean.

        If ``reduce_gradients`` is False, the gradients stay unchanged.
        """
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
        """Return the sums over the processes of a group of those tensors that this process is to receive.

        Args:
            parts: this process's tensors, by key.
            places: for each key, the member of the group that receives the sum.
            among: all members.
            here: this process's number among the members.
            group: the process group; None for all processes.
        """
        mine = {name: part for name, part in parts.items() if places[name] == here}
        if len(among) == 1:
            return mine
        buffers = [self._flat([p for name, p in parts.items() if places[name] == place]) for place in among]
        total = torch.empty_like(buffers[here])
        self._grid.call(distributed.reduce_scatter, total, buffers, group=group)
        return dict(zip(mine, _split(total, list(mine.values())), strict=True))

    def _all_reduce(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
        """Replace tensors by their sums over a group. One buffer contains all of them."""
        buffer = self._flat(tensors)
        self._grid.call(distributed.all_reduce, buffer, group=group)
        for tensor, total in zip(tensors, _split(buffer, tensors), strict=True):
            tensor.copy_(total)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors as one vector, in the type of the factors and on the device of the weights."""
        device = next(iter(self._layers.values())).weight.device
        return torch.cat(
            [torch.empty(0, dtype=self._dtype, device=device), *(_vector(t).to(self._dtype) for t in tensors)]
        )


def _vector(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors with the shapes and types of ``like``."""
    parts = vector.split([t.numel() for t in like])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, like, strict=True)]
