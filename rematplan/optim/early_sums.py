"""Statistics that leave for their owners while the backward still runs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from torch import Tensor

from rematplan.optim.layer import Layer


class Pending(Protocol):
    """A communication that has been started."""

    def wait(self) -> object:
        """Wait until the communication is complete."""


class EarlySums:
    """Adds the statistics of all processes layer by layer, each at its owner, as soon as a backward completes them.

    Processes may complete the layers in different orders, because their plans differ. So that all start the same
    communications in the same order, each backward is one round over all layers, last layer first: the statistics of a
    layer wait until those of the layers before it have been sent. `finish` completes the rounds, with zeros for a layer
    that got no statistics. All processes need the same number of backwards with statistics between two calls of
    `finish`.

    Args:
        layers: by weight name, in the same order in all processes.
        owned: the layers whose sums this process receives.
        start: takes a layer's name and a vector, and starts the sum over all processes into the owner's vector.
    """

    def __init__(
        self, layers: Mapping[str, Layer], owned: Collection[str], start: Callable[[str, Tensor], Pending]
    ) -> None:
        self._layers, self._owned, self._start = dict(layers), owned, start
        self._order = tuple(reversed(self._layers))
        self._waiting: dict[str, deque[Tensor]] = defaultdict(deque)
        self._step: int | None = None
        self._clear()

    def _clear(self) -> None:
        self._received: Counter[str] = Counter()
        self._sent = 0
        self._started: list[tuple[str, Tensor, Pending]] = []
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, sums: Tensor, step: int) -> None:
        """Send a layer's statistics of one backward, or keep them until those before them have been sent.

        The first statistics of a new training step drop those of an earlier one that `finish` did not return: its
        backwards led to no update.

        Args:
            name: the layer.
            sums: a vector that is overwritten.
            step: the number of the training step.
        """
        if step != self._step:
            self.finish()
            self._step = step
        self._waiting[name].append(sums)
        self._received[name] += 1
        while self._waiting[self._next]:
            self._send(self._waiting[self._next].popleft())

    def finish(self) -> dict[str, Tensor]:
        """Complete all rounds and return the sums of the owned layers by name; {} if there were no rounds."""
        rounds = max(self._received.values(), default=0)
        while self._sent < rounds * len(self._order):
            waiting = self._waiting[self._next]
            self._send(waiting.popleft() if waiting else self._layers[self._next].no_sums())
        self._collect()
        found = self._sums
        self._clear()
        return found

    @property
    def _next(self) -> str:
        return self._order[self._sent % len(self._order)]

    def _send(self, sums: Tensor) -> None:
        name = self._next
        if name == self._order[0]:
            self._collect()  # so that no more than one round's vectors are allocated
        self._started.append((name, sums, self._start(name, sums)))
        self._sent += 1

    def _collect(self) -> None:
        """Wait for the communications that have been started, and add what they brought."""
        for name, sums, pending in self._started:
            pending.wait()
            if name in self._owned:
                self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        self._started = []
