"""Regions: groups of neighbouring ops that one kernel can compute.

A region is connected and belongs to one half of the step, and its ops have the same level: the largest number of calls
on a path to them that no kernel computes. A path that leaves a region through such a call reaches a higher level, so no
path leads back into the region.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rematplan.runtime.fuse.fusible_ops import is_factory, is_fusible, is_inner_view
from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs

LEAST_CALLS = 2
"""A region of fewer ops stays a call of a library."""


@dataclass(frozen=True, eq=False)
class Region:
    """Ops that one kernel computes, with what the kernel reads and returns."""

    names: tuple[str, ...]
    """The ops, in the captured order."""
    calls: tuple[Call, ...]
    """The same ops, with the views and factories that they read."""
    inputs: tuple[str, ...]
    """The values that they read from outside, in the order of the kernel's arguments."""
    outputs: tuple[str, ...]
    """Their results that others read, in the order of the kernel's results."""


class Regions:
    """Finds the regions of a step."""

    def __init__(self, step: CapturedStep) -> None:
        self.step = step
        self.maker = {r: c for c in step.calls for r in c.results if r}
        self.position = {c.name: at for at, c in enumerate(step.calls)}
        returned = {step.values[o.value].storage for o in step.outputs if o.kind == "output"}
        self.fusible = {
            c.name
            for c in step.calls
            # What makes an output runs once, so it would keep a whole region from running again.
            if is_fusible(step, c) and returned.isdisjoint(step.writes(c))
        }
        self.readers = self._readers()

    def _readers(self) -> Mapping[str, tuple[str, ...]]:
        """Return the calls that read each storage. Those of the step's outputs have one without a name."""
        found: dict[str, dict[str, None]] = {}
        for call in self.step.calls:
            if not call.is_view:
                for storage in self.step.reads(call):
                    found.setdefault(storage, {})[call.name] = None
        for output in self.step.outputs:
            found.setdefault(self.step.values[output.value].storage, {})[""] = None
        return {storage: tuple(names) for storage, names in found.items()}

    def find(self) -> tuple[Region, ...]:
        """Return the largest regions."""
        level, half = self._levels(), self._halves()
        place = {name: (level[name], half[name]) for name in self.fusible}
        return self._components(
            {name: [p for p in self._parents(name) if place[p] == place[name]] for name in self.fusible}
        )

    def cut(self, region: Region) -> tuple[Region, ...]:
        """Return the regions of both halves of a region's ops. Ops that are alone are left out."""
        middle = len(region.names) // 2
        found: list[Region] = []
        for part in (region.names[:middle], region.names[middle:]):
            inside = set(part)
            found += self._components({n: [p for p in self._parents(n) if p in inside] for n in part})
        return tuple(found)

    def _components(self, parents: Mapping[str, Sequence[str]]) -> tuple[Region, ...]:
        """Return the connected groups of ops as regions. ``parents``: by op, those that it is connected to."""
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
        return tuple(self._region(names) for names in members.values() if len(names) >= LEAST_CALLS)

    def _levels(self) -> dict[str, int]:
        """Return the level of each call. Ordered calls count as if each read the one before it."""
        level: dict[str, int] = {}
        before: str | None = None
        for call in self.step.calls:
            found = [self.maker[r.value] for r in refs((call.args, call.kwargs)) if r.value in self.maker]
            level[call.name] = max((level[m.name] + self._ends(m) for m in found), default=0)
            if call.ordered:
                level[call.name] = max(level[call.name], 0 if before is None else level[before] + 1)
                before = call.name
        return level

    def _ends(self, call: Call) -> bool:
        """Return whether a call cannot be part of a region."""
        return not (call.name in self.fusible or is_inner_view(call) or is_factory(self.step, call))

    def _halves(self) -> dict[str, tuple[bool, bool]]:
        late = self.step.after_loss
        return {c.name: (c.backward, c.name in late) for c in self.step.calls}

    def _parents(self, name: str) -> list[str]:
        """Return the fusible ops whose results a call reads, also through views that a kernel can take."""
        found: dict[str, None] = {}
        stack = [r.value for r in refs((self.step.call[name].args, self.step.call[name].kwargs))]
        while stack:
            call = self.maker.get(stack.pop())
            if call is not None and is_inner_view(call):
                stack += [r.value for r in refs((call.args, call.kwargs))]
            elif call is not None and call.name in self.fusible:
                found[call.name] = None
        return list(found)

    def _region(self, names: Sequence[str]) -> Region:
        inside, calls, inputs = set(names), dict[str, Call](), dict[str, None]()
        for name in names:
            self._add(self.step.call[name], inside, calls, inputs)
        ordered = sorted(calls.values(), key=lambda c: self.position[c.name])
        outputs = tuple(
            r for name in names for r in self.step.call[name].results if r and self._is_read(r, inside)
        )
        return Region(tuple(names), tuple(ordered), tuple(inputs), outputs)

    def _add(self, call: Call, inside: set[str], calls: dict[str, Call], inputs: dict[str, None]) -> None:
        """Add a call to a region's calls, with the views and factories that it reads."""
        stack = [call]
        while stack:
            call = stack.pop()
            calls[call.name] = call
            for ref in refs((call.args, call.kwargs)):
                maker = self.maker.get(ref.value)
                if maker is None or not (
                    maker.name in inside or is_inner_view(maker) or is_factory(self.step, maker)
                ):
                    inputs[ref.value] = None
                elif maker.name not in calls and maker.name not in inside:
                    stack.append(maker)

    def _is_read(self, value: str, inside: set[str]) -> bool:
        readers = self.readers.get(self.step.values[value].storage, ())
        return any(name not in inside for name in readers)


def bytes_of(step: CapturedStep, values: Iterable[str]) -> int:
    """Return the bytes of the storages of values, each once."""
    return sum(step.storage_bytes[s] for s in {step.values[v].storage for v in values})
