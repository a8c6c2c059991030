"""Measured costs of a step, interpolated between two sizes at which its calls were measured.

A call's time is about linear in the bytes that it moves. Measured at each size are calls with a workspace, which may
jump, ops that choose among kernels, and calls outside of the range so far.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from rematplan.planner.caches.latest import remember
from rematplan.planner.core.strategy import Progress, silent
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.costs.roofline import moved_bytes
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import pytree

KERNELS = re.compile("convolution|attention|cudnn|mkldnn|rnn|lstm|gru|fft")
"""Ops that choose among kernels by their sizes."""
SIZES = 16
"""The largest number of sizes of one step whose costs are remembered."""
STEPS = 32
"""The largest number of steps whose costs are remembered; a step at several sizes counts once."""
NUMBERS = 8
"""A number among a call's arguments that is larger than this is taken for a size."""

Kind: TypeAlias = tuple[str, ...]
One = TypeVar("One")


@dataclass(frozen=True)
class _Measured:
    """The cost of a call at one size."""

    traffic: int
    """The bytes that the call reads and writes."""
    cost: CallCost
    """The call's cost, measured or interpolated."""
    plain: bool
    """Whether the call has no workspace and one possible kernel. If so at all known sizes, costs are interpolated."""


@dataclass(eq=False)
class SizedCosts:
    """Measured costs of the calls of captured steps. From them, costs of the same steps at other sizes are
    interpolated."""

    _known: dict[Kind, list[list[_Measured]]] = field(default_factory=dict)

    def costs(self, step: CapturedStep, progress: Progress = silent) -> Mapping[str, CallCost]:
        """Return the costs of a step's calls and inverses, without views, by name: interpolated where possible, else
        measured and remembered."""
        calls = step.priced_calls
        kind = (str(step.device), *(_kind(step, call) for call in calls))
        known = remember(self._known, kind, self._known.get(kind, []), STEPS)
        traffic = [moved_bytes(step, call) for call in calls]
        found = {
            call.name: cost
            for at, call in enumerate(calls)
            if (cost := _between([size[at] for size in known], traffic[at])) is not None
        }
        rest = [call.name for call in calls if call.name not in found]
        measured = profile_costs(step, progress, only=rest) if rest else {}
        if len(found) < len(calls):
            row = [
                _Measured(bytes_, measured[call.name], _is_plain(step, call, measured[call.name]))
                if call.name in measured
                else _Measured(bytes_, found[call.name], plain=True)
                for call, bytes_ in zip(calls, traffic, strict=True)
            ]
            known[:] = ends_and_latest([*known, row], SIZES, lambda row: sum(m.traffic for m in row))
        return {call.name: found.get(call.name) or measured[call.name] for call in calls}


def _between(known: list[_Measured], traffic: int) -> CallCost | None:
    """Interpolate the cost of a call linearly in the bytes that it reads and writes (``traffic``). None if it must be
    measured: outside of the bytes ``known``, or if it is not plain at one of the known sizes."""
    plain = sorted((m for m in known if m.plain), key=lambda m: m.traffic)
    if len(plain) < len(known) or not known:
        return None
    places = [m.traffic for m in plain]
    low, high = bisect_right(places, traffic) - 1, bisect_left(places, traffic)
    if low < 0 or high == len(plain):
        return None
    a, b = plain[low], plain[high]
    if a.traffic == b.traffic:
        return a.cost
    share = (traffic - a.traffic) / (b.traffic - a.traffic)
    return CallCost(
        a.cost.time + share * (b.cost.time - a.cost.time), library=max(a.cost.library, b.cost.library)
    )


def _is_plain(step: CapturedStep, call: Call, cost: CallCost) -> bool:
    """Return whether a call's cost may be interpolated: an ATen op of one kernel, without workspace or larger
    storages than captured."""
    name = str(call.target)
    nominal = [step.values[r].fake.untyped_storage().nbytes() if r else 0 for r in call.results]
    return (
        name.startswith("aten.")
        and KERNELS.search(name) is None
        and cost.workspace == 0
        and all(real <= shown for real, shown in zip(cost.results, nominal, strict=False))
    )


def _kind(step: CapturedStep, call: Call) -> str:
    """Return a text of all on which a call's kernel depends except sizes: calls with equal texts count as one."""

    def describe(name: str) -> str:
        t = step.values[name].fake
        strides = t.stride()
        order = sorted(range(t.ndim), key=lambda d: (-strides[d], d))
        zeros = [d for d in range(t.ndim) if strides[d] == 0]
        return f"{t.dtype}{order}{zeros}{t.is_contiguous()}"

    def without_size(number: int) -> int | str:
        return "size" if abs(number) > NUMBERS else number

    given = substitute((call.args, dict(call.kwargs)), describe)
    return f"{call.target}{pytree.tree_map_only(int, without_size, given)}"


def ends_and_latest(known: list[One], most: int, size: Callable[[One], int]) -> list[One]:
    """Return at most ``most`` of what is known at some sizes: at the smallest size, the largest, and the latest.
    ``size`` returns the number by which sizes are compared."""
    if len(known) <= most:
        return known
    totals = list(map(size, known))
    ends = {totals.index(min(totals)), totals.index(max(totals))}
    rest = [at for at in range(len(known)) if at not in ends][-(most - len(ends)) :]
    return [known[at] for at in sorted({*ends, *rest})]
