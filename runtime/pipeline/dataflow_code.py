"""Code generation for a stage of a dataflow pipeline: a forward and a backward function without autograd, which call
hooks (`StageHooks`) to exchange messages.

In the backward, the next stage sends this stage's outputs, recomputed, with their gradients; inverses recompute the
inputs from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Free, Run, Schedule, Step
from rematplan.runtime.execute.codegen import Writer
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, StepInput, StepOutput
from rematplan.runtime.pipeline.dataflow_step import RETURN, SEND, Handed
from rematplan.runtime.problem.loss_boundary import LOSS


@dataclass(frozen=True)
class StageCode:
    """The compiled forward and backward functions of one pipeline stage."""

    source: str
    """The source of the two functions."""
    handed: frozenset[str]
    """The names of the received tensors that the functions remove from the dict ``handed``."""
    inputs: tuple[StepInput, ...]
    """The tensors that come in no message: parameters, buffers, constants, and the batch on the first stage."""
    buffers: tuple[StepOutput, ...]
    """Those outputs of the captured step that are new contents of buffers."""
    returned: tuple[int, ...]
    """The positions of the stage's inputs whose gradients the backward computes."""
    crossing: tuple[str, ...]
    """The names of the values in the list that the forward returns."""
    draws: int
    """The number of calls that draw random numbers."""
    forward: Callable[..., list[Any]] = field(repr=False)
    """``forward(handed, hooks, *inputs)`` removes tensors from ``handed`` as it uses them, and returns a list for
    the backward."""
    backward: Callable[..., None] = field(repr=False)
    """``backward(handed, hooks, held, *inputs)`` takes that list as ``held``, and empties it."""


def compile_stage(step: CapturedStep, schedule: Schedule, last: bool) -> StageCode:
    """Compile a schedule of a dataflow pipeline's stage into a forward and a backward function. ``last``: whether the
    loss is computed from the stage's outputs."""
    writer = _StageWriter(step, schedule, last)
    source = writer.stage()
    scope = dict(writer.scope)
    exec(compile(source, f"<rematplan stage of {step.name}>", "exec"), scope)
    return StageCode(
        source,
        frozenset(writer.taken_over),
        writer.fixed,
        writer.of_kind("buffer"),
        tuple(int(o.target) for o in writer.of_kind("input gradient")),
        writer.crossing,
        len(writer.draws),
        scope["forward"],
        scope["backward"],
    )


def check_crossing(code: StageCode) -> None:
    """Refuse a stage whose forward keeps a value for the backward: memory would grow with micro-batches in flight."""
    if code.crossing:
        raise ProblemError(f"{', '.join(code.crossing[:3])}: kept from a stage's forward for its backward")


