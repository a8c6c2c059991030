"""The backward half of a plan, compiled once for each kind of backward: which tangents arrive, with which strides, and
whether autograd retains the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rematplan.planner.core.lane_schedule import Lanes
from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.execute.compile import Backward, compile_halves
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.tangent_layouts import Notes, for_any_layout
from rematplan.runtime.graph.zero_tangents import changes_strides


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """The conditions under which a backward runs, for each of which it is compiled separately.

    ``missing``: tangents (gradients of outputs, by value name) that did not arrive. ``kept``: whether the graph is
    retained, so that the saved tensors must stay unchanged. ``strides``: the strides of the tangents; None if they
    are as captured.
    """

    missing: frozenset[str] = frozenset()
    kept: bool = False
    strides: tuple[tuple[int, ...], ...] | None = None

    @property
    def noted(self) -> bool:
        """Whether its first backward records the strides of all values, so that later ones may overwrite
        values in place."""
        return self.strides is not None and not (self.kept or self.missing)


AS_CAPTURED = BackwardVariant()
"""The variant of a backward that gets all tangents, with strides as captured, and whose graph is not retained."""


class BackwardVariants:
    """The compiled variants of a plan's backward half.

    Args:
        step, schedule, lanes, spare: as for `CompiledPlan`.
        backward: the segments of the variant `AS_CAPTURED`.
    """

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        backward: tuple[Backward, ...],
        lanes: Lanes | None,
        spare: Sequence[int],
    ) -> None:
        self.step, self.schedule, self.lanes, self.spare = step, schedule, lanes, spare
        self.compiled: dict[BackwardVariant, tuple[Backward, ...]] = {AS_CAPTURED: backward}
        self.tangents = [i.value for i in step.inputs if i.kind == "tangent"]
        self.strides = tuple(step.values[value].fake.stride() for value in self.tangents)

    def select(self, tangents: Sequence[torch.Tensor | None], kept: bool) -> BackwardVariant:
        """Return the variant of a backward: the conditions under which it is compiled separately.

        Args:
            tangents: the gradients of the outputs that have a tangent input, in the order of `CapturedStep.inputs`;
                None for one that did not arrive.
            kept: whether autograd retains the graph after this backward.
        """
        missing = frozenset(v for v, given in zip(self.tangents, tangents, strict=True) if given is None)
        strides = tuple(
            like if given is None else given.stride()
            for given, like in zip(tangents, self.strides, strict=True)
        )
        return BackwardVariant(missing, kept, None if strides == self.strides else strides)

    def segments(self, variant: BackwardVariant, notes: Notes) -> tuple[Backward, ...]:
        """Return the segments (parts) of the backward for a variant, in order. They are compiled at first use.

        Args:
            variant: the conditions under which the backward runs.
            notes: records the strides of all values while the segments run, if the strides of the outputs' gradients
                differ from those at capture and the variant was not compiled for them yet.
        """
        if variant in self.compiled:
            return self.compiled[variant]
        as_captured = variant.strides is None and not changes_strides(self.step, variant.missing)
        step = self.step if as_captured else for_any_layout(self.step)
        note = notes.note if variant.noted else None
        overwrite = as_captured and not variant.kept
        halves = compile_halves(
            step, self.schedule, variant.missing, spare=self.spare, overwrite=overwrite, note=note
        )
        if not variant.noted:
            self.compiled[variant] = halves.backward
        return halves.backward

    def learn(self, variant: BackwardVariant, notes: Notes) -> None:
        """Compile a variant of the backward again with the strides that its first run recorded, so that later runs
        may overwrite values in place.

        Nothing happens if the variant records no strides (`BackwardVariant.noted`), or was compiled in this way
        before.

        Args:
            variant: the variant.
            notes: the recorded strides.
        """
        if variant.noted and variant not in self.compiled:
            step = notes.with_layouts(for_any_layout(self.step))
            halves = compile_halves(step, self.schedule, lanes=self.lanes, spare=self.spare)
            self.compiled[variant] = halves.backward
