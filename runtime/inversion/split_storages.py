"""Split a storage into parts that are separate storages, where only the parts are used.

The halves of a reversible network are often slices of one tensor, and one half must exist before the other to
recompute it. Readers of a dense half may sum in another order than with gaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value, free_name, single_call
from rematplan.runtime.graph.passes import with_phases, without_dead_calls
from rematplan.runtime.graph.storage_slices import Band, band, bands_tile, has_strides, within

aten = torch.ops.aten

TOGETHER = (aten.cat.default, aten.stack.default)
"""Ops that copy the tensors of a list, their first argument, to separate parts of their result."""


@dataclass(frozen=True)
class SplitStep:
    """A step in which some storages were split into parts that are separate storages."""

    step: CapturedStep
    """The step."""
    copied: dict[str, tuple[str, ...]]
    """By split storage, the storages of parts copied out of it. Others are tensors it was concatenated from."""


def split_storages(step: CapturedStep, leave: Iterable[str]) -> SplitStep:
    """Return the step with forward storages, except ``leave``, split into separate parts, where views allow it."""
    return _Parter(step, frozenset(leave)).part()


@dataclass
class _Apart:
    """The split of one storage into parts, each denoted by the `Band` of the storage that it covers."""

    base: Value
    """The tensor for which the storage was allocated."""
    tops: dict[str, Band]
    """The views that are in one part and are not views of such views, by name, with their bands."""
    parts: list[Band]
    """The parts of the storage."""
    sources: dict[Band, str] = field(default_factory=dict)
    """By part, the name of a value that has its elements."""
    copies: list[Call] = field(default_factory=list)
    """The new calls, which copy parts out of the storage."""
    values: dict[str, Value] = field(default_factory=dict)
    """New and changed values by name."""
    views: dict[str, list[Call]] = field(default_factory=dict)
    """By the name of a call that makes views, the calls that replace it."""
    copied: list[str] = field(default_factory=list)
    """The names of the storages of copied parts."""


class _Parter:
    def __init__(self, step: CapturedStep, leave: frozenset[str]) -> None:
        self.step, self.leave = step, leave
        self.values = dict(step.values)
        self.views: dict[str, list[Call]] = {}
        self.after: dict[str, list[Call]] = {}
        self.copied: dict[str, tuple[str, ...]] = {}
        self.position = {call.name: at for at, call in enumerate(step.calls)}

    def part(self) -> SplitStep:
        """Split the forward's storages, except those of ``leave``, into parts where that is possible, and return the
        step; the same step if none can be."""
        for call in self.step.calls:
            made = [self.values[r] for r in call.made]
            if not call.is_view and not call.backward:
                for value in made:
                    alone = sum(v.storage == value.storage for v in made) == 1
                    if alone and value.storage not in self.leave:
                        self._try(call, value)
        if not self.views:
            return SplitStep(self.step, {})
        calls: list[Call] = []
        for call in self.step.calls:
            calls += [*self.views.get(call.name, [call]), *self.after.get(call.name, [])]
        step = replace(self.step, calls=tuple(calls), values=self.values)
        return SplitStep(without_dead_calls(with_phases(step)), self.copied)

    def _try(self, producer: Call, base: Value) -> None:
        """Split the storage of a call's result ``base``, if it has parts and the results of all readers keep their
        layouts."""
        apart = self._bands(producer, base)
        if apart is None:
            return
        self._find_sources(producer, apart)
        try:
            fits = self._move(apart)
        except (RuntimeError, ValueError, TypeError):  # a view call is not possible with the parts' strides
            return
        if fits:
            self.values |= apart.values
            self.views |= apart.views
            self.after[producer.name] = apart.copies
            if apart.copied:
                self.copied[base.storage] = tuple(apart.copied)

    def _bands(self, producer: Call, base: Value) -> _Apart | None:
        """Return a storage's parts: its largest views, or operands concatenated to it, if they tile it; else None."""
        if (whole := band(base.fake)) is None or not whole.whole:
            return None
        tops: dict[str, Band] = {}
        plain = [base.name]  # views of the whole base
        while plain:
            for call in self.step.readers.get(plain.pop(), ()):
                for result in call.made if call.is_view else ():
                    if found := band(self.values[result].fake):
                        if found.whole:
                            plain.append(result)
                        else:
                            tops[result] = found
        together = sorted(b for _, narrow in self._operands(producer, base) if (b := band(narrow)))
        for period in sorted({b.period for b in tops.values()}):
            bands = sorted({b for b in tops.values() if b.period == period})
            # Of x[:, 0:4], x[:, 4:8] and x[:, 0:2], the first two, which hold the third.
            widest = [b for b in bands if not any(o != b and o.holds(b) for o in bands)]
            for parts in (widest, together):
                if (
                    len(parts) > 1
                    and bands_tile(parts)
                    and all(any(p.holds(b) for p in parts) for b in bands)
                ):
                    return _Apart(base, {v: b for v, b in tops.items() if b.period == period}, parts)
        return None

    def _find_sources(self, producer: Call, apart: _Apart) -> None:
        """Note in ``apart.sources``, by part, an operand of ``producer`` that is this part in the same strides. Parts
        without one that hold a view are copied out."""
        base = apart.base
        for operand, narrow in self._operands(producer, base):
            found, operand_value = band(narrow), self.values[operand]
            if found in apart.parts and operand_value.fake.dtype == base.fake.dtype:
                own = band(operand_value.fake)
                if own and own.whole and _same_strides(operand_value.fake, within(narrow, found)):
                    apart.sources.setdefault(found, operand)
        for index, one in enumerate(apart.parts):
            if one not in apart.sources and any(map(one.holds, apart.tops.values())):
                self._copy_out(apart, one, f"{base.name}_part_{index}")

    def _operands(self, producer: Call, base: Value) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the operands that a call concatenates or stacks, with the view of the result that each becomes."""
        dim = producer.args[1] if len(producer.args) > 1 else producer.kwargs.get("dim", 0)
        start = 0
        for index, ref in enumerate(producer.args[0] if producer.target in TOGETHER else ()):
            fake = self.values[ref.value].fake
            if producer.target is aten.stack.default:
                yield ref.value, base.fake.select(dim, index)
            elif fake.dim() == base.fake.dim():
                yield ref.value, base.fake.narrow(dim, start, fake.shape[dim])
                start += fake.shape[dim]

    def _copy_out(self, apart: _Apart, one: Band, name: str) -> None:
        """Add to ``apart`` the calls that copy its part ``one`` out of the storage, as a contiguous tensor ``name``."""
        base = apart.base
        name = free_name(name, self.step.call, self.values)
        count = base.fake.numel() // one.period
        size, stride = [count, one.length], [one.period, 1]
        view = base.fake.as_strided(size, stride, one.start)
        strip = f"{name}_strip"
        apart.copies += [
            single_call(
                strip, aten.as_strided.default, (Ref(base.name), size, stride, one.start), is_view=True
            ),
            single_call(name, aten.clone.default, (Ref(strip),), {"memory_format": torch.contiguous_format}),
        ]
        apart.values[strip] = Value(strip, base.storage, strip, view)
        with torch.no_grad():
            apart.values[name] = Value(name, name, name, view.clone(memory_format=torch.contiguous_format))
        apart.sources[one] = name
        apart.copied.append(name)

    def _move(self, apart: _Apart) -> bool:
        """Record in ``apart`` how views are made from the parts; return whether readers' results keep shape, strides
        and type. RuntimeError, ValueError or TypeError if a view is impossible."""
        now = {**self.values, **apart.values}
        touched: list[str] = []
        for value, one in apart.tops.items():
            old = self.values[value]
            part_ = next(p for p in apart.parts if p.holds(one))
            source = now[apart.sources[part_]]
            size, stride, offset = within(old.fake, part_)
            fake = source.fake.as_strided(size, stride, offset)
            name = free_name(f"{value}_view", self.step.call, self.values)
            maker = self.step.call[old.call or ""]
            view = single_call(
                name, aten.as_strided.default, (Ref(source.name), size, stride, offset), is_view=True
            )
            view = replace(view, results=(value,), backward=maker.backward)
            # A call that returns several views keeps those that do not move.
            left = apart.views.setdefault(maker.name, list(self.views.get(maker.name, [maker])))
            apart.views[maker.name] = [
                c if c.name != maker.name else replace(c, results=_without(c.results, value)) for c in left
            ] + [view]
            now[value] = apart.values[value] = Value(value, source.storage, name, fake)
            touched.append(value)
        for name, calls in apart.views.items():
            apart.views[name] = [c for c in calls if any(c.results)]
        return self._follow(apart, now, touched)

    def _follow(self, apart: _Apart, now: dict[str, Value], touched: list[str]) -> bool:
        """Recompute the strides of views of moved views. Return whether other readers' results keep their shapes,
        strides and types."""
        moved = set(touched)
        pending = [self.position[c.name] for v in touched for c in self.step.readers.get(v, ())]
        heapq.heapify(pending)  # in order, so that a view is handled before its own views
        last = -1
        while pending:
            at = heapq.heappop(pending)
            if at == last:
                continue
            call, last = self.step.calls[at], at
            operands = list(call.operands)
            with torch.no_grad():
                found = call.run(lambda name: now[name].fake)
            for result, new in zip(call.results, found, strict=True):
                if result is None or result in apart.tops:
                    continue
                old = now[result]
                if call.is_view:
                    storage = next(now[g].storage for g in operands if g in moved)
                    now[result] = apart.values[result] = replace(old, storage=storage, fake=new)
                    moved.add(result)
                    for reader in self.step.readers.get(result, ()):
                        heapq.heappush(pending, self.position[reader.name])
                elif _described(new) != _described(old.fake):
                    return False
        return True


def _described(fake: torch.Tensor) -> tuple[object, ...]:
    return fake.shape, fake.stride(), fake.dtype


def _same_strides(fake: torch.Tensor, geometry: tuple[tuple[int, ...], tuple[int, ...], int]) -> bool:
    size, stride, offset = geometry
    return bool(
        fake.storage_offset() == offset == 0 and tuple(fake.shape) == size and has_strides(fake, stride)
    )


def _without(results: tuple[str | None, ...], value: str) -> tuple[str | None, ...]:
    return tuple(None if r == value else r for r in results)
