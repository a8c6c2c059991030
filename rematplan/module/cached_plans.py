"""The compiled plans of a module, and which of them is valid for a call.

The key of an entry (`Tracing.key`) covers arguments, modes and structure; its guard covers state and values that the
traced forward read; `CacheEntry.fitting` covers gradients of earlier steps.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from rematplan.module.forward_capture import Tracing
from rematplan.module.plan_swaps import Running
from rematplan.module.symbolic_forward import Instance
from rematplan.module.unplanned_step import UnplannedStep
from rematplan.planner.core.plan import Plan
from rematplan.plans.refining import StepPlan
from rematplan.runtime import guards
from rematplan.runtime.execute.compiled_plan import CompiledPlan
from rematplan.runtime.graph.captured_step import in_model
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.statistics.insert import StatisticsStep


@dataclass
class LeastRecentlyUsed:
    """Drops the entries that were not used for longest. Entries with the same key count as used together."""

    limit: int
    """The largest number of entries that remain."""
    dropped: int = 0
    """The number of entries dropped so far."""
    _used: dict[Hashable, int] = field(default_factory=dict)
    _clock: Any = field(default_factory=count)

    def use(self, key: Hashable) -> None:
        """Record that the cache entries with this key are used now."""
        self._used[key] = next(self._clock)

    def trim(self, entries: dict[Any, list[Any]]) -> None:
        """Remove entries, in place, until ``limit`` remain: those of the key that was not used for longest, the oldest
        first. ``entries``: a list of entries, the oldest first, by key."""
        while sum(map(len, entries.values())) > self.limit:
            oldest = min(entries, key=lambda key: self._used.get(key, -1))
            del entries[oldest][0]
            self.dropped += 1
            if not entries[oldest]:
                del entries[oldest]
                self._used.pop(oldest, None)


@dataclass(eq=False)
class CacheEntry:
    """A compiled plan for one combination of arguments, modes, module state and outcomes of guards."""

    running: Running
    outputs: pytree.TreeSpec
    """The pytree structure of the forward's results, the attributes that it sets, and the arguments if it changes lists
    or dictionaries. Attributes are by the module's position, and by name."""
    constants: tuple[Any, ...]
    """The leaves of ``outputs``. A leaf is a constant or a placeholder: `ResultTensor` for an output tensor of the
    compiled plan, `ArgumentLeaf` for a leaf of the arguments, `ModuleTensor` for a parameter or buffer of the model."""
    guard: guards.Guard
    """The check that everything that the forward read while it was traced, except its arguments, is unchanged."""
    unplanned: UnplannedStep
    """The captured step, without statistics and before the planner changed it."""
    instance: Instance | None = None
    """The sizes of the call in a capture with symbolic sizes; None without such a capture."""
    carried: bool = False
    """Whether the plan was made at other sizes, so that the step of these sizes was not made."""
    statistics: StatisticsStep | None = None
    """The step with Kronecker-factored statistics; None if this entry's step computes none."""
    measured: CacheEntry | None = None
    """The entry for the same forward whose step also computes statistics; None until it is planned."""
    with_gradients: dict[tuple[frozenset[str], int], CacheEntry] = field(default_factory=dict)
    """Entries for steps during which gradients of earlier steps exist. A key is a pair: the names of the parameters
    that may have such gradients, and the largest number of bytes of such gradients with which the entry's plan fits the
    budget."""

    @property
    def plan(self) -> Plan:
        """The plan that calls follow now. A background search may replace it by a better plan between two steps."""
        return self.running.plan

    @property
    def compiled(self) -> CompiledPlan:
        """The compiled form of `plan`."""
        return self.running.compiled

    @cached_property
    def targets(self) -> dict[str, str]:
        """By name in the model, the name in the step of each parameter that gets a gradient."""
        found = (o.target for o in self.compiled.like.outputs if o.kind == "gradient")
        return {in_model(target): target for target in found}

    def fitting(self, gradients: int, names: Set[str]) -> CacheEntry | None:
        """Return an entry for the same call whose plan is known to fit with ``gradients`` bytes of earlier gradients of
        ``names``; None without one."""
        known = self.with_gradients.items()
        return next((w for (others, most), w in known if gradients <= most and names <= others), None)

    def counting(self, gradients: int, names: frozenset[str]) -> CacheEntry:
        """Note in `with_gradients` that the plan of this entry also fits with ``gradients`` bytes of gradients of
        ``names``, unless that is 0. Return this entry."""
        if gradients:
            self.with_gradients[names, gradients] = self
        return self

    def planned_again(
        self, made: StepPlan, unplanned: UnplannedStep, statistics: StatisticsStep | None = None
    ) -> CacheEntry:
        """Return an entry for the same calls with another step and plan. It also serves gradients of earlier steps, if
        the plan ``made`` counts some."""
        running = Running.of(made)
        other = replace(
            self,
            running=running,
            unplanned=unplanned,
            statistics=statistics,
            with_gradients={},
            measured=None,
        )
        return other.counting(made.gradients, next((names for names, _ in self.with_gradients), frozenset()))

    def swap_plan(self) -> None:
        """Replace the plan by the better one of ``running.improved``, and stop serving earlier gradients with which
        it does not fit."""
        found = self.running.swap()
        # The old plan also fitted with earlier gradients; the new one may not.
        alone = [key for key, w in self.with_gradients.items() if w is self and key[1] > found.gradients]
        for key in alone:
            del self.with_gradients[key]


