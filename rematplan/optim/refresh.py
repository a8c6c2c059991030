"""When which inverse is made again: spread over steps, so that none is long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rematplan.optim.layer import Layer
from rematplan.optim.slots import longest_first


class Refresh:
    """Makes the inverses of the layers that this process owns.

    Each side of a layer has a slot among ``every`` steps, by `longest_first`, and is inverted again in the step of its
    slot if its average has changed. In the first ``early`` steps, and where it has no inverse, it is inverted as soon
    as its average changes.
    """

    def __init__(self, layers: Mapping[str, Layer], owned: Collection[str], every: int, early: int) -> None:
        self._layers = {name: layer for name, layer in layers.items() if name in owned}
        self._every, self._early = every, early
        costs = {(n, s): side.cost for n, layer in layers.items() for s, side in enumerate(layer.sides)}
        # Those of all layers: when a layer is inverted must not depend on how many processes there are.
        slots = longest_first(costs, every)
        self._slots = {key: slot for key, slot in slots.items() if key[0] in self._layers}

    def __call__(self, clock: int, damping: Callable[[Layer], float]) -> Mapping[str, tuple[int, ...]]:
        """Invert what is due at the step ``clock``: by layer, which sides were (0: inputs, 1: outputs)."""
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
