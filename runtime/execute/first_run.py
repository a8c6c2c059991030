"""The checks when a plan runs first: its values have the strides with which the step was captured from fake tensors,
and fused kernels compute the numbers of eager mode up to rounding.

If strides differ in the backward half, its reshapes choose again between view and copy, and nothing is overwritten
from then on: the bits stay those of eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.execute.backward_variants import AS_CAPTURED, BackwardVariant
from rematplan.runtime.execute.compile import compile_halves
from rematplan.runtime.execute.layout_check import LayoutCheck
from rematplan.runtime.fuse.kernel import FusedKernel
from rematplan.runtime.fuse.real_numbers import with_checks
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.tangent_layouts import RESHAPE, AsCaptured, LikeFirst, for_any_layout
from rematplan.runtime.graph.zero_tangents import changes_strides

CLONE = torch.ops.aten.clone.default


class OtherResults(Exception):
    """Ops gave other results than planned, so the step is planned again. ``ops``: the ops at fault. ``text``: one of
    them, and what is wrong."""

    def __init__(self, ops: frozenset[Any], text: str) -> None:
        super().__init__(text)
        self.ops, self.text = ops, text


class OtherLayouts(OtherResults):
    """Kernels gave results with other strides than the captured step has, for arguments that had its strides."""


class OtherNumbers(OtherResults):
    """Fused kernels gave results too far from those of float64."""


class FirstRun:
    """The halves of a plan, compiled so that they compare the strides of values with the captured step's and, where
    ``unused`` bytes suffice, check fused kernels. ``missing``, ``kept``: the tangents that do not arrive, and whether
    the graph is retained. ``spare``: by position, unused bytes for gradients that wait."""

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        spare: Sequence[int],
        missing: frozenset[str] = frozenset(),
        kept: bool = False,
        unused: Sequence[int] = (),
    ) -> None:
        self.step = step
        opened = for_any_layout(with_checks(step, schedule, unused))
        # The copy of a reshape has the new shape there.
        reshaped = {c.name for c in opened.calls if c.target is RESHAPE and step.call[c.name].target is CLONE}
        # The copy to the strides at capture follows later there.
        reshaped |= {c.name for c in opened.calls if isinstance(c.target, LikeFirst)}
        strides = {name: v.fake.stride() for name, v in step.values.items() if v.call not in reshaped}
        read = {r for call in step.call.values() for r in call.operands}
        self.check = check = LayoutCheck(strides, read)
        self.halves = compile_halves(opened, schedule, missing, spare=spare, overwrite=not kept, note=check)

    @property
    def error(self) -> OtherResults | None:
        """What the run found: `OtherLayouts` if strides differ, else `OtherNumbers` if a fused kernel's numbers do;
        None if all values are as planned."""
        others = self.check.others
        if not others:
            return self._wrong_numbers()
        makers = {name: self.step.call[self.step.values[name].call or ""] for name in others}
        first = {name: call for name, call in makers.items() if others.keys().isdisjoint(call.operands)}
        name, call = next(iter((first or makers).items()))
        shape, planned = tuple(self.step.values[name].fake.shape), self.check.strides[name]
        text = f"{call.target} returned a tensor of shape {shape} with strides {others[name]}, not {planned}"
        ops = (
            c.target.op if isinstance(c.target, AsCaptured) else c.target for c in (first or makers).values()
        )
        return OtherLayouts(frozenset(ops), text)

    def _wrong_numbers(self) -> OtherNumbers | None:
        kernels = dict.fromkeys(c.target for c in self.step.calls if isinstance(c.target, FusedKernel))
        wrong = [kernel for kernel in kernels if kernel.real.error]
        return OtherNumbers(frozenset(wrong), wrong[0].real.error) if wrong else None


class FirstRuns:
    """Says which parts of a plan still have to be compared with the captured step, and compiles the halves that compare
    them. ``step``: makes the captured step. ``spare``, ``unused``: by position, unused bytes of the budget, for
    gradients that wait and for checks of kernels."""

    def __init__(
        self,
        step: Callable[[], CapturedStep],
        schedule: Schedule,
        spare: Sequence[int],
        unused: Sequence[int] = (),
    ) -> None:
        self.step, self.schedule, self.spare, self.unused = step, schedule, spare, unused
        self.forward_passed = False
        self.passed: set[BackwardVariant] = set()
        """The conditions under which a backward was compared. A comparison under `AS_CAPTURED` is one for all."""
        self.failed: OtherResults | None = None
        """What the earliest backward found whose values were not all as planned; None if there was none."""
        self._runs: dict[BackwardVariant, FirstRun] = {}

    def pass_all(self) -> None:
        """Compare nothing: a plan of the same step was compared."""
        self.forward_passed = True
        self.passed.add(AS_CAPTURED)

    @property
    def all_passed(self) -> bool:
        """Whether the forward and all kinds of backwards were compared, or need not be."""
        return self.forward_passed and AS_CAPTURED in self.passed

    def forward(self) -> FirstRun | None:
        """Return what runs the next forward; None if the forward was compared."""
        return None if self.forward_passed else self._run(AS_CAPTURED)

    def end_forward(self, run: FirstRun) -> None:
        """Record that a forward has run; raise `OtherResults` if its values were not as planned."""
        if run.error:
            raise run.error
        self.forward_passed = True

    def backward(self, variant: BackwardVariant, like: CapturedStep) -> FirstRun | None:
        """Return what runs and compares the next backward of a variant. None if a comparison covered the variant or
        failed, or if strides differ because of the tangents that arrive. ``like``: a step of the same calls."""
        # After a failure all backwards are compiled for any strides.
        compared = self.failed or not self.passed.isdisjoint((variant, AS_CAPTURED))
        if compared or variant.strides is not None or changes_strides(like, variant.missing):
            return None
        return self._run(variant)

    def end_backward(self, variant: BackwardVariant, run: FirstRun) -> None:
        """Record that a backward has run, and in `failed` what it found."""
        self.failed = self.failed or run.error
        self.passed.add(variant)
        self._runs.pop(variant, None)

    def _run(self, variant: BackwardVariant) -> FirstRun:
        if variant not in self._runs:
            self._runs[variant] = FirstRun(
                self.step(), self.schedule, self.spare, variant.missing, variant.kept, self.unused
            )
        return self._runs[variant]
