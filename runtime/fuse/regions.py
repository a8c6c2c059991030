"""Regions: groups of neighbouring ops that one kernel can compute.

A region is connected and in one half, and its ops have one level: the most calls outside of kernels on a path to
them. So no path leads out of a region and into it again. Parts of ops that are split along rows are in regions of their
own: with one kernel for several parts, all of them would exist at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rematplan.runtime.fuse.computed_again import computed_again, is_cheap
from rematplan.runtime.fuse.fusible_ops import is_factory, is_fusible, is_inner_view
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.split.call_emitter import part_of

LEAST_CALLS = 2
"""Groups of fewer ops are no regions: their ops stay calls of libraries."""


Group: TypeAlias = tuple[str, ...]
"""The names of the ops of a region, in the captured order."""


Place: TypeAlias = tuple[int, bool, bool, int | None]
"""The level of an op, whether it belongs to the backward, whether it runs after the loss, and its part if it is split
along rows."""


@dataclass(frozen=True, eq=False)
class Region:
    """Ops that one kernel computes, with what the kernel reads and returns."""

    names: Group
    calls: tuple[Call, ...]
    """The ops, with the views and factories that they read, and the ops of the forward that the kernel runs again."""
    inputs: tuple[str, ...]
    """The values that these calls read from outside, in the order of the kernel's arguments."""
    outputs: tuple[str, ...] = ()
    """The results of these calls that others read, in the order of the kernel's results."""


