"""The sizes that calls of a planned module may have, as `torch.export` states them, and the calls to plan first."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.export import Dim

from rematplan.ir import UsageError

MAX_PLANS = 64
"""The number of plans that a planned module keeps."""
FEW = 12
"""If ranges allow at most this many combinations of sizes, all of them are planned before training."""
SMALLEST = 2
"""Sizes below this are special to PyTorch, so that steps of other sizes do not serve them."""
DynamicShapes: TypeAlias = Mapping[str, Any] | Sequence[Any] | bool | None
"""The values that the option ``dynamic_shapes`` accepts."""


@dataclass(frozen=True)
class Axis:
    """A size that varies: a named `torch.export.Dim`, or the root of derived ones."""

    name: str
    numbers: range
    """The values of the Dim, in ascending order."""


@dataclass(frozen=True)
class Size:
    """The size of one dimension of an argument: ``scale`` × the value of the axis + ``offset``."""

    axis: Axis
    scale: int = 1
    offset: int = 0

    def of(self, number: int) -> int:
        """Return the dimension's size if the axis has the value ``number``."""
        return self.scale * number + self.offset

    @property
    def allowed(self) -> range:
        """The sizes that the dimension may have."""
        numbers = self.axis.numbers
        return range(self.of(numbers[0]), self.of(numbers[-1]) + 1, self.scale)


