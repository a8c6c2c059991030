"""`audit`: whether a model's own checkpointing is right, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rematplan.auditing.comparison import compared, error_faults, watched
from rematplan.auditing.compiled import compiled_anew, in_eager_mode, note_of_compiled, unwrapped
from rematplan.auditing.faults import Fault
from rematplan.auditing.measured_steps import Measured, measured, planned
from rematplan.auditing.plain_path import plain_path
from rematplan.auditing.step_runs import Step, default_loss
from rematplan.ir import UsageError, first_line, show_bytes
from rematplan.planner.core.strategy import Progress, silent


@dataclass(frozen=True)
class Audit:
    """The answer of `audit`. ``str`` of it is the verdict in one line."""

    name: str
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    """What is not repeatable, what was not compared, and other remarks."""
    unchecked: str
    """The names of `torch.autograd.Function`s whose backward was compared with nothing, since ``plain`` is missing."""
    regions: int
    """The number of checkpointed regions that ran in the forward of one step."""
    recomputed: int
    """The number of ops that ran again in the backward."""
    plain: Measured
    """The peak and the time without checkpointing."""
    own: Measured | None
    """Peak and time with the model's own checkpointing; None if it raises an error."""
    planned: Measured | None
    """Peak and time with a plan within the peak of ``own`` or, if none fits, of the smallest peak found; None if none
    was made."""

    @property
    def sound(self) -> bool:
        """Whether no fault was found."""
        return not self.faults

    def __str__(self) -> str:
        if not self.faults:
            return f"{self.name}: sound" + (
                f", but {self.unchecked} is not checked" if self.unchecked else ""
            )
        more = f", and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
        return f"{self.name}: {self.faults[0]}{more}"


def audit(
    model: nn.Module,
    args: Sequence[Any] | Mapping[str, Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    plain: Callable[..., Any] | None = None,
    plan: bool = True,
    progress: Progress = silent,
) -> Audit:
    """Run a training step with the model's own checkpointing and without it, compare all that the two leave behind, and
    measure peak and time of both.

    Compared are the loss, gradients, buffers, parameters, random states, Python state of modules and hooks, and how
    often hooks of gradients run. This is done after each of two steps, whose gradients accumulate. Without
    checkpointing means: without `torch.utils.checkpoint`, without hooks on saved tensors, and with the forwards of
    Functions that recompute differentiated by autograd. Differences that vanish in float64 are rounding errors; results
    in which two plain runs differ are notes. The state of the model is restored.

    The forward runs in the autocast state of the caller, the backward without autocast.

    Args:
        model: the model, in the mode in which it trains.
        args: positional arguments of its forward; or one tensor; or keyword arguments by name.
        kwargs: keyword arguments of its forward.
        loss: a function of the model's output that returns a scalar. By default the output's ``loss``, a scalar output,
            or the sum of the outputs with weights that differ.
        plain: another implementation without the checkpointing in question, such as a loss that is not in chunks: a
            function of the same arguments that uses the model's parameters, or a module with equal ones. Its loss and
            gradients are compared, too.
        plan: whether to plan the step within the peak of its own checkpointing, and measure that, too.
        progress: called with the fraction done (0 to 1) and a short text.

    Raises:
        UsageError: an argument is malformed, the loss trains no parameter, or the parameters of ``plain`` are not those
            of the model.
        ModelError: the step does not run without its checkpointing.
    """
    _check(model, args, kwargs, loss, plain)
    named = dict(args) if isinstance(args, Mapping) else {}
    given = (args,) if isinstance(args, torch.Tensor) else () if named else tuple(args)
    with unwrapped(model) as (original, called, wrapped):
        step = Step(
            original, given, {**named, **(kwargs or {})}, loss or default_loss, called, wrapped=wrapped
        )
        return _audited(step, plain, plan, progress)


def _check(model: object, args: object, kwargs: object, loss: object, plain: object) -> None:
    """Raise a UsageError if an argument of `audit` is of a wrong kind."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{type(model).__name__} is no torch.nn.Module")
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"{type(model).__name__} has parameters whose shape is not known yet; call it once before the audit"
        )
    if isinstance(args, str) or not isinstance(args, (torch.Tensor, Mapping, Sequence)):
        raise UsageError(
            "the inputs must be a tensor, a sequence of arguments, or a mapping of arguments by name"
        )
    if not isinstance(kwargs or {}, Mapping):
        raise UsageError("kwargs must be a mapping of arguments by name")
    for name, function in (("loss", loss), ("plain", plain)):
        if not (function is None or callable(function)):
            raise UsageError(f"{name} must be a function")


def _audited(step: Step, plain: Callable[..., Any] | None, plan: bool, progress: Progress) -> Audit:
    """Watch, compare and measure a step, with and without its checkpointing. With ``plan``, also plan it at its own
    peak; if that fails, a note says why."""
    progress(0.0, "watching")
    seen, error = watched(step)
    step = replace(step, compiled=seen.compiled)
    anew, eager = (compiled_anew, in_eager_mode) if seen.compiled else (nullcontext, nullcontext)
    progress(0.2, "comparing")
    with anew():
        result = error_faults(step, seen, error) if error else compared(step, seen, plain)
    progress(0.6, "measuring")
    without = measured(step, lambda: plain_path(result.differentiated))
    own = measured(step, step.wrapped) if result.ran else None
    best, notes = None, (*result.notes, *([note_of_compiled(seen.draws)] if seen.compiled else []))
    if plan and own is not None:
        progress(0.8, "planning")
        try:
            with eager():
                best = planned(step, own.peak)
            if best.peak > own.peak:
                over = show_bytes(best.peak - own.peak)
                notes = (*notes, f"no plan at this peak was found; the one shown needs {over} more")
        except Exception as refusal:  # of any kind: a plan is no part of the question
            notes = (*notes, f"no plan at this peak: {first_line(refusal)}")
    progress(1.0, "done")
    name = type(step.model).__name__
    return Audit(
        name, result.faults, notes, result.unchecked, len(seen.regions), seen.recomputed, without, own, best
    )