class CachedPlans:
    """The entries for plain calls of a planned module, by `Tracing.key`. Each refers to those with statistics and for
    gradients of earlier steps."""

    def __init__(self, limit: int) -> None:
        self.recent = LeastRecentlyUsed(limit)
        self._entries: dict[Hashable, list[CacheEntry]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def valid(self, call: Tracing) -> CacheEntry | None:
        """Return the entry with the call's key whose guard holds, or None."""
        known = self._entries.get(call.key, ())
        return next((one for one in known if one.guard.holds(call.state, call.tensors, call.assumed)), None)

    def put_first(self, entry: CacheEntry) -> None:
        """Let later calls try the entries for the forward of ``entry`` before others of the same key."""
        for entries in self._entries.values():
            entries.sort(key=lambda one: one.guard is not entry.guard)

    def use(self, key: Hashable) -> None:
        """Record that the entries with this key are used now."""
        self.recent.use(key)

    def add(self, key: Hashable, entry: CacheEntry) -> None:
        """Add an entry, and drop the entries that were not used for longest if there are too many now."""
        self._entries.setdefault(key, []).append(entry)
        self.recent.use(key)
        self.recent.trim(self._entries)

    def of_forward(self, entry: CacheEntry) -> list[CacheEntry]:
        """Return the plain entries for the same forward as ``entry``: those with the same guard object."""
        return [one for one in self.plain() if one.guard is entry.guard]

    def replace(self, found: CacheEntry) -> None:
        """Put ``found`` in place of the entries for the same forward: those with the same guard object."""
        for entries in self._entries.values():
            entries[:] = [found if one.guard is found.guard else one for one in entries]

    def plain(self) -> list[CacheEntry]:
        """Return the entries for ordinary calls: without statistics, and without gradients of earlier steps."""
        return [entry for entries in self._entries.values() for entry in entries]

    def all(self) -> list[CacheEntry]:
        """Return all entries in use, each once, also those that compute statistics or serve earlier gradients."""
        every = [w for entry in self.plain() for w in (entry, entry.measured) if w is not None]
        return list({id(w): w for entry in every for w in (entry, *entry.with_gradients.values())}.values())

    def copy(self) -> CachedPlans:
        """Return another cache with the same entries. Entries that are added to one of the two later do not appear in
        the other."""
        other = CachedPlans(self.recent.limit)
        other.recent = copy.deepcopy(self.recent)
        other._entries = {key: list(found) for key, found in self._entries.items()}
        return other