@dataclass(frozen=True)
class ShapeOptions:
    """The shapes that calls of a planned module may have."""

    dynamic: bool = True
    """Whether a call that fits no existing plan gets a new one. If not, the call is refused."""
    max_plans: int = field(default_factory=lambda: MAX_PLANS)
    """The largest number of plans that are kept, and of captures with symbolic sizes."""
    ranges: Mapping[str, Mapping[int, Size]] = field(default_factory=dict)
    """By the name of an argument and a dimension, the sizes that calls may have."""

    @classmethod
    def of(
        cls, stated: DynamicShapes, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ShapeOptions:
        """Return the options that ``stated`` (``dynamic_shapes``) describes; ``args`` and ``kwargs`` are a first call's
        arguments. `UsageError` if it is malformed."""
        if stated is None or isinstance(stated, bool):
            return cls(dynamic=stated is not False)
        if not isinstance(stated, (Mapping, tuple, list)):
            raise UsageError(
                f"dynamic_shapes is {stated!r}; it must be None, False, or ranges in the form of torch.export"
            )
        names = _parameters(model)
        if not isinstance(stated, Mapping):
            stated = dict(zip(names, stated, strict=False))
        given = _arguments(model, args, kwargs)
        return cls(
            ranges={
                name: sizes
                for name, dims in stated.items()
                if (sizes := dict(_sizes_of(name, dims, given.get(name))))
            }
        )

    def check(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `UsageError` unless the sizes of a call's tensors are in their ranges, and those of one axis follow
        from one value of it."""
        found: dict[Axis, tuple[int, str]] = {}
        for name, tensor in self._tensors(model, args, kwargs).items():
            for dim, size in self.ranges[name].items():
                if not -tensor.ndim <= dim < tensor.ndim:
                    raise UsageError(
                        f"dynamic_shapes: {name} has {tensor.ndim} dimensions, so no dimension {dim}"
                    )
                present, allowed = tensor.shape[dim], size.allowed
                if present not in allowed:
                    steps = f" in steps of {allowed.step}" if allowed.step > 1 else ""
                    raise UsageError(
                        f"{name} has size {present} in dimension {dim}; dynamic_shapes allows {allowed[0]} to "
                        f"{allowed[-1]}{steps}"
                    )
                number, place = (present - size.offset) // size.scale, f"dimension {dim} of {name}"
                known, first = found.setdefault(size.axis, (number, place))
                if known != number:
                    raise UsageError(
                        f"{size.axis.name} is {known} in {first} and {number} in {place}; dynamic_shapes says that "
                        f"they are equal"
                    )

    def first_calls(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of the calls that are planned first: only the given ones without ranges, else those of
        the largest sizes, the given ones, and all combinations if they are few (`FEW`), else two more. `UsageError` for
        given sizes outside of the ranges."""
        arguments = tuple(args), dict(kwargs)
        if not self.ranges:
            return [arguments]
        self.check(model, args, kwargs)
        # The ends of a range are often powers of two, and equal to sizes of the model, which gives their steps another
        # structure (see `sized_plans`). So a size between is planned too, and an odd one.
        axes = {axis: self.usual(axis) or axis.numbers[-1:] for axis in self.axes}
        if math.prod(map(len, axes.values())) <= min(FEW, self.max_plans):
            others = [dict(zip(axes, numbers, strict=True)) for numbers in itertools.product(*axes.values())]
        else:
            others = [
                {axis: numbers[0] for axis, numbers in axes.items()},
                {a: a.numbers[min(len(a.numbers) - 1, len(a.numbers) // 2 | 1)] for a in axes},
            ]
        first, *more = (self.call_of_sizes(model, args, kwargs, numbers) for numbers in ({}, *others))
        return [first, arguments, *more]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that vary, each once."""
        return tuple(dict.fromkeys(size.axis for dims in self.ranges.values() for size in dims.values()))

    def usual(self, axis: Axis) -> range:
        """Return the numbers of an axis for which all sizes on it are at least `SMALLEST`."""
        sizes = [size for dims in self.ranges.values() for size in dims.values() if size.axis == axis]
        below = (all(size.of(n) >= SMALLEST for size in sizes) for n in axis.numbers)
        return axis.numbers[next((at for at, enough in enumerate(below) if enough), len(axis.numbers)) :]

    def call_of_sizes(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Mapping[Axis, int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors of other sizes: each axis has its number in ``numbers``, else its largest.
        Entries of tensors are left out or repeated evenly."""
        other = {
            id(tensor): _resized(
                tensor,
                {
                    dim: size.of(numbers.get(size.axis, size.axis.numbers[-1]))
                    for dim, size in self.ranges[name].items()
                },
            )
            for name, tensor in self._tensors(model, args, kwargs).items()
        }
        return (
            tuple(other.get(id(arg), arg) for arg in args),
            {name: other.get(id(arg), arg) for name, arg in kwargs.items()},
        )

    def _tensors(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return a call's tensors that have ranges, by name, without absent ones and None. `UsageError` if the forward
        lacks an argument with ranges, or it is no tensor."""
        if not self.ranges:
            return {}
        arguments, known = _arguments(model, args, kwargs), _parameters(model)
        found = {}
        for name in self.ranges:
            if name not in arguments and name not in known:
                raise UsageError(
                    f"dynamic_shapes: the forward of {type(model).__name__} has no argument {name}"
                )
            if arguments.get(name) is None:
                continue
            if not isinstance(arguments[name], torch.Tensor):
                raise UsageError(
                    f"dynamic_shapes: {name} is a {type(arguments[name]).__name__}, not a tensor"
                )
            found[name] = arguments[name]
        return found


def _parameters(model: nn.Module) -> list[str]:
    return list(inspect.signature(type(model).forward).parameters)[1:]


def _arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_parameters(model), args, strict=False)), **kwargs}


def _sizes_of(name: str, dims: Any, given: object) -> Iterator[tuple[int, Size]]:
    """Yield the dimensions of an argument whose sizes are stated, with these; `UsageError` if malformed. `Dim.STATIC`
    states the size that ``given``, the argument of a first call, has."""
    if dims is None:
        return
    if not isinstance(dims, (Mapping, Sequence)) or isinstance(dims, str):
        raise UsageError(
            f"dynamic_shapes: {name} has {dims!r}; write a dictionary such as {{0: Dim('batch', min=2, max=64)}}"
        )
    for dim, stated in dims.items() if isinstance(dims, Mapping) else enumerate(dims):
        place = f"dimension {dim} of {name}"
        size = _size(place, stated)
        if stated is Dim.STATIC:
            if not isinstance(given, torch.Tensor):
                raise UsageError(
                    f"dynamic_shapes: {place} is Dim.STATIC, and no argument shows its size; write the size"
                )
            size = _fixed(place, given.shape[dim])
        if size is not None:
            yield dim, size


def _size(place: str, stated: Any) -> Size | None:
    """Return the size of a dimension that a user stated; None if it may have any, has no upper limit or is
    `Dim.STATIC`. `UsageError` if malformed."""
    if stated is None or stated in (Dim.AUTO, Dim.DYNAMIC, Dim.STATIC):
        return None
    if isinstance(stated, int):
        return _fixed(place, stated)
    if not isinstance(stated, Dim):
        raise UsageError(
            f"dynamic_shapes: {place} has {stated!r}; write torch.export.Dim(name, min=…, max=…), Dim.AUTO, "
            f"Dim.STATIC or a number"
        )
    root, step = getattr(stated, "root", stated), getattr(stated, "fn", lambda n: n)
    if not math.isfinite(float(root.max)):
        return None
    numbers = range(int(root.min), int(root.max) + 1)
    if not numbers:
        raise UsageError(f"dynamic_shapes: {place} has no sizes from {root.min} to {root.max}")
    offset = int(step(0))
    return Size(Axis(root.__name__, numbers), int(step(1)) - offset, offset)


def _fixed(place: str, size: int) -> Size:
    return Size(Axis(place, range(size, size + 1)))


def _resized(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Return a new tensor with other ``sizes`` by dimension, whose entries are the nearest ones of ``tensor`` from
    first to last."""
    other = tensor.detach()
    for dim, size in sizes.items():
        last, most = max(0, other.shape[dim] - 1), max(1, size - 1)
        nearest = (torch.arange(size, device=other.device) * last + most // 2) // most
        other = other.index_select(dim, nearest)
    return other.requires_grad_(tensor.requires_grad)