class _StageWriter(Writer):
    """Writes the schedule of a dataflow pipeline's stage as the source of a forward and a backward function."""

    def __init__(self, step: CapturedStep, schedule: Schedule, last: bool) -> None:
        """Find what hooks must get: recomputed values, and parameter gradients before their last free. ``last``:
        whether the stage is the last."""
        super().__init__(
            step, tuple(one for one in schedule if not (isinstance(one, Free) and one.tensor in MARKERS))
        )
        self.last = last
        handed = {ref.value for c in step.call.values() if isinstance(c.target, Handed) for ref in c.args}
        #: The stage's inputs that come in no message.
        self.fixed = tuple(i for i in step.inputs if i.value not in handed)
        self.draws = {call.name: at for at, call in enumerate(c for c in step.calls if c.seeded)}
        self.inverses = {inverse.name for inverse in step.inverses}
        #: The values that inverses recompute in the backward.
        self.watched = {
            result
            for one in self.schedule
            if isinstance(one, Run) and one.op in self.inverses
            for result in step.call[one.op].results
        }
        self.seen: set[str] = set()  # those of them that the forward has computed or received
        self.late = False  # whether the backward function is being written
        self.rerun = set(self.draws)  # so that each run of a random call is written by `_replayed`
        self.added: dict[str, list[StepOutput]] = {}
        for o in self.of_kind("gradient"):
            self.added.setdefault(step.values[o.value].storage, []).append(o)
        #: By the storage of a parameter gradient, the position of its last free, before which the hook ``add``
        #: gets it.
        self.leaves = {
            one.tensor: at
            for at, one in enumerate(self.schedule)
            if isinstance(one, Free) and one.tensor in self.added
        }
        self.crossing: tuple[str, ...] = ()
        self.taken_over: set[str] = set()

    def of_kind(self, kind: str) -> tuple[StepOutput, ...]:
        """Return those outputs of the captured step that have the given kind, such as ``buffer`` or ``gradient``."""
        return tuple(o for o in self.step.outputs if o.kind == kind)

    def stage(self) -> str:
        """Return the source of the stage's two functions, ``forward`` and ``backward``. The schedule is split at the op
        that represents the loss."""
        boundary, values = self.schedule.index(Run(LOSS)), [i.value for i in self.fixed]
        names = self.take(values)
        self.steps(0, boundary)
        if self.last:
            self._outputs_leave(boundary)
        for value in values:
            self.alive.pop(self.step.values[value].storage, None)
        self.crossing = tuple(value for kept in self.alive.values() for value in kept)
        crossing = self.tuple_of(map(self.name, self.crossing))
        self.lines.append(f"return list({crossing})")
        forward = self.function(f"forward(handed, hooks, {names})")
        self.late = True
        names = self.take(values)
        if self.crossing:
            self.lines += [f"{crossing} = held", "held.clear()"]
        self.steps(boundary, len(self.schedule))
        for storage in self.added.keys() - self.leaves.keys():
            self._add(storage)
        self.lines.append("return None")
        return f"{forward}\n\n{self.function(f'backward(handed, hooks, held, {names})')}"

    def _outputs_leave(self, boundary: int) -> None:
        """Write the call that passes outputs to the loss, and drop those that no op reads from ``boundary`` on."""
        outputs = [o.value for o in self.of_kind("output")]
        self.lines.append(f"hooks.send({self.tuple_of(map(self.use, outputs))})")
        later = {
            storage
            for one in self.schedule[boundary:]
            if isinstance(one, Run) and one.op in self.step.call
            for storage in self.step.reads(self.step.call[one.op])
        }
        for storage in {self.step.values[value].storage for value in outputs} - later:
            self.left.add(storage)
            self.alive.pop(storage, None)

    def steps(self, start: int, end: int) -> None:
        """Write the op executions and frees at positions ``start`` to ``end`` (exclusive) of the schedule, and the
        calls of hooks between them."""
        for at in range(start, end):
            one: Step = self.schedule[at]
            if isinstance(one, Free) and self.leaves.get(one.tensor) == at:
                self._add(one.tensor)
            if isinstance(one, Run) and one.op in MARKERS:
                self.drop_dead()
                MARKERS[one.op](self)
            else:
                super().steps(at, at + 1)
        self.drop_dead()

    def _made(self, call: Call) -> None:
        """Write, after a call, lines by which hooks watch its results; in the late half, lines that compare recovered
        results with those seen before."""
        super()._made(call)
        mine = [result for result in call.made if result in self.watched]
        if not self.late:
            self.seen.update(mine)
            self.lines += [f"hooks.watch({result!r}, {self.name(result)})" for result in mine]
        elif call.name in self.inverses:
            compared = (result for result in mine if result in self.seen)
            self.lines += [f"hooks.recovered({result!r}, {self.name(result)})" for result in compared]

    def _add(self, storage: str) -> None:
        self.lines += [f"hooks.add({o.target!r}, {self.use(o.value)})" for o in self.added[storage]]

    def _send(self) -> None:
        if not self.last:
            self.lines.append(f"hooks.send({self._values('output')})")
        if self.of_kind("buffer"):
            self.lines.append(f"hooks.renew({self._values('buffer')})")

    def _send_back(self) -> None:
        recovered, gradients = self._values("recovered input"), self._values("input gradient")
        self.lines.append(f"hooks.send_back({recovered}, {gradients})")

    def _loss_boundary(self) -> None:
        """Write nothing: the loss is computed between the two functions."""

    def _values(self, kind: str) -> str:
        return self.tuple_of(self.use(o.value) for o in self.of_kind(kind))

    def _replayed(self, call: Call, expression: str, _at: int) -> None:
        self.lines += [f"hooks.seed({self.draws[call.name]})", f"{self._results(call)} = {expression}"]

    def _expression(self, call: Call) -> str:
        """Return a call's source. A call of `Handed` takes its tensor out of ``handed``, with other strides if the step
        has these, and notes it in ``taken_over``."""
        if not isinstance(call.target, Handed):
            return super()._expression(call)
        (source,) = call.args
        assert isinstance(source, Ref)
        self.taken_over.add(source.value)
        received = f"handed.pop({source.value!r})"
        if call.target == Handed.like(self.step.values[source.value].fake):
            return received
        return f"{received}.as_strided({call.target.size}, {call.target.stride})"


MARKERS: Mapping[str, Callable[[_StageWriter], None]] = {
    SEND: _StageWriter._send,
    LOSS: _StageWriter._loss_boundary,
    RETURN: _StageWriter._send_back,
}
"""How to write those ops of the problem that are not calls of the step."""
