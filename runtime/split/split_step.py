"""Split regions of a captured step: each op becomes one op for each part of the axis.

Slices of operands, ops of parts and a `cat` of what is read whole are ordinary calls, which the planner keeps or
recomputes separately. Gradients of weights are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value, refs, substitute
from rematplan.runtime.graph.passes import with_phases, without_dead_calls
from rematplan.runtime.split.axis_spans import AxisSpan
from rematplan.runtime.split.call_emitter import CannotSplit
from rematplan.runtime.split.early_backward import early_backward
from rematplan.runtime.split.regions import SplitRegion, StepUse
from rematplan.runtime.split.rule_functions import LOSS, SUM, DimensionRule, State
from rematplan.runtime.split.split_table import RESHAPES, rule_of, states_of
from rematplan.runtime.split.sum_emitter import Part, SumEmitter

ATEN = torch.ops.aten
ROWS = 16
"""Parts have a multiple of this number of rows, since kernels for fewer rows may round otherwise."""
SMALL = 8
"""An operand may be copied, to be divided along several dimensions, if it has 1 / so many of the bytes that a region
saves."""
IGNORED, SUMMED = 4, 2
"""Of ``nll_loss``: the position of the ignored target, and the reduction that sums."""
NO_CLASS = -100
"""A target that is no class."""


def bounds_of(region: SplitRegion, parts: int) -> tuple[int, ...]:
    """Return the first index of each part, and the number of indices last. Short axes have fewer parts; starts are
    multiples of `ROWS` if there are as many indices for each part."""
    # Part k begins at n · k / parts, rounded to the nearest multiple of ``grain``: ⌊(x + grain/2) / grain⌋ · grain with
    # numerator and denominator times 2 · parts. 100 indices in 3 parts begin at 0, 32 (of 33.3) and 64 (of 66.7).
    n = region.indices
    grain = ROWS if n >= ROWS * parts else 1
    starts = dict.fromkeys((2 * n * k + parts * grain) // (2 * parts * grain) * grain for k in range(parts))
    return (*(start for start in starts if start < n), n)


def split_regions(step: CapturedStep, parts: Mapping[SplitRegion, int]) -> CapturedStep:
    """Return a step whose regions are split into so many ``parts``. A region too short for two parts stays whole."""
    bounds = {r: found for r, k in parts.items() if len(found := bounds_of(r, k)) > 2}
    return _Splitter(step, bounds).split() if bounds else step


def splittable(step: CapturedStep, regions: Iterable[SplitRegion]) -> tuple[SplitRegion, ...]:
    """Return those of the regions that can be split together, each at least in two."""
    left = [r for r in regions if len(bounds_of(r, 2)) > 2]
    while True:
        try:
            split_regions(step, dict.fromkeys(left, 2))
            return tuple(left)
        except CannotSplit as error:
            left.remove(error.region)


class _Splitter(SumEmitter):
    """Builds the new step for ``bounds``, by region the result of `bounds_of`.

    A call is emitted after what it reads: `_need` makes whole values, `_part` parts, `_join` a whole of parts. A
    region's calls in one half (all, if its backward is early) are emitted together, part after part.
    """

    def __init__(self, step: CapturedStep, bounds: Mapping[SplitRegion, tuple[int, ...]]) -> None:
        """Find the parts of each region, the regions with an early backward, and the calls whose parts run together.
        Nothing is emitted yet."""
        super().__init__(step, next(iter(bounds)))
        self.use = StepUse(step)
        self.emitted: set[str] = set()
        self.maker = self.use.maker
        self.region_of = {name: r for r in bounds for name in r.calls}
        self.parts = {
            r: tuple(Part(r, k, *ends) for k, ends in enumerate(pairwise(b))) for r, b in bounds.items()
        }
        self.early = {r: early for r in bounds if (early := early_backward(self.use, r))}
        """The regions whose backward runs in the forward half."""
        ordered = [c for c in step.calls if c.ordered]
        self.before = {b.name: a for a, b in pairwise(ordered)}
        self.local: dict[tuple[str, Part], str] = {}
        """By value and part, the value that is its part."""
        self.whole: set[str] = set()
        """The results of regions that were made whole again."""
        self.of_one: dict[tuple[SplitRegion, str], str] = {}
        """By region and value of `early`, what the value is if the gradient of that region's loss is 1."""
        self.hoisted: set[str] = set()
        """The calls that run together with a loss of `early`."""
        found: dict[tuple[SplitRegion, bool], list[Call]] = {}
        for call in step.calls:
            if (region := self.region_of.get(call.name)) is not None:
                found.setdefault((region, call.backward and region not in self.early), []).append(call)
        self.block = {c.name: tuple(calls) for calls in found.values() for c in calls}
        """By call of a region, all calls of the region whose parts run together: those in the same half of the step."""

    def split(self) -> CapturedStep:
        """Emit all calls, and return the new step with phases, without dead calls. `CannotSplit` if a region reads a
        part of a value that lacks its axis."""
        for call in self.step.calls:
            if not call.is_view:
                self._emit(call)
        for output in self.step.outputs:
            self._need(output.value)
        step = with_phases(replace(self.step, calls=tuple(self.calls), values=self._made()))
        forward = self.hoisted - step.after_loss
        calls = (replace(c, backward=c.backward and c.name not in forward) for c in step.calls)
        return without_dead_calls(replace(step, calls=tuple(calls)))

    def _made(self) -> dict[str, Value]:
        made = {i.value for i in self.step.inputs} | {r for c in self.calls for r in c.made}
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
        if call.name not in self.region_of:
            self.emitted.add(call.name)
            for name in call.operands:
                self._need(name)
            self.calls.append(call)
            return
        block, region, began = self.block[call.name], self.region_of[call.name], len(self.calls)
        self.emitted.update(c.name for c in block)
        early = region in self.early
        if early:
            self._start_early(region)
        for part in self.parts[region]:
            for one in block:
                self._run(one, part)
        if early:
            self._end_early(region)
        for loss in region.losses.intersection(r for c in block for r in c.made):
            self._need(loss)
        if early:
            self.hoisted.update(c.name for c in self.calls[began:])

    def _need(self, value: str) -> None:
        """Emit what makes a whole value."""
        call = self.maker.get(value)
        if call is None:
            return
        self._emit(call)
        if call.name in self.region_of and value not in self.whole:
            self.whole.add(value)
            self._gather(call, value)

    # A backward that runs in the forward half

    def _start_early(self, region: SplitRegion) -> None:
        """Emit what the backward of a loss reads that no part computes: 1 as the gradient, and the means' divisors."""
        calls = [self.step.call[name] for name in region.calls]
        tangent = self.early[region].tangent
        one, like = self._new(f"{tangent}.one"), self.values[tangent].fake
        last = [c for c in calls if not c.backward][-1]
        made = Call(one, ATEN.ones.default, (), {}, (one,), module=last.module)
        given = {"dtype": like.dtype, "device": like.device}
        self.call(made, one, made.target, (list(like.shape),), given, (one,))
        self.of_one[region, tangent] = one
        for call in calls:
            if LOSS in self._states(call):
                self._divisor(call)

    def _of_one(self, value: str, region: SplitRegion) -> str:
        """Return what a value from before a region's backward is if the loss's gradient is 1, after emitting it. A
        value that does not depend on that gradient is returned itself."""
        if (region, value) not in self.of_one:
            if (call := self.early[region].before.get(value)) is None:
                self._need(value)
                return value
            args, kwargs = substitute((call.args, call.kwargs), lambda name: Ref(self._of_one(name, region)))
            names = tuple(r and self._new(f"{r}.of_one") for r in call.results)
            self.call(call, self._new(f"{call.name}.of_one"), call.target, args, kwargs, names)
            for result, name in zip(call.results, names, strict=True):
                if result and name:
                    self.of_one[region, result] = name
        return self.of_one[region, value]

    def _end_early(self, region: SplitRegion) -> None:
        """Emit those results of the region's backward that are read whole, for a gradient of the loss of 1."""
        for call in map(self.step.call.__getitem__, region.calls):
            for value in filter(None, call.results):
                if value in self.early[region].scaled and self._is_read_whole(value):
                    self.of_one[region, value] = name = self._new(f"{value}.of_one")
                    self._join(call, value, name)

    def _states(self, call: Call) -> set[State | None]:
        states = self.region_of[call.name].states
        return {states.get(r) for r in call.made}

    def _is_read_whole(self, value: str) -> bool:
        storage, region = self.step.values[value].storage, self.region_of[self.maker[value].name]
        readers = self.use.readers_of_storage.get(storage, ())
        return storage in self.use.outputs or not all(
            c.name in region.calls and isinstance(region.states.get(v), AxisSpan) for v, c in readers
        )

    # One part of a call

    def _run(self, call: Call, part: Part) -> None:
        """Emit one part of a call, and add what it sums to the sum so far. `CannotSplit` if the call lacks the axis or
        the part has another shape than expected."""
        self.region = part.region
        states = states_of(self.step, call, part.region.states, part.region.indices)
        if states is None:
            raise CannotSplit(self.region, f"{call.name} does not have the axis")
        spans = {v: s for v, s in states.items() if isinstance(s, AxisSpan)}
        rule = rule_of(self.step, call)
        mean = rule.mean if rule else None
        run = mean.call if mean else call

        def own(value: str) -> Ref:
            if value in spans:
                return Ref(self._part(value, part))
            return Ref(self._whole_operand(value, part.region))

        args, kwargs = substitute((self._with_shapes(call, rule, run.args, spans, part), run.kwargs), own)
        if LOSS in states.values():
            args = (*args[:3], 0, *args[4:])
        results = list(call.made)
        if mean and mean.scales:
            args = (Ref(self._over(call, args[0].value, mean)), *args[1:])
        packet = getattr(run.target, "overloadpacket", None)
        if SUM in states.values() and packet is ATEN.sum and self._is_half(results[0]):
            kwargs = {**kwargs, "dtype": torch.float32}  # each part's sum would be rounded
        if SUM in states.values() and call.target is ATEN.mm.default and not self._is_half(results[0]):
            self._add_product(call, args, results[0], part)
            return
        if hasattr(call.target, "of_rows"):
            self._add_rows(call, args, part)
            return
        names = tuple(r and f"{r}.{part.at}" for r in call.results)
        self.call(call, f"{call.name}.{part.at}", run.target, args, kwargs, names)
        for result, name in zip(call.results, names, strict=True):
            if result and name:
                if mean and not mean.scales and states[result] != SUM:
                    name = self._over(call, name, mean)
                self.local[result, part] = name
                if states[result] == SUM:
                    self._add(call, result, name, part)
                elif isinstance(state := states[result], AxisSpan):
                    self._check(result, name, state, part)

    def _with_shapes(
        self,
        call: Call,
        rule: DimensionRule | None,
        args: tuple[Any, ...],
        spans: Mapping[str, AxisSpan],
        part: Part,
    ) -> tuple[Any, ...]:
        """Return the arguments of a call with the shapes of parts in place of those of whole tensors."""
        reshapes = getattr(call.target, "overloadpacket", None) in RESHAPES
        given = {1: call.made[0]} if reshapes else rule.shapes if rule else {}
        changed = list(args)
        for at, value in given.items():
            shape = self._shape(value, spans[value], part)
            changed[at] = shape[0] if isinstance(args[at], int) else list(shape)
        return tuple(changed)

    def _shape(self, value: str, span: AxisSpan, part: Part) -> tuple[int, ...]:
        shape = [int(n) for n in self.step.values[value].fake.shape]
        return span.of_part(shape, part.stop - part.start)

    def _check(self, whole: str, name: str, span: AxisSpan, part: Part) -> None:
        if tuple(self.values[name].fake.shape) != self._shape(whole, span, part):
            raise CannotSplit(self.region, f"a part of {whole} has another shape than expected")

    def _part(self, value: str, part: Part) -> str:
        """Return the part of a value, after emitting what makes it."""
        if (value, part) in self.local:
            return self.local[value, part]
        call = self.maker.get(value)
        span = part.region.states[value]
        assert isinstance(span, AxisSpan)
        if call is not None and call.is_view and self._is_inner(value, part.region):
            self._run(call, part)
            return self.local[value, part]
        self.local[value, part] = self._slice(self._whole_operand(value, part.region), value, span, part)
        return self.local[value, part]

    def _whole_operand(self, value: str, region: SplitRegion) -> str:
        """Return a whole value that a region reads, after emitting what makes it."""
        if (early := self.early.get(region)) is not None and (
            value == early.tangent or value in early.before
        ):
            return self._of_one(value, region)
        self._need(value)
        return value

    def _is_inner(self, value: str, region: SplitRegion) -> bool:
        """Return whether a value's storage is made by the region, and the views up to the value keep the axis."""
        call = self.maker.get(value)
        while call is not None and call.is_view:
            if not isinstance(region.states.get(value), AxisSpan):
                return False
            value = next(refs(call.args)).value
            call = self.maker.get(value)
        return call is not None and self.region_of.get(call.name) is region

    def _slice(self, whole: str, value: str, span: AxisSpan, part: Part) -> str:
        """Emit the slice of a value for a part, and return its name. ``whole``: the name that the value has now."""
        like, source = self.maker.get(value), whole
        if span.first < span.last:
            source = self._new(f"{value}.flat")
            shape = span.of_part([int(n) for n in self.values[value].fake.shape], part.region.indices)
            if self._is_small(whole, part.region) and not self.can_view(whole, shape):
                whole = self.copied(like, whole)
            self.view(like, source, ATEN.view.default, (Ref(whole), list(shape)))
        start, stop = part.start * span.inner, part.stop * span.inner
        name = self._new(f"{value}.{part.at}")
        self.view(like, name, ATEN.slice.Tensor, (Ref(source), span.last, start, stop))
        if not self.values[value].fake.is_contiguous() or self.values[name].fake.is_contiguous():
            return name
        # Kernels may rely on an operand that always is contiguous, such as the statistics of a norm.
        return self.copied(like, name)

    def _is_small(self, value: str, region: SplitRegion) -> bool:
        """Return whether a copy of a value is small in comparison with what the region saves; indices always are."""
        fake = self.values[value].fake
        return not fake.is_floating_point() or SMALL * fake.nbytes <= region.saved

    # Whole results

    def _gather(self, call: Call, value: str) -> None:
        """Emit what makes a whole result of a call from its parts. A result of an early backward, computed for a
        gradient of 1, is multiplied by the loss's gradient."""
        region = self.region = self.region_of[call.name]
        early = self.early.get(region)
        if early is None or value not in early.scaled:
            self._join(call, value, value)
            return
        self._need(early.tangent)
        self.plain(call, value, ATEN.mul.Tensor, (Ref(self.of_one[region, value]), Ref(early.tangent)))
        self._lay_out(call, value, value)

    def _join(self, call: Call, value: str, name: str) -> None:
        """Emit what makes a whole result of a call from its parts. ``name``: of the whole."""
        region = self.region_of[call.name]
        state = region.states[value]
        if state == SUM:
            rule = rule_of(self.step, call)
            self._finish_sum(call, value, name, rule.mean if rule else None)
        elif state == LOSS:
            self._finish_loss(call, region)
        else:
            self._cat(call, value, region, name)

    def _cat(self, call: Call, value: str, region: SplitRegion, name: str) -> None:
        """Emit the concatenation ``name`` of a result's parts; `CannotSplit` if its layout is another than unsplit."""
        span, like = region.states[value], self.step.values[value].fake
        assert isinstance(span, AxisSpan)
        parts, at = [self.local[value, part] for part in self.parts[region]], span.last
        joined, back = name, None
        if span.first < span.last:
            joined, back = f"{name}.flat", (ATEN.view.default, [int(n) for n in like.shape])
        elif not like.is_contiguous():
            # Joined in the order in which the whole has its dimensions in memory.
            strides = like.stride()
            order = sorted(range(like.ndim), key=lambda d: -strides[d])
            for k, part in enumerate(parts):
                parts[k] = self._new(f"{part}.ordered")
                self.view(call, parts[k], ATEN.permute.default, (Ref(part), order))
            joined, at = f"{name}.ordered", order.index(at)
            back = ATEN.permute.default, [order.index(d) for d in range(like.ndim)]
        self.call(call, f"{joined}.cat", ATEN.cat.default, ([*map(Ref, parts)], at), {}, (joined,))
        if back is not None:
            self.view(call, name, back[0], (Ref(joined), back[1]))
        self._lay_out(call, value, name)

    def _divisor(self, call: Call) -> None:
        """Emit the divisor of a loss's mean, from the targets alone: the number of rows that are not ignored, or the
        sum of their weights. It counts as whole from now on."""
        targets, weight, first = call.args[1], call.args[2], f"{call.name}.ignored"
        total = call.results[1] or f"{call.name}.unused1"
        self._need(targets.value)
        self.plain(call, first, ATEN.eq.Scalar, (targets, call.args[IGNORED]))
        self.plain(call, f"{call.name}.marks", ATEN.where.Scalar, (Ref(first), NO_CLASS, 0))
        known, own = f"{call.name}.known", f"{call.name}.weights"
        if weight is None:
            like = self.step.values[call.args[0].value].fake
            self.plain(call, own, ATEN._to_copy.default, (Ref(f"{call.name}.marks"),), {"dtype": like.dtype})
            self._reduced(call, own, (f"{total}.of_marks", total), call.args[3])
        else:
            self._need(weight.value)
            self.plain(call, known, ATEN.masked_fill.Scalar, (targets, Ref(first), 0))
            self.plain(call, own, ATEN.index.Tensor, (weight, [Ref(known)]))
            self.plain(call, f"{own}.negative", ATEN.neg.default, (Ref(own),))
            self._reduced(call, f"{own}.negative", (total, f"{total}.rows"), SUMMED)
        self.whole.add(total)

    def _finish_loss(self, call: Call, region: SplitRegion) -> None:
        """Emit the mean or sum of the rows' losses in the order of the whole op, so with the same bits."""
        # The op itself reduces them, as scores of one class, without ignored rows. Weights of classes are
        # summed alike, and divide.
        loss, total = (r or f"{call.name}.unused{k}" for k, r in enumerate(call.results))
        if f"{call.name}.marks" not in self.values:
            self._divisor(call)
        rows = self._rows(call, region)
        if call.args[2] is not None and call.args[3] == 1:
            self._reduced(call, rows, (f"{loss}.sum", f"{loss}.rows"), SUMMED)
            self.plain(call, loss, ATEN.div.Tensor, (Ref(f"{loss}.sum"), Ref(total)))
        else:
            self._reduced(call, rows, (loss, f"{loss}.rows"), call.args[3])
        self.whole.add(loss)

    def _rows(self, call: Call, region: SplitRegion) -> str:
        """Emit the losses of all rows, joined and with the opposite sign, and return their name. `_reduced` then
        negates them, as scores."""
        shape = [int(n) for n in self.step.values[call.args[1].value].fake.shape]
        span = region.states[call.args[1].value]
        assert isinstance(span, AxisSpan)
        name, loss = f"{call.name}.rows", call.results[0] or ""
        parts = [Ref(self.local[loss, part]) for part in self.parts[region]]
        self.call(call, f"{name}.cat", ATEN.cat.default, (parts, span.last), {}, (f"{name}.flat",))
        self.view(call, name, ATEN.view.default, (Ref(f"{name}.flat"), shape))
        self.plain(call, f"{name}.negative", ATEN.neg.default, (Ref(name),))
        return f"{name}.negative"

    def _reduced(self, call: Call, rows: str, results: tuple[str, str], reduction: int) -> None:
        """Emit the sum or mean of negative losses (``rows``) by the loss's own op, as scores of one class without
        ignored rows. ``results``: the names of its two results."""
        column = f"{rows}.column"
        self.view(call, column, ATEN.unsqueeze.default, (Ref(rows), 1))
        args = (Ref(column), Ref(f"{call.name}.marks"), None, reduction, NO_CLASS)
        self.call(call, f"{results[0]}.reduced", call.target, args, {}, results)
