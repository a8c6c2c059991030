"""Options for the shapes of a planned module's calls: whether further shapes are planned, in which ranges, and how many
plans are kept."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rematplan.ir import UsageError

MAX_PLANS = 64
"""The default number of plans that a planned module keeps."""
FEW = 12
"""If ranges allow at most this many combinations of sizes, all of them are planned before training."""
Dimension = int | tuple[int, ...]
"""A dimension of a tensor, or several dimensions of equal size, such as (2, 3) for square images."""
Axis = tuple[Dimension, range]
"""A dimension of an argument, and its sizes in ascending order."""
Ranges = Mapping[str, Mapping[Dimension, tuple[int, int] | tuple[int, int, int]]]
"""By the name of an argument of a forward and a dimension, the smallest and the largest size; or these and the distance
between sizes, such as (32, 160, 16) for 32, 48, ..., 160."""


@dataclass(frozen=True)
class ShapeOptions:
    """Options for the shapes of a planned module's calls.

    ``dynamic``: whether a call that fits no existing plan gets a new one. If it is false, the call is refused.
    ``max_plans``: the largest number of plans that are kept, and of captures with symbolic sizes. Those that were not
    used for longest are dropped.
    ``ranges``: the sizes that calls may have. For the name of an argument, a dictionary from a dimension to the
    smallest size, the largest size, and the distance between sizes (1 if it is missing).

    Raises:
        UsageError: ``max_plans`` is no positive number, or a range is empty or malformed.
    """

    dynamic: bool = True
    max_plans: int = MAX_PLANS
    ranges: Ranges = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_plans < 1:
            raise UsageError(f"max_plans is {self.max_plans}; it must be 1 or more")
        for name, dims in self.ranges.items():
            for dim, stated in dims.items():
                if len(stated) not in (2, 3) or min(stated) < 0 or 0 in stated[2:]:
                    raise UsageError(
                        f"shape_ranges: dimension {dim} of {name} has {stated}; write the smallest and the largest "
                        f"size, such as (16, 512), or also the distance between sizes, such as (32, 160, 16)"
                    )
                if not _sizes(stated):
                    raise UsageError(
                        f"shape_ranges: dimension {dim} of {name} has no sizes from {stated[0]} to {stated[1]}"
                    )

    def check(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check that the arguments of a call have sizes within ``ranges``. Arguments that are absent or None are not
        checked.

        Args:
            model: the model, for the names of the forward's arguments.
            args: the positional arguments of the call.
            kwargs: its keyword arguments.

        Raises:
            UsageError: an argument has a size outside of its range, different sizes where ``ranges`` says that they
                are equal, lacks a dimension that has a range, or is no tensor; or the forward has no argument of a
                name in ``ranges``.
        """
        for name, tensor in self._tensors(model, args, kwargs).items():
            for key, stated in self.ranges[name].items():
                dims, allowed = _dims(key), _sizes(stated)
                for dim in dims:
                    if not -tensor.ndim <= dim < tensor.ndim:
                        raise UsageError(
                            f"shape_ranges: {name} has {tensor.ndim} dimensions, so no dimension {dim}"
                        )
                    if tensor.shape[dim] not in allowed:
                        steps = f" in steps of {allowed.step}" if allowed.step > 1 else ""
                        raise UsageError(
                            f"{name} has size {tensor.shape[dim]} in dimension {dim}; shape_ranges allows "
                            f"{allowed[0]} to {allowed[-1]}{steps}"
                        )
                sizes = [tensor.shape[dim] for dim in dims]
                if len(set(sizes)) > 1:
                    raise UsageError(
                        f"{name} has the sizes {sizes} in dimensions {list(dims)}; shape_ranges says that they are "
                        f"equal"
                    )

    def first_calls(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of the calls that are planned first: with the largest sizes of the ranges, the sizes of
        the given arguments, the smallest sizes, and sizes between, or all sizes if these are few (`FEW`). Without
        ranges, return only the given arguments.

        Except in the second call, the arguments are the given tensors, resized in the dimensions that have ranges (see
        `call_of_sizes`). The sizes between are there because the ends of a range are often powers of two and equal to
        sizes of the model, which gives their steps another structure (see `sized_plans`). A smallest size of 0 or 1 is
        replaced by the next one from 2 on, if the range has one. The reason is that PyTorch treats the sizes 0 and 1
        specially, so that they need a separate capture.

        Args:
            model: the model, for the names of the forward's arguments.
            args: the given positional arguments.
            kwargs: the given keyword arguments.

        Raises:
            UsageError: as `check`.
        """
        arguments = tuple(args), dict(kwargs)
        if not self.ranges:
            return [arguments]
        self.check(model, args, kwargs)
        smallest = {axis: next((size for size in axis[1] if size >= 2), axis[1][-1]) for axis in self.axes}
        between = {axis: axis[1][min(len(axis[1]) - 1, len(axis[1]) // 2 | 1)] for axis in self.axes}
        every = [[size for size in axis[1] if size >= smallest[axis]] for axis in self.axes]
        if math.prod(map(len, every)) <= min(FEW, self.max_plans):
            others = [dict(zip(self.axes, sizes, strict=True)) for sizes in itertools.product(*every)]
        else:
            others = [smallest, between]
        first, *more = (self.call_of_sizes(model, args, kwargs, sizes) for sizes in ({}, *others))
        return [first, arguments, *more]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The dimensions that vary, as pairs of a dimension and its sizes, each once. Arguments that have the same
        range for the same dimension, such as tokens and their mask, have one common pair: their sizes are assumed to
        be equal."""
        rows = ((dim, _sizes(stated)) for dims in self.ranges.values() for dim, stated in dims.items())
        return tuple(dict.fromkeys(rows))

    def call_of_sizes(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[Axis, int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with other sizes, made from the given ones. In each dimension that has a
        range, entries of a given tensor are left out or repeated evenly, so that a mask of padded words has about the
        same share of padding, and the forward takes the same branches.

        Args:
            model: the model, for the names of the forward's arguments.
            args: the positional arguments.
            kwargs: the keyword arguments.
            sizes: the wanted sizes. The keys are elements of `axes`; a dimension that is absent gets its largest size.

        Raises:
            UsageError: the forward has no argument of a name in ``ranges``, or that argument is no tensor.
        """
        wanted = {
            name: {
                dim: sizes.get((key, _sizes(stated)), _sizes(stated)[-1])
                for key, stated in ranges.items()
                for dim in _dims(key)
            }
            for name, ranges in self.ranges.items()
        }
        tensors = self._tensors(model, args, kwargs)
        other = {id(tensor): _resized(tensor, wanted[name]) for name, tensor in tensors.items()}
        return (
            tuple(other.get(id(arg), arg) for arg in args),
            {name: other.get(id(arg), arg) for name, arg in kwargs.items()},
        )

    def _tensors(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors among a call's arguments that have ranges, by the argument's name. Arguments that are
        absent or None are left out.

        Raises:
            UsageError: the forward has no argument of a name in ``ranges``, or that argument is no tensor.
        """
        if not self.ranges:
            return {}
        signature = inspect.signature(type(model).forward)
        arguments = {**dict(zip(list(signature.parameters)[1:], args, strict=False)), **kwargs}
        found = {}
        for name in self.ranges:
            if name not in arguments and name not in signature.parameters:
                raise UsageError(
                    f"shape_ranges: the forward of {type(model).__name__} has no argument {name}"
                )
            if arguments.get(name) is None:
                continue
            if not isinstance(arguments[name], torch.Tensor):
                raise UsageError(f"shape_ranges: {name} is a {type(arguments[name]).__name__}, not a tensor")
            found[name] = arguments[name]
        return found


def _dims(dimension: Dimension) -> tuple[int, ...]:
    """Return the dimensions that an element of `Axis` names: one, or several of equal size."""
    return dimension if isinstance(dimension, tuple) else (dimension,)


def _sizes(stated: Sequence[int]) -> range:
    """Return the sizes of a range. ``stated``: the smallest and the largest size, and the distance, if there is one."""
    low, high, *step = stated
    return range(low, high + 1, *step)


def _resized(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Return a new tensor with other sizes in some dimensions. In each of these, the entries are the nearest ones of
    ``tensor``, if the first and the last entries of both are at the same places.

    ``sizes``: the new sizes, by dimension.
    """
    other = tensor.detach()
    for dim, size in sizes.items():
        last, most = max(0, other.shape[dim] - 1), max(1, size - 1)
        nearest = (torch.arange(size, device=other.device) * last + most // 2) // most
        other = other.index_select(dim, nearest)
    return other.requires_grad_(tensor.requires_grad)
