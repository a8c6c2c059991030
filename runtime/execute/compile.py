"""A schedule becomes one flat Python function over ATen calls, with ``del``s, readable when printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rematplan.ir import ProblemError
from rematplan.planner.core.lanes import Lanes
from rematplan.planner.core.schedule import Schedule, runs_of
from rematplan.runtime.execute.codegen import Writer, read_from, renewed_buffers
from rematplan.runtime.execute.missing_tangents import unused_by
from rematplan.runtime.execute.two_lane_codegen import LaneWriter
from rematplan.runtime.graph.captured_step import CapturedStep, StepOutput
from rematplan.runtime.problem.loss_boundary import split_at_loss
from rematplan.runtime.problem.segments import gradient_segments


@dataclass(frozen=True)
class Executable:
    """A compiled schedule. ``source`` is the function that runs.

    Calling it with the step's input tensors, in order, gives the outputs, in order. No autograd graph is made.
    """

    source: str
    function: Callable[..., tuple[torch.Tensor, ...]] = field(repr=False)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the step on tensors that stand in the order of `CapturedStep.inputs`."""
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            return self.function(*inputs)


@dataclass(frozen=True)
class Backward:
    """One segment of a compiled schedule's backward half.

    ``function(held, *tangents)`` (tangents for the first segment only) empties the list ``held``, so that what it holds
    can be freed on the way, and gives the gradients ``outputs`` and after them the ``statistics``, and the list of what
    the next segment is to get.
    ``still_read``: positions in `Halves.read_late` of the inputs that it or a later segment reads.
    """

    outputs: tuple[StepOutput, ...]
    still_read: tuple[int, ...]
    function: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)
    statistics: tuple[StepOutput, ...] = ()


@dataclass(frozen=True)
class Halves:
    """A compiled schedule in two halves, before and after the gradients of the outputs are known.

    ``forward(*inputs)``, tangents left out, gives the outputs and new buffers, and a list of all that is held at the
    turn, for the first segment of ``backward``. Both follow the order of `CapturedStep.inputs` and
    `CapturedStep.outputs`. ``read_late``: positions of the inputs that the backward half reads, and so must find as
    they were; of buffers that the step gives new content it has copies of its own. ``outputs_late``: positions of such
    among what ``forward`` gives; only these are also in the list of what is held. ``early``: how many of the segments
    a backward runs at once; a split one leaves the others for later.
    """

    source: str
    forward: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)
    backward: tuple[Backward, ...]
    read_late: tuple[int, ...]
    outputs_late: tuple[int, ...]
    early: int


def compile_step(step: CapturedStep, schedule: Schedule, lanes: Lanes | None = None) -> Executable:
    """Compile a schedule of the step's planning problem, on two lanes if they are given: the results are the same, bit
    by bit.

    Raises:
        ProblemError: the schedule names an op that the step does not have, or runs random ops for the first time in
            another order than the step does, which would draw other numbers; or the lanes do not fit it, or do not wait
            for what they read.
    """
    _check_order(step, schedule)
    writer = LaneWriter(step, schedule, lanes) if lanes else Writer(step, schedule)
    source = writer.write()
    return Executable(source, _defined(step, source, writer.scope)["step"])


def compile_halves(
    step: CapturedStep,
    schedule: Schedule,
    missing: Iterable[str] = (),
    lanes: Lanes | None = None,
    spare: Sequence[int] = (),
    overwrite: bool = True,
    note: Callable[[str, torch.Tensor], None] | None = None,
) -> Halves:
    """Compile a schedule in two halves. It must run all that the outputs and buffers need before anything that needs
    a tangent (`turn.with_loss_boundary`).

    ``missing``: tangents (values) that the backward gets as None, since the loss does not use their outputs. It skips
    what depends on them alone, and gives None for gradients that do. The forward is the same whatever is missing.
    ``lanes``: each segment of the backward half runs on two, unless tangents are missing. ``spare``:
    bytes at each step of the schedule, if gradients may hold no more until they leave. ``overwrite``: whether the
    backward half may write over what it is given. ``note`` is told the name and tensor of each value that is made.

    Raises:
        ProblemError: as `compile_step`; or an output is not there at the turn.
    """
    _check_order(step, schedule)
    own = split_at_loss(step, schedule, lanes)
    schedule, lanes = own.schedule, own.lanes
    left = [spare[at] for at in own.positions if spare]
    segments = gradient_segments(step, schedule, own.turn, left, late=own.late)
    writer = Writer(step, schedule)
    if lanes and not missing:
        writer = LaneWriter(step, schedule, lanes, segments[0].start)
    if not overwrite:
        writer.overwriting = {}
    if note:
        writer.noting, writer.scope["note"] = True, note
    writer.unused = unused_by(step, schedule, segments[0].start, missing)
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
    """The functions of a generated source, by name."""
    found = dict(scope)
    exec(compile(source, f"<rematplan step of {step.name}>", "exec"), found)
    return found


def _check_order(step: CapturedStep, schedule: Schedule) -> None:
    """Refuse a schedule that would draw other random numbers, or communicate in another order.

    Raises:
        ProblemError: it runs random ops and collectives for the first time in another order than the step, or a
            collective again.
    """
    ordered = [c.name for c in step.calls if c.ordered]
    wanted = set(ordered)
    runs = [name for name in runs_of(schedule) if name in wanted]
    if list(dict.fromkeys(runs)) != ordered:
        raise ProblemError(
            f"{step.name}: the schedule's first runs of random ops and collectives stand in another order than the "
            f"step's"
        )
    again = next((name for name in ordered if step.call[name].collective and runs.count(name) > 1), None)
    if again is not None:
        raise ProblemError(f"{step.name}: the schedule runs the collective {again} again")


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each once, as a captured step knows them."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def bind_inputs(
    step: CapturedStep, named: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The step's inputs in order: parameters and buffers by name, the batch by position, constants, a tangent
    of 1."""
    take: Mapping[str, Callable[[Any], torch.Tensor]] = MappingProxyType(
        {
            "parameter": lambda i: named[i.target].detach(),
            "buffer": lambda i: named[i.target],
            "batch": lambda i: batch[int(i.target)],
            "constant": lambda i: step.constants[i.value],
            "tangent": lambda i: torch.ones_like(_real_like(step.values[i.value].fake)),
        }
    )
    return tuple(take[i.kind](i) for i in step.inputs)


def _real_like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
