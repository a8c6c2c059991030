"""Decide in which step each Kronecker factor is inverted again, so that no single step takes long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rematplan.optim.assignment import FactorKey, longest_first
from rematplan.optim.layer import Layer
from rematplan.optim.options import Options


class Refresh:
    """Inverts this process's factors whose averages have changed: each once in ``inverse_every`` steps, spread over
    these. In the first ``early_steps`` steps, and while it has no inverse, a factor is inverted in each step."""

    def __init__(self, layers: Mapping[str, Layer], owned: Collection[FactorKey], options: Options) -> None:
        self._layers = dict(layers)
        self._every, self._early = options.inverse_every, options.early_steps
        costs = {(n, s): side.cost for n, layer in layers.items() for s, side in enumerate(layer.sides)}
        # Slots are assigned to all factors, owned or not: a factor's slot must not depend on the number of processes.
        slots = longest_first(costs, self._every)
        self._slots = {key: slot for key, slot in slots.items() if key in owned}

    def __call__(self, clock: int, damping: Callable[[Layer], float]) -> Mapping[str, tuple[int, ...]]:
        """Invert the factors that are due in step ``clock``, and return them (0 or 1) by weight name.
        ``damping``: λ of a layer."""
        made: dict[str, tuple[int, ...]] = {}
        for name, at in self._due(clock):
            made[name] = (*made.get(name, ()), at)
        for name, sides in made.items():
            layer = self._layers[name]
            dampings = layer.dampings(damping(layer))
            for at in sides:
                layer.sides[at].invert(dampings[at])
        return made

    def _due(self, clock: int) -> list[tuple[str, int]]:
        return [
            (name, at)
            for (name, at), slot in self._slots.items()
            if (side := self._layers[name].sides[at]).changed
            and (side.inverse is None or clock < self._early or clock % self._every == slot)
        ]
