"""K-FAC on several processes: each inverts the factors of some layers (Osawa et al. 2019, 2020).

Every process runs forward and backward on its part of the batch. Then

1. a reduce-scatter adds the packed factors of all processes, each layer's at its owner, after the backward or,
   layer by layer, while it runs (``early``);
2. owners average, damp and invert them;
3. a reduce-scatter averages the gradients, each layer's at its workers, which multiply it by the inverses;
4. an all-gather distributes the updates to all processes.

Steps 3 and 4 together move as many bytes as the all-reduce of gradients in plain data parallelism, so only step 1 is
additional. If `torch.nn.parallel.DistributedDataParallel` or FSDP2 has already averaged the gradients, step 3 is left
out.

A layer may have several workers (``grad_workers``; Pauloski et al. 2021, KAISA). The processes then form a grid: each
row is a block of consecutive ranks, there are ``grad_workers`` blocks, and a column contains the ranks with the same
position in their blocks. The workers of a layer are the column of its owner. New inverses are sent along columns;
updates are sent within blocks, in every step. One worker per layer needs the least memory; if every process is a
worker of every layer, step 4 is not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from rematplan.ir import ProcessEnded, UsageError
from rematplan.optim.damped_inverses import restored, saved
from rematplan.optim.early_sums import EarlySums, Pending
from rematplan.optim.layer import Layer
from rematplan.optim.load_balancing import longest_first

Result = TypeVar("Result")
ROWS = "(rows)"


class Ranks:
    """The exchange between the processes of a group.

    Args:
        group: the processes; by default all.
        grad_workers: the number of workers of a layer, a divisor of the number of processes.
        reduce_gradients: whether gradients are those of each process alone. They are then averaged here, weighted by
            the ``rows`` of `KFAC.step`. False if DistributedDataParallel or FSDP2 has averaged them.
        early: whether the statistics of a planned module are sent while the backward still runs, layer by layer, and
            not in `KFAC.step`. Each micro-batch then sends its own. All processes need the same number of backwards
            in a training step.

    Raises:
        UsageError: there is no process group, or ``grad_workers`` is no divisor.
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
        if not distributed.is_initialized():
            raise UsageError(
                "there is no process group: call torch.distributed.init_process_group, or run under torchrun"
            )
        self._group = group
        self._rank, self._size = distributed.get_rank(group), distributed.get_world_size(group)
        if grad_workers < 1 or self._size % grad_workers:
            raise UsageError(f"grad_workers is {grad_workers}, which does not divide {self._size} processes")
        self.early, self._reduce = early, reduce_gradients
        self._width = self._size // grad_workers
        self._block = self._subgroup([range(b, b + self._width) for b in range(0, self._size, self._width)])
        self._column = self._subgroup([range(c, self._size, self._width) for c in range(self._width)])
        # A group of their own: DistributedDataParallel communicates at the same time, in an order that may differ.
        self._early_group = self._subgroup([range(self._size)]) if early else None
        self._early_sums: EarlySums | None = None
        self._layers: Mapping[str, Layer] = {}
        self._owner: Mapping[str, int] = {}
        self._dtype = torch.float32

    def _subgroup(self, parts: Sequence[range]) -> ProcessGroup | None:
        """Create a process group for each part, in the same order in every process, and return the one with this
        process.
        """
        found: ProcessGroup | None = None
        for part in parts:
            made: Any = self._guarded(distributed.new_group, [self._global(rank) for rank in part])
            found = made if self._rank in part else found
        return found

    def _global(self, rank: int) -> int:
        return rank if self._group is None else distributed.get_global_rank(self._group, rank)

    def assign(self, layers: Mapping[str, Layer]) -> None:
        """Assign each layer to an owner, so that the time of the inversions is divided evenly."""
        self._layers = layers
        costs = {name: sum(side.cost for side in layer.sides) for name, layer in layers.items()}
        self._owner = longest_first(costs, self._size)
        self._dtype = functools.reduce(torch.promote_types, (layer.a.dtype for layer in layers.values()))
        if self.early:
            self._early_sums = EarlySums(layers, self.owned(), self._start)

    def owned(self) -> Collection[str]:
        """Return the names of the layers that `assign` gave to this process."""
        return tuple(name for name, owner in self._owner.items() if owner == self._rank)

    def worked(self) -> Collection[str]:
        """Return the names of the layers whose gradients this process multiplies by inverses."""
        return tuple(name for name in self._owner if self._place(name) == self._rank % self._width)

    def _place(self, name: str) -> int:
        """Return the position, in each block, of the layer's worker."""
        return self._owner[name] % self._width

    def begin(self, name: str, sums: Tensor, step: int) -> None:
        """Start to add one layer's statistics at its owner; see `EarlySums`."""
        assert self._early_sums
        self._early_sums.add(name, sums.to(self._dtype), step)

    def _start(self, name: str, sums: Tensor) -> Pending:
        owner = self._global(self._owner[name])
        started: Pending | None = self._guarded(
            distributed.reduce, sums, owner, group=self._early_group, async_op=True
        )
        assert started is not None  # this process is in the group
        return started

    def sums(self, sums: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return the sums over all processes of the statistics of the layers that this process owns.

        If `begin` has sent statistics, the result is their sum. Otherwise ``sums`` are added by a reduce-scatter.
        """
        if self._early_sums and (found := self._guarded(self._early_sums.finish)):
            return found.items()
        parts = dict(sums)
        summed = self._reduce_scatter(parts, self._owner, range(self._size), self._rank, self._group)
        return summed.items()

    def inverses(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Broadcast new inverses from each layer's owner to its other workers: first kinds and shapes, then tensors.

        ``made``: see `Exchange.inverses`.
        """
        if self._width == self._size:
            return
        for rank in range(self._rank % self._width, self._size, self._width):
            source, here = self._global(rank), rank == self._rank
            states = self._saved(made) if here else {}
            said: list[Any] = [{key: _map(torch.Tensor.to, state, "meta") for key, state in states.items()}]
            self._guarded(distributed.broadcast_object_list, said, source, self._column)
            for (name, side), form in said[0].items():
                device = self._layers[name].weight.device
                state = states[name, side] if here else _map(torch.empty_like, form, device=device)
                _map(lambda t, source=source: self._send(t, source), state)
                if not here:
                    self._layers[name].sides[side].inverse = restored(state, device)

    def _saved(self, made: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, int], dict[str, Any]]:
        sides = {(name, at): self._layers[name].sides[at] for name, these in made.items() for at in these}
        states = {key: saved(side.inverse) for key, side in sides.items() if side.inverse is not None}
        return {key: _map(Tensor.contiguous, state) for key, state in states.items()}

    def _send(self, tensor: Tensor, source: int) -> None:
        self._guarded(distributed.broadcast, tensor, source, self._column)

    def gradients(self, gradients: Mapping[str, Tensor], rows: float) -> Mapping[str, Tensor]:
        """Return the mean gradients of the layers that this process is a worker of.

        They are averaged by a reduce-scatter and an all-reduce, weighted by ``rows``. If ``reduce_gradients`` is False
        they are returned unchanged.
        """
        places = {name: self._place(name) for name in gradients}
        here = self._rank % self._width
        if not self._reduce:
            return {name: gradients[name] for name, place in places.items() if place == here}
        # In addition to its layers, each position in the block receives the sum of the weights.
        weights = {f"{ROWS} {place}": torch.full((1,), rows) for place in range(self._width)}
        parts = {name: gradient * rows for name, gradient in gradients.items()} | weights
        places |= {name: place for place, name in enumerate(weights)}
        summed = self._reduce_scatter(parts, places, range(self._width), here, self._block)
        if self._width < self._size:
            self._all_reduce(list(summed.values()), self._column)
        total = summed.pop(f"{ROWS} {here}")
        return {name: part / total for name, part in summed.items()}

    def updates(
        self, names: Collection[str], updates: Mapping[str, Tensor], product: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the updates of all layers in ``names``, and the sum of ``product`` over all layers.

        Each process broadcasts the updates that it has computed, together with its ``product``.
        """
        if self._width == 1:
            return updates, product
        at = {place: [n for n in names if self._place(n) == place] for place in range(self._width)}
        buffers: list[Tensor] = []
        started: list[Any] = []
        for place, here in at.items():
            if place == self._rank % self._width:
                buffer = self._flat([*(updates[name] for name in here), product.view(1)])
            else:
                size = sum(self._layers[name].shape.numel() for name in here)
                buffer = torch.empty(size + 1, dtype=self._dtype, device=product.device)
            source = self._global(self._rank - self._rank % self._width + place)
            started.append(self._guarded(distributed.broadcast, buffer, source, self._block, async_op=True))
            buffers.append(buffer)
        for work in started:
            self._guarded(work.wait)
        found: dict[str, Tensor] = {}
        for here, buffer in zip(at.values(), buffers, strict=True):
            like = [self._layers[name].empty() for name in here]
            found |= dict(zip(here, _split(buffer[:-1], like), strict=True))
        return found, torch.stack([buffer[-1] for buffer in buffers]).sum()

    def others(self, gradients: Collection[Tensor], rows: float) -> None:
        """Replace gradients by their means over the processes, weighted by ``rows``, in place, by one all-reduce.

        If ``reduce_gradients`` is False they stay unchanged.
        """
        if not self._reduce or not gradients:
            return
        total = torch.full((1,), rows, dtype=self._dtype, device=next(iter(gradients)).device)
        for gradient in gradients:
            gradient.mul_(rows)
        self._all_reduce([*gradients, total], self._group)
        for gradient in gradients:
            gradient.div_(total.to(gradient.dtype))

    def _reduce_scatter(
        self,
        parts: Mapping[str, Tensor],
        places: Mapping[str, int],
        among: range,
        here: int,
        group: ProcessGroup | None,
    ) -> dict[str, Tensor]:
        """Return the sums over a group of the tensors in ``parts`` whose place is ``here``.

        ``places``: for each name, the member of the group that gets the sum. ``among``: all members.
        """
        mine = {name: part for name, part in parts.items() if places[name] == here}
        if len(among) == 1:
            return mine
        buffers = [self._flat([p for name, p in parts.items() if places[name] == place]) for place in among]
        total = torch.empty_like(buffers[here])
        self._guarded(distributed.reduce_scatter, total, buffers, group=group)
        return dict(zip(mine, _split(total, list(mine.values())), strict=True))

    def _all_reduce(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
        """Replace tensors by their sums over a group. One buffer contains all of them."""
        buffer = self._flat(tensors)
        self._guarded(distributed.all_reduce, buffer, group=group)
        for tensor, total in zip(tensors, _split(buffer, tensors), strict=True):
            tensor.copy_(total)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors as one vector, in the factors' type."""
        device = next(iter(self._layers.values())).weight.device
        return torch.cat(
            [torch.empty(0, dtype=self._dtype, device=device), *(_vector(t).to(self._dtype) for t in tensors)]
        )

    def _guarded(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function of `torch.distributed` and return its result.

        Raises:
            ProcessEnded: the call failed.
        """
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise ProcessEnded(
                f"rank {self._rank} of {self._size}: another process has ended or cannot be reached ({reason})"
            ) from None


def _vector(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors with the shapes and types of ``like``."""
    parts = vector.split([t.numel() for t in like])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, like, strict=True)]


def _map(function: Callable[..., Any], state: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a saved inverse with ``function`` applied to each of its tensors."""
    return {
        name: part
        if isinstance(part, str)
        else tuple(function(t, *args, **kwargs) for t in part)
        if isinstance(part, tuple)
        else function(part, *args, **kwargs)
        for name, part in state.items()
    }
