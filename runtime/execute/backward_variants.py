"""The backward half of a plan, compiled for each combination of arriving gradients, their strides, and whether the
graph is retained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rematplan.planner.core.lane_schedule import Lanes
from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.execute.compile import Backward, compile_halves
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.tangent_layouts import Notes, for_any_layout
from rematplan.runtime.graph.tracked_sizes import SizeValues, at_sizes, stride_of
from rematplan.runtime.graph.zero_tangents import changes_strides


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """The conditions under which a backward runs. The backward half is compiled for each combination of them."""

    missing: frozenset[str] = frozenset()
    """The tangents (gradients of outputs, by value name) that autograd did not compute."""
    kept: bool = False
    """Whether autograd retains the graph, so that the saved tensors must stay unchanged."""
    strides: tuple[tuple[int, ...], ...] | None = None
    """The strides of the tangents; None if all are as at capture."""


AS_CAPTURED = BackwardVariant()
"""The usual conditions: all gradients of outputs arrive, with the strides that they had at capture, and autograd does
not retain the graph."""


class BackwardVariants:
    """The backward half of a plan, compiled for several conditions under which a backward runs. ``backward``: its
    segments for `AS_CAPTURED`. ``spare``: by position, the unused bytes of the budget, which gradients may occupy until
    their segment ends."""

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        backward: tuple[Backward, ...],
        lanes: Lanes | None,
        spare: Sequence[int],
    ) -> None:
        """Begin with the one compiled variant ``backward``; others are compiled when needed. ``lanes``: None for one
        lane."""
        self.schedule, self.lanes, self.spare = schedule, lanes, spare
        self.like = step
        """A step of the same calls and values, perhaps of other sizes."""
        self._step: Callable[[], CapturedStep] = lambda: step
        self.sizes: SizeValues | None = None
        """The values of all size expressions in the step; None if the segments are for the step's sizes only."""
        self.compiled: dict[BackwardVariant, tuple[Backward, ...]] = {AS_CAPTURED: backward}
        self.for_any_sizes: dict[BackwardVariant, tuple[Backward, ...]] = {}
        """Variants whose functions take the values of all size expressions as an argument."""
        self.tangents = [i.value for i in step.inputs if i.kind == "tangent"]
        self.strides = tuple(stride_of(step.values[value].fake) for value in self.tangents)
        self.misplaced = False
        """Whether values have other strides than in the step, although the tangents have the same."""

    def at(
        self, sizes: SizeValues, step: Callable[[], CapturedStep], backward: tuple[Backward, ...]
    ) -> BackwardVariants:
        """Return these variants, which must be of a plan compiled for any sizes, as variants for certain sizes."""
        other = copy.copy(self)
        other.sizes, other._step, other.compiled = sizes, step, {AS_CAPTURED: backward}
        other.strides = at_sizes(self.strides, sizes)
        return other

    def select(self, tangents: Sequence[torch.Tensor | None], kept: bool) -> BackwardVariant:
        """Return the variant of a backward that gets the gradients ``tangents``, in the order of the step's tangent
        inputs, None where missing. ``kept``: whether autograd retains the graph."""
        missing = frozenset(v for v, given in zip(self.tangents, tangents, strict=True) if given is None)
        strides = tuple(
            like if given is None else given.stride()
            for given, like in zip(tangents, self.strides, strict=True)
        )
        return BackwardVariant(missing, kept, None if strides == self.strides else strides)

    def segments(self, variant: BackwardVariant, notes: Notes) -> tuple[Backward, ...]:
        """Return the backward half's segments, compiled for ``variant`` and cached. Not cached are segments that record
        strides in ``notes``, from which `learn` compiles others."""
        if variant in self.compiled:
            return self.compiled[variant]
        as_captured = not (
            self.misplaced or variant.strides is not None or changes_strides(self.like, variant.missing)
        )
        if as_captured and self.sizes is not None:
            self.compiled[variant] = self._at_any_sizes(variant, self.sizes)
            return self.compiled[variant]
        step = self._step() if as_captured else for_any_layout(self._step())
        note = notes.note if self._noted(variant) else None
        overwrite = as_captured and not variant.kept
        halves = compile_halves(
            step, self.schedule, variant.missing, spare=self.spare, overwrite=overwrite, note=note
        )
        if not self._noted(variant):
            self.compiled[variant] = halves.backward
        return halves.backward

    def _noted(self, variant: BackwardVariant) -> bool:
        """Return whether the first backward of a variant records layouts for `learn`: if strides differ, all tangents
        arrive and the graph is not retained."""
        otherwise = self.misplaced or variant.strides is not None
        return otherwise and not (variant.kept or variant.missing)

    def misplace(self) -> None:
        """Record that values have other strides than in the step although the tangents do not, and forget the variants
        that were compiled for the step's strides."""
        self.misplaced = True
        self.compiled = {one: segments for one, segments in self.compiled.items() if one.strides is not None}

    def _at_any_sizes(self, variant: BackwardVariant, sizes: SizeValues) -> tuple[Backward, ...]:
        """Return the segments for ``variant`` and certain sizes, from functions that are compiled for all sizes."""
        if variant not in self.for_any_sizes:
            halves = compile_halves(
                self.like,
                self.schedule,
                variant.missing,
                spare=self.spare,
                overwrite=not variant.kept,
                for_any_sizes=True,
            )
            self.for_any_sizes[variant] = halves.backward
        return tuple(one.at(sizes) for one in self.for_any_sizes[variant])

    def learn(self, variant: BackwardVariant, notes: Notes) -> None:
        """Compile and cache the backward half for the strides that the first backward of ``variant`` recorded, so that
        later ones write in place. Nothing happens if the variant records no strides or was compiled before."""
        if self._noted(variant) and variant not in self.compiled:
            step = notes.with_layouts(for_any_layout(self._step()))
            halves = compile_halves(step, self.schedule, lanes=self.lanes, spare=self.spare)
            self.compiled[variant] = halves.backward
