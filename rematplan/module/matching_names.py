"""Comparison of captured steps, ignoring the names of calls and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Value


def names_of(step: CapturedStep, other: CapturedStep) -> Mapping[str, str] | None:
    """Return, by the name of a call or value in ``step``, its name in ``other``; None if the steps differ in more than
    names."""
    return _Comparison(step, other).names


class _Comparison:
    """Compares two captured steps. ``names``: by the name of a call or value in one, its name in the other; None if the
    steps differ in more than names."""

    def __init__(self, step: CapturedStep, other: CapturedStep) -> None:
        """Compare the steps now, and set ``names``: None if they differ in more than names."""
        self.step, self.other = step, other
        self._names: dict[str, str] = {}
        self._storages: dict[str, str] = {}
        same = (
            len(step.inputs) == len(other.inputs)
            and len(step.calls) == len(other.calls)
            and len(step.outputs) == len(other.outputs)
            and all(map(self._input, step.inputs, other.inputs))
            and all(map(self._call, step.calls, other.calls))
            and all(map(self._output, step.outputs, other.outputs))
            and self._constants()
            and len(set(self._storages.values())) == len(self._storages)
        )
        self.names = self._names if same else None

    def _input(self, a: Any, b: Any) -> bool:
        kinds = (a.kind, a.target) == (b.kind, b.target) or a.kind == b.kind == "constant"
        return kinds and self._value(a.value, b.value)

    def _output(self, a: Any, b: Any) -> bool:
        return (a.kind, a.target) == (b.kind, b.target) and self._names.get(a.value) == b.value

    def _call(self, a: Call, b: Call) -> bool:
        """Return whether two calls are equal apart from names. Record the call's name, and the results' names if the
        calls are equal; with different numbers of results, record nothing."""
        if len(a.results) != len(b.results):
            return False
        known = self._names
        named = a.reading(lambda name: known.get(name, ""))
        changed = replace(named, indexed=b.indexed, name=b.name, results=b.results)
        self._names[a.name] = b.name
        results = (
            (x is y) if x is None or y is None else self._value(x, y)
            for x, y in zip(a.results, b.results, strict=True)
        )
        return _exactly(changed) == _exactly(replace(b, kwargs=dict(b.kwargs))) and all(results)

    def _value(self, name: str, other: str) -> bool:
        a, b = self.step.values[name], self.other.values[other]
        if self._names.setdefault(name, other) != other or _layout(a) != _layout(b):
            return False
        if self._storages.setdefault(a.storage, b.storage) != b.storage:
            return False
        self._names.setdefault(a.storage, b.storage)
        return self._names[a.storage] == b.storage

    def _constants(self) -> bool:
        for name, constant in self.step.constants.items():
            if name not in self._names:
                continue
            other = self.other.constants.get(self._names[name])
            if other is None or not (other is constant or torch.equal(other, constant)):
                return False
        return True


def _exactly(call: Call) -> Any:
    """Return a key that is equal for equal calls; it distinguishes 1, 1.0 and True."""
    return call, repr((call.args, call.kwargs))


def _layout(value: Value) -> tuple[Any, ...]:
    """Return what must be equal in two values: shape, strides except of dimensions of size 1, offset, type, device and
    bytes of the storage."""
    fake = value.fake
    strides = tuple(0 if size == 1 else stride for size, stride in zip_longest(fake.shape, fake.stride()))
    return (
        tuple(fake.shape),
        strides,
        fake.storage_offset(),
        fake.dtype,
        fake.device,
        fake.untyped_storage().nbytes(),
    )
