"""Append the sums of what parts of a region compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value, free_name
from rematplan.runtime.split.call_emitter import CallEmitter, CannotSplit
from rematplan.runtime.split.regions import SplitRegion
from rematplan.runtime.split.rule_functions import HALF, Mean

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """One part of a region's axis: indices ``start`` to ``stop`` (exclusive); ``at``: the part's number."""

    region: SplitRegion
    at: int
    start: int
    stop: int


class SumEmitter(CallEmitter):
    """Appends sums over parts. ``step``: the step whose calls run in parts."""

    def __init__(self, step: CapturedStep, region: SplitRegion) -> None:
        super().__init__(step.values, region)
        self.step = step
        self.sums: dict[str, str] = {}
        """By value that is summed over parts, the sum so far."""

    def _is_half(self, result: str) -> bool:
        return self.step.values[result].fake.dtype in HALF

    def _add_product(self, call: Call, args: tuple[Any, ...], result: str, part: Part) -> None:
        """Emit a product that is added to the sum so far; the first part's is the sum."""
        name = f"{result}.sum{part.at}"
        if part.at:
            args = (Ref(self.sums[result]), *args)
        target = ATEN.addmm.default if part.at else call.target
        self.call(call, f"{call.name}.{part.at}", target, args, {}, (name,))
        self.sums[result] = name

    def _add_rows(self, call: Call, args: tuple[Any, ...], part: Part) -> None:
        """Emit the op that adds one part's rows, in place, to the sum so far; the first part keeps the call's own
        operands."""
        x, result = call.args[-1].value, call.results[0] or ""
        shape = tuple(int(n) for n in self.step.values[x].fake.shape)
        count, whole = part.stop - part.start, part.region.indices
        target = call.target.of_rows(shape, part.region.states[x], whole, count)  # type: ignore[attr-defined]
        one, name = self._new(f"{call.name}.{part.at}"), self._new(f"{result}.sum{part.at}")
        if part.at:
            args = (Ref(self.sums[result]), args[-1])
        adds = len(args) > 1
        self.calls.append(replace(call, name=one, target=target, args=args, results=(name,), in_place=adds))
        storage = self.values[args[0].value].storage if adds else name
        self.values[name] = Value(name, storage, one, self.step.values[result].fake)
        self.sums[result] = name

    def _add(self, call: Call, result: str, summand: str, part: Part) -> None:
        """Emit the addition of a part's result to the sum so far; the first part's result is the sum. In types of 16
        bits the sum is in float32."""
        name, half = f"{result}.sum{part.at}", self.values[summand].fake.dtype in HALF
        if part.at:
            self.plain(call, name, ATEN.add.Tensor, (Ref(self.sums[result]), Ref(summand)))
        elif half:
            self.plain(call, name, ATEN._to_copy.default, (Ref(summand),), {"dtype": torch.float32})
        else:
            name = summand
        self.sums[result] = name

    def _over(self, like: Call, value: str, mean: Mean) -> str:
        """Emit a value divided by how many numbers a mean is taken of, unless that was emitted, and return its name."""
        name = f"{value}.over{mean.count}"
        if name not in self.values:
            # Kernels multiply a mean's gradient by the reciprocal, and divide its sum.
            by = 1 / max(mean.count, 1) if mean.scales else mean.count
            self.plain(like, name, ATEN.mul.Scalar if mean.scales else ATEN.div.Scalar, (Ref(value), by))
        return name

    def _finish_sum(self, call: Call, value: str, name: str, mean: Mean | None) -> None:
        """Let the sum over all parts, or its mean, be the whole result ``name``, in the type and strides of ``value``.
        `CannotSplit` if these strides are impossible."""
        last, like = self.sums[value], self.step.values[value].fake
        if mean:
            last = self._over(call, last, mean)
        if self.values[last].fake.dtype != like.dtype:
            self.plain(call, name, ATEN._to_copy.default, (Ref(last),), {"dtype": like.dtype})
        else:
            self._rename(last, name)
        self._lay_out(call, value, name)

    def _rename(self, old: str, new: str) -> None:
        """Let the result of an emitted call have another name."""
        at = next(k for k, c in enumerate(self.calls) if old in c.results)
        call = self.calls[at]
        self.calls[at] = replace(call, results=tuple(new if r == old else r for r in call.results))
        value = self.values.pop(old)
        self.values[new] = replace(value, name=new, storage=new if value.storage == old else value.storage)

    def _new(self, name: str) -> str:
        """Return a name that no value has. A value may be sliced in several regions."""
        return free_name(name, self.values)

    def _lay_out(self, call: Call, value: str, name: str) -> None:
        """Give the whole result ``name`` the strides of the unsplit ``value``, by a view if only dimensions of size 1
        differ. `CannotSplit` if shape, type or other strides differ."""
        made, like = self.values[name].fake, self.step.values[value].fake
        if (made.shape, made.dtype) == (like.shape, like.dtype) and made.stride() != like.stride():
            strides = zip(made.shape, made.stride(), like.stride(), strict=True)
            if all(n == 1 or a == b for n, a, b in strides):  # those of dimensions of size 1 are arbitrary
                self._rename(name, own := self._new(f"{name}.own"))
                self.view(call, name, ATEN.as_strided.default, (Ref(own), [*like.shape], [*like.stride()]))
                return
        if (made.shape, made.stride(), made.dtype) != (like.shape, like.stride(), like.dtype):
            raise CannotSplit(self.region, f"{value} would get other strides")
