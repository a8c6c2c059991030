"""The additional bytes of a backward whose tangents have other strides than at capture.

A loss that permutes or sums an output produces a gradient with strides of its choice. Calls that read the
gradient may copy it, return results with other strides themselves, or copy where a view was possible at
capture (`tangent_layouts.for_any_layout`). This module follows all that on fake tensors, for a few typical
layouts, from the tangents to the values whose strides are again those at capture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from rematplan.runtime.capture.patches.fake_layouts import TrueLayouts
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs, substitute
from rematplan.runtime.graph.quiet_logs import quiet
from rematplan.runtime.graph.storage_slices import has_strides
from rematplan.runtime.graph.tangent_layouts import AsCaptured, for_any_layout

Layout = Callable[[torch.Tensor], torch.Tensor]


def _dense(order: Callable[[list[int]], list[int]]) -> Layout:
    """Return a layout: dense, with the dimensions in that order in memory, outermost first."""

    def strided(like: torch.Tensor) -> torch.Tensor:
        dims = order(list(range(like.ndim)))
        back = sorted(range(like.ndim), key=dims.__getitem__)
        shape = [like.shape[d] for d in dims]
        return torch.empty(shape, dtype=like.dtype, device=like.device).permute(back)

    return strided


def _expanded(like: torch.Tensor) -> torch.Tensor:
    """Return one number expanded to the shape of ``like``, as the gradient of a sum is."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)


LAYOUTS: Mapping[str, Layout] = {
    "dense": _dense(lambda dims: dims),
    "channels last": _dense(lambda dims: dims[:1] + dims[2:] + dims[1:2]),
    "channels second": _dense(lambda dims: dims[:1] + dims[1:][-1:] + dims[1:-1]),
    "transposed": _dense(lambda dims: dims[::-1]),
    "expanded": _expanded,
}
"""Typical layouts of an output's gradient: functions that return a tensor of that layout, of the argument's
shape, type and device."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes that a backward needs in addition to the captured one, if its tangents have other strides than at
    capture.

    ``workspace``: by call name, bytes that are allocated only while the call runs. ``kept``: by storage name, bytes
    of copies that are freed together with that storage.
    """

    workspace: Mapping[str, int]
    kept: Mapping[str, int]


NONE = Copies({}, {})


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """A step whose tangents have one of the `LAYOUTS`, and the values computed from them the strides that follow.

    ``step``: the step, with fakes of these strides. ``read``: by the name of each call that reads values with other
    strides than at capture, the bytes of a copy of all these values. ``kept``: as in `Copies`. ``spare``: bytes that
    are charged for the tangents but not needed in this layout (an expanded tangent is one number).
    """

    step: CapturedStep
    read: Mapping[str, int]
    kept: Mapping[str, int]
    spare: int


def other_layouts(step: CapturedStep) -> Iterator[OtherLayout]:
    """Yield an `OtherLayout` of the step for each of `LAYOUTS` in which some tangent has other strides than at
    capture."""
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
    """Return, for each call and each storage, the most bytes that a backward needs in addition to the captured
    backward, over all `LAYOUTS` of the gradients that it gets for the outputs.

    Args:
        step: the captured step.
        own: the workspace of each of the step's calls as captured, in bytes, by call name.
        measured: a function of a step and names of its calls that measures the workspaces of these calls, in bytes.
            If it is None, each call is assumed to copy every argument whose strides differ.
    """
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
    """One layout of the tangents, followed through all calls that read a value with other strides than at
    capture."""

    def __init__(self, step: CapturedStep, layout: Layout) -> None:
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
            if any(ref.value in self.otherwise for ref in refs((call.args, call.kwargs))):
                self._follow(call)

    def _follow(self, call: Call) -> None:
        fakes = {ref.value: self.step.values[ref.value].fake for ref in refs((call.args, call.kwargs))}
        if not call.is_view:
            self.read[call.name] = sum(
                allocated(fake.numel() * fake.itemsize, fake.device)
                for name, fake in fakes.items()
                if name in self.otherwise
            )
        here = {
            name: self.otherwise[name] if name in self.otherwise else _again(fake)
            for name, fake in fakes.items()
        }
        args, kwargs = substitute((call.args, dict(call.kwargs)), here.__getitem__)
        try:
            results = call.target(*args, **kwargs)
        except RuntimeError:  # eager mode's backward would fail, too
            return
        storages = {fake.untyped_storage()._cdata for fake in here.values()}
        for name, result in zip(call.results, (results,) if call.single else results, strict=True):
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


def _again(fake: torch.Tensor) -> torch.Tensor:
    """Return the same fake tensor in the current fake mode."""
    storage = torch.empty(
        fake.untyped_storage().nbytes() // fake.itemsize, dtype=fake.dtype, device=fake.device
    )
    return storage.as_strided(fake.shape, fake.stride(), fake.storage_offset())
