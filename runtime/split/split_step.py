"""Split regions of a captured step: each op becomes one op for each part of the axis.

The new ops are ordinary ATen calls, part after part: slices of the operands, the region's ops on each part, and a `cat`
of those results that are read whole. Gradients of weights are summed over the parts. So the planner may keep or
recompute each part separately, and simulator and executor treat them as all other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value, refs, substitute
from rematplan.runtime.graph.passes import with_phases, without_dead_calls
from rematplan.runtime.split.axis_rules import LOSS, RESHAPES, SUM, AxisSpan, rule_of, states_of
from rematplan.runtime.split.regions import SplitRegion

ATEN = torch.ops.aten
ROWS = 16
"""Parts have a multiple of this number of rows, since kernels for fewer rows may round otherwise."""
HALF = frozenset({torch.float16, torch.bfloat16})
"""Types in which sums over parts would lose digits. They are added in float32."""
IGNORED, SUMMED = 4, 2
"""Of ``nll_loss``: the position of the ignored target, and the reduction that sums."""
NO_CLASS = -100
"""A target that is no class."""


class CannotSplit(ModelError):
    """A region cannot be split, since an op would return another layout. ``region``: the region."""

    def __init__(self, region: SplitRegion, why: str) -> None:
        self.region = region
        super().__init__(why)


def bounds_of(region: SplitRegion, parts: int) -> tuple[int, ...]:
    """Return the first index of each part, and the number of indices at the end: fewer parts if the axis is short.

    Parts are about equally large. If there are enough indices, all parts except the last have a multiple of `ROWS`.
    """
    n = region.indices
    grain = ROWS if n >= ROWS * parts else 1
    starts = dict.fromkeys((2 * n * k + parts * grain) // (2 * parts * grain) * grain for k in range(parts))
    return (*(start for start in starts if start < n), n)


def split_regions(step: CapturedStep, parts: Mapping[SplitRegion, int]) -> CapturedStep:
    """Return a step in which regions are split. ``parts``: by region, into how many parts. A region that is too short
    for two parts stays whole.
    """
    bounds = {r: found for r, k in parts.items() if len(found := bounds_of(r, k)) > 2}
    return _Splitter(step, bounds).split() if bounds else step


def splittable(step: CapturedStep, regions: Iterable[SplitRegion]) -> tuple[SplitRegion, ...]:
    """Return those of the regions that can be split, each at least in two."""
    left = [r for r in regions if len(bounds_of(r, 2)) > 2]
    while True:
        try:
            split_regions(step, dict.fromkeys(left, 2))
            return tuple(left)
        except CannotSplit as error:
            left.remove(error.region)


@dataclass(frozen=True)
class _Part:
    """One part of a region's axis: indices ``start`` to ``stop``; part ``at``."""

    region: SplitRegion
    at: int
    start: int
    stop: int


