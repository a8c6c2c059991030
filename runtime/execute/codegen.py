"""The source of a schedule as a flat Python function over ATen calls, with ``del``s."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Free, Run, Schedule, runs_of
from rematplan.runtime.execute.in_place import overwriting_calls
from rematplan.runtime.execute.missing_tangents import Unused
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, refs
from rematplan.runtime.graph.kernel_of import kernel_of
from rematplan.runtime.problem.segments import Segment

Generator = Callable[[], Any]


class Writer:
    """Writes the source of one schedule, line by line, following which values are alive.

    A storage's views are made when first used and dropped with it, so that no view is evaluated twice. A call
    that runs again drops what is left of its old results first: the simulator counts each storage once.
    """

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self.step, self.schedule = step, schedule
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
        self.targets: dict[Any, str] = {}
        self.alive: dict[str, dict[str, None]] = {}  # storage → its values that stand in variables
        self.left: set[str] = set()  # storages that were handed over for good; a schedule may free them later
        self.dead: list[str] = []  # values freed since the last call
        self.variable: dict[str, str] = {}  # of a value
        self.taken: set[str] = set()  # names of variables
        self.states: set[str] = set()
        self.unused = Unused()
        self.overwriting = overwriting_calls(step, schedule)
        self.rerun = {name for name, count in Counter(runs_of(schedule)).items() if count > 1}
        self.ends: dict[int, list[str]] = {}  # storages that go after a position, though no step frees them
        self.noting = False
        """Whether each value that is made is told to ``note(name, tensor)``, which the scope must have."""

    def write(self) -> str:
        """The whole schedule as ``step(*inputs)``."""
        step = self.step
        names = self.take([i.value for i in step.inputs])
        self.steps(0, len(self.schedule))
        self.lines.append(f"return {self.tuple_of(self.use(o.value) for o in step.outputs)}")
        return self.function(f"step({names})")

    def write_halves(self, segments: Sequence[Segment]) -> str:
        """The schedule as ``forward(*inputs)`` and ``backward_0(held, *tangents)``, ``backward_1(held)``, ..."""
        step = self.step
        names = self.take([i.value for i in step.inputs if i.kind != "tangent"])
        self.steps(0, segments[0].start)
        early = [o.value for o in step.outputs if o.kind in ("output", "buffer")]
        self._keep_old_buffers(segments[0].start)
        self.ends = self._last_reads_of_tangents()
        functions = [
            self._handing_over(f"forward({names})", early, self._done_with(segments[0].start, early))
        ]
        for k, segment in enumerate(segments):
            held = self.tuple_of(self._held())
            tangents = "" if k else self.take([i.value for i in step.inputs if i.kind == "tangent"])
            self.lines += [f"{held} = held", "held.clear()"]
            self.steps(segment.start, segment.end)
            given = [o.value for o in (*segment.outputs, *segment.statistics)]
            head = f"backward_{k}(held{', ' if tangents else ''}{tangents})"
            gone = [*given, *self._done_with(segment.end)]
            functions.append(self._handing_over(head, given, gone, self.unused.zero))
        return "\n\n".join(functions)

    def _last_reads_of_tangents(self) -> dict[int, list[str]]:
        """The storages of tangents that are not given as gradients, too, by the position of the last run that reads
        them: views of them may be copies, where they lie otherwise than captured."""
        given = {self.step.values[o.value].storage for o in self.step.outputs}
        tangents = {
            self.step.values[i.value].storage for i in self.step.inputs if i.kind == "tangent"
        } - given
        ends = {
            storage: at
            for at, one in enumerate(self.schedule)
            if isinstance(one, Run)
            for storage in self.step.reads(self.step.call[one.op])
            if storage in tangents
        }
        return {at: [storage for storage, end in ends.items() if end == at] for at in ends.values()}

    def _keep_old_buffers(self, turn: int) -> None:
        """Copies of the buffers that get new content at the turn and are read after it, unless the forward is given
        copies."""
        if self.step.left_out:
            return
        late = read_from(self.step, self.schedule, turn) & renewed_buffers(self.step)
        for i in self.step.inputs:
            storage = self.step.values[i.value].storage
            if storage in late:
                self.free(storage)
                self.dead.remove(i.value)
                self.bring_to_life(i.value)
                self.lines.append(f"{self.name(i.value)} = {self.name(i.value)}.clone()")
        self.drop_dead()

    def _done_with(self, start: int, outputs: Sequence[str] = ()) -> list[str]:
        """Of inputs and some outputs, which no step frees, those that nothing reads from a position on."""
        late = read_from(self.step, self.schedule, start)
        ends = [*(i.value for i in self.step.inputs), *outputs]
        return [v for v in ends if self.step.values[v].storage not in late]

    def _handing_over(
        self, head: str, values: Sequence[str], gone: Iterable[str], zero: frozenset[str] = frozenset()
    ) -> str:
        """The lines so far as a function that returns ``values``, None for those that are ``zero``, and all else that
        is held; not the storages of those that are ``gone``, which nothing reads again."""
        given = self.tuple_of("None" if v in zero else self.use(v) for v in values)
        for value in gone:
            self.left.add(self.step.values[value].storage)
            self.alive.pop(self.step.values[value].storage, None)
        self.lines.append(f"return {given}, [{', '.join(self._held())}]")
        return self.function(head)

    def _held(self) -> list[str]:
        return [self.name(v) for values in self.alive.values() for v in values] + sorted(self.states)

    def steps(self, start: int, end: int) -> None:
        """The steps of the schedule from one position to another."""
        for at in range(start, end):
            one = self.schedule[at]
            for storage in self.ends.get(at - 1, ()):
                self.free(storage)
            if at in self.unused.skipped:
                continue
            if isinstance(one, Free):
                resident = one.tensor in self.alive or one.tensor in self.left
                if not (resident or self.unused.zero or self.unused.skipped):
                    raise ProblemError(f"step {at}: frees {one.tensor!r}, which is not resident")
                self.free(one.tensor)
            else:
                self.run(one, at)
        self.drop_dead()

    def take(self, values: Sequence[str]) -> str:
        """Parameters: the values' variables, from here on alive; missing tangents are None, and so made where read."""
        for value in values:
            if value not in self.unused.zero:
                self.bring_to_life(value)
        return ", ".join(map(self.name, values))

    def function(self, head: str) -> str:
        """The lines so far as a function; the next begin another."""
        body = "".join(f"    {line}\n" for line in self.lines)
        self.lines = []
        return f"def {head}:\n{body}"

    @staticmethod
    def tuple_of(names: Iterable[str]) -> str:
        """A tuple, in source."""
        return f"({''.join(name + ', ' for name in names).rstrip()})"

    def run(self, run: Run, at: int) -> None:
        """One run. ``at``: where it stands."""
        call = self.step.call.get(run.op)
        if call is None:
            raise ProblemError(f"step {at}: {self.step.name} has no op named {run.op!r}")
        if not self.unused.zero:  # else a sum may be another name of its summand
            call = self.overwriting.get(at, call)
        for storage in self.step.writes(call):
            self.free(storage)
        self.drop_dead()
        same = dict(self.unused.same).get(call.name)
        expression = self.use(same) if same else self._expression(call)
        if call.seeded and call.name in self.rerun:
            self._replayed(call, expression)
        else:
            self.lines.append(f"{self._results(call)} = {expression}")
        self._made(call)

    def _made(self, call: Call) -> None:
        """A call's results stand in their variables."""
        for result in filter(None, call.results):
            self.bring_to_life(result)
            if self.noting:
                self.lines.append(f"note({result!r}, {self.name(result)})")

    def _replayed(self, call: Call, expression: str) -> None:
        state = f"rng_{self.name(call.name)}"
        assign = f"{self._results(call)} = {expression}"
        device = self.step.drawing_device(call)
        save, load = (f"{what}_rng_{device.type}" for what in ("save", "load"))
        self.scope.update({save: save_rng(device), load: load_rng(device)})
        if state not in self.states:
            self.states.add(state)
            self.lines += [f"{state} = {save}()", assign]
        else:
            self.lines += [
                f"rng_now = {save}()",
                f"{load}({state})",
                assign,
                f"{load}(rng_now)",
                "del rng_now",
            ]

    def _results(self, call: Call) -> str:
        if call.single:
            return self.name(call.results[0] or "_")
        left = ", ".join(self.name(r) if r else "_" for r in call.results)
        return left + ("," if len(call.results) == 1 else "")

    def free(self, storage: str) -> None:
        """Nothing reads a storage any more: its variables go with the next `drop_dead`."""
        self.dead += self.alive.pop(storage, ())

    def drop_dead(self) -> None:
        """The ``del`` of what was freed."""
        if self.dead:
            self.lines.append(f"del {', '.join(map(self.name, self.dead))}")
            self.dead.clear()

    def bring_to_life(self, value: str) -> None:
        """A value stands in its variable from here on."""
        self.alive.setdefault(self.step.values[value].storage, {})[value] = None

    def use(self, value: str) -> str:
        """The variable of a value; a view that does not stand in one yet is made here (an explicit stack,
        since chains of views may be long)."""
        stack = [value]
        while stack:
            top = self.step.values[stack[-1]]
            if top.name in self.alive.get(top.storage, ()):
                stack.pop()
                continue
            if top.name in self.unused.zero:
                self.lines.append(f"{self.name(top.name)} = {self._zeros(top.fake)}")
                self.bring_to_life(top.name)
                stack.pop()
                continue
            call = self.step.call[top.call or ""]
            if not call.is_view:
                raise ProblemError(f"{self.step.name}: {top.name!r} is read, but its storage is not resident")
            missing = [
                r.value
                for r in refs((call.args, call.kwargs))
                if r.value not in self.alive.get(self.step.values[r.value].storage, ())
            ]
            if missing:
                stack += missing
                continue
            self.lines.append(f"{self._results(call)} = {self._expression(call)}")
            self._made(call)
            stack.pop()
        return self.name(value)

    def _zeros(self, like: torch.Tensor) -> str:
        layout = f"{tuple(like.shape)}, {tuple(like.stride())}, dtype={like.dtype}"
        return f"torch.empty_strided({layout}, device={str(like.device)!r}).zero_()"

    def _expression(self, call: Call) -> str:
        arguments = [self._literal(a) for a in call.args]
        arguments += [f"{k}={self._literal(a)}" for k, a in call.kwargs.items()]
        return f"{self._target(call.target)}({', '.join(arguments)})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self.use(value.value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, (list, tuple)):
            body = ", ".join(self._literal(v) for v in value)
            return f"[{body}]" if isinstance(value, list) else f"({body}{',' if len(value) == 1 else ''})"
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        name = f"constant_{len(self.scope)}"
        self.scope[name] = value
        return name

    def _target(self, target: Any) -> str:
        if target not in self.targets:
            text = getattr(target, "source_name", str(target))
            name = "_".join(re.sub(r"\W", "_", part) for part in text.split(".") if part != "default")
            name = f"{name}_{len(self.targets)}" if name in self.scope else name
            self.targets[target] = name
            self.scope[name] = kernel_of(target)
        return self.targets[target]

    def name(self, value: str) -> str:
        """The variable of a value."""
        if value not in self.variable:
            name = "v_" + re.sub(r"\W", "_", value)
            # Values' names are identifiers by construction; a collision after cleaning would be a silent
            # wrong result.
            while name in self.taken:
                name += "_"
            self.taken.add(name)
            self.variable[value] = name
        return self.variable[value]


def renewed_buffers(step: CapturedStep) -> set[str]:
    """The storages of the buffers that the step gives new content."""
    renewed = {o.target for o in step.outputs if o.kind == "buffer"}
    return {step.values[i.value].storage for i in step.inputs if i.kind == "buffer" and i.target in renewed}


def read_from(step: CapturedStep, schedule: Schedule, start: int) -> set[str]:
    """The storages that a schedule reads from a position on."""
    return {s for one in schedule[start:] if isinstance(one, Run) for s in step.reads(step.call[one.op])}


def save_rng(device: torch.device) -> Generator:
    """A function that gives the state of the device's default generator."""
    if device.type == "cuda":
        return lambda: torch.cuda.get_rng_state(device)
    return torch.get_rng_state


def load_rng(device: torch.device) -> Callable[[Any], None]:
    """A function that sets the state of the device's default generator."""
    if device.type == "cuda":
        return lambda state: torch.cuda.set_rng_state(state, device)
    return torch.set_rng_state
