"""A compiled plan that takes part in autograd, and each call of it, from the forward to the end of the backward.

A call is a `ForwardAndBackward`, which also refuses a backward if tensors were changed in place since the forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakSet

import torch

from rematplan.planner.core.lane_schedule import Lanes
from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.costs.measure import bytes_of
from rematplan.runtime.execute.autograd_nodes import as_nodes
from rematplan.runtime.execute.backward_autocast import BackwardAutocast
from rematplan.runtime.execute.backward_variants import BackwardVariant, BackwardVariants
from rematplan.runtime.execute.compile import Backward, compile_halves
from rematplan.runtime.execute.first_run import FirstRun, FirstRuns
from rematplan.runtime.execute.rerun_forward import Rerun, states_restored_if_it_fails
from rematplan.runtime.graph.captured_step import GRADIENT_OF, CapturedStep, StepInput, in_model
from rematplan.runtime.graph.compat import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from rematplan.runtime.graph.tangent_layouts import Notes
from rematplan.runtime.graph.tracked_sizes import SizeValues

Sink: TypeAlias = Callable[[Mapping[str, torch.Tensor | None], bool], None]
"""A callback that is called after a segment (part) of the backward. It receives the segment's statistics by their
`StepOutput.target` (None where no gradient arrived), and whether the segment is the last one."""


class CompiledPlan:
    """A plan that takes part in autograd: calling it runs the forward half, and the outputs' backward the backward
    half. If it is compiled for any sizes, only a plan that `at` returns can be called. ``spare``: by position, the
    unused bytes of the budget, which gradients may occupy until their segment ends; empty for no limit. ``unused``:
    those with which the first run may check kernels. Raises `ProblemError` if the schedule or the lanes do not fit the
    step."""

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        lanes: Lanes | None = None,
        spare: Sequence[int] = (),
        for_any_sizes: bool = False,
        unused: Sequence[int] = (),
    ) -> None:
        """Compile both halves. ``step``: the captured step. ``lanes``: None for one lane. ``for_any_sizes``: whether
        the code takes the values of all size expressions."""
        self.schedule, self.lanes, self.spare = schedule, lanes, spare
        self.like = step
        """A step of the same calls and values, perhaps of other sizes."""
        self._step: Callable[[], CapturedStep] = lambda: step
        self.halves = halves = compile_halves(
            step, schedule, lanes=lanes, spare=spare, for_any_sizes=for_any_sizes
        )
        self.variants = BackwardVariants(step, schedule, halves.backward, lanes, spare)
        self.first_runs = FirstRuns(self._step, schedule, spare, unused)
        self.autocast = BackwardAutocast(step)
        self.inputs = [i for i in step.inputs if i.kind != "tangent"]
        self.sources = [self._source(i) for i in self.inputs]
        self.tangents = [(int(i.target), i.value) for i in step.inputs if i.kind == "tangent"]
        early = [o for o in step.outputs if o.kind in ("output", "buffer")]
        self.outputs = [at for at, o in enumerate(early) if o.kind == "output"]
        self.buffers = [(in_model(o.target), at) for at, o in enumerate(early) if o.kind == "buffer"]
        wanted = {at for at, _ in self.tangents} | set(map(int, step.left_out))
        self.constant_outputs = [at for at in range(len(self.outputs)) if at not in wanted]
        of = {(GRADIENT_OF.get(i.kind), i.target): at for at, i in enumerate(self.inputs)}
        self.wanting = [[of[o.kind, o.target] for o in segment.outputs] for segment in halves.backward]
        """For each segment of the backward, the positions in ``inputs`` of the tensors whose gradients it computes."""
        self.calls: WeakSet[ForwardAndBackward] = WeakSet()

    @property
    def step(self) -> CapturedStep:
        """The captured step. For a plan that `at` returned, each access makes the step anew."""
        return self._step()

    def at(
        self, sizes: SizeValues, step: Callable[[], CapturedStep], unused: Sequence[int] = ()
    ) -> CompiledPlan:
        """Return this plan, which must be compiled for any sizes, as a plan for certain sizes. Nothing is compiled.
        ``step``: makes the captured step of these sizes. ``unused``: the unused bytes with which its first run may
        check kernels."""
        other = copy.copy(self)
        other._step, other.halves = step, self.halves.at(sizes)
        other.variants = self.variants.at(sizes, step, other.halves.backward)
        other.first_runs = FirstRuns(step, self.schedule, self.spare, unused)
        other.calls = WeakSet()
        return other

    def end_first_backward(self, variant: BackwardVariant, run: FirstRun) -> None:
        """Record that the first backward of a variant has run. If its values were not as planned, later backwards are
        compiled for any strides."""
        self.first_runs.end_backward(variant, run)
        if self.first_runs.failed:
            self.variants.misplace()

    @property
    def pending(self) -> bool:
        """Whether a backward may still come or is not finished, because a forward had none, the graph is retained,
        or segments are left."""
        return any(call.start is not None or call.running is not None for call in list(self.calls))

    @property
    def held_bytes(self) -> int:
        """The bytes of the values that forwards hold for a backward that has not begun or may be repeated, without the
        step's inputs."""
        return bytes_of([v for call in list(self.calls) for v in call.start or ()])

    def __call__(
        self,
        named: Mapping[str, torch.Tensor],
        batch: Sequence[torch.Tensor],
        with_tangents: WithTangents | None = None,
        statistics: Sink | None = None,
        deferred: Deferred | None = None,
        retained: Callable[[int], None] = lambda held: None,
    ) -> tuple[torch.Tensor, ...]:
        """Run the forward half, copy new content into the buffers, and return the module's outputs as nodes of the
        autograd graph. ``named``: parameters and buffers; ``batch``: the module's tensor arguments; ``with_tangents``
        and later arguments: as in `ForwardAndBackward`."""
        pools = (named, batch, self.like.constants)
        inputs = [pools[pool][key] for pool, key in self.sources]  # type: ignore[index]
        waiting = [] if deferred is None else deferred
        call = ForwardAndBackward(self, named, inputs, with_tangents, statistics, waiting, retained)
        self.calls.add(call)
        return as_nodes(call, inputs)

    @staticmethod
    def _source(i: StepInput) -> tuple[int, str | int]:
        """Return where an input of the step is found: 0 and a parameter's or buffer's name, 1 and a batch position,
        or 2 and a constant."""
        if i.kind == "batch":
            return 1, int(i.target)
        return (2, i.value) if i.kind == "constant" else (0, in_model(i.target))