class _Splitter:
    """Builds the new step. Calls are emitted after all calls on whose results they depend.

    ``step``: the step. ``bounds``: by region, the result of `bounds_of`.
    """

    def __init__(self, step: CapturedStep, bounds: Mapping[SplitRegion, tuple[int, ...]]) -> None:
        self.step = step
        self.values = dict(step.values)
        self.calls: list[Call] = []
        self.emitted: set[str] = set()
        self.maker = {r: c for c in step.calls for r in c.results if r}
        self.region = {name: r for r in bounds for name in r.calls}
        self.parts = {
            r: tuple(_Part(r, k, *ends) for k, ends in enumerate(pairwise(b))) for r, b in bounds.items()
        }
        self.now = next(iter(bounds))
        """The region whose calls are emitted, for errors."""
        ordered = [c for c in step.calls if c.ordered]
        self.before = {b.name: a for a, b in pairwise(ordered)}
        self.local: dict[tuple[str, _Part], str] = {}
        """By value and part, the value that is its part."""
        self.whole: set[str] = set()
        """The results of regions that were made whole again."""
        self.sums: dict[str, str] = {}
        """By value that is summed over parts, the sum so far."""
        found: dict[str, list[Call]] = {}
        for call in step.calls:
            if call.name in self.region:
                found.setdefault(f"{call.backward}{id(self.region[call.name])}", []).append(call)
        self.block = {c.name: tuple(calls) for calls in found.values() for c in calls}
        """By call of a region, all calls of the same region and half of the step."""

    def split(self) -> CapturedStep:
        for call in self.step.calls:
            if not call.is_view:
                self._emit(call)
        for output in self.step.outputs:
            self._need(output.value)
        step = replace(self.step, calls=tuple(self.calls), values=self._made())
        return without_dead_calls(with_phases(step))

    def _made(self) -> dict[str, Value]:
        made = {i.value for i in self.step.inputs} | {r for c in self.calls for r in c.results if r}
        values = ((name, value) for name, value in self.values.items() if name in made)
        return {name: replace(value, storage=self._storage(value.storage)) for name, value in values}

    def _storage(self, name: str) -> str:
        """Return the storage that a storage of the old step is now: a whole result may be a view of a `cat`."""
        while name in self.values and self.values[name].storage != name:
            name = self.values[name].storage
        return name

    def _emit(self, call: Call) -> None:
        """Emit a call as it is, or all calls of its region in the same half of the step, part after part."""
        if call.name in self.emitted:
            return
        if call.name in self.before:
            self._emit(self.before[call.name])
        if call.name not in self.region:
            self.emitted.add(call.name)
            for ref in refs((call.args, call.kwargs)):
                self._need(ref.value)
            self.calls.append(call)
            return
        block, region = self.block[call.name], self.region[call.name]
        self.emitted.update(c.name for c in block)
        for part in self.parts[region]:
            for one in block:
                self._run(one, part)

    def _need(self, value: str) -> None:
        """Emit what makes a whole value."""
        call = self.maker.get(value)
        if call is None:
            return
        self._emit(call)
        if call.name in self.region and value not in self.whole:
            self.whole.add(value)
            self._gather(call, value)

    # One part of a call

    def _run(self, call: Call, part: _Part) -> None:
        """Emit one part of a call."""
        self.now = part.region
        states = states_of(self.step, call, part.region.states, part.region.indices)
        if states is None:
            raise CannotSplit(self.now, f"{call.name} does not have the axis")
        spans = {v: s for v, s in states.items() if isinstance(s, AxisSpan)}
        args, kwargs = substitute((call.args, call.kwargs), Ref)
        args = self._with_shapes(call, args, spans, part)

        def own(value: str) -> Ref:
            if value in spans:
                return Ref(self._part(value, part))
            self._need(value)
            return Ref(value)

        args, kwargs = substitute((args, kwargs), own)
        if LOSS in states.values():
            args = (*args[:3], 0, *args[4:])
        results = [r for r in call.results if r]
        if SUM in states.values() and call.target is ATEN.mm.default and self._adds_in_product(results[0]):
            self._add_product(call, args, results[0], part)
            return
        names = tuple(r and f"{r}.{part.at}" for r in call.results)
        self._call(call, f"{call.name}.{part.at}", call.target, args, kwargs, names)
        for result, name in zip(call.results, names, strict=True):
            if result and name:
                self.local[result, part] = name
                if states[result] == SUM:
                    self._add(call, result, name, part)
                elif isinstance(state := states[result], AxisSpan):
                    self._check(result, name, state, part)

    def _with_shapes(
        self, call: Call, args: tuple[Any, ...], spans: Mapping[str, AxisSpan], part: _Part
    ) -> tuple[Any, ...]:
        """Return the arguments of a call with the shapes of parts in place of those of whole tensors."""
        if getattr(call.target, "overloadpacket", None) in RESHAPES:
            given = {1: next(r for r in call.results if r)}
        else:
            rule = rule_of(self.step, call)
            given = dict(rule.shapes) if rule else {}
        changed = list(args)
        for at, value in given.items():
            changed[at] = list(self._shape(value, spans[value], part))
        return tuple(changed)

    def _shape(self, value: str, span: AxisSpan, part: _Part) -> tuple[int, ...]:
        shape = [int(n) for n in self.step.values[value].fake.shape]
        return span.of_part(shape, part.stop - part.start)

    def _check(self, whole: str, name: str, span: AxisSpan, part: _Part) -> None:
        if tuple(self.values[name].fake.shape) != self._shape(whole, span, part):
            raise CannotSplit(self.now, f"a part of {whole} has another shape than expected")

    def _part(self, value: str, part: _Part) -> str:
        """Return the part of a value, after emitting what makes it."""
        if (value, part) in self.local:
            return self.local[value, part]
        call = self.maker.get(value)
        span = part.region.states[value]
        assert isinstance(span, AxisSpan)
        if call is not None and call.is_view and self._is_inner(value, part.region):
            self._run(call, part)
            return self.local[value, part]
        self._need(value)
        self.local[value, part] = self._slice(value, span, part)
        return self.local[value, part]

    def _is_inner(self, value: str, region: SplitRegion) -> bool:
        """Return whether a value's storage is made by the region, and the views up to the value keep the axis."""
        call = self.maker.get(value)
        while call is not None and call.is_view:
            if not isinstance(region.states.get(value), AxisSpan):
                return False
            value = next(refs(call.args)).value
            call = self.maker.get(value)
        return call is not None and self.region.get(call.name) is region

    def _slice(self, value: str, span: AxisSpan, part: _Part) -> str:
        """Emit a slice of a whole value, and return its name."""
        like, source = self.maker.get(value), value
        if span.first < span.last:
            source = self._new(f"{value}.flat")
            shape = span.of_part([int(n) for n in self.values[value].fake.shape], part.region.indices)
            self._view(like, source, ATEN.view.default, (Ref(value), list(shape)))
        start, stop = part.start * span.inner, part.stop * span.inner
        name = self._new(f"{value}.{part.at}")
        self._view(like, name, ATEN.slice.Tensor, (Ref(source), span.last, start, stop))
        if not self.values[value].fake.is_contiguous() or self.values[name].fake.is_contiguous():
            return name
        # Kernels may rely on an operand that always is contiguous, such as the statistics of a norm.
        copy = self._new(f"{name}.copy")
        made = Call(copy, ATEN.clone.default, (), {}, (copy,), module=like.module if like else "")
        self._call(made, copy, made.target, (Ref(name),), {"memory_format": torch.contiguous_format}, (copy,))
        return copy

    def _new(self, name: str) -> str:
        """Return a name that no value has. A value may be sliced in several regions."""
        while name in self.values:
            name += "_"
        return name

    # Whole results

    def _gather(self, call: Call, value: str) -> None:
        """Emit what makes a whole result of a call from its parts."""
        region = self.now = self.region[call.name]
        state = region.states[value]
        if state == SUM:
            self._finish_sum(call, value)
        elif state == LOSS:
            self._finish_loss(call, region)
        else:
            self._cat(call, value, region, value)

    def _cat(self, call: Call, value: str, region: SplitRegion, name: str) -> None:
        """Emit the concatenation of all parts of a result. ``name``: of the whole."""
        span, like = region.states[value], self.step.values[value].fake
        assert isinstance(span, AxisSpan)
        flat = f"{name}.flat" if span.first < span.last else name
        parts = [Ref(self.local[value, part]) for part in self.parts[region]]
        self._call(call, f"{flat}.cat", ATEN.cat.default, (parts, span.last), {}, (flat,))
        if flat != name:
            self._view(call, name, ATEN.view.default, (Ref(flat), [int(n) for n in like.shape]))
        made = self.values[name].fake
        if (made.shape, made.stride(), made.dtype) != (like.shape, like.stride(), like.dtype):
            raise CannotSplit(self.now, f"{value} would get other strides")

    def _finish_loss(self, call: Call, region: SplitRegion) -> None:
        """Emit the mean or sum of the rows' losses, as the whole op computes it: in the same order, with the same bits.

        The op itself reduces them, as scores of a single class; it ignores rows with an ignored target. With weights of
        classes, the rows' weights are summed in the same way, and the mean is the quotient.
        """
        targets, weight = call.args[1], call.args[2]
        loss, total = (r or f"{call.name}.unused{k}" for k, r in enumerate(call.results))
        rows = self._rows(call, region)
        first = f"{call.name}.ignored"
        self._need(targets.value)
        self._plain(call, first, ATEN.eq.Scalar, (targets, call.args[IGNORED]))
        self._plain(call, f"{call.name}.marks", ATEN.where.Scalar, (Ref(first), NO_CLASS, 0))
        if weight is None:
            self._reduced(call, rows, (loss, total), call.args[3])
        else:
            known, own = f"{call.name}.known", f"{call.name}.weights"
            self._need(weight.value)
            self._plain(call, known, ATEN.masked_fill.Scalar, (targets, Ref(first), 0))
            self._plain(call, own, ATEN.index.Tensor, (weight, [Ref(known)]))
            self._plain(call, f"{own}.negative", ATEN.neg.default, (Ref(own),))
            self._reduced(call, f"{own}.negative", (total, f"{total}.rows"), SUMMED)
            if call.args[3] == 1:
                self._reduced(call, rows, (f"{loss}.sum", f"{loss}.rows"), SUMMED)
                self._plain(call, loss, ATEN.div.Tensor, (Ref(f"{loss}.sum"), Ref(total)))
            else:
                self._reduced(call, rows, (loss, f"{loss}.rows"), call.args[3])
        self.whole |= {loss, total}

    def _rows(self, call: Call, region: SplitRegion) -> str:
        """Emit the losses of all rows, negative again, and return their name."""
        shape = [int(n) for n in self.step.values[call.args[1].value].fake.shape]
        span = region.states[call.args[1].value]
        assert isinstance(span, AxisSpan)
        name, loss = f"{call.name}.rows", call.results[0] or ""
        parts = [Ref(self.local[loss, part]) for part in self.parts[region]]
        self._call(call, f"{name}.cat", ATEN.cat.default, (parts, span.last), {}, (f"{name}.flat",))
        self._view(call, name, ATEN.view.default, (Ref(f"{name}.flat"), shape))
        self._plain(call, f"{name}.negative", ATEN.neg.default, (Ref(name),))
        return f"{name}.negative"

    def _reduced(self, call: Call, rows: str, results: tuple[str, str], reduction: int) -> None:
        column = f"{rows}.column"
        self._view(call, column, ATEN.unsqueeze.default, (Ref(rows), 1))
        args = (Ref(column), Ref(f"{call.name}.marks"), None, reduction, NO_CLASS)
        self._call(call, f"{results[0]}.reduced", call.target, args, {}, results)

    # Sums over parts

    def _adds_in_product(self, result: str) -> bool:
        return self.step.values[result].fake.dtype not in HALF

    def _add_product(self, call: Call, args: tuple[Any, ...], result: str, part: _Part) -> None:
        """Emit a product that is added to the sum so far."""
        name = f"{result}.sum{part.at}"
        if part.at:
            args = (Ref(self.sums[result]), *args)
        target = ATEN.addmm.default if part.at else call.target
        self._call(call, f"{call.name}.{part.at}", target, args, {}, (name,))
        self.sums[result] = name

    def _add(self, call: Call, result: str, summand: str, part: _Part) -> None:
        """Emit the addition of a part's result to the sum so far, in float32 if the type has 16 bits."""
        name, half = f"{result}.sum{part.at}", self.values[summand].fake.dtype in HALF
        if part.at:
            self._plain(call, name, ATEN.add.Tensor, (Ref(self.sums[result]), Ref(summand)))
        elif half:
            self._plain(call, name, ATEN._to_copy.default, (Ref(summand),), {"dtype": torch.float32})
        else:
            name = summand
        self.sums[result] = name

    def _finish_sum(self, call: Call, value: str) -> None:
        """Let the sum over all parts be the whole result."""
        last, like = self.sums[value], self.step.values[value].fake
        if self.values[last].fake.dtype != like.dtype:
            self._plain(call, value, ATEN._to_copy.default, (Ref(last),), {"dtype": like.dtype})
        else:
            self._rename(last, value)
        made = self.values[value].fake
        if (made.shape, made.stride()) != (like.shape, like.stride()):
            raise CannotSplit(self.now, f"{value} would get other strides")

    def _rename(self, old: str, new: str) -> None:
        """Let the result of an emitted call have another name."""
        at = next(k for k, c in enumerate(self.calls) if old in c.results)
        call = self.calls[at]
        self.calls[at] = replace(call, results=tuple(new if r == old else r for r in call.results))
        self.values[new] = replace(self.values.pop(old), name=new, storage=new)

    # Emitting calls

    def _plain(
        self,
        like: Call,
        name: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._call(replace(like, single=True), name, target, args, kwargs or {}, (name,))

    def _view(self, like: Call | None, name: str, target: Any, args: tuple[Any, ...]) -> None:
        call = Call(name, target, args, {}, (name,), is_view=True, module=like.module if like else "")
        self._call(call, name, target, args, {}, (name,))

    def _call(
        self,
        like: Call,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: tuple[str | None, ...],
    ) -> None:
        """Emit a call, with the fields of another one, and describe its results."""
        view = like.is_view and target is like.target
        single = like.single if target is like.target else len(results) == 1
        call = replace(
            like,
            name=name,
            target=target,
            args=args,
            kwargs=kwargs,
            results=results,
            is_view=view,
            single=single,
        )
        fakes = self._fakes(call)
        given = {
            fake.untyped_storage()._cdata: self.values[r.value].storage for r, fake in self._operands(call)
        }
        storages: dict[int, str] = dict(given) if view else {}
        for result, fake in zip(results, fakes, strict=True):
            if result is None:
                continue
            memory = fake.untyped_storage()._cdata
            if (memory in given) != view:
                raise CannotSplit(self.now, f"{name} is a view of other tensors than the whole op")
            self.values[result] = Value(result, storages.setdefault(memory, result), name, fake)
        self.calls.append(call)

    def _operands(self, call: Call) -> Iterable[tuple[Ref, torch.Tensor]]:
        return [(r, self.values[r.value].fake) for r in refs((call.args, call.kwargs))]

    def _fakes(self, call: Call) -> list[torch.Tensor]:
        mode = next(iter(self.values.values())).fake.fake_mode  # type: ignore[attr-defined]
        args, kwargs = substitute((call.args, call.kwargs), lambda name: self.values[name].fake)
        try:
            with mode:
                found = call.target(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CannotSplit(self.now, f"{call.name}: {error}") from error
        return [found] if call.single else list(found)
