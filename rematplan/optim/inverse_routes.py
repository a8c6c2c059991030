"""Send new inverses from the owners of factors to the workers of layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from rematplan.optim.assignment import FactorKey, Part
from rematplan.optim.damped_inverses import restored, saved
from rematplan.optim.grid import Grid
from rematplan.optim.layer import Layer

SavedInverses: TypeAlias = dict[FactorKey, dict[str, Any]]
Pass: TypeAlias = Callable[..., Any]
"""A function that sends its argument to other processes, or fills it with what it receives."""


class InverseRoutes:
    """Sends new inverses: from a factor's owner to the layer's worker in the owner's block, then along the worker's
    column.

    Processes form a grid (`Grid`): rows are blocks of consecutive ranks. A worker multiplies the layer's gradient by
    both inverses; there is one in each block.

    Args:
        grid: the processes.
        layers: by weight name.
        parts: the rank of the owner of each layer's factors.
        places: the position, in each block, of each layer's worker.
    """

    def __init__(
        self, grid: Grid, layers: Mapping[str, Layer], parts: Mapping[Part, int], places: Mapping[str, int]
    ) -> None:
        self._grid, self._layers, self._places = grid, layers, places
        routes = {(owner, places[name]) for (name, _), owner in parts.items()}
        alone = grid.width == grid.size  # a column is one process
        # In the same order in all processes, so that none waits for another forever.
        self._routes = sorted(route for route in routes if not alone or route[0] != route[1])

    def send(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Send the inverses of the factors in ``made``, and put the inverses that this process receives into its
        layers.

        All processes must call it. ``made``: the factors that this process has just inverted, by weight name (0: of the
        inputs, 1: of the outputs' gradients).
        """
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
        """Return the inverses in ``made`` that the workers at a position in the blocks need."""
        keys = ((name, at) for name, these in made.items() for at in these if self._places[name] == place)
        found = {(name, at): self._layers[name].sides[at].inverse for name, at in keys}
        states = {key: saved(inverse) for key, inverse in found.items() if inverse is not None}
        return {key: _map(Tensor.contiguous, state) for key, state in states.items()}

    def _passed(self, states: SavedInverses, here: bool, whole: Pass, part: Pass) -> SavedInverses:
        """Send saved inverses if they are in this process (``here``), otherwise receive them; return them.

        ``whole`` first passes the kinds and shapes of all inverses, in a list of one object; then ``part`` passes each
        tensor.
        """
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
        """Return two functions that pass an object and a tensor from process ``source`` to process ``target``.

        They send if this process is ``source``, and receive if it is ``target``.
        """
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
        """Return two functions that broadcast an object and a tensor from process ``source`` to its column."""
        end: dict[str, Any] = {"src": self._grid.everywhere(source), "group": self._grid.column}
        return functools.partial(distributed.broadcast_object_list, **end), functools.partial(
            distributed.broadcast, **end
        )


def _map(function: Callable[..., Any], state: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a saved inverse with a function applied to each of its tensors."""
    return {
        name: part
        if isinstance(part, str)
        else tuple(function(t, *args, **kwargs) for t in part)
        if isinstance(part, tuple)
        else function(part, *args, **kwargs)
        for name, part in state.items()
    }
