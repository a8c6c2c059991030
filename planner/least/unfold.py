"""Unfold actions back in time into runs within a number of bytes, with eliminations put off as long as
possible.

Tensors that stay though the actions eliminate them are *extras*. They remain certified, so one can always go:
the cheapest for its bytes and the distance to its next use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from rematplan.planner.least.values import Values


class TooLong(Exception):
    """The sequence of runs would be longer than the limit."""


class Unfolding:
    """A sequence of at most ``most`` runs that grows back in time, within ``limit`` bytes of large tensors. Large
    tensors that later runs read belong to a *frame*: one for the outputs, and one for each elimination (a tensor
    computed from nothing at that point)."""

    def __init__(self, values: Values, limit: int, most: int) -> None:
        """Begin without runs and demanded tensors. ``values``: for each tensor, how and within how many bytes it can be
        computed from nothing."""
        self.values, self.demands, self.limit, self.most = values, values.demands, limit, most
        tables = self.demands.tables
        self.size, self.value, self.maker = tables.size.tolist(), tables.value.tolist(), tables.maker.tolist()
        self.key = [v - s for v, s in zip(self.value, self.size, strict=True)]
        self.workspace = tables.workspace.tolist()
        self.reads = [self.demands.large_of(row) for row in self.demands.reads]
        self.writes = [self.demands.large_of(row) for row in self.demands.writes]
        large = self.demands.large
        self.small_reads = [[t for t in row if not large[t]] for row in self.demands.reads]
        self.small_writes = [[t for t in row if not large[t]] for row in self.demands.writes]
        self.frame_of: dict[int, set[int]] = {}  # demanded large tensors
        self.small: set[int] = set()  # demanded small tensors
        self.bytes, self.cost = 0, 0.0
        self.runs: list[int] = []  # back in time
        self.costs = [op.cost for op in self.demands.ops]
        self.price = self._prices()
        self.riders = self._riders()

    def _prices(self) -> list[float]:
        """Return, by tensor, the cost of computing it from nothing if no op ran twice. `_eliminate` later replaces it
        by the costs met."""
        count = len(self.demands.ops)
        behind = np.eye(count, dtype=np.bool_)
        for v, row in enumerate(self.demands.reads):
            for t in row:
                behind[v] |= behind[self.maker[t]]
        total = behind @ np.array(self.costs)
        return [float(total[v]) for v in self.maker]

    def _riders(self) -> dict[int, list[int]]:
        """Return, by large tensor, its readers that write only small tensors, some of them outputs or gradients, and
        may run more than once. They run when all they read is resident."""
        riders: dict[int, list[int]] = {}
        outputs = set(self.demands.outputs)
        for v, op in enumerate(self.demands.ops):
            small = self.small_writes[v]
            if self.writes[v] or not self.reads[v] or self.demands.is_once[v]:
                continue
            if any(t in outputs or op.phase == "backward" for t in small):
                for t in self.reads[v]:
                    riders.setdefault(t, []).append(v)
        return riders

    def run(self, actions: Sequence[int]) -> list[int]:
        """Return the ops to run, in order; `TooLong` if they are more than ``most``. ``actions``: back in time from the
        outputs, to tensors that can be computed from nothing, one after another, within the limit."""
        frame: set[int] = set()
        for t in self.demands.outputs:
            if self.demands.large[t]:
                self._demand(t, frame)
            else:
                self.small.add(t)
        self._follow(frame, actions)
        self._finish(frame, ())
        while self.small:  # small tensors that are left are computed first, and stay
            self._eliminate(max(self.small, key=self.maker.__getitem__))
        return self.runs[::-1]

    def _demand(self, t: int, frame: set[int]) -> None:
        self.frame_of[t] = frame
        frame.add(t)
        self.bytes += self.size[t]

    def _transition(self, v: int) -> tuple[int, int]:
        """Return the bytes resident while op ``v`` runs, and those demanded before it."""
        known, size = self.frame_of, self.size
        during, before = self.bytes + self.workspace[v], self.bytes
        for t in self.writes[v]:
            if t in known:
                before -= size[t]
            else:
                during += size[t]
        for t in self.reads[v]:
            if t not in known:
                during += size[t]
                before += size[t]
        return during, before

    def _regress(self, v: int, frame: set[int]) -> None:
        """Put a run of op ``v`` before the others: what it writes is no longer demanded, and new reads enter ``frame``.
        Then ops of `riders` that read these run, if they can. `TooLong` if there are more than ``most`` runs."""
        for t in self.writes[v]:
            if t in self.frame_of:
                self.frame_of.pop(t).discard(t)
                self.bytes -= self.size[t]
        fresh = [t for t in self.reads[v] if t not in self.frame_of]
        for t in fresh:
            self._demand(t, frame)
        self.small.difference_update(self.small_writes[v])
        self.small.update(self.small_reads[v])
        self.runs.append(v)
        self.cost += self.costs[v]
        if len(self.runs) > self.most:
            raise TooLong
        for t in fresh:
            for u in self.riders.get(t, ()):
                if not self.small.isdisjoint(self.small_writes[u]) and all(
                    r in self.frame_of for r in self.reads[u]
                ):
                    self._regress(u, frame)

    def _last_riders(self, v: int) -> list[int]:
        """Return the ops of `riders` to run after op ``v``, so put before the others first. They write small tensors
        still demanded, and read tensors of ``v`` that cannot be computed again."""
        lasting = [t for t in self.writes[v] if t in self.frame_of and t in self.demands.after_once]
        riders = dict.fromkeys(u for t in lasting for u in self.riders.get(t, ()))
        return [u for u in riders if not self.small.isdisjoint(self.small_writes[u])]

    def _eliminate(self, t: int) -> None:
        """Put runs before the others that compute tensor ``t`` from nothing, and note in ``price`` what they cost.
        `TooLong` if there are more than ``most`` runs."""
        before, v, frame = self.cost, self.maker[t], set[int]()
        self._regress(v, frame)
        self._finish(frame, self.values.recipe[v].tolist())
        cost = self.cost - before
        self.price[t] = max(cost, (self.price[t] + cost) / 2)

    def _is_certified(self, tensors: Iterable[int], size: int) -> bool:
        for t in sorted(tensors, key=self.key.__getitem__):
            size -= self.size[t]
            if size + self.value[t] > self.limit:
                return False
        return True

    def _certified_before(self, v: int, own: Iterable[int]) -> bool:
        """Return whether op ``v`` fits the limit before the other runs. The rest of ``own`` must then be computable
        from nothing within it, one after another."""
        during, before = self._transition(v)
        if during > self.limit:
            return False
        gone = self.writes[v]
        fresh = [t for t in self.reads[v] if t not in self.frame_of]
        return self._is_certified([*(t for t in own if t not in gone), *fresh], before)

    def _follow(self, frame: set[int], actions: Sequence[int]) -> None:
        """Put runs of those ops of ``actions`` that write a demanded tensor before the others; what they read enters
        ``frame``. Tensors that ``actions`` compute from nothing stay demanded as long as the limit allows."""
        uses: dict[int, list[int]] = {}
        for i, v in enumerate(actions):
            for t in self.reads[v] if v >= 0 else ():
                uses.setdefault(t, []).append(i)
        extras: set[int] = set()
        for i, v in enumerate(actions):
            if v < 0:
                extras |= {-1 - v} & self.frame_of.keys()
            elif any(t in self.frame_of and t not in extras for t in self.writes[v]):
                for u in self._last_riders(v):
                    extras.update(t for t in self.reads[u] if t not in self.frame_of)
                    self._regress(u, frame)
                while extras and not self._keeps(extras, v):
                    t = self._cheapest(extras, uses, i)
                    extras.discard(t)
                    self._eliminate(t)
                extras.difference_update(self.reads[v], self.writes[v])
                self._regress(v, frame)

    def _keeps(self, extras: set[int], v: int) -> bool:
        """Return whether all ``extras`` may stay demanded before a run of op ``v``, within the limit."""
        during, before = self._transition(v)
        rest = extras.difference(self.writes[v], self.reads[v])
        return during <= self.limit and self._is_certified(rest, before)

    def _cheapest(self, extras: set[int], uses: dict[int, list[int]], now: int) -> int:
        """Return the tensor of ``extras`` to compute from nothing: of those that fit, the cheapest for its bytes and
        next use. If none fits, it is the one with the smallest difference of value and size."""

        def price(t: int) -> tuple[float, int]:
            later = uses.get(t, [])
            at = bisect_left(later, now)
            distance = later[at] - now if at < len(later) else len(self.runs) + 10**6
            return self.price[t] / (max(1, self.size[t]) * (distance + 1)), t

        fits = [t for t in extras if self.bytes + self.key[t] <= self.limit]
        if fits:
            return min(fits, key=price)
        return min(extras, key=lambda t: (self.key[t], t))

    def _finish(self, frame: set[int], actions: Sequence[int]) -> None:
        """Put runs before the others until nothing of ``frame`` is demanded. They follow ``actions`` until the frame
        can be computed from nothing within the limit. Then its latest op runs if that stays so, else a tensor is
        computed from nothing."""
        at, certified = 0, False
        while frame:
            certified = certified or self._is_certified(frame, self.bytes)
            if not certified and at < len(actions):
                v, at = actions[at], at + 1
                if v < 0 and -1 - v in frame:
                    self._eliminate(-1 - v)
                elif v >= 0 and not frame.isdisjoint(self.writes[v]):
                    self._regress(v, frame)
                continue
            v = max(map(self.maker.__getitem__, frame))
            if self._certified_before(v, frame):
                self._regress(v, frame)
                continue
            room = self.limit - self.bytes
            fits = [t for t in frame if self.key[t] <= room]
            if fits:
                self._eliminate(max(fits, key=lambda t: (self.size[t] / (self.price[t] + 1e-9), t)))
            else:
                self._eliminate(min(frame, key=lambda t: (self.key[t], t)))
