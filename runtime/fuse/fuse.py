"""Fuse a captured step: find its regions, compile their kernels, and cut regions that would raise the peak."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rematplan.ir import topological_order
from rematplan.runtime.fuse.channels_last import in_channels_last
from rematplan.runtime.fuse.kernel import CannotFuse, FusedKernel, RegionOps, begin_kernel
from rematplan.runtime.fuse.regions import Group, Region, Regions
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.graph.passes import with_phases, without_dead_calls
from rematplan.runtime.graph.tracked_sizes import SizeValues

GIVE_UP = 3
"""After this many failures without a success, no more regions are compiled: a compiler may be missing."""


@dataclass
class Kernels:
    """Compiled kernels by their key. Regions of equal ops and layouts share one."""

    known: dict[str, FusedKernel] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Why a region could not be compiled, by its key."""

    begun: dict[str, Callable[[], FusedKernel]] = field(default_factory=dict)
    """What waits for the compilation of a region, by its key."""

    def begin(self, step: CapturedStep, regions: Sequence[Region]) -> None:
        """Begin to compile those of the regions that have no kernel yet (into `begun`, failures into `failed`); none
        after `GIVE_UP` failures without a success. Until one succeeds, each is waited for: it shows whether there is a
        compiler."""
        for region in regions:
            ops = RegionOps(step, region)
            key = ops.key
            if not self.known and len(self.failed) >= GIVE_UP:
                return
            if key not in self.known and key not in self.failed and key not in self.begun:
                with self._failing(key):
                    self.begun[key] = begin_kernel(step, region, ops)
                if not self.known:
                    self._end(key)

    def of(self, step: CapturedStep, region: Region) -> FusedKernel:
        """Return the kernel of a region, compiled if there is none yet. `CannotFuse` if the region cannot be compiled,
        no region could be, or the kernel was wrong in a training step or at the step's sizes."""
        key = RegionOps(step, region).key
        self.begin(step, (region,))
        self._end(key)
        if key in self.failed:
            raise CannotFuse(self.failed[key])
        if key not in self.known:
            raise CannotFuse(next(iter(self.failed.values())))
        if self.known[key].real.error:
            raise CannotFuse(self.known[key].real.error)
        return self.known[key].at(step, region)

    def _end(self, key: str) -> None:
        if key in self.begun:
            with self._failing(key):
                self.known[key] = self.begun.pop(key)()

    @contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a compiler may raise anything
            self.failed[key] = f"{type(error).__name__}: {error}".splitlines()[0][:200]


KERNELS = Kernels()
"""The kernels of this process. They depend on nothing but their key."""


@dataclass(frozen=True)
class FusedStep:
    """A step with fused kernels."""

    step: CapturedStep
    kernels: Mapping[Region, FusedKernel]
    failures: tuple[str, ...]
    """For each region that could not be compiled, why. Its ops run as they are."""
    compiled: Mapping[Region, list[FusedKernel]] = field(default_factory=dict)
    """The kernels of each region for steps of the same structure. Each but the first was compiled for sizes that those
    before it do not serve."""

    @property
    def regions(self) -> int:
        """The number of regions, those included that could not be compiled."""
        return len(self.kernels) + len(self.failures)

    @property
    def note(self) -> str:
        """What to tell the user."""
        ops = sum(len(region.names) for region in self.kernels)
        kinds = len({kernel.key for kernel in self.kernels.values()})
        return (
            f"{self.step.name}: {ops} ops are {len(self.kernels)} calls of {kinds} fused kernels, whose results differ "
            f"from those of eager mode by rounding; peaks without recomputation and bounds are those of the fused step"
        )


def fuse(
    step: CapturedStep,
    kernels: Kernels = KERNELS,
    known: FusedStep | None = None,
    alone: Collection[str] = (),
) -> FusedStep:
    """Return the step with a compiled kernel for each region. A region that cannot be compiled keeps its ops; one that
    would raise the peak, or need more bytes than any op, is cut in two. Without any kernel, the step is returned as it
    was. ``known``: a fused step of the same structure, whose regions and kernels are taken if the step has open
    sizes. ``alone``: ops that are in no region."""
    if known is not None and step.open_sizes is not None:
        return _alike(step, step.open_sizes.values, kernels, known)
    captured, step = step, in_channels_last(step)
    regions, failures = Regions(step, alone), dict[Group, str]()
    groups = list(regions.find())
    most, peak = max(map(_need(step), step.priced_calls), default=0), _peak(step)[0]
    while True:
        kept: dict[Region, FusedKernel] = {}
        found, failed = regions.regions(groups), len(failures)
        kernels.begin(step, found)
        for region in found:
            try:
                kept[region] = kernels.of(step, region)
            except CannotFuse as error:
                failures[region.names] = str(error)
        over: list[Group] = []
        if len(failures) == failed:
            fused = fused_step(step, kept)
            need, (highest, at) = _need(fused), _peak(fused)
            # A kernel has all operands and results at once. A region is cut in two if that exceeds each op of
            # the step, or raises the peak without recomputation.
            over = [r.names for r in kept if need(fused.call[name_of(r)]) > most]
            over = over or [r.names for r in kept if name_of(r) == at and highest > peak]
            if not over:
                named = replace(fused, name=f"{step.name} (fused)") if kept else captured
                return FusedStep(named, kept, tuple(failures.values()), {r: [k] for r, k in kept.items()})
        groups = [names for names in groups if names not in failures and names not in over]
        groups += [part for names in over for part in regions.cut(names)]


