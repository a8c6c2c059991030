"""Add statistics (sums of outer products) of all processes while the backward still runs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping

from torch import Tensor
from torch.distributed import Work

from rematplan.optim.assignment import FactorPart


class EarlySums:
    """Adds statistics over all processes as soon as a backward has computed them. A part is one factor of a layer, or
    both. All processes need the same number of backwards with statistics between two calls of `finish`."""

    def __init__(
        self,
        parts: Mapping[FactorPart, Callable[[], Tensor]],
        owned: Collection[FactorPart],
        start: Callable[[FactorPart, Tensor], Work],
    ) -> None:
        # Zeros by part, parts whose sums come here, and the function that starts to add a vector into that of
        # the part's owner.
        self._nothing, self._owned, self._start = dict(parts), owned, start
        # Plans differ, so processes compute layers in different orders, but must start the same
        # communications in one order.
        self._order = tuple(reversed(self._nothing))
        self._waiting: dict[FactorPart, deque[Tensor]] = defaultdict(deque)
        self._step: int | None = None
        self._clear()

    def _clear(self) -> None:
        self._received: Counter[FactorPart] = Counter()
        self._sent = 0
        self._started: list[tuple[FactorPart, Tensor, Work]] = []
        self._sums: dict[FactorPart, Tensor] = {}

    def add(self, part: FactorPart, sums: Tensor, step: int) -> None:
        """Send the statistics of one backward for a part, or store them until the parts before it are sent. ``sums`` is
        overwritten. With a new ``step``, what `finish` did not return is dropped."""
        # What `finish` did not return is dropped: the backwards of that step led to no update.
        if step != self._step:
            self.finish()
            self._step = step
        self._waiting[part].append(sums)
        self._received[part] += 1
        while self._waiting[self._next]:
            self._send(self._waiting[self._next].popleft())

    def finish(self) -> dict[FactorPart, Tensor]:
        """Send what is not sent yet, and return the sums of this process's parts; empty if it owns none, or without a
        backward since the last call."""
        # Parts without statistics are sent as zeros.
        rounds = max(self._received.values(), default=0)
        while self._sent < rounds * len(self._order):
            waiting = self._waiting[self._next]
            self._send(waiting.popleft() if waiting else self._nothing[self._next]())
        self._collect()
        found = self._sums
        self._clear()
        return found

    @property
    def _next(self) -> FactorPart:
        return self._order[self._sent % len(self._order)]

    def _send(self, sums: Tensor) -> None:
        part = self._next
        if part == self._order[0]:
            self._collect()  # so that at most the vectors of one backward are allocated
        self._started.append((part, sums, self._start(part, sums)))
        self._sent += 1

    def _collect(self) -> None:
        """Wait for the communications that have been started, and add the received vectors to the sums of this
        process's parts."""
        for part, sums, pending in self._started:
            pending.wait()
            if part in self._owned:
                self._sums[part] = self._sums[part] + sums if part in self._sums else sums
        self._started = []
