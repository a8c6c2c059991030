"""A stage's schedule as two functions without autograd, which meet the neighbours' messages where the plan says so.

What crosses from the forward to the backward function is one list; for a stage that inverses recover whole it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Free, Run, Schedule, Step
from rematplan.runtime.execute.codegen import Writer
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, StepInput, StepOutput
from rematplan.runtime.pipeline.dataflow_step import RETURN, SEND, Handed
from rematplan.runtime.problem.loss_boundary import LOSS


class Hooks(Protocol):
    """What is done with the results of a stage's two functions, where its plan says so."""

    def send(self, outputs: Sequence[torch.Tensor]) -> None:
        """The outputs, in order: for the next stage, or for a loss."""

    def renew(self, buffers: Sequence[torch.Tensor]) -> None:
        """The buffers' new content, in the order of `StageCode.buffers`."""

    def give_back(self, recovered: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """The inputs as recovered, and the gradients of some of them, in the order of `StageCode.returned`."""

    def add(self, parameter: str, gradient: torch.Tensor) -> None:
        """A parameter's gradient, by the parameter's name in the step."""

    def seed(self, draw: int) -> None:
        """The random call of this number is about to run."""


@dataclass(frozen=True)
class StageCode:
    """A compiled stage.

    ``forward(handed, hooks, *inputs)`` gives the list of what is kept; ``backward(handed, hooks, held, *inputs)``
    empties it. ``handed``: the values that the neighbours' messages give; each is taken out as it is used. ``inputs``:
    what is there all the time. ``buffers``: those that get new content. ``returned``: the positions of the inputs that
    have gradients. ``crossing``: the values that are kept. ``draws``: how many random calls there are.
    """

    source: str
    handed: frozenset[str]
    inputs: tuple[StepInput, ...]
    buffers: tuple[StepOutput, ...]
    returned: tuple[int, ...]
    crossing: tuple[str, ...]
    draws: int
    forward: Callable[..., list[Any]] = field(repr=False)
    backward: Callable[..., None] = field(repr=False)


def compile_stage(step: CapturedStep, schedule: Schedule, last: bool) -> StageCode:
    """Compile a schedule of a stage's `with_dataflow_boundary`.

    Raises:
        ProblemError: it names an op that the step does not have.
    """
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
    """Refuse a compiled stage whose backward gets anything but parameters, buffers, seeds and messages.

    Raises:
        ProblemError: names what crosses from the forward to the backward.
    """
    if code.crossing:
        raise ProblemError(f"{', '.join(code.crossing[:3])}: kept from a stage's forward to its backward")


class _StageWriter(Writer):
    """``fixed``: the inputs that nobody hands over. ``leaves``: the position of each gradient's last free."""

    def __init__(self, step: CapturedStep, schedule: Schedule, last: bool) -> None:
        super().__init__(
            step, tuple(one for one in schedule if not (isinstance(one, Free) and one.tensor in MARKERS))
        )
        self.last = last
        handed = {ref.value for c in step.call.values() if isinstance(c.target, Handed) for ref in c.args}
        self.fixed = tuple(i for i in step.inputs if i.value not in handed)
        self.draws = {call.name: at for at, call in enumerate(c for c in step.calls if c.seeded)}
        self.rerun = set(self.draws)  # so that each run of a random call is written by `_replayed`
        self.added: dict[str, list[StepOutput]] = {}
        for o in self.of_kind("gradient"):
            self.added.setdefault(step.values[o.value].storage, []).append(o)
        self.leaves = {
            one.tensor: at
            for at, one in enumerate(self.schedule)
            if isinstance(one, Free) and one.tensor in self.added
        }
        self.crossing: tuple[str, ...] = ()
        self.taken_over: set[str] = set()

    def of_kind(self, kind: str) -> tuple[StepOutput, ...]:
        """The step's outputs of a kind."""
        return tuple(o for o in self.step.outputs if o.kind == kind)

    def stage(self) -> str:
        """Both functions."""
        turn, values = self.schedule.index(Run(LOSS)), [i.value for i in self.fixed]
        names = self.take(values)
        self.steps(0, turn)
        if self.last:
            self._outputs_leave(turn)
        for value in values:
            self.alive.pop(self.step.values[value].storage, None)
        self.crossing = tuple(value for kept in self.alive.values() for value in kept)
        held = self.tuple_of(map(self.name, self.crossing))
        self.lines.append(f"return list({held})")
        forward = self.function(f"forward(handed, hooks, {names})")
        names = self.take(values)
        if self.crossing:
            self.lines += [f"{held} = held", "held.clear()"]
        self.steps(turn, len(self.schedule))
        for storage in self.added.keys() - self.leaves.keys():
            self._add(storage)
        self.lines.append("return None")
        return f"{forward}\n\n{self.function(f'backward(handed, hooks, held, {names})')}"

    def _outputs_leave(self, turn: int) -> None:
        """The last stage's outputs go to a loss; what no later op reads of them is not kept."""
        outputs = [o.value for o in self.of_kind("output")]
        self.lines.append(f"hooks.send({self.tuple_of(map(self.use, outputs))})")
        later = {
            storage
            for one in self.schedule[turn:]
            if isinstance(one, Run) and one.op in self.step.call
            for storage in self.step.reads(self.step.call[one.op])
        }
        for storage in {self.step.values[value].storage for value in outputs} - later:
            self.left.add(storage)
            self.alive.pop(storage, None)

    def steps(self, start: int, end: int) -> None:
        """The steps of the schedule from one position to another."""
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

    def _add(self, storage: str) -> None:
        self.lines += [f"hooks.add({o.target!r}, {self.use(o.value)})" for o in self.added[storage]]

    def _send(self) -> None:
        if not self.last:
            self.lines.append(f"hooks.send({self._values('output')})")
        if self.of_kind("buffer"):
            self.lines.append(f"hooks.renew({self._values('buffer')})")

    def _give_back(self) -> None:
        recovered, gradients = self._values("recovered input"), self._values("input gradient")
        self.lines.append(f"hooks.give_back({recovered}, {gradients})")

    def _turn(self) -> None:
        """Between the two functions."""

    def _values(self, kind: str) -> str:
        return self.tuple_of(self.use(o.value) for o in self.of_kind(kind))

    def _replayed(self, call: Call, expression: str) -> None:
        self.lines += [f"hooks.seed({self.draws[call.name]})", f"{self._results(call)} = {expression}"]

    def _expression(self, call: Call) -> str:
        if not isinstance(call.target, Handed):
            return super()._expression(call)
        (source,) = call.args
        assert isinstance(source, Ref)
        self.taken_over.add(source.value)
        taken = f"handed.pop({source.value!r})"
        if call.target == Handed.like(self.step.values[source.value].fake):
            return taken
        return f"{taken}.as_strided({call.target.size}, {call.target.stride})"


MARKERS: Mapping[str, Callable[[_StageWriter], None]] = {
    SEND: _StageWriter._send,
    LOSS: _StageWriter._turn,
    RETURN: _StageWriter._give_back,
}
"""What is written for each op of the problem that is none of the step."""