def _alike(step: CapturedStep, sizes: SizeValues, kernels: Kernels, known: FusedStep) -> FusedStep:
    """Return the step with the regions of ``known``, a fused step of the same structure; failures keep their ops. Where
    none of a region's kernels serves the ``sizes``, another is compiled and added to ``known.compiled``."""
    kept: dict[Region, FusedKernel] = {}
    failures = list(known.failures)
    for region, found in known.compiled.items():
        here = replace(region, calls=tuple(step.call[call.name] for call in region.calls))
        try:
            if found[0].real.error:
                raise CannotFuse(found[0].real.error)
            serving = next((kernel for kernel in found if kernel.serves(sizes)), None)
            if serving is None:
                serving = kernels.of(step, here)
                found.append(serving)
            kept[here] = serving.at(step, here)
        except CannotFuse as error:
            failures.append(str(error))
    fused = fused_step(step, kept)
    fused = replace(fused, name=f"{step.name} (fused)") if kept else step
    return FusedStep(fused, kept, tuple(failures), known.compiled)


def _need(step: CapturedStep) -> Callable[[Call], int]:
    """Return a function of a call: the bytes of its operands, its results and its workspace, if it is a kernel."""

    def need(call: Call) -> int:
        storages = {*step.reads(call), *step.writes(call)}
        return sum(step.storage_bytes[s] for s in storages) + getattr(call.target, "workspace", 0)

    return need


def _peak(step: CapturedStep) -> tuple[int, str]:
    """Return the largest bytes without recomputation, without inputs and libraries' workspaces, and the call where
    they occur."""
    kept = step.given() | step.returned()
    last = {s: c.name for c in step.calls if not c.is_view for s in step.reads(c)}
    resident, highest, at = 0, 0, ""
    for call in step.calls:
        if call.is_view:
            continue
        writes = step.writes(call)
        resident += sum(step.storage_bytes[s] for s in writes)
        now = resident + getattr(call.target, "workspace", 0)
        if now > highest:
            highest, at = now, call.name
        gone = {s for s in (*step.reads(call), *writes) if last.get(s, call.name) == call.name} - kept
        resident -= sum(step.storage_bytes[s] for s in gone)
    return highest, at


def fused_step(step: CapturedStep, kernels: Mapping[Region, FusedKernel]) -> CapturedStep:
    """Return the step with one call of a kernel in place of each region's ops."""
    made = {region: _call(step, region, kernel) for region, kernel in kernels.items()}
    inside = {name: call for region, call in made.items() for name in region.names}
    values = dict(step.values)
    for region, call in made.items():
        values |= {v: replace(values[v], call=call.name) for v in region.outputs}
    at = {inside.get(c.name, c).name: at for at, c in enumerate(step.calls)}
    calls = [c for c in (*step.calls, *made.values()) if c.name not in inside]
    fused = replace(step, calls=_sorted(calls, at), values=values)
    return without_dead_calls(with_phases(fused))


def _sorted(calls: Sequence[Call], at: Mapping[str, int]) -> tuple[Call, ...]:
    """Return calls so that each follows those it reads, forward before backward and by least position ``at``."""
    calls = sorted(calls, key=lambda c: (c.backward, at[c.name]))
    place = {c.name: k for k, c in enumerate(calls)}
    maker = {r: place[c.name] for c in calls for r in c.made}
    before = [{maker[r] for r in c.operands if r in maker} for c in calls]
    for a, b in pairwise(sorted((c.name for c in calls if c.ordered), key=at.__getitem__)):
        before[place[b]].add(place[a])
    order = topological_order(before)
    assert len(order) == len(calls), "regions depend on each other"
    return tuple(calls[k] for k in order)


def name_of(region: Region) -> str:
    """Return the name of the call that stands for a region."""
    return f"{region.names[0]}.fused"


def _call(step: CapturedStep, region: Region, kernel: FusedKernel) -> Call:
    """Return the call of ``kernel`` that replaces the calls of ``region``."""
    last = step.call[region.names[-1]]
    modules = {step.call[name].module for name in region.names}
    return Call(
        name=name_of(region),
        target=kernel,
        args=(*kernel.sizes, *map(Ref, region.inputs)),
        kwargs={},
        results=region.outputs,
        single=len(region.outputs) == 1,
        backward=last.backward,
        module=modules.pop() if len(modules) == 1 else "",
        sequence=last.sequence,
    )
