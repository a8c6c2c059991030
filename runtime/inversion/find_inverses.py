"""Find the inverses of a captured step: ops that recompute a tensor from tensors that were computed from it.

Rules of the inverse table recompute one call's arguments, maybe slices of a storage; those that cover it form an
inverse. Unusable ones are dropped (`rematplan.ir.recoverable`), as x = y − F(x), where F(x) needs x.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.ir.recoverable import recoveries
from rematplan.planner.core.inversion_error import ROUNDING
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, free_name, single_call
from rematplan.runtime.graph.constant_values import KnownValues
from rematplan.runtime.graph.storage_slices import Band, band, bands_tile
from rematplan.runtime.graph.tracked_sizes import shape_of, stride_of
from rematplan.runtime.inversion.inverse_ops import Fill, Inverse
from rematplan.runtime.inversion.inverse_table import undo
from rematplan.runtime.inversion.row_types import Facts, Refused, Undone
from rematplan.runtime.inversion.scatter_to_cat import scatter_to_cat
from rematplan.runtime.inversion.split_storages import SplitStep, split_storages
from rematplan.runtime.problem.planning_problem import training_graph
from rematplan.runtime.problem.random_states import without_random_states

aten = torch.ops.aten

MOST_INVERSES = 4
"""The largest number of inverses of one storage."""
ROUNDS = 3
"""The number of passes that split storages into parts, since a part may itself consist of parts."""


@dataclass(frozen=True)
class Invertible:
    """A captured step with its inverses, which recompute a tensor from tensors that were computed from it."""

    step: CapturedStep
    """The step, whose field ``inverses`` has the inverses."""
    refused: tuple[str, ...] = ()
    """One line for each tensor that has no inverse for a reason that a user can change."""


def with_exact_inverses(step: CapturedStep) -> CapturedStep:
    """Return the step with inverses that only copy, move or negate numbers, so that all plans compute the same bits."""
    return _with_inverses(step, {}, exact=True).step


def with_inverses(
    step: CapturedStep, named: Mapping[str, torch.Tensor], renormalise: bool = False, own_seeds: bool = False
) -> Invertible:
    """Return the step with all inverses that are found. Scatters become concatenations where possible; storages are
    split where inverses need it. ``named``: parameters and buffers, by name. ``renormalise``: batch norms may run again
    without new running statistics. ``own_seeds``: random ops may run again."""
    found = _found(scatter_to_cat(step, named), named, own_seeds)
    twins = tuple(_renormalisations(found.step)) if renormalise and found.step.inverses else ()
    return replace(found, step=replace(found.step, inverses=(*found.step.inverses, *twins)))


def is_exact(call: Call) -> bool:
    """Return whether an inverse returns the original bits if its arguments have theirs."""
    return not call.noise


def _renormalisations(step: CapturedStep) -> Iterator[Call]:
    """Yield, for each forward batch norm that returns new running statistics, a call that computes the same bits
    without them."""
    for call in step.calls:
        row = None if call.backward or call.kwargs else _RENORMALISED.get(call.target)
        twin = row and row(*call.args)
        if not twin:
            continue
        target, *args = twin
        fresh = call.results[: len(target._schema.returns)]
        yield replace(call, name=f"{call.name}_again", target=target, args=tuple(args), results=fresh)


_RENORMALISED: Mapping[Any, Callable[..., tuple[Any, ...] | None]] = {
    aten._native_batch_norm_legit_functional.default: lambda x, weight, bias, mean, variance, training, *how: (
        (aten._native_batch_norm_legit.no_stats, x, weight, bias, True, *how) if training else None
    ),
    # Captured only if cuDNN's kernel is used.
    aten._batch_norm_with_update_functional.default: lambda x, weight, bias, mean, variance, *how: (
        aten.cudnn_batch_norm.default,
        x,
        weight,
        bias,
        None,
        None,
        True,
        *how,
    ),
}
"""By op of a batch norm that returns new running statistics, a function of its arguments. It returns the op that
computes the same without new running statistics, followed by the arguments of that op; None if the norm is frozen."""


def _found(step: CapturedStep, named: Mapping[str, torch.Tensor], own_seeds: bool) -> Invertible:
    """Return the step with split storages and inverses. A storage is not split if parts would be copied out of it and
    none of these has an inverse."""
    leave: set[str] = set()
    while True:
        split = _split(step, leave)
        found = _with_inverses(split.step, named, exact=False, own_seeds=own_seeds)
        inverted = {found.step.values[c.results[0] or ""].storage for c in found.step.inverses}
        useless = {storage for storage, parts in split.copied.items() if inverted.isdisjoint(parts)}
        if not useless:
            return found
        leave |= useless


def _split(step: CapturedStep, leave: set[str]) -> SplitStep:
    """Return the step with storages, except ``leave``, split into parts, and parts into parts, in `ROUNDS` passes or
    fewer."""
    copied: dict[str, tuple[str, ...]] = {}
    for _ in range(ROUNDS):
        split = split_storages(step, {*leave, *copied})
        if split.step is step:
            break
        step = scatter_to_cat(split.step, {})  # replaces copies of copied parts by the parts
        copied |= split.copied
    return SplitStep(step, copied)


def _with_inverses(
    step: CapturedStep, named: Mapping[str, torch.Tensor], exact: bool, own_seeds: bool = False
) -> Invertible:
    """Return the step with the inverses that recover a tensor of the forward, and why others were refused. ``exact``:
    without those that round. ``own_seeds``: random ops may run again."""
    facts = Facts(step, KnownValues(step, named))
    undone: list[Undone] = []
    refused: list[str] = []
    # Inputs are always there. Memory into which calls write has no inverse: only its last content is of use.
    there = step.given()
    there |= {step.values[c.results[0] or ""].storage for c in step.calls if c.in_place}
    for call in step.calls:
        if call.backward or call.is_view or call.seeded or call.in_place:
            continue
        for found in undo(call, facts):
            if step.values[found.value].storage in there:
                continue
            if isinstance(found, Refused):
                refused.append(f"{found.value} cannot be recomputed from {call.name}: {found.why}")
            elif found.exact or not exact:
                undone.append(found)
    candidates = replace(step, inverses=tuple(_inverses(step, undone)))
    graph = training_graph(candidates, {c.name: CallCost(0.0) for c in candidates.priced_calls})
    if own_seeds:
        again = {call.name for call in step.calls if call.seeded}
        graph = without_random_states(graph)
        graph = replace(graph, never_rerun=tuple(name for name in graph.never_rerun if name not in again))
    useful = {r.name for recovery in recoveries(graph).values() for r in recovery.used}
    kept = tuple(c for c in candidates.inverses if c.name in useful)
    return Invertible(replace(step, inverses=kept), tuple(dict.fromkeys(refused)))


def _inverses(step: CapturedStep, undone: Iterable[Undone]) -> Iterator[Call]:
    """Yield calls that recompute whole storages of the forward by rules, at most `MOST_INVERSES` a storage."""
    by_storage: dict[str, dict[Band, list[Undone]]] = {}
    for one in undone:
        value = step.values[one.value]
        covered = band(value.fake)
        reads = {step.values[r].storage for r in one.reads}
        base = step.values.get(value.storage, value)  # a storage has the name of its first value
        if covered and base.fake.dtype == value.fake.dtype and value.storage not in reads:
            by_storage.setdefault(value.storage, {}).setdefault(covered, []).append(one)
    makers = {step.values[r].storage: c for c in step.calls for r in c.made if not c.is_view}
    for storage, pieces in by_storage.items():
        maker = makers.get(storage)
        if maker is None or maker.backward:
            continue  # inputs are always resident
        bases = [r for r in maker.made if step.values[r].storage == storage]
        if len(bases) == 1:
            for index, rules in enumerate(itertools.islice(_covers(pieces), MOST_INVERSES)):
                yield _inverse(step, bases[0], rules, index)


def _covers(pieces: Mapping[Band, list[Undone]]) -> Iterator[tuple[Undone, ...]]:
    """Yield tuples of rules that together recompute a storage: rules for all of it, then one rule for each part.
    ``pieces``: the rules by the `Band` that they recompute."""
    for covered, rules in pieces.items():
        if covered.whole:
            yield from ((rule,) for rule in rules)
    for period in {b.period: None for b in pieces if not b.whole}:
        tiles = sorted(b for b in pieces if b.period == period and not b.whole)
        if bands_tile(tiles):
            yield from itertools.product(*(pieces[b] for b in tiles))


def _inverse(step: CapturedStep, base: str, rules: tuple[Undone, ...], index: int) -> Call:
    """Return the call that recomputes a storage by these rules, each of which fills a part of it. ``base``: the
    storage's first value. ``index``: how many other calls recompute it; part of the name."""
    fake = step.values[base].fake
    fills = tuple(
        Fill(w.kernel, w.constants, len(w.reads), shape_of(v), stride_of(v), int(v.storage_offset()), w.scale)
        for w, v in ((w, step.values[w.value].fake) for w in rules)
    )
    exact = all(w.exact for w in rules)
    inverse = Inverse(
        shape_of(fake),
        stride_of(fake),
        fake.dtype,
        fills,
        gain=max(w.gain for w in rules),
        noise=0.0 if exact else ROUNDING * torch.finfo(fake.dtype).eps / 2 * max(w.gain for w in rules),
    )
    name = free_name(f"invert_{base}" + (f"_way{index + 1}" if index else ""), step.call, step.values)
    reads = tuple(Ref(r) for w in rules for r in w.reads)
    return single_call(name, inverse, reads, result=base, gain=inverse.gain, noise=inverse.noise)
