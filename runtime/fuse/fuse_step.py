"""The step in which each region is one call of a fused kernel."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from rematplan.runtime.fuse.kernel import FusedKernel
from rematplan.runtime.fuse.regions import Region
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.graph.passes import with_phases, without_dead_calls


def fused_step(step: CapturedStep, kernels: Mapping[Region, FusedKernel]) -> CapturedStep:
    """Return the step with one call of a kernel in place of each region's ops."""
    made = {region: _call(step, region, kernel) for region, kernel in kernels.items()}
    inside = {name: call for region, call in made.items() for name in region.names}
    values = dict(step.values)
    for region, call in made.items():
        values |= {v: replace(values[v], call=call.name) for v in region.outputs}
    at = {inside.get(c.name, c).name: at for at, c in enumerate(step.calls)}
    calls = {c.name: c for c in (*step.calls, *made.values()) if c.name not in inside}
    fused = replace(step, calls=_sorted(calls, at), values=values)
    return without_dead_calls(with_phases(fused))


def _sorted(calls: Mapping[str, Call], at: Mapping[str, int]) -> tuple[Call, ...]:
    """Return calls so that each follows those it reads, forward before backward and by least position ``at``."""
    maker = {r: c.name for c in calls.values() for r in c.made}
    before = {name: {maker[r] for r in c.operands if r in maker} for name, c in calls.items()}
    for a, b in pairwise(sorted((c.name for c in calls.values() if c.ordered), key=at.__getitem__)):
        before[b].add(a)
    after: dict[str, list[str]] = {name: [] for name in calls}
    for name, found in before.items():
        for other in found:
            after[other].append(name)
    left = {name: len(found) for name, found in before.items()}
    ready = [(calls[name].backward, at[name], name) for name, n in left.items() if not n]
    heapq.heapify(ready)
    found_order = []
    while ready:
        name = heapq.heappop(ready)[-1]
        found_order.append(calls[name])
        for other in after[name]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, (calls[other].backward, at[other], other))
    assert len(found_order) == len(calls), "regions depend on each other"
    return tuple(found_order)


def name_of(region: Region) -> str:
    """Return the name of the call that stands for a region."""
    return f"{region.names[0]}.fused"


def _call(step: CapturedStep, region: Region, kernel: FusedKernel) -> Call:
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
