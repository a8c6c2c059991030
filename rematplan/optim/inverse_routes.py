"""Send new inverses of Kronecker factors from the processes that computed them to those that use them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from rematplan.optim.assignment import FactorKey, FactorPart
from rematplan.optim.damped_inverses import restored, saved
from rematplan.optim.grid import Grid
from rematplan.optim.layer import Layer

SavedInverses: TypeAlias = dict[FactorKey, dict[str, Any]]
Pass: TypeAlias = Callable[..., Any]
"""A function that sends its argument to other processes, or overwrites it with what another process sends."""


class InverseRoutes:
    """Sends new inverses from their owners to the layers' workers: first within the owner's block, then along a column
    of the grid. ``places``: the position of a layer's worker in each block."""

    def __init__(
        self,
        grid: Grid,
        layers: Mapping[str, Layer],
        parts: Mapping[FactorPart, int],
        places: Mapping[str, int],
    ) -> None:
        self._grid, self._layers, self._places = grid, layers, places
        routes = {(owner, places[name]) for (name, _), owner in parts.items()}
        alone = grid.width == grid.size  # a column is one process
        # All processes use the routes in the same order, so that no process waits for another forever.
        self._routes = sorted(route for route in routes if not alone or route[0] != route[1])

    def send(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send this process's new inverses ``made`` (of factors 0 or 1, by weight name) to the layers' workers, and
        store received ones. All processes must call this."""
        grid = self._grid
        for source, place in self._routes:
            relay = source - source % grid.width + place
            states = self._saved(made, place) if grid.rank == source else {}
            if source != relay and grid.rank in (source, relay):
                states = self._passed(states, grid.rank == source, *self._between(source, relay))
            if grid.width < grid.size and grid.here == place:
                states = self._passed(states, grid.rank == relay, *self._along_column(relay))
            for (name, at), state in states.items():
                if grid.rank != source:
                    layer = self._layers[name]
                    layer.sides[at].inverse = restored(state, layer.weight.device)

    def _saved(self, made: Mapping[str, tuple[int, ...]], place: int) -> SavedInverses:
        """Return, as dictionaries, this process's new inverses that workers at place ``place`` of blocks need."""
        keys = ((name, at) for name, these in made.items() for at in these if self._places[name] == place)
        found = {(name, at): self._layers[name].sides[at].inverse for name, at in keys}
        states = {key: saved(inverse) for key, inverse in found.items() if inverse is not None}
        return {key: _map(Tensor.contiguous, state) for key, state in states.items()}

    def _passed(self, states: SavedInverses, here: bool, whole: Pass, part: Pass) -> SavedInverses:
        """Send ``states``, or receive inverses if not ``here``; return them in both cases. ``whole`` transfers the
        kinds and shapes, ``part`` one tensor."""
        said: list[Any] = [{key: _map(torch.Tensor.to, state, "meta") for key, state in states.items()}]
        self._grid.call(whole, said)
        if not here:
            states = {
                key: _map(torch.empty_like, form, device=self._layers[key[0]].weight.device)
                for key, form in said[0].items()
            }
        for state in states.values():
            _map(lambda tensor: self._grid.call(part, tensor), state)
        return states

    def _between(self, source: int, target: int) -> tuple[Pass, Pass]:
        """Return functions that transfer a list of objects and a tensor from ``source`` to ``target``; the
        receiver's argument is overwritten."""
        grid = self._grid
        end: dict[str, Any] = {"group": grid.group}
        if grid.rank == source:
            end["dst"] = grid.everywhere(target)
            return functools.partial(distributed.send_object_list, **end), functools.partial(
                distributed.send, **end
            )
        end["src"] = grid.everywhere(source)
        return functools.partial(distributed.recv_object_list, **end), functools.partial(
            distributed.recv, **end
        )

    def _along_column(self, source: int) -> tuple[Pass, Pass]:
        """Return functions that broadcast a list of objects and a tensor from ``source`` along this column;
        receivers' arguments are overwritten."""
        end: dict[str, Any] = {"src": self._grid.everywhere(source), "group": self._grid.column}
        return functools.partial(distributed.broadcast_object_list, **end), functools.partial(
            distributed.broadcast, **end
        )


def _map(function: Callable[..., Any], state: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Apply ``function`` to each tensor of an inverse as a dictionary, and return the results. Strings are copied."""
    return {
        name: part
        if isinstance(part, str)
        else tuple(function(t, *args, **kwargs) for t in part)
        if isinstance(part, tuple)
        else function(part, *args, **kwargs)
        for name, part in state.items()
    }
