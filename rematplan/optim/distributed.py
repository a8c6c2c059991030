"""K-FAC on several processes: each inverts the factors of some layers (Osawa et al. 2019, 2020).

Each Kronecker factor has one owner: the process that averages and inverts it. Each layer has workers: the processes
that multiply its gradient by both inverses. Every process runs forward and backward on its part of the batch. Then

1. a reduce-scatter adds the packed statistics (sums of outer products) of all processes, after the backward. The owner
   of a factor receives its total. With ``early`` there is one reduce for each layer, while the backward runs;
2. owners average, damp and invert their factors;
3. a reduce-scatter averages the gradients. The workers of a layer receive the mean and multiply it by the inverses;
4. an all-gather, made of one broadcast per sender, distributes the updates to all processes.

With one worker per layer, steps 3 and 4 together move as many bytes as the all-reduce of gradients in plain data
parallelism, so only step 1 is additional. If `torch.nn.parallel.DistributedDataParallel` or FSDP2 has already averaged
the gradients, step 3 communicates nothing.

Both factors of a layer have one owner, unless inverting the two takes longer than the time of all inversions divided by
the number of processes: then they may have different owners (`assignment`). The owner of the larger inverse is a
worker. It receives the smaller inverse whenever that inverse is new, which is additional communication.

A layer may have several workers (``grad_workers``; Pauloski et al. 2021, KAISA). The processes then form a grid: each
row is a block of consecutive ranks, there are ``grad_workers`` blocks, and a column contains the ranks with the same
position in their blocks. The workers of a layer are the column of the owner of its larger inverse. New inverses are
sent along columns. Gradients are averaged within blocks and then along columns. Updates are sent within blocks, in
every step. One worker per layer needs the least memory. If every process is a worker of every layer, step 4 is not
needed.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from rematplan.optim.assignment import FactorKey, FactorPart, by_factor, homes, owners
from rematplan.optim.early_sums import EarlySums, Pending
from rematplan.optim.grid import Grid
from rematplan.optim.inverse_routes import InverseRoutes
from rematplan.optim.layer import Layer
from rematplan.optim.step_memory import Copies

Key = TypeVar("Key")
ROWS = "(rows)"


class Ranks:
    """The implementation of `Exchange` for several processes: what K-FAC's processes send each other in a step.

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
        self._grid = Grid(group, grad_workers)
        self.early, self._reduce = early, reduce_gradients
        # A separate group, since DistributedDataParallel communicates at the same time, in an order that may differ.
        self._early_group = self._grid.subgroup([range(self._grid.size)]) if early else None
        self._early_sums: EarlySums | None = None
        self._layers: Mapping[str, Layer] = {}
        self._parts: Mapping[FactorPart, int] = {}  # the rank of the owner
        self._places: Mapping[str, int] = {}  # the positions of layers' workers in each block
        self._routes: InverseRoutes | None = None
        self._dtype = torch.float32

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Assign the Kronecker factors of ``layers`` to the processes that will average and invert them.

        The time of inversions is divided evenly. Also choose which processes multiply each layer's gradient by the
        inverses.

        ``layers``: by weight name.
        """
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
        """Return all Kronecker factors of all layers: pairs of a weight name and a tuple of factors that have the same
        owner.

        The tuple is (0,) for the factor of the inputs, (1,) for that of the outputs' gradients, (0, 1) for both.
        """
        return self._parts

    def owned(self) -> Collection[FactorKey]:
        """Return the Kronecker factors that this process averages and inverts, as `assign` has chosen them.

        Each is a pair of a weight name and 0 (the factor of the inputs) or 1 (that of the outputs' gradients).
        """
        return tuple(factor for factor, owner in by_factor(self._parts).items() if owner == self._grid.rank)

    def worked(self) -> Collection[str]:
        """Return the weight names of the layers whose gradients this process multiplies by the inverses of Kronecker
        factors.
        """
        return tuple(name for name in self._places if self._places[name] == self._grid.here)

    def begin(self, part: FactorPart, sums: Tensor, step: int) -> None:
        """Start to add statistics that a backward has just computed over all processes, while the backward still runs.

        The process that inverts the factors receives the total. All processes must call this method equally often for
        each item of `parts`.

        Args:
            part: the weight name and the factors to which the statistics belong, an item of `parts`.
            sums: this process's statistics (sums of outer products), as a vector. It is overwritten.
            step: the number of the training step.
        """
        assert self._early_sums
        self._early_sums.add(part, sums.to(self._dtype), step)

    def _start(self, part: FactorPart, sums: Tensor) -> Pending:
        owner = self._grid.everywhere(self._parts[part])
        started: Pending | None = self._grid.call(
            distributed.reduce, sums, owner, group=self._early_group, async_op=True
        )
        assert started is not None  # this process is in the group
        return started

    def sums(self, sums: Iterable[tuple[FactorPart, Tensor]]) -> Iterable[tuple[FactorPart, Tensor]]:
        """Return the statistics added over all processes, for the factors that this process owns.

        If `begin` has sent statistics, they are the result, and ``sums`` is ignored. Otherwise a reduce-scatter adds
        ``sums``.

        Args:
            sums: this process's statistics: pairs of an item of `parts` (a weight name and factors) and a vector.

        Returns:
            Pairs of an item of `parts` and the total over all processes.
        """
        if self._early_sums and (found := self._grid.call(self._early_sums.finish)):
            return found.items()
        parts = dict(sums)
        grid = self._grid
        return self._reduce_scatter(parts, self._parts, range(grid.size), grid.rank, grid.group).items()

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send new inverses from their owners to the processes that multiply the layers' gradients by them.

        The inverses that this process receives are stored in its layers.

        ``made``: the factors that this process has just inverted, by weight name: 0 stands for the factor of the
        inputs, 1 for that of the outputs' gradients.
        """
        assert self._routes
        self._routes.send(made)

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the mean gradients, by weight name, of the layers that this process multiplies by inverses.

        The mean over the processes is computed by a reduce-scatter and an all-reduce, and ``rows`` is the weight of
        this process in it. If ``reduce_gradients`` is False, the gradients are returned as they are.
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
        """Return the updates of all layers in ``names``, and the sum of ``product`` over all these layers.

        Each process broadcasts the updates that it has computed, and its ``product``, within its block of consecutive
        ranks. If a block is one process, it has computed all updates, and nothing is sent.

        Args:
            names: the weight names of all layers to update.
            updates: the updates that this process has computed, by weight name.
            product: Σ lr² ⟨update, gradient⟩ over the layers in ``updates``, a scalar tensor.
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
        """Average gradients over the processes, in place, by one all-reduce.

        ``rows``: the weight of this process in the mean. If ``reduce_gradients`` is False, the gradients stay
        unchanged.
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
        """Add tensors over the processes of a group, and return the sums that are meant for this process, by key.

        Args:
            parts: this process's tensors, by key. All processes have the same keys and shapes.
            places: for each key, the index in the group of the process that receives the sum.
            among: the indices of all processes of the group, from 0.
            here: this process's index in the group.
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
        """Replace each tensor by its sum over the processes of a group, in place. One buffer contains all tensors."""
        buffer = self._flat(tensors)
        self._grid.call(distributed.all_reduce, buffer, group=group)
        for tensor, total in zip(tensors, _split(buffer, tensors), strict=True):
            tensor.copy_(total)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors into one vector, in the data type of the Kronecker factors and on the device of the
        weights.
        """
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
