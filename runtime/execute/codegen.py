"""Code generation: write a schedule as the source of a flat Python function of ATen calls, with ``del`` statements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.runtime.execute.emitter import Emitter
from rematplan.runtime.execute.in_place import overwriting_calls
from rematplan.runtime.execute.layout_check import LayoutCheck
from rematplan.runtime.execute.missing_tangents import ALL_USED, Unused
from rematplan.runtime.execute.random_replay import first_draw, later_draw, replay_functions
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, free_name
from rematplan.runtime.graph.in_place_calls import as_run
from rematplan.runtime.graph.kernel_of import kernel_of
from rematplan.runtime.graph.tracked_sizes import TrackedSize, shape_of, stride_of, without_values
from rematplan.runtime.problem.backward_segments import Segment

Note: TypeAlias = Callable[[str, torch.Tensor], None]


class Writer(Emitter):
    """Writes the Python source that runs a schedule, line by line, and tracks which values are in variables. A variable
    is deleted when its value's storage is freed, and before the op that computes it runs again. ``for_any_sizes``:
    whether each written function takes the values of all size expressions as its first argument ``s``. ``note``: called
    by the source with the name and the tensor of each value; a `LayoutCheck` if calls may overwrite operands."""

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        for_any_sizes: bool = False,
        unused: Unused = ALL_USED,
        overwrite: bool = True,
        note: Note | LayoutCheck | None = None,
    ) -> None:
        super().__init__(step, schedule)
        self.for_any_sizes, self.unused = for_any_sizes, unused
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
        self.targets: dict[Any, str] = {}
        self.left: set[str] = set()  # storages that were returned; a schedule may still free them
        self.dead: list[str] = []  # freed values whose variables are not deleted yet
        self.variable: dict[str, str] = {}  # value → its variable
        self.taken: set[str] = set()  # names of all variables
        self.states: set[str] = set()  # variables of generators' states
        self.gone: list[str] = []  # those of them that were deleted, some to be saved again
        last = {
            one.op: at for at, one in enumerate(schedule) if isinstance(one, Run) and one.op in self.rerun
        }
        self.last_draws = {at: self._state(op) for op, at in last.items()}
        #: By position, the call that writes its result into an operand that nothing reads again.
        self.overwriting = overwriting_calls(step, schedule) if overwrite else {}
        #: Values that the present function computes. It may write into them even if nothing else may be
        #: overwritten, as in a backward that runs again from the same saved tensors.
        self.own: set[str] = set()
        self.overwrite = overwrite
        self.ends: dict[int, list[str]] = {}  # position → storages freed after it without a Free
        self.noting = note is not None
        if note:
            self.scope["note"] = note

    def write(self) -> str:
        """Return the source of the whole schedule as one function ``step(*inputs)``, which returns its outputs."""
        step = self.step
        names = self.take([i.value for i in step.inputs])
        self.steps(0, len(self.schedule))
        self.lines.append(f"return {self.tuple_of(self.use(o.value) for o in step.outputs)}")
        return self.function(f"step({names})")

    def write_halves(self, segments: Sequence[Segment]) -> str:
        """Return as source the functions ``forward(*inputs)``, ``backward_0(held, *tangents)``, ``backward_1(held)`` …,
        one a segment. Each returns a tuple of its results and the list ``held`` for the next function, which empties
        that list."""
        step = self.step
        names = self.take([i.value for i in step.inputs if i.kind != "tangent"])
        self.steps(0, segments[0].start)
        early = [o.value for o in step.outputs if o.kind in ("output", "buffer")]
        self._keep_old_buffers(segments[0].start)
        self.ends = self._last_reads_of_tangents()
        functions = [
            self._handing_over(f"forward({names})", early, self._not_read_from(segments[0].start, early))
        ]
        for k, segment in enumerate(segments):
            held = self.tuple_of(self._live_variables())
            tangents = "" if k else self.take([i.value for i in step.inputs if i.kind == "tangent"])
            self.lines += [f"{held} = held", "held.clear()"]
            self.steps(segment.start, segment.end)
            given = [o.value for o in (*segment.outputs, *segment.statistics)]
            head = f"backward_{k}(held{', ' if tangents else ''}{tangents})"
            gone = [*given, *self._not_read_from(segment.end)]
            functions.append(self._handing_over(head, given, gone, self.unused.zero))
        return "\n\n".join(functions)

    def _last_reads_of_tangents(self) -> dict[int, list[str]]:
        """Return, by position of an op execution, the tangents' storages that it reads as the last one. Storages that
        the step returns are left out."""
        # The variables are deleted there even if the schedule frees the storage later or not at all: with
        # other strides than at capture, views may be copies.
        tangents = self.step.given("tangent") - self.step.returned()
        ends = {
            storage: at
            for at, one in enumerate(self.schedule)
            if isinstance(one, Run)
            for storage in self.step.reads(self.step.call[one.op])
            if storage in tangents
        }
        return {at: [storage for storage, end in ends.items() if end == at] for at in ends.values()}

    def _keep_old_buffers(self, boundary: int) -> None:
        """Write lines that clone the changed buffers that the backward half, from ``boundary`` on, reads: the caller
        overwrites the originals after the forward. None are written if the forward gets copies already (`Rerun`)."""
        if self.step.left_out:
            return
        late = read_from(self.step, self.schedule, boundary) & self.step.renewed
        for i in self.step.inputs:
            storage = self.step.values[i.value].storage
            if storage in late:
                self.free(storage)
                self.dead.remove(i.value)
                self.mark_alive(i.value)
                self.lines.append(f"{self.name(i.value)} = {self.name(i.value)}.clone()")
        self.drop_dead()

    def _not_read_from(self, start: int, outputs: Sequence[str] = ()) -> list[str]:
        """Return those of ``outputs`` and of the step's inputs that nothing reads from position ``start`` on.
        Schedules do not free them."""
        late = read_from(self.step, self.schedule, start)
        ends = [*(i.value for i in self.step.inputs), *outputs]
        return [v for v in ends if self.step.values[v].storage not in late]

    def _handing_over(
        self, head: str, values: Sequence[str], gone: Iterable[str], zero: frozenset[str] = frozenset()
    ) -> str:
        """Return the lines so far as a function that returns a tuple of ``values`` (None if in ``zero``) and a list of
        the live variables without ``gone``. ``head``: the function's name and parameters."""
        given = self.tuple_of("None" if v in zero else self.use(v) for v in values)
        for value in gone:
            self.left.add(self.step.values[value].storage)
            self.alive.pop(self.step.values[value].storage, None)
        self.lines.append(f"return {given}, [{', '.join(self._live_variables())}]")
        return self.function(head)

    def _live_variables(self) -> list[str]:
        return [self.name(v) for values in self.alive.values() for v in values] + sorted(self.states)

    def steps(self, start: int, end: int) -> None:
        """Write the positions ``start`` to ``end`` (exclusive) of the schedule, without op executions that missing
        gradients make superfluous. Raises `ProblemError` if a tensor is freed or read that is not resident."""
        for at in range(start, end):
            one = self.schedule[at]
            for storage in self.ends.get(at - 1, ()):
                self.free(storage)
            if at in self.unused.skipped:
                if at in self.last_draws:
                    self.lines.append(f"del {self.last_draws[at]}")
                    self._gone(self.last_draws[at])
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
        """Return the parameter list of a function that gets ``values``, which are in variables from now on, except
        for missing tangents."""
        for value in values:
            if value not in self.unused.zero:
                self.mark_alive(value)
        return ", ".join(map(self.name, values))

    def function(self, head: str) -> str:
        """Return all lines since the last call as a function with this head (name, parameters), and begin anew."""
        body = "".join(f"    {line}\n" for line in self.lines)
        self.lines, self.own = [], set()
        return f"def {head.replace('(', '(s, ', 1) if self.for_any_sizes else head}:\n{body}"

    @staticmethod
    def tuple_of(names: Iterable[str]) -> str:
        """Return the source of a tuple. ``names``: the source of each element."""
        return f"({''.join(name + ', ' for name in names).rstrip()})"

    def run(self, run: Run, at: int) -> None:
        """Write one execution of an op, at position ``at``, after deleting what an earlier execution made. A sum with a
        missing gradient is its other summand."""
        call = self.call_of(run, at)
        over = None if self.unused.zero else self.overwriting.get(at)  # with zeros, a sum may be one summand
        for storage in self.step.writes(call):
            self.free(storage)
        self.drop_dead()
        same = dict(self.unused.same).get(call.name)
        expression = self.use(same) if same else self._overwriting(over, self._in_place(call))
        if call.name in self.rerun:
            self._replayed(call, expression, at)
        else:
            self.lines.append(f"{self._results(call)} = {expression}")
        self._made(call)
        if call.in_place:
            self._forget(call.args[0].value)

    def _in_place(self, call: Call) -> Call:
        """Return the call as it runs: a call writes into its first argument unless that must stay as it is."""
        return as_run(call) if call.in_place and (self.overwrite or call.args[0].value in self.own) else call

    def _forget(self, value: str) -> None:
        """Mark the first argument of an in-place call as dead: its memory has the result now, or is freed if the result
        is in new memory."""
        if self.is_alive(value):
            del self.alive[self.step.values[value].storage][value]
            self.dead.append(value)

    def _overwriting(self, over: Call | None, call: Call) -> str:
        """Return the source of ``call`` or, if given, of ``over``, its variant that overwrites an operand. With
        `noting`, this source decides when it runs: ``over`` if all values so far are as planned."""
        if over is None:
            return self._expression(call)
        expression = self._expression(over)
        return f"{expression} if note.as_planned else {self._expression(call)}" if self.noting else expression

    def _made(self, call: Call) -> None:
        """Record that the results of a call are in variables. Also write a call of ``note`` for each result if that was
        asked for."""
        for result in filter(None, call.results):
            self.mark_alive(result)
            self.own.add(result)
            if self.noting:
                self.lines.append(f"note({result!r}, {self.name(result)})")

    def _replayed(self, call: Call, expression: str, at: int) -> None:
        """Write one run, at position ``at``, of a random call that runs several times: the first saves the generator's
        state, from which later ones draw. ``expression``: the source of the call."""
        state = self._state(call.name)
        device = self.step.drawing_device(call)
        self.scope.update(replay_functions(device))
        assign = f"{self._results(call)} = {expression}"
        if state not in self.states:
            self.states.add(state)
            self.lines += first_draw(assign, state, device)
            return
        self.lines += later_draw(assign, state, device, last=at in self.last_draws)
        self._gone(state)
        self.states.update(() if at in self.last_draws else (state,))

    def _state(self, op: str) -> str:
        return f"rng_{self.name(op)}"

    def _gone(self, state: str) -> None:
        self.states.discard(state)
        self.gone.append(state)

    def _results(self, call: Call) -> str:
        if call.single:
            return self.name(call.results[0] or "_")
        left = ", ".join(self.name(r) if r else "_" for r in call.results)
        return left + ("," if len(call.results) == 1 else "")

    def free(self, storage: str) -> list[str]:
        """Mark all values in a storage as dead, and return those that were alive (in variables). The next `drop_dead`
        writes the deletion of their variables."""
        freed = super().free(storage)
        self.dead += freed
        return freed

    def drop_dead(self) -> None:
        """Write a ``del`` statement for the variables of values that `free` marked since the last ``del``; nothing if
        there are none."""
        if self.dead:
            self.lines.append(f"del {', '.join(map(self.name, self.dead))}")
            self.dead.clear()

    def emit(self, call: Call) -> None:
        """Write a call as an assignment to the variables of its results."""
        self.lines.append(f"{self._results(call)} = {self._expression(call)}")
        self._made(call)

    def fetch(self, value: str) -> bool:
        """Return whether a value is zero because a tangent is missing. If so, write the zeros."""
        if value in self.unused.zero:
            self.lines.append(f"{self.name(value)} = {self._zeros(self.step.values[value].fake)}")
            self.mark_alive(value)
        return value in self.unused.zero

    def use(self, value: str) -> str:
        """Return a value's variable, after writing the views it is computed from, or zeros for a missing gradient."""
        self.make(value)
        return self.name(value)

    def _zeros(self, like: torch.Tensor) -> str:
        layout = f"{self._literal(shape_of(like))}, {self._literal(stride_of(like))}, dtype={like.dtype}"
        return f"torch.empty_strided({layout}, device={str(like.device)!r}).zero_()"

    def _expression(self, call: Call) -> str:
        arguments = [self._literal(a) for a in call.args]
        arguments += [f"{k}={self._literal(a)}" for k, a in call.kwargs.items()]
        sized = ".at_sizes(s)" if self.for_any_sizes and hasattr(call.target, "at_sizes") else ""
        return f"{self._target(call.target)}{sized}({', '.join(arguments)})"

    def _literal(self, value: Any) -> str:
        """Return the source of an argument of a call. A value that has no source of its own becomes a constant in
        ``scope``."""
        if isinstance(value, Ref):
            return self.use(value.value)
        if isinstance(value, TrackedSize):
            return f"s[{value.at}]" if self.for_any_sizes else repr(int(value))
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
        """Return the name in ``scope`` of the function that runs a call's target. Equal targets share one name."""
        # Two targets that are equal only at the step's sizes are two.
        key = without_values(target) if hasattr(target, "at_sizes") else target
        if key not in self.targets:
            text = getattr(target, "source_name", str(target))
            name = "_".join(re.sub(r"\W", "_", part) for part in text.split(".") if part != "default")
            name = f"{name}_{len(self.targets)}" if name in self.scope else name
            self.targets[key] = name
            self.scope[name] = kernel_of(target)
        return self.targets[key]

    def name(self, value: str) -> str:
        """Return the name of a value's variable, the same at each call."""
        if value not in self.variable:
            # Two values whose names differ only in replaced characters must not share a variable.
            name = free_name("v_" + re.sub(r"\W", "_", value), self.taken)
            self.taken.add(name)
            self.variable[value] = name
        return self.variable[value]


def read_from(step: CapturedStep, schedule: Schedule, start: int) -> set[str]:
    """Return the names of the storages that the op executions at position ``start`` of a schedule or later read."""
    return {s for one in schedule[start:] if isinstance(one, Run) for s in step.reads(step.call[one.op])}
