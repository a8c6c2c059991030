"""Bytes that a backward needs in addition if the outputs' gradients have other strides than at capture.

A loss that permutes or sums an output chooses strides. Calls that read them may copy, or return other strides, so
the backward runs on fake tensors for a few typical layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from rematplan.runtime.capture.patches.fake_layouts import TrueLayouts
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.quiet_logs import quiet
from rematplan.runtime.graph.storage_slices import has_strides, uninitialised_like
from rematplan.runtime.graph.tangent_layouts import AsCaptured, for_any_layout

Layout = Callable[[torch.Tensor], torch.Tensor]


def _dense(order: Callable[[list[int]], list[int]]) -> Layout:
    """Return a function that makes an empty dense tensor like its argument, with the dimensions in another order in
    memory. ``order``: from the list of all dimensions to their order in memory, outermost first."""

    def strided(like: torch.Tensor) -> torch.Tensor:
        dims = order(list(range(like.ndim)))
        back = sorted(range(like.ndim), key=dims.__getitem__)
        shape = [like.shape[d] for d in dims]
        return torch.empty(shape, dtype=like.dtype, device=like.device).permute(back)

    return strided


def _expanded(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one number, expanded to the shape of ``like``. The gradient of a sum is such a tensor."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)


LAYOUTS: Mapping[str, Layout] = {
    "dense": _dense(lambda dims: dims),
    "channels last": _dense(lambda dims: dims[:1] + dims[2:] + dims[1:2]),
    "channels second": _dense(lambda dims: dims[:1] + dims[1:][-1:] + dims[1:-1]),
    "transposed": _dense(lambda dims: dims[::-1]),
    "expanded": _expanded,
}
"""Typical layouts of an output's gradient, by name. Each is a function of a tensor that returns a tensor of that
layout, with the same shape, type and device."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes that a backward needs in addition if a loss gives the outputs' gradients other strides than at capture."""

    workspace: Mapping[str, int]
    """By call name, bytes that are allocated only while the call runs."""
    kept: Mapping[str, int]
    """By storage name, bytes of copies that are freed together with that storage."""


NONE = Copies({}, {})


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """A captured step as it would be if the gradients of its outputs had another layout, one of `LAYOUTS`."""

    step: CapturedStep
    """The step, whose fake tensors have the strides that follow from that layout."""
    read: Mapping[str, int]
    """By call that reads tensors with other strides than at capture, the bytes of a copy of all these tensors."""
    kept: Mapping[str, int]
    """By storage name, bytes of copies that are freed together with that storage."""
    spare: int
    """Bytes charged for the outputs' gradients but not needed in this layout: an expanded gradient is one number."""


def other_layouts(step: CapturedStep) -> Iterator[OtherLayout]:
    """Yield the step for each of `LAYOUTS` of its outputs' gradients, except for layouts in which all have the strides
    at capture."""
    opened = for_any_layout(step)
    for layout in LAYOUTS.values():
        with quiet(), TrueLayouts():
            followed = _Followed(opened, layout)
        if followed.otherwise:
            values = {
                name: replace(step.values[name], fake=fake) for name, fake in followed.otherwise.items()
            }
            changed = replace(opened, values={**step.values, **values})
            yield OtherLayout(changed, followed.read, followed.kept, followed.spare)


def most_copied(
    step: CapturedStep,
    own: Mapping[str, int],
    measured: Callable[[CapturedStep, Collection[str]], Mapping[str, int]] | None,
) -> Copies:
    """Return the bytes that a backward may need in addition: for each call and storage, the maximum over the `LAYOUTS`.
    ``own``: by call, the workspace at capture. ``measured``: returns the workspaces of named calls of a step; if None,
    the bytes of copies are added to ``own``."""
    workspace: dict[str, int] = defaultdict(int)
    kept: dict[str, int] = defaultdict(int)
    for other in other_layouts(step):
        sizes = {name: own[name] + size for name, size in other.read.items()}
        if measured:
            plain = [n for n in other.read if not isinstance(other.step.call[n].target, AsCaptured)]
            sizes |= measured(other.step, plain)
        spare = 0 if other.kept else other.spare
        for name, size in sizes.items():
            workspace[name] = max(workspace[name], size - spare - own[name])
        for name, size in other.kept.items():
            kept[name] = max(kept[name], size)
    return Copies(dict(workspace), dict(kept))


class _Followed:
    """The effect of one layout of the outputs' gradients on a backward, found on fake tensors. ``otherwise``: by value
    name, the tensors with other strides. ``read``, ``kept`` and ``spare`` become those of `OtherLayout`."""

    def __init__(self, step: CapturedStep, layout: Layout) -> None:
        """Give the outputs' gradients this layout, and follow all calls that depend on them. Nothing is followed if no
        stride changes."""
        self.step = step
        self.otherwise: dict[str, torch.Tensor] = {}
        self.read: dict[str, int] = {}
        self.kept: dict[str, int] = defaultdict(int)
        self.spare = 0
        for value in (i.value for i in step.inputs if i.kind == "tangent"):
            like = step.values[value].fake
            tangent = layout(like)
            self.spare += max(0, _bytes(like) - _bytes(tangent))
            self._made(value, tangent)
        for call in step.calls if self.otherwise else ():
            if not self.otherwise.keys().isdisjoint(call.operands):
                self._follow(call)

    def _follow(self, call: Call) -> None:
        """Run a call on fake tensors of the other layout. Record bytes of its arguments' copies in `read`, those by
        which results grow in `kept`, and results with other strides in `otherwise`. If the call fails, no results are
        recorded."""
        fakes = {name: self.step.values[name].fake for name in call.operands}
        if not call.is_view:
            self.read[call.name] = sum(
                allocated(fake.numel() * fake.itemsize, fake.device)
                for name, fake in fakes.items()
                if name in self.otherwise
            )
        here = {
            name: self.otherwise[name] if name in self.otherwise else uninitialised_like(fake)
            for name, fake in fakes.items()
        }
        try:
            results = call.run(here.__getitem__)
        except RuntimeError:  # eager mode's backward would fail, too
            return
        storages = {fake.untyped_storage()._cdata for fake in here.values()}
        for name, result in zip(call.results, results, strict=True):
            if name is None or result is None:
                continue
            known = self.step.values[name]
            beyond = _bytes(result) - (0 if call.is_view else _bytes(known.fake))
            if result.untyped_storage()._cdata not in storages and beyond > 0:
                self.kept[known.storage] += beyond
            self._made(name, result)

    def _made(self, name: str, tensor: torch.Tensor) -> None:
        if not has_strides(tensor, self.step.values[name].fake.stride()):
            self.otherwise[name] = tensor


def _bytes(tensor: torch.Tensor) -> int:
    return allocated(tensor.untyped_storage().nbytes(), tensor.device)
