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
from rematplan.runtime.execute.codegen import Note, Writer, read_from
from rematplan.runtime.execute.layout_check import LayoutCheck
from rematplan.runtime.execute.missing_tangents import unused_by
from rematplan.runtime.execute.two_lane_codegen import LaneWriter
from rematplan.runtime.graph.captured_step import MODEL, CapturedStep, StepOutput
from rematplan.runtime.graph.tracked_sizes import SizeValues
from rematplan.runtime.problem.backward_segments import gradient_segments
from rematplan.runtime.problem.loss_boundary import split_at_loss


@dataclass(frozen=True)
class Backward:
    """One segment of the backward half of a compiled schedule."""

    outputs: tuple[StepOutput, ...]
    """The gradients that the segment computes."""
    still_read: tuple[int, ...]
    """The inputs that this segment or a later one reads, as positions in `Halves.read_late`."""
    function: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)
    """``function(held, *tangents)`` returns the gradients, followed by the statistics, and the list ``held`` for the
    next segment. Only the first segment takes tangents. The list ``held`` is emptied, so that its tensors can be freed
    meanwhile."""
    statistics: tuple[StepOutput, ...] = ()
    """The sums over rows of layers, for Kronecker factors, that it computes."""

    def at(self, sizes: SizeValues) -> Backward:
        """Return this segment, which must be compiled for any sizes, for the values of all size expressions."""
        return replace(self, function=partial(self.function, sizes))


@dataclass(frozen=True)
class Halves:
    """A compiled schedule in two halves, before and after the loss boundary, at which the caller computes the
    outputs' gradients."""

    source: str
    """The source of all functions."""
    forward: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)
    """Takes the step's inputs except tangents. Returns outputs and the buffers' new content, and a list of values for
    the first segment. All are in the order of the `CapturedStep`."""
    backward: tuple[Backward, ...]
    """The segments of the backward half, in order."""
    read_late: tuple[int, ...]
    """Positions of the arguments of ``forward`` that the backward half reads and the caller must not change, without
    renewed buffers."""
    outputs_late: tuple[int, ...]
    """Positions, in the tuple that ``forward`` returns, of the tensors that the backward half reads."""
    early: int
    """The number of segments that autograd runs. Later ones belong to the second part of a split backward (gradients
    of weights)."""

    def at(self, sizes: SizeValues) -> Halves:
        """Return these functions, which must be compiled for any sizes, for the values of all size expressions."""
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
    """Compile a schedule into a forward and a backward half. If ``lanes`` are given and no tangents (value names) are
    ``missing``, it runs on two lanes, without ``note`` and ``for_any_sizes``. Raises `ProblemError` if the schedule or
    the lanes do not fit the step, such as an output that is not ready at the loss boundary. ``spare``: by position,
    unused bytes of the budget, for gradients that wait. ``overwrite``: whether calls may write into operands. ``note``,
    ``for_any_sizes``: those of `Writer`."""
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
    renewed = step.renewed
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
    """Execute generated source with the names of ``scope``, and return all names that are defined afterwards."""
    found = dict(scope)
    exec(compile(source, f"<rematplan step of {step.name}>", "exec"), found)
    return found


def _check_order(step: CapturedStep, schedule: Schedule) -> None:
    """Raise `ProblemError` if the first runs of random ops and collectives are in another order than in the step, or if
    a collective runs twice."""
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
    """Return a module's parameters and buffers by name. A tensor with several names is returned under the first."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensors_in_step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by their names in captured steps."""
    return {f"{MODEL}{name}": tensor for name, tensor in named_tensors(model).items()}
