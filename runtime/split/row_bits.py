"""Which calls of split regions give their rows other bits in parts than whole: each runs both ways on this device.

A library may choose another kernel for fewer rows, and a vectorised loop computes its last numbers one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rematplan.runtime.costs import measurement_cache
from rematplan.runtime.costs.measure import unprofiled
from rematplan.runtime.costs.profile import profile_file, signature
from rematplan.runtime.costs.synthetic_arguments import SyntheticArguments
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.in_place_calls import as_run
from rematplan.runtime.graph.kernel_of import kernel_of
from rematplan.runtime.split.axis_spans import AxisSpan
from rematplan.runtime.split.regions import SplitRegion
from rematplan.runtime.split.split_step import bounds_of
from rematplan.runtime.split.split_table import states_of

_ALIGNED = 64
"""Bytes. Operands of parts begin at the same offset from a multiple of it as in the step."""


def changed_rows(
    step: CapturedStep, split: CapturedStep, parts: Mapping[SplitRegion, int], cache: Path | None = None
) -> tuple[str, ...]:
    """Return the names of the calls whose rows have other bits in parts, tested here unless cached, and of those that
    cannot be run. ``split``: the step in which the regions run in so many ``parts``, as `split_regions` makes it.
    ``cache``: the folder, by default the user's."""
    file = profile_file(step.device, cache)
    tests = _Tests(step, split)
    bounds = {region: bounds_of(region, k) for region, k in parts.items()}
    calls = {
        name: (text, region)
        for region in parts
        for name in region.calls
        if (text := tests.text(name, len(bounds[region]) - 1)) is not None
    }
    known = measurement_cache.load(file, bool, (text for text, _ in calls.values()))
    new: dict[str, bool] = {}
    for name, (text, region) in calls.items():
        if text not in known:
            try:
                known[text] = new[text] = unprofiled(partial(tests.keeps_bits, name, region, bounds[region]))
            except (RuntimeError, IndexError, ValueError):  # not on these arguments; it is not cached
                known[text] = False
    if new:
        measurement_cache.save(file, new)
    return tuple(name for name, (text, _) in calls.items() if not known[text])


class _Tests:
    """Runs calls of a step whole and in parts. ``split``: the step with the parts."""

    def __init__(self, step: CapturedStep, split: CapturedStep) -> None:
        self.step, self.split, self.arguments = step, split, SyntheticArguments(step)

    def text(self, name: str, count: int) -> str | None:
        """Return the key of a call and its ``count`` parts in the cache; None if parts of it are not in the step."""
        parts = [self.split.call.get(f"{name}.{at}") for at in range(count)]
        found = list(dict.fromkeys(signature(self.split, part) for part in parts if part))
        whole = signature(self.step, self.step.call[name])
        return f"rows of {whole} in {' and '.join(found)}" if None not in parts and count > 1 else None

    def keeps_bits(self, name: str, region: SplitRegion, bounds: tuple[int, ...]) -> bool:
        """Return whether all parts of a call have the bits of the same rows of the whole call; true if its results are
        sums alone."""
        call = self.step.call[name]
        states = states_of(self.step, call, region.states, region.indices) or {}
        spans = {v: s for v, s in states.items() if isinstance(s, AxisSpan)}
        if spans.keys().isdisjoint(call.made):
            return True  # sums alone
        as_captured = torch.autocast(self.step.device.type, enabled=False)  # all casts are in the step
        with torch.no_grad(), as_captured:
            args, kwargs = self.arguments.of(call)
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            given = dict(zip(call.operands, tensors, strict=True))
            found = []
            for at, ends in enumerate(pairwise(bounds)):
                part = self.split.call[f"{name}.{at}"]
                own: dict[str, torch.Tensor] = {}
                for value, mine in zip(call.operands, part.operands, strict=True):
                    rows = _rows(given[value], spans.get(value), region.indices, ends)
                    own[mine] = _laid_out(rows, self.split.values[mine].fake) if value in spans else rows
                found.append(_results(part, *substitute((part.args, part.kwargs), own.__getitem__)))
            whole = _results(call, args, kwargs)
        for at, result in enumerate(call.results):
            if result in spans:
                for ends, part_results in zip(pairwise(bounds), found, strict=True):
                    rows = _rows(whole[at], spans[result], region.indices, ends)
                    if not _same_bits(rows, part_results[at]):
                        return False
        return True


def _results(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    found = kernel_of(as_run(call).target)(*args, **kwargs)
    return (found,) if call.single else tuple(found)


def _rows(tensor: torch.Tensor, span: AxisSpan | None, indices: int, ends: tuple[int, int]) -> torch.Tensor:
    """Return the rows of a tensor from index ``ends[0]`` to ``ends[1]`` of ``indices``, or all if it lacks the axis."""
    if span is None:
        return tensor
    flat = tensor.reshape(span.of_part(tensor.shape, indices))
    return flat.narrow(span.last, ends[0] * span.inner, (ends[1] - ends[0]) * span.inner)


def _laid_out(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows with the shape, strides and alignment that the operand has in the step."""
    if any(n > 1 and not stride for n, stride in zip(like.shape, like.stride(), strict=True)):
        return rows.reshape(like.shape)  # it repeats numbers, as ``rows`` does
    begin = like.storage_offset() * like.element_size() % _ALIGNED // like.element_size()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
    made = torch.empty(begin + extent, dtype=rows.dtype, device=rows.device)
    return made.as_strided(like.shape, like.stride(), begin).copy_(rows.reshape(like.shape))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    one, other = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)