class Regions:
    """Finds the regions of a step."""

    def __init__(self, step: CapturedStep, alone: Collection[str] = ()) -> None:
        """``alone``: ops that are in no region."""
        self.step = step
        self.maker = step.makers
        self.position = {c.name: at for at, c in enumerate(step.calls)}
        returned = step.returned("output")
        self.fusible = {
            c.name
            for c in step.calls
            # What makes an output runs once, so it would keep a whole region from running again.
            if is_fusible(step, c) and returned.isdisjoint(step.writes(c)) and c.name not in alone
        }
        self.operands = self._operands_of_cheap_ops()

    def find(self) -> tuple[Group, ...]:
        """Return the ops of the largest regions."""
        place = self._places()
        parents = {name: [p for p in self._parents(name) if place[p] == place[name]] for name in self.fusible}
        return self._components(self._with_siblings(parents, place))

    def _places(self) -> dict[str, Place]:
        """Return, by fusible op, where it is computed. Regions consist of ops of one place."""
        level, late = self._levels(), self.step.after_loss
        place = {n: (level[n], self.step.call[n].backward, n in late, part_of(n)) for n in self.fusible}
        for call in reversed(self.step.calls):
            # What only one place of the backward reads is computed there, so that no kernel writes it.
            if call.name in place and call.backward and is_cheap(call):
                readers = {place.get(r.name) for r in self._readers(call)}
                (only,) = readers if len(readers) == 1 else (None,)
                if only and only[-1] == place[call.name][-1]:
                    place[call.name] = only
        return place

    def _with_siblings(
        self, parents: Mapping[str, list[str]], place: Mapping[str, Place]
    ) -> dict[str, list[str]]:
        """Return ``parents`` with one more for each pointwise op that would be no part of a region. It is an op of the
        same place that reads the same numbers, if there is one."""
        connected = {name for child, found in parents.items() if found for name in (child, *found)}
        reading: dict[tuple[Place, str], str] = {}
        ordered = sorted(parents, key=self.position.__getitem__)
        for name in sorted(ordered, key=connected.__contains__, reverse=True):
            for value in self._operands(self.step.call[name]):
                reading.setdefault((place[name], value), name)
        found = {name: list(before) for name, before in parents.items()}
        for name in ordered:
            call = self.step.call[name]
            if name in connected or not is_cheap(call):
                continue
            size = self.step.values[call.results[0] or ""].fake.numel()
            for value in self._operands(call):
                if self.step.values[value].fake.numel() == size and reading[place[name], value] != name:
                    found[name].append(reading[place[name], value])
                    break
        return found

    def cut(self, group: Group) -> tuple[Group, ...]:
        """Return the groups into which a region's ops fall if they are cut in the middle. Ops that are alone then are
        left out."""
        middle = len(group) // 2
        found: list[Group] = []
        for part in (group[:middle], group[middle:]):
            inside = set(part)
            found += self._components({n: [p for p in self._parents(n) if p in inside] for n in part})
        return tuple(found)

    def regions(self, groups: Sequence[Group]) -> tuple[Region, ...]:
        """Return the groups as regions, with what each reads and returns in a step that has exactly these. Those that
        read nothing, or whose results nothing reads, are left out."""
        again = self._computed_again(groups)
        found = [self._region(names, again) for names in groups]
        needed = self._needed({name: region for region in found for name in region.names})
        results = (
            tuple(r for name in region.names for r in self.step.call[name].made if r in needed)
            for region in found
        )
        return tuple(
            replace(r, outputs=outputs)
            for r, outputs in zip(found, results, strict=True)
            if outputs and r.inputs
        )

    def _components(self, parents: Mapping[str, Sequence[str]]) -> tuple[Group, ...]:
        """Return the connected groups of at least `LEAST_CALLS` ops. ``parents``: by op, those that it is connected
        to."""
        group = {name: name for name in parents}

        def root(name: str) -> str:
            while group[name] != name:
                group[name] = name = group[group[name]]
            return name

        for name, found in parents.items():
            for parent in found:
                group[root(parent)] = root(name)
        members: dict[str, list[str]] = {}
        for name in sorted(parents, key=self.position.__getitem__):
            members.setdefault(root(name), []).append(name)
        return tuple(tuple(names) for names in members.values() if len(names) >= LEAST_CALLS)

    def _levels(self) -> dict[str, int]:
        """Return the level of each call. Ordered calls count as if each read the one before it, and to begin or leave a
        part of a split region counts as a call outside of kernels."""
        level: dict[str, int] = {}
        before: str | None = None
        for call in self.step.calls:
            found = [self.maker[v] for v in call.operands if v in self.maker]
            ends = (self._ends(m) or part_of(m.name) != part_of(call.name) for m in found)
            level[call.name] = max(
                (level[m.name] + end for m, end in zip(found, ends, strict=True)), default=0
            )
            if call.ordered:
                level[call.name] = max(level[call.name], 0 if before is None else level[before] + 1)
                before = call.name
        return level

    def _ends(self, call: Call) -> bool:
        """Return whether a call cannot be part of a region."""
        return not (call.name in self.fusible or is_inner_view(call) or is_factory(self.step, call))

    def _operands(self, call: Call) -> list[str]:
        """Return the values that a call reads, through views that a kernel can take. Results of factories are left
        out."""
        found: dict[str, None] = {}
        stack = [*call.operands]
        while stack:
            value = stack.pop()
            maker = self.maker.get(value)
            if maker is not None and is_inner_view(maker):
                stack += maker.operands
            elif maker is None or not is_factory(self.step, maker):
                found[value] = None
        return list(found)

    def _parents(self, name: str) -> list[str]:
        """Return the fusible ops whose results a call reads."""
        makers = [self.maker[v].name for v in self._operands(self.step.call[name]) if v in self.maker]
        return [maker for maker in makers if maker in self.fusible]

    def _readers(self, call: Call) -> list[Call]:
        """Return the calls that read a call's results, through views that a kernel can take."""
        found: dict[str, Call] = {}
        stack = list(call.made)
        while stack:
            for reader in self.step.readers.get(stack.pop(), ()):
                if is_inner_view(reader):
                    stack += reader.made
                else:
                    found[reader.name] = reader
        return list(found.values())

    def _region(self, names: Group, again: frozenset[str]) -> Region:
        """Return the region of a group: its ops with the views and factories that they read, and ops that the kernel
        runs ``again``."""
        inside, calls, inputs = set(names), dict[str, Call](), dict[str, None]()
        stack = [self.step.call[name] for name in reversed(names)]
        backward = stack[0].backward
        while stack:
            call = stack.pop()
            calls[call.name] = call
            for value in call.operands:
                maker = self.maker.get(value)
                if maker is None or not (
                    maker.name in inside
                    or is_inner_view(maker)
                    or is_factory(self.step, maker)
                    or (backward and self.step.values[value].storage in again)
                ):
                    inputs[value] = None
                elif maker.name not in calls and maker.name not in inside:
                    stack.append(maker)
        ordered = sorted(calls.values(), key=lambda c: self.position[c.name])
        return Region(names, tuple(ordered), tuple(inputs))

    def _operands_of_cheap_ops(self) -> dict[str, list[str]]:
        """Return, by the storage that a cheap op of the forward makes, the storages that it reads. Ops that read views
        or make an output are left out."""
        kept = self.step.returned()
        found = {}
        for call in self.step.calls:
            (storage, *_) = (*self.step.writes(call), "")
            cheap = call.name in self.fusible and not call.backward and is_cheap(call) and storage not in kept
            operands = [self.step.values[v] for v in self._operands(call)] if cheap else []
            if cheap and not any(v.call and self.step.call[v.call].is_view for v in operands):
                found[storage] = [v.storage for v in operands]
        return found

    def _computed_again(self, groups: Sequence[Group]) -> frozenset[str]:
        """Return the storages of the forward that kernels of the backward compute again."""
        inside = {name for names in groups for name in names}
        early = {s for c in self.step.calls if not c.backward for s in self.step.writes(c)}
        late = [c for c in self.step.calls if c.backward and not c.is_view]
        kept = {*self.step.given()}
        kept |= self.step.returned()
        kept |= {s for c in late if c.name not in inside for s in self.step.reads(c)}
        fused = {s for c in late if c.name in inside for s in self.step.reads(c)} & early
        return computed_again(self.step, self.operands, fused, kept)

    def _needed(self, region_of: Mapping[str, Region]) -> set[str]:
        """Return the values that a step with these regions needs. A region's ops need what the region reads."""
        needed = {o.value for o in self.step.outputs}
        needed |= {v for c in self.step.calls if c.ordered for v in c.operands}
        stack = list(needed)
        while stack:
            call = self.maker.get(stack.pop())
            if call is not None:
                region = region_of.get(call.name)
                read = call.operands if region is None else region.inputs
                stack += [v for v in read if v not in needed]
                needed.update(read)
        return needed
