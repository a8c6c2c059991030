"""Append ATen calls to a step, and describe their results by fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import Call, Ref, Value
from rematplan.runtime.split.regions import SplitRegion


def part_of(op: str) -> int | None:
    """Return the number of the part of a region that an op computes, by its name; None for other ops."""
    _, *parts = op.split(".")
    return int(parts[0]) if parts and parts[0].isdigit() else None


class CannotSplit(ModelError):
    """A region cannot be split, since an op would return another layout. ``region``: the region."""

    def __init__(self, region: SplitRegion, why: str) -> None:
        self.region = region
        super().__init__(why)


class CallEmitter:
    """Appends calls to ``calls``, and their results to ``values``. ``region``: whose calls they are, for errors."""

    def __init__(self, values: Mapping[str, Value], region: SplitRegion) -> None:
        self.values = dict(values)
        self.calls: list[Call] = []
        self.region = region
        self.copies: dict[str, str] = {}
        """The contiguous copies, by the values that they are copies of."""

    def plain(
        self,
        like: Call,
        name: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Append a call with one result, and the other fields of the call ``like``."""
        self.call(replace(like, single=True), name, target, args, kwargs or {}, (name,))

    def view(self, like: Call | None, name: str, target: Any, args: tuple[Any, ...]) -> None:
        """Append a call that returns a view of its operand. ``like``: a call of the same module."""
        call = Call(name, target, args, {}, (name,), is_view=True, module=like.module if like else "")
        self.call(call, name, target, args, {}, (name,))

    def call(
        self,
        like: Call,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: tuple[str | None, ...],
    ) -> None:
        """Append a call with the fields of ``like``, and describe its results. `CannotSplit` if the op fails, or if
        results are views where the whole op's are not, or conversely."""
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
        operands = [self.values[name] for name in call.operands]
        given = {value.fake.untyped_storage()._cdata: value.storage for value in operands}
        storages: dict[int, str] = dict(given) if view else {}
        for result, fake in zip(results, fakes, strict=True):
            if result is None:
                continue
            memory = fake.untyped_storage()._cdata
            if (memory in given) != view:
                raise CannotSplit(self.region, f"{name} is a view of other tensors than the whole op")
            self.values[result] = Value(result, storages.setdefault(memory, result), name, fake)
        self.calls.append(call)

    def copied(self, like: Call | None, value: str) -> str:
        """Emit a contiguous copy of a value if there is none yet, and return its name. ``like``: a call whose module
        the copy gets."""
        if value not in self.copies:
            self.copies[value] = copy = f"{value}.copy"
            made = Call(
                copy, torch.ops.aten.clone.default, (), {}, (copy,), module=like.module if like else ""
            )
            given = {"memory_format": torch.contiguous_format}
            self.call(made, copy, made.target, (Ref(value),), given, (copy,))
        return self.copies[value]

    def can_view(self, value: str, shape: Sequence[int]) -> bool:
        """Return whether a value can have another shape without a copy."""
        try:
            self.values[value].fake.view(*shape)
        except (RuntimeError, ValueError):
            return False
        return True

    def _fakes(self, call: Call) -> tuple[torch.Tensor, ...]:
        mode = next(iter(self.values.values())).fake.fake_mode  # type: ignore[attr-defined]
        try:
            with mode:
                return call.run(lambda name: self.values[name].fake)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CannotSplit(self.region, f"{call.name}: {error}") from error
