"""The comparison of the strides of values, while a plan runs, with those that they had at capture."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch

from rematplan.runtime.graph.storage_slices import has_strides


class LayoutCheck:
    """Compares the strides of values with those of a captured step. Values that ``strides`` lacks are not compared.
    ``read``: the values that calls read; strides of other values may differ in dimensions of size 1."""

    def __init__(self, strides: Mapping[str, tuple[int, ...]], read: Set[str]) -> None:
        self.strides, self.read = strides, read
        self.others: dict[str, tuple[int, ...]] = {}
        """The strides of the values that have others than at capture."""
        self.as_planned = True
        """Whether there are none so far. If there are, nothing may be overwritten."""

    def __call__(self, value: str, tensor: torch.Tensor | None) -> None:
        """Record the strides of a value in `others`, and that not all is as planned, if they are not those at capture.
        Nothing is recorded for None (a gradient that nothing needs) and tensors without elements."""
        if (
            tensor is None
            or tensor.stride() == self.strides.get(value, tensor.stride())
            or not tensor.numel()
        ):
            return
        if value in self.read or not has_strides(tensor, self.strides[value]):
            self.others[value], self.as_planned = tensor.stride(), False