WithTangents: TypeAlias = Callable[[frozenset[str]], CompiledPlan]
"""A function from positions of outputs (as text) to the plan of the same step that also takes the gradients of these
outputs."""

Deferred: TypeAlias = "list[ForwardAndBackward]"
"""Forwards whose backward has run only its first part, in the order of these backwards. `finish_backward` runs the
second part, which computes gradients of weights."""


@dataclass(eq=False)
class RunningBackward:
    """A backward in progress: its conditions, the strides that it records, and its compiled segments."""

    variant: BackwardVariant
    notes: Notes
    first: FirstRun | None
    """What compares the strides, if the backward is the first one."""
    segments: Sequence[Backward]
    held: list[Any]
    """The values that the next segment needs."""


@dataclass(eq=False)
class ForwardAndBackward:
    """One forward of a compiled plan and what it leaves for its backwards."""

    plan: CompiledPlan
    named: Mapping[str, torch.Tensor]
    inputs: Sequence[torch.Tensor]
    """The step's inputs; empty after the forward has run."""
    with_tangents: WithTangents | None = None
    statistics: Sink | None = None
    deferred: Deferred = field(default_factory=list)
    retained: Callable[[int], None] = lambda held: None
    """With the fields before it: the plan and the arguments of its call. Called with the bytes that the forward holds
    when a backward that retains the graph begins."""
    rerun: Rerun | None = None
    """Inputs and random states to run the forward again, if the plan does not take the gradients of all outputs;
    else None."""
    start: list[Any] | None = None
    """The values that the forward left for the backward; None once a backward that frees the graph has begun."""
    read: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """The inputs that the backward reads, with version counters that show changes in place, by position in
    `Halves.read_late`. Unless the graph is retained, each is dropped after the last segment that reads it."""
    outputs: Sequence[torch.Tensor] = ()
    output_versions: Sequence[int] = ()
    """With ``outputs``: the outputs that the backward reads, and their version counters."""
    running: RunningBackward | None = None
    """The backward whose next segment is due; None while a segment runs, and before and after a backward."""
    gradients: dict[int, torch.Tensor | None] | None = None
    """The gradients of the inputs, by position, if the forward was run again by another plan; else None."""

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the forward half, copy new content into the buffers, and return the module's outputs. If the step leaves
        out gradients of outputs, save inputs and random states first, so that the forward can run again."""
        plan, named = self.plan, self.named
        if plan.like.left_out:
            self.rerun = Rerun.before_forward(plan.like, self.inputs)
            self.inputs = self.rerun.inputs
        early = self._forward_half()
        for name, at in plan.buffers:
            if named[name].shape != early[at].shape:  # an op may set its buffer's size in its first call
                named[name].resize_(early[at].shape)
            named[name].copy_(early[at])
        # Detach views: the caller could not change in place a view that an autograd function returns.
        return tuple(t.detach() if t._is_view() else t for t in (early[at] for at in plan.outputs))

    def _forward_half(self) -> tuple[torch.Tensor, ...]:
        """Run the forward half without changing the buffers, and store what the backward needs. Return outputs and the
        buffers' new content. Raises `OtherResults`, with random states restored, if a first run's values are not as
        planned."""
        plan, inputs = self.plan, self.inputs
        given = [t.detach() for t in inputs]  # an input itself would keep its gradient until its last read
        late = [given[at] for at in plan.halves.read_late]
        self.inputs, self.read = (), {at: (t, t._version) for at, t in enumerate(late)}
        first = plan.first_runs.forward()
        may_fail = first is not None or plan.like.checks
        restoring = states_restored_if_it_fails(plan.like) if may_fail else nullcontext()
        with _without_autocast(plan.like.device), restoring:
            if first is None:
                early, held = plan.halves.forward(*given)
            else:
                early, held = first.halves.forward(*given)
                plan.first_runs.end_forward(first)
        del given
        # Detach: an autograd node that refers to its own output would be a reference cycle.
        shared = {id(early[at]) for at in plan.halves.outputs_late}
        self.start = [t.detach() if id(t) in shared else t for t in held] if shared else held
        self.outputs = [early[at].detach() for at in plan.halves.outputs_late]
        self.output_versions = [t._version for t in self.outputs]
        return early

    def begin(self, gradients: Sequence[torch.Tensor | None], kept: bool) -> list[torch.Tensor | None] | None:
        """Prepare a backward and return the gradients for its first segment; None if no gradient arrived. If the
        gradient of an output in `CapturedStep.left_out` arrived, another plan runs forward and backward now, and the
        list is empty. ``gradients``: of all outputs. ``kept``: whether the graph is retained. Raises RuntimeError if
        the backward cannot start."""
        arrived = frozenset(at for at in self.plan.like.left_out if gradients[int(at)] is not None)
        tangents = [gradients[at] for at, _ in self.plan.tangents]
        if not arrived and all(given is None for given in tangents):
            return None
        self._check(gradients)
        assert self.start is not None
        if arrived:
            self._run_again(gradients, arrived)
            tangents = []
        else:
            variant, notes = self.plan.variants.select(tangents, kept), Notes()
            first = self.plan.first_runs.backward(variant, self.plan.like)
            segments = first.halves.backward if first else self.plan.variants.segments(variant, notes)
            for (_, value), given in zip(self.plan.tangents, tangents, strict=True):
                if given is not None:
                    notes.note(value, given)
            self.running = RunningBackward(variant, notes, first, segments, list(self.start))
        if kept:
            self.retained(bytes_of(self.start))
        else:
            self.start, self.outputs, self.rerun = None, (), None
        return tangents

    def _check(self, tangents: Sequence[torch.Tensor | None]) -> None:
        """Raise RuntimeError if tensors were freed, a saved output was changed in place, weight gradients of an earlier
        backward are due, or a gradient is batched."""
        name = self.plan.like.name
        if self.start is None:
            raise RuntimeError(
                f"{name}: backward a second time through a planned step, whose tensors the first backward freed; pass "
                f"retain_graph=True to the first"
            )
        if [t._version for t in self.outputs] != self.output_versions:
            raise RuntimeError(f"{name}: an output that the backward needs was changed in place")
        if self in self.deferred:
            raise RuntimeError(
                f"{name}: backward a second time before the weight gradients of the first are computed; call "
                f"finish_weights first"
            )
        if any(given is not None and _is_batched(given) for given in tangents):
            raise RuntimeError(
                f"{name}: a planned step computes one gradient at a time; for batched gradients (is_grads_batched, "
                f"vectorize, torch.func) use the original model"
            )

    def _run_again(self, gradients: Sequence[torch.Tensor | None], arrived: frozenset[str]) -> None:
        """Run the forward again, then the whole backward, by a plan that also takes the gradients of the outputs
        ``arrived``, and store the inputs' gradients for `backward`. ``gradients``: those of all outputs. Raises
        RuntimeError if an input was changed in place since the forward."""
        assert self.rerun is not None
        assert self.with_tangents is not None
        self.rerun.check(self.plan.like.name)
        plan = self.with_tangents(arrived)
        again = ForwardAndBackward(plan, {}, self.rerun.inputs, statistics=self.statistics)
        with self.rerun.as_before():
            again._forward_half()
        tangents = again.begin(gradients, kept=False)
        assert tangents is not None
        self.gradients = {}
        for k, wanting in enumerate(plan.wanting):
            self.gradients.update(zip(wanting, again.backward(k, *tangents), strict=True))
            tangents = []

    def backward(self, k: int, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run segment ``k`` of the backward half, pass statistics to the callback, and return its gradients, ordered as
        ``CompiledPlan.wanting[k]``. Only segment 0 takes ``tangents``. If another plan has run the backward, only
        return the stored gradients. Raises RuntimeError if an input that is read from here on was changed in place
        since the forward, and ModelError if autocast would change the backward."""
        self.plan.autocast.check()
        if self.gradients is not None:
            # Another plan has computed them: see `_run_again`.
            given = tuple(self.gradients.pop(at) for at in self.plan.wanting[k])
            self.gradients = self.gradients if k < len(self.plan.wanting) - 1 else None
            return given
        running, self.running = self.running, None
        assert running is not None
        if any(t._version != version for t, version in (self.read[at] for at in self._still_read(k))):
            raise RuntimeError(
                f"{self.plan.like.name}: a parameter, buffer or input was changed in place between forward and backward"
            )
        with _without_autocast(self.plan.like.device):
            gradients, running.held = running.segments[k].function(running.held, *tangents)
        last = k == len(self.plan.wanting) - 1
        if sums := running.segments[k].statistics:
            gradients, found = gradients[: -len(sums)], gradients[-len(sums) :]
            if self.statistics:
                self.statistics(dict(zip((o.target for o in sums), found, strict=True)), last)
        elif self.statistics and last:
            self.statistics({}, True)
        if not running.variant.kept:
            self.read = {at: self.read[at] for at in self._still_read(k + 1)}
        if not last:
            self.running = running
        elif running.first is None:
            self.plan.variants.learn(running.variant, running.notes)
        else:
            self.plan.end_first_backward(running.variant, running.first)
        return gradients

    def _still_read(self, k: int) -> Sequence[int]:
        """Return the keys in ``read`` of the inputs that segment ``k`` or a later one reads; none after the last."""
        segments = self.plan.halves.backward
        return segments[k].still_read if k < len(segments) else ()


def finish_backward(call: ForwardAndBackward) -> None:
    """Run the segments that a split backward left out, which compute gradients of weights, and add these gradients to
    the ``.grad`` of the parameters. ``call`` is not removed from its list `Deferred`."""
    plan = call.plan
    for k in range(plan.halves.early, len(plan.wanting)):
        gradients = [*call.backward(k)]
        for at in reversed(plan.wanting[k]):  # each gradient is freed as soon as it is added
            add_gradient(call.named[str(plan.sources[at][1])], gradients.pop())


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add a gradient to ``parameter.grad`` in place, or make it ``parameter.grad`` if there is none, and run the
    parameter's hooks as autograd does. Nothing happens if ``gradient`` is None or the parameter is frozen."""
    if gradient is None or not parameter.requires_grad:
        return
    with torch.no_grad():
        for hook in (parameter._backward_hooks or {}).values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)


def _is_batched(tensor: torch.Tensor) -> bool:
    return is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)


_NOTHING = nullcontext()


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast on a device: captured calls include all casts that autocast inserted."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _NOTHING
