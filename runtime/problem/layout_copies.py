"""What a backward holds beyond the captured one where the gradients of the outputs lie otherwise in memory.

A loss that permutes an output, or sums it, gives a gradient laid out by its own ways. What takes it may then copy it,
give results that lie otherwise, too, or copy where a view would have done (`tangents.for_any_layout`). All this is
followed on fakes, for a few layouts that losses give, from the tangents to where everything lies as captured again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from rematplan.runtime.capture.patches.fake_layouts import TrueLayouts
from rematplan.runtime.graph.allocator import allocated
from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs, substitute
from rematplan.runtime.graph.quiet_logs import quiet
from rematplan.runtime.graph.storage_slices import lies_so
from rematplan.runtime.graph.tangent_layouts import AsCaptured, for_any_layout

Layout = Callable[[torch.Tensor], torch.Tensor]


def _dense(order: Callable[[list[int]], list[int]]) -> Layout:
    """Dense, with the dimensions in such an order in memory."""

    def lay(like: torch.Tensor) -> torch.Tensor:
        dims = order(list(range(like.ndim)))
        back = sorted(range(like.ndim), key=dims.__getitem__)
        shape = [like.shape[d] for d in dims]
        return torch.empty(shape, dtype=like.dtype, device=like.device).permute(back)

    return lay


def _expanded(like: torch.Tensor) -> torch.Tensor:
    """One number, as the gradient of a sum."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)


LAYOUTS: Mapping[str, Layout] = {
    "dense": _dense(lambda dims: dims),
    "channels last": _dense(lambda dims: dims[:1] + dims[2:] + dims[1:2]),
    "channels second": _dense(lambda dims: dims[:1] + dims[1:][-1:] + dims[1:-1]),
    "transposed": _dense(lambda dims: dims[::-1]),
    "expanded": _expanded,
}
"""How the gradients of outputs may lie."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes beyond the captured step: ``workspace`` by call, while it runs, and ``kept`` by storage, of copies that
    live as long as it."""

    workspace: Mapping[str, int]
    kept: Mapping[str, int]


NONE = Copies({}, {})


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """A step as it lies for one layout of its tangents.

    ``read``: the calls that read what lies otherwise, with the bytes of a copy of that. ``kept``: as in `Copies`.
    ``spare``: bytes that are charged for tangents and are not there.
    """

    step: CapturedStep
    read: Mapping[str, int]
    kept: Mapping[str, int]
    spare: int


def other_layouts(step: CapturedStep) -> Iterator[OtherLayout]:
    """The step for each of `LAYOUTS` in which its tangents may lie otherwise than captured."""
    opened = for_any_layout(step)
    for lay in LAYOUTS.values():
        with quiet(), TrueLayouts():
            followed = _Followed(opened, lay)
        if followed.otherwise:
            values = {
                name: replace(step.values[name], fake=fake) for name, fake in followed.otherwise.items()
            }
            lying = replace(opened, values={**step.values, **values})
            yield OtherLayout(lying, followed.read, followed.kept, followed.spare)


def most_copied(
    step: CapturedStep,
    own: Mapping[str, int],
    measured: Callable[[CapturedStep, Collection[str]], Mapping[str, int]] | None,
) -> Copies:
    """What a step holds at most beyond the captured one.

    ``own``: the workspaces of its calls, in bytes. ``measured``: gives those of some calls of a step; without it, they
    copy what lies otherwise.
    """
    workspace: dict[str, int] = defaultdict(int)
    kept: dict[str, int] = defaultdict(int)
    for other in other_layouts(step):
        sizes = {name: own[name] + size for name, size in other.read.items()}
        if measured:
            as_they_lie = [n for n in other.read if not isinstance(other.step.call[n].target, AsCaptured)]
            sizes |= measured(other.step, as_they_lie)
        spare = 0 if other.kept else other.spare
        for name, size in sizes.items():
            workspace[name] = max(workspace[name], size - spare - own[name])
        for name, size in other.kept.items():
            kept[name] = max(kept[name], size)
    return Copies(dict(workspace), dict(kept))


class _Followed:
    """One layout of the tangents, followed through the calls that read what lies otherwise."""

    def __init__(self, step: CapturedStep, lay: Layout) -> None:
        self.step = step
        self.otherwise: dict[str, torch.Tensor] = {}
        self.read: dict[str, int] = {}
        self.kept: dict[str, int] = defaultdict(int)
        self.spare = 0
        for value in (i.value for i in step.inputs if i.kind == "tangent"):
            like = step.values[value].fake
            given = lay(like)
            self.spare += max(0, _bytes(like) - _bytes(given))
            self._made(value, given)
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
            name: self.otherwise[name] if name in self.otherwise else _anew(fake)
            for name, fake in fakes.items()
        }
        args, kwargs = substitute((call.args, dict(call.kwargs)), here.__getitem__)
        try:
            results = call.target(*args, **kwargs)
        except RuntimeError:  # eager mode's own backward would refuse it, too
            return
        given = {fake.untyped_storage()._cdata for fake in here.values()}
        for name, result in zip(call.results, (results,) if call.single else results, strict=True):
            if name is None or result is None:
                continue
            known = self.step.values[name]
            beyond = _bytes(result) - (0 if call.is_view else _bytes(known.fake))
            if result.untyped_storage()._cdata not in given and beyond > 0:
                self.kept[known.storage] += beyond
            self._made(name, result)

    def _made(self, name: str, tensor: torch.Tensor) -> None:
        if not lies_so(tensor, self.step.values[name].fake.stride()):
            self.otherwise[name] = tensor


def _bytes(tensor: torch.Tensor) -> int:
    return allocated(tensor.untyped_storage().nbytes(), tensor.device)


def _anew(fake: torch.Tensor) -> torch.Tensor:
    """The same in the present mode."""
    storage = torch.empty(
        fake.untyped_storage().nbytes() // fake.itemsize, dtype=fake.dtype, device=fake.device
    )
    return storage.as_strided(fake.shape, fake.stride(), fake.storage_offset())
