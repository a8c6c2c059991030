"""Rewrite tensors that are written slice by slice as concatenations of the slices, with the same bits.

A functional trace turns ``x[:, :h] += f(x[:, h:])`` into a copy with a written slice (a scatter). The equal ``cat([a
+ f(b), b])`` has separate parts. Indexing by evenly spaced indices becomes slicing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import (
    Call,
    CapturedStep,
    Ref,
    Value,
    free_name,
    single_call,
)
from rematplan.runtime.graph.constant_values import KnownValues
from rematplan.runtime.graph.index_to_slice import Slice, picked_slice
from rematplan.runtime.graph.passes import with_phases, without_dead_calls
from rematplan.runtime.graph.storage_slices import band

aten = torch.ops.aten


def scatter_to_cat(step: CapturedStep, named: Mapping[str, torch.Tensor]) -> CapturedStep:
    """Return the step with concatenations for the forward's scatters where possible, with all strides and bits; the
    step itself if none changes."""
    if not any(_row(call) for call in step.calls):
        return step
    return _Rewriter(step, KnownValues(step, named)).rewritten()


@dataclass
class _Rewriter:
    step: CapturedStep
    known: KnownValues
    calls: list[Call] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    made: dict[str, Call] = field(default_factory=dict)  # by value, the call of the new step that makes it
    same: dict[str, str] = field(default_factory=dict)  # by replaced value, the value that replaces it
    storage: dict[str, str] = field(default_factory=dict)  # by replaced storage, the storage that replaces it

    def rewritten(self) -> CapturedStep:
        """Return the step with each call as its row rewrites it, without dead calls; the step itself if no row changes
        anything."""
        step = self.step
        self.values = dict(step.values)
        for call in step.calls:
            call = call.reading(lambda name: self.same.get(name, name))
            for name in filter(None, call.results):
                old = self.values[name]
                self.values[name] = replace(old, storage=self.storage.get(old.storage, old.storage))
            row = _row(call)
            if row is None or not row(self, call):
                self.append(call)
        if not self.same and not self.storage and self.calls == list(step.calls):
            return step
        return without_dead_calls(with_phases(replace(step, calls=tuple(self.calls), values=self.values)))

    def append(self, call: Call) -> None:
        self.calls.append(call)
        self.made.update(dict.fromkeys(call.made, call))

    def fake(self, ref: Ref) -> torch.Tensor:
        return self.values[ref.value].fake

    def equate(self, result: str, source: str) -> bool:
        """Replace ``result`` by ``source`` in all later calls, and return true. Return false, without a change, if
        their layouts differ, or if ``result`` is in an output's storage or ``source`` only in a part of one."""
        old, new = self.values[result], self.values[source]
        outside = self.step.returned()
        whole = band(new.fake)
        if self.step.values[result].storage in outside or whole is None or not whole.whole:
            return False
        if _described(old.fake) != _described(new.fake):
            return False
        self.same[result] = source
        self.storage[old.storage] = new.storage
        return True

    def view(self, name: str, target: Any, args: tuple[Any, ...], result: str | None = None) -> Ref:
        """Append a view of an existing value, the first of ``args``, to the new step, and return a reference to the
        view. ``name``: of the call. ``result``: of the view, by default that of the call."""
        source = self.values[args[0].value]
        with torch.no_grad():
            fake = target(source.fake, *args[1:])
        call = single_call(free_name(name, self.step.call, self.values), target, args, is_view=True)
        call = replace(call, results=(result or call.name,))
        self.values[result or call.name] = Value(result or call.name, source.storage, call.name, fake)
        self.append(call)
        return Ref(result or call.name)

    def slices(self, base: Ref, wanted: Sequence[Slice]) -> list[Ref]:
        return [
            self.view(f"{base.value}_slice", aten.slice.Tensor, (base, s.dim, s.start, s.end, s.step))
            for s in wanted
        ]

    def scatter(self, call: Call, base: Ref, source: Ref, at: Slice) -> bool:
        """Append a concatenation for a call that writes ``source`` into a slice of ``base``, or equate its result with
        ``base`` if the source is that slice already. Return whether that was possible."""
        result, dim, n = call.results[0] or "", at.dim, self.fake(base).shape[at.dim]
        with torch.no_grad():
            there = aten.slice.Tensor(self.fake(base), dim, at.start, at.end, at.step)
        source = self._original(source)
        if self.fake(source).shape != there.shape or self.fake(source).dtype != there.dtype:
            return False
        # The source is that slice already.
        if self._is_there(base, source, there):
            return self.equate(result, base.value)
        if at.step == 1:
            others = [Slice(dim, 0, at.start, 1), Slice(dim, at.end, n, 1)]
            return self._joined(call, aten.cat.default, base, [others[0], None, others[1]], source, dim)
        if n % at.step or at.start >= at.step or there.shape[dim] != n // at.step:
            return False
        combs = [None if k == at.start else Slice(dim, k, n, at.step) for k in range(at.step)]
        return self._joined(call, aten.stack.default, base, combs, source, dim)

    def _joined(
        self, call: Call, target: Any, base: Ref, rest: list[Slice | None], source: Ref, dim: int
    ) -> bool:
        """Append a concatenation in place of a call that writes a slice, permuted to its result's strides. Return
        whether that was possible. ``rest``: what is joined, as slices of ``base``, and None for ``source``."""
        old, before = self.values[call.results[0] or ""].fake, len(self.calls)
        # The dimensions as they follow in memory: (0, 2, 3, 1) for channels-last. `back` is the inverse, (0, 3, 1, 2).
        order = sorted(range(old.dim()), key=lambda d: -old.stride()[d])
        rest = [s for s in rest if s is None or s.start < s.end]
        parts = [source if s is None else self.slices(base, [s])[0] for s in rest]
        if straight := order == sorted(order):
            laid = parts
        else:
            laid = [self.view(f"{call.name}_laid", aten.permute.default, (p, order)) for p in parts]
        back = [order.index(d) for d in range(old.dim())]
        at = order.index(dim) + (target is aten.stack.default)
        with torch.no_grad():
            fake = target([self.fake(p) for p in laid], at)
            fits = fake.is_contiguous() or (straight and target is aten.cat.default)
            shape = [old.shape[d] for d in order]
            if not fits or len(parts) < 2 or _described(fake.view(shape).permute(back)) != _described(old):
                del self.calls[before:]
                return False
        name = call.results[0] or ""
        if straight and target is aten.cat.default:
            self.append(replace(call, target=target, args=(laid, at), kwargs={}))
            return True
        whole = replace(
            single_call(free_name(f"{call.name}_whole", self.step.call, self.values), target, (laid, at)),
            module=call.module,
        )
        self.storage[self.values[name].storage] = whole.name
        self.values[whole.name] = Value(whole.name, whole.name, whole.name, fake)
        self.append(whole)
        shaped = self.view(f"{call.name}_shaped", aten.view.default, (Ref(whole.name), shape))
        self.view(f"{call.name}_view", aten.permute.default, (shaped, back), name)
        return True

    def _original(self, source: Ref) -> Ref:
        """Return what a value is a copy of, through any copies, with the same shape, type and device; else itself."""
        while (call := self.made.get(source.value)) and call.target is aten.copy.default:
            original = call.args[1]
            if _kind(self.fake(original)) != _kind(self.fake(source)):
                break
            source = original
        return source

    def _is_there(self, base: Ref, source: Ref, there: torch.Tensor) -> bool:
        fake = self.fake(source)
        return bool(
            self.values[source.value].storage == self.values[base.value].storage
            and fake.stride() == there.stride()
            and fake.storage_offset() == there.storage_offset()
        )

    def regular(self, base: Ref, indices: Sequence[Ref | None]) -> Slice | None:
        """Return the slice of ``base`` that equals indexing its leading dimensions by ``indices``; None if no slice
        does, or an index is not known before the step runs."""
        lists = [None if i is None else self.known(i.value) for i in indices]
        if any(i is not None and t is None for i, t in zip(indices, lists, strict=True)):
            return None
        return picked_slice([None if t is None else t.cpu().numpy() for t in lists], self.fake(base).shape)


