"""Decide in which step each Kronecker factor is inverted again, so that no single step takes long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rematplan.optim.assignment import FactorKey
from rematplan.optim.layer import Layer
from rematplan.optim.load_balancing import longest_first
from rematplan.optim.options import Options


class Refresh:
    """Inverts the Kronecker factors that this process owns, some of them in each step, so that no step takes long.

    The factors of all layers are divided among ``inverse_every`` slots of about equal cost (`longest_first`). A factor
    is inverted in each step whose number modulo ``inverse_every`` is the factor's slot, if its moving average has
    changed since its last inversion.

    During the first ``early_steps`` steps, and while it has no inverse, a factor is inverted in every step in which its
    average has changed.
    """

    def __init__(self, layers: Mapping[str, Layer], owned: Collection[FactorKey], options: Options) -> None:
        self._layers = dict(layers)
        self._every, self._early = options.inverse_every, options.early_steps
        costs = {(n, s): side.cost for n, layer in layers.items() for s, side in enumerate(layer.sides)}
        # Slots are assigned to all factors, owned or not: a factor's slot must not depend on the number of processes.
        slots = longest_first(costs, self._every)
        self._slots = {key: slot for key, slot in slots.items() if key in owned}

    def __call__(self, clock: int, damping: Callable[[Layer], float]) -> Mapping[str, tuple[int, ...]]:
        """Invert the Kronecker factors whose inversion is due in step number ``clock``.

        Args:
            clock: the number of steps so far.
            damping: returns λ, the damping, of a layer.

        Returns:
            The factors that were inverted, by weight name (0: of the inputs, 1: of the outputs' gradients).
        """
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
