"""Compile a schedule into flat Python functions over ATen calls, with ``del`` statements. Their source can be printed
and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rematplan.ir import ProblemError
from rematplan.planner.core.lane_schedule import Lanes
from rematplan.planner.core.schedule import Schedule, runs_of
from rematplan.runtime.execute.buffers_once import renewed_buffers
from rematplan.runtime.execute.codegen import Note, Writer, read_from
from rematplan.runtime.execute.layout_check import LayoutCheck
from rematplan.runtime.execute.missing_tangents import unused_by
from rematplan.runtime.execute.two_lane_codegen import LaneWriter
from rematplan.runtime.graph.captured_step import CapturedStep, StepOutput
from rematplan.runtime.graph.tracked_sizes import SizeValues
from rematplan.runtime.problem.backward_segments import gradient_segments
from rematplan.runtime.problem.loss_boundary import split_at_loss


@dataclass(frozen=True)
class Backward:
    """One segment (part) of the backward half of a compiled schedule.

    ``outputs``: the gradients that it computes. ``statistics``: the sums over rows of layers (for Kronecker factors)
    that it computes. ``function``: is called as ``function(held, *tangents)``; only the first segment takes tangents
    (gradients of the module's outputs). It empties the list ``held``, so that the tensors in it can be freed during
    the segment. It returns a tuple of the gradients ``outputs`` followed by the ``statistics``, and the list ``held``
    for the next segment. ``still_read``: which inputs this segment or a later one reads, as positions in the tuple
    `Halves.read_late`.
    """

    outputs: tuple[StepOutput, ...]
    still_read: tuple[int, ...]
    function: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)
    statistics: tuple[StepOutput, ...] = ()

    def at(self, sizes: SizeValues) -> Backward:
        """Return this segment, which must be compiled for any sizes, for certain sizes.

        ``sizes``: the values, for these sizes of the batch, of all size expressions in the step.
        """
        return replace(self, function=partial(self.function, sizes))


@dataclass(frozen=True)
class Halves:
    """A compiled schedule in two halves, before and after the loss boundary (the moment at which the caller has the
    outputs and computes their gradients).

    - ``source``: the source of all functions.
    - ``forward``: a function of the step's inputs except gradients of outputs, in the order of `CapturedStep.inputs`.
      It returns two things: a tuple of the module's outputs and the buffers' new content, in the order of
      `CapturedStep.outputs`; and a list of the values that the first segment of ``backward`` needs.
    - ``backward``: the segments (parts) of the backward half, in order.
    - ``read_late``: positions, among the arguments of ``forward``, of the inputs that the backward half reads. The
      caller must not change these between forward and backward. Buffers that get new content are not among them, since
      the backward has copies.
    - ``outputs_late``: positions, in the tuple that ``forward`` returns, of the tensors that the backward half reads.
    - ``early``: the number of segments that run when autograd calls the backward. Later segments belong to the second
      part of a split backward (gradients of weights).
    """

    source: str
    forward: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)
    backward: tuple[Backward, ...]
    read_late: tuple[int, ...]
    outputs_late: tuple[int, ...]
    early: int

    def at(self, sizes: SizeValues) -> Halves:
        """Return these functions, which must be compiled for any sizes, for certain sizes.

        ``sizes``: the values, for these sizes of the batch, of all size expressions in the step.
        """
        backward = tuple(one.at(sizes) for one in self.backward)
        return replace(self, forward=partial(self.forward, sizes), backward=backward)


def compile_halves(
    step: CapturedStep,
    schedule: Schedule,
    missing: Iterable[str] = (),
    lanes: Lanes | None = None,
    spare: Sequence[int] = (),
    overwrite: bool = True,
    note: Note | LayoutCheck | None = None,
    for_any_sizes: bool = False,
) -> Halves:
    """Compile a schedule into a forward and a backward half.

    The schedule must run everything that the outputs and buffers need before anything that needs a tangent, the
    gradient of an output (`loss_boundary.with_loss_boundary`).
    """
    _check_order(step, schedule)
    own = split_at_loss(step, schedule, lanes)
    schedule, lanes = own.schedule, own.lanes
    left = [spare[at] for at in own.positions if spare]
    segments = gradient_segments(step, schedule, own.boundary, left, late=own.late)
    unused = unused_by(step, schedule, segments[0].start, missing)
    if lanes and not missing:
        writer: Writer = LaneWriter(step, schedule, lanes, segments[0].start, unused, overwrite)
    else:
        writer = Writer(step, schedule, for_any_sizes, unused, overwrite, note)
    source = writer.write_halves(segments)
    scope = _defined(step, source, writer.scope)
    renewed = renewed_buffers(step)
    storages = [step.values[i.value].storage for i in step.inputs if i.kind != "tangent"]
    read = [read_from(step, schedule, s.start) - renewed for s in segments]
    late = tuple(at for at, storage in enumerate(storages) if storage in read[0])
    early = [step.values[o.value].storage for o in step.outputs if o.kind in ("output", "buffer")]
    given = tuple(at for at, storage in enumerate(early) if storage in read[0])
    backward = tuple(
        Backward(
            segment.outputs,
            tuple(k for k, at in enumerate(late) if storages[at] in still),
            scope[f"backward_{k}"],
            segment.statistics,
        )
        for k, (segment, still) in enumerate(zip(segments, read, strict=True))
    )
    sooner = sum(own.late is None or one.end <= own.late for one in segments)
    return Halves(source, scope["forward"], backward, late, given, sooner)


def _defined(step: CapturedStep, source: str, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Execute generated source, and return all names that are defined afterwards: its functions, and those of
    ``scope``.

    ``step``: names the source in tracebacks. ``scope``: the names that the source uses.
    """
    found = dict(scope)
    exec(compile(source, f"<rematplan step of {step.name}>", "exec"), found)
    return found


def _check_order(step: CapturedStep, schedule: Schedule) -> None:
    """Check that a schedule draws the same random numbers and communicates in the same order as the captured step."""
    ordered = [c.name for c in step.calls if c.ordered]
    wanted = set(ordered)
    runs = [name for name in runs_of(schedule) if name in wanted]
    if list(dict.fromkeys(runs)) != ordered:
        raise ProblemError(
            f"{step.name}: the schedule's first runs of random ops and collectives are in another order than in the "
            f"step"
        )
    again = next((name for name in ordered if step.call[name].collective and runs.count(name) > 1), None)
    if again is not None:
        raise ProblemError(f"{step.name}: the schedule runs the collective {again} again")


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name, as a captured step names them. A tensor with several names is
    returned under the first."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