def _clone(now: _Rewriter, call: Call) -> bool:
    return now.equate(call.results[0] or "", call.args[0].value)


def _slice_scatter(now: _Rewriter, call: Call) -> bool:
    arguments = call.arguments()
    base = arguments["self"]
    dim = arguments["dim"] % now.fake(base).dim()
    ends = slice(arguments["start"], arguments["end"], arguments["step"]).indices(now.fake(base).shape[dim])
    return now.scatter(call, base, arguments["src"], Slice(dim, *ends))


def _select_scatter(now: _Rewriter, call: Call) -> bool:
    arguments = call.arguments()
    base = arguments["self"]
    dim = arguments["dim"] % now.fake(base).dim()
    at = arguments["index"] % now.fake(base).shape[dim]
    row = now.view(f"{call.name}_row", aten.unsqueeze.default, (now._original(arguments["src"]), dim))
    return now.scatter(call, base, row, Slice(dim, at, at + 1, 1))


def _index_put(now: _Rewriter, call: Call) -> bool:
    """Rewrite an index_put into a regular slice as a scatter of that slice, and return whether that was possible: not
    if it accumulates or broadcasts."""
    arguments = call.arguments()
    base, source, at = (
        arguments["self"],
        arguments["values"],
        now.regular(arguments["self"], arguments["indices"]),
    )
    if at is None or arguments["accumulate"]:
        return False
    with torch.no_grad():
        there = aten.slice.Tensor(now.fake(base), at.dim, at.start, at.end, at.step)
    if now.fake(source).numel() != there.numel() or not now.fake(source).is_contiguous():
        return False
    shaped = now.view(f"{call.name}_slice", aten.view.default, (source, list(there.shape)))
    return now.scatter(call, base, shaped, at)


