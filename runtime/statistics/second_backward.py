"""An additional backward through a captured step, for another gradient of one of its outputs.

Each copied call runs directly after the call that it repeats. Both read the same saved tensors, and no saved tensor is
recomputed twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value, single_call, substitute

aten = torch.ops.aten


@dataclass
class SecondBackward:
    """A copy of a step's backward for another gradient of one output, with zero for all other outputs. Raises
    `ModelError` if a call that must be copied draws random numbers."""

    step: CapturedStep
    """The captured step."""
    tangent: str
    """The name of the output's gradient in the first backward."""
    begin: Call
    """The call that computes ``cotangent``."""
    cotangent: Value
    """The value that replaces ``tangent`` in the copy."""
    suffix: str
    """Appended to the names of copied calls and values."""
    made: dict[str, Value | None] = field(default_factory=dict)
    """By the name of a value of the first backward, the value of the copy; None if that is zero."""
    behind: dict[str, list[Call]] = field(default_factory=dict)
    """The copied calls, by the name of the step's call after which they are placed."""
    values: dict[str, Value] = field(default_factory=dict)
    """The copy's values by name."""

    def __post_init__(self) -> None:
        """Fill ``made``, ``behind`` and ``values``: repeat each call that depends on tangents, of which all but
        ``tangent`` count as zero."""
        self.values[self.cotangent.name] = self.cotangent
        for one in self.step.inputs:
            if one.kind == "tangent":
                self.made[one.value] = self.cotangent if one.value == self.tangent else None
        for call in self.step.calls:
            late = [r for r in call.operands if r in self.made]
            if late:
                self._repeat(call, late)

    def _repeat(self, call: Call, late: list[str]) -> None:
        """Add the second backward's counterpart of a call, unless ``late``, its operands that depend on gradients, are
        all zero there. A sum of which one operand is zero is the other operand. `ModelError` if the call draws random
        numbers."""
        left = [v for v in late if self.made[v] is not None]
        if not left:
            self.made.update((r, None) for r in call.made)
            return
        if call.target is aten.add.Tensor and len(late) == 2 and len(left) == 1 and not call.kwargs:
            self.made[call.results[0] or ""] = self.made[left[0]]
            return
        if call.seeded:
            raise ModelError(
                f"{self.step.name}: {call.name} draws random numbers in the backward, so no second backward can "
                f"run for statistics; use fisher='empirical'"
            )
        own: list[Call] = []

        def counterpart(name: str) -> Ref:
            if name not in self.made:
                return Ref(name)
            made = self.made[name]
            return Ref((self._zeros(name, own) if made is None else made).name)

        args, kwargs = substitute((call.args, dict(call.kwargs)), counterpart)
        results = []
        for name in call.results:
            if name:
                self.made[name] = self._value(call, name)
            results.append(f"{name}{self.suffix}" if name else None)
        own.append(
            replace(call, name=f"{call.name}{self.suffix}", args=args, kwargs=kwargs, results=tuple(results))
        )
        self.behind[call.name] = own

    def _value(self, call: Call, name: str) -> Value:
        """Record and return the second backward's counterpart of the result ``name`` of a call. It has a storage of its
        own or, of a view, that of the counterpart of what it views."""
        like = self.step.values[name]
        storage = f"{like.storage}{self.suffix}"
        if call.is_view:
            for operand in call.operands:
                made = self.made.get(operand)
                if made is not None and self.step.values[operand].storage == like.storage:
                    storage = made.storage
        value = Value(f"{name}{self.suffix}", storage, f"{call.name}{self.suffix}", like.fake)
        self.values[value.name] = value
        return value

    def _zeros(self, name: str, calls: list[Call]) -> Value:
        """Record and return zeros in place of the first backward's ``name``, and append the call that makes them to
        ``calls``."""
        fake, zero = self.step.values[name].fake, f"{name}{self.suffix}"
        calls.append(
            call_of(
                f"{zero}_made",
                aten.zeros.default,
                ([*fake.shape],),
                zero,
                kwargs={"dtype": fake.dtype, "device": fake.device},
            )
        )
        with torch.no_grad():
            value = Value(zero, zero, f"{zero}_made", fake.new_empty(fake.shape))
        self.made[name] = self.values[zero] = value
        return value


def call_of(
    name: str, target: Any, args: tuple[Any, ...], result: str, kwargs: Mapping[str, Any] | None = None
) -> Call:
    """Return a new call of the backward half with one result. It runs after the outputs' gradients have
    arrived, even if it reads none."""
    return single_call(name, target, args, kwargs, result=result, backward=True, late=True)


def without_results(call: Call, needed: Collection[str]) -> Call:
    """Return a call without its unneeded results, such as gradients of weights, if its op has an
    ``output_mask``; else the call itself."""
    arguments = [a.name for a in getattr(getattr(call.target, "_schema", None), "arguments", ())]
    at = arguments.index("output_mask") if "output_mask" in arguments else len(call.args)
    if at >= len(call.args):
        return call
    mask = [
        made and (result is None or result in needed)
        for made, result in zip(call.args[at], call.results, strict=True)
    ]
    results = tuple(result if made else None for made, result in zip(mask, call.results, strict=True))
    return replace(call, args=(*call.args[:at], mask, *call.args[at + 1 :]), results=results)


def with_calls(
    step: CapturedStep,
    before: Mapping[str, Iterable[Call]],
    behind: Mapping[str, Iterable[Call]],
    values: Mapping[str, Value],
) -> CapturedStep:
    """Return a step with ``values`` added, and the calls of ``before`` and ``behind`` placed before and behind the
    calls that their keys name."""
    calls: list[Call] = []
    for call in step.calls:
        calls += [*before.get(call.name, ()), call, *behind.get(call.name, ())]
    return replace(step, calls=tuple(calls), values={**step.values, **values})