def _index(now: _Rewriter, call: Call) -> bool:
    arguments = call.arguments()
    return _picked(now, call, arguments["self"], arguments["indices"])


def _index_select(now: _Rewriter, call: Call) -> bool:
    arguments = call.arguments()
    dim = arguments["dim"] % max(now.fake(arguments["self"]).dim(), 1)
    return _picked(now, call, arguments["self"], [*[None] * dim, arguments["index"]])


def _picked(now: _Rewriter, call: Call, base: Ref, indices: Sequence[Ref | None]) -> bool:
    """Append a copy of a slice in place of a call that indexes ``base`` by known, evenly spaced indices. Return whether
    that was possible."""
    at, old = now.regular(base, indices), now.values[call.results[0] or ""]
    if at is None:
        return False
    with torch.no_grad():
        fake = aten.slice.Tensor(now.fake(base), at.dim, at.start, at.end, at.step)
        fake = fake.clone(memory_format=torch.contiguous_format)
    if _described(fake) != _described(old.fake):
        return False
    source = now.slices(base, [at])[0]
    contiguous = {"memory_format": torch.contiguous_format}
    now.append(replace(call, target=aten.clone.default, args=(source,), kwargs=contiguous))
    return True


Row = Callable[[_Rewriter, Call], bool]

ROWS: Mapping[Any, Row] = {
    aten.clone: _clone,
    aten.slice_scatter: _slice_scatter,
    aten.select_scatter: _select_scatter,
    aten.index_put: _index_put,
    aten.index: _index,
    aten.index_select: _index_select,
}
"""By ATen op, a function that appends other calls in place of a call, or returns False."""


def _row(call: Call) -> Row | None:
    return None if call.backward else ROWS.get(getattr(call.target, "overloadpacket", None))


def _kind(fake: torch.Tensor) -> tuple[object, ...]:
    return fake.shape, fake.dtype, fake.device


def _described(fake: torch.Tensor) -> tuple[object, ...]:
    return *_kind(fake), fake.stride()
