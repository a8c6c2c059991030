"""A schedule becomes one flat Python function over ATen calls, with ``del``s, readable when printed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rematplan.ir import ProblemError
from rematplan.planner.schedule import Free, Run, Schedule, runs_of
from rematplan.runtime.captured_step import Call, CapturedStep, Ref, StepOutput, refs
from rematplan.runtime.inverse_kernels import Inverse
from rematplan.runtime.segments import Segment, gradient_segments
from rematplan.runtime.unused_outputs import Unused, unused_by

Generator = Callable[[], Any]


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
    can be freed on the way, and gives the gradients ``outputs`` and the list of what the next segment is to get.
    ``still_read``: positions in `Halves.read_late` of the inputs that it or a later segment reads.
    """

    outputs: tuple[StepOutput, ...]
    still_read: tuple[int, ...]
    function: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)


@dataclass(frozen=True)
class Halves:
    """A compiled schedule in two halves, before and after the gradients of the outputs are known.

    ``forward(*inputs)``, tangents left out, gives the outputs and new buffers, and a list of all that is held at the
    turn, for the first segment of ``backward``. Both follow the order of `CapturedStep.inputs` and
    `CapturedStep.outputs`. ``read_late``: positions of the inputs that the backward half reads, and so must find as
    they were; of buffers that the step gives new content it has copies of its own.
    """

    source: str
    forward: Callable[..., tuple[tuple[torch.Tensor, ...], list[Any]]] = field(repr=False)
    backward: tuple[Backward, ...]
    read_late: tuple[int, ...]


def compile_step(step: CapturedStep, schedule: Schedule) -> Executable:
    """Compile a schedule of the step's planning problem.

    Raises:
        ProblemError: the schedule names an op that the step does not have, or runs random ops for the first time in
            another order than the step does, which would draw other numbers.
    """
    _check_order_of_draws(step, schedule)
    writer = _Writer(step, schedule)
    source = writer.write()
    return Executable(source, _defined(step, source, writer.scope)["step"])


def compile_halves(step: CapturedStep, schedule: Schedule, missing: Iterable[str] = ()) -> Halves:
    """Compile a schedule in two halves. It must run all that the outputs and buffers need before anything that needs
    a tangent (`turn.turning_problem`).

    ``missing``: tangents (values) that the backward gets as None, since the loss does not use their outputs. It skips
    what depends on them alone, and gives None for gradients that do. The forward is the same whatever is missing.

    Raises:
        ProblemError: as `compile_step`; or an output is not there at the turn.
    """
    _check_order_of_draws(step, schedule)
    writer = _Writer(step, schedule)
    segments = gradient_segments(step, schedule)
    writer.unused = unused_by(step, schedule, segments[0].start, missing)
    source = writer.write_halves(segments)
    scope = _defined(step, source, writer.scope)
    own = _renewed_buffers(step)
    storages = [step.values[i.value].storage for i in step.inputs if i.kind != "tangent"]
    read = [_read_from(step, schedule, s.start) - own for s in segments]
    late = tuple(at for at, storage in enumerate(storages) if storage in read[0])
    backward = tuple(
        Backward(
            segment.outputs,
            tuple(k for k, at in enumerate(late) if storages[at] in still),
            scope[f"backward_{k}"],
        )
        for k, (segment, still) in enumerate(zip(segments, read, strict=True))
    )
    return Halves(source, scope["forward"], backward, late)


def _renewed_buffers(step: CapturedStep) -> set[str]:
    """The storages of the buffers that the step gives new content."""
    renewed = {o.target for o in step.outputs if o.kind == "buffer"}
    return {step.values[i.value].storage for i in step.inputs if i.kind == "buffer" and i.target in renewed}


def _read_from(step: CapturedStep, schedule: Schedule, start: int) -> set[str]:
    """The storages that a schedule reads from a position on."""
    return {s for one in schedule[start:] if isinstance(one, Run) for s in step.reads(step.call[one.op])}


def _defined(step: CapturedStep, source: str, scope: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(scope)
    exec(compile(source, f"<rematplan step of {step.name}>", "exec"), found)
    return found


def _check_order_of_draws(step: CapturedStep, schedule: Schedule) -> None:
    seeded = [c.name for c in step.calls if c.seeded]
    wanted = set(seeded)
    first = [name for name in dict.fromkeys(runs_of(schedule)) if name in wanted]
    if first != seeded:
        raise ProblemError(
            f"{step.name}: the schedule's first runs of random ops stand in another order than the step's"
        )


class _Writer:
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
        self.dead: list[str] = []  # values freed since the last call
        self.variable: dict[str, str] = {}
        self.states: set[str] = set()
        self.unused = Unused()
        self.rerun = {name for name, count in Counter(runs_of(schedule)).items() if count > 1}

    def write(self) -> str:
        """The whole schedule as ``step(*inputs)``."""
        step = self.step
        names = self._take([i.value for i in step.inputs])
        self._steps(0, len(self.schedule))
        self.lines.append(f"return {self._tuple(self._use(o.value) for o in step.outputs)}")
        return self._function(f"step({names})")

    def write_halves(self, segments: Sequence[Segment]) -> str:
        """The schedule as ``forward(*inputs)`` and ``backward_0(held, *tangents)``, ``backward_1(held)``, ..."""
        step = self.step
        names = self._take([i.value for i in step.inputs if i.kind != "tangent"])
        self._steps(0, segments[0].start)
        self._keep_old_buffers(segments[0].start)
        early = [o.value for o in step.outputs if o.kind in ("output", "buffer")]
        functions = [self._handing_over(f"forward({names})", early)]
        for k, segment in enumerate(segments):
            held = self._tuple(self._held())
            tangents = "" if k else self._take([i.value for i in step.inputs if i.kind == "tangent"])
            self.lines += [f"{held} = held", "held.clear()"]
            self._steps(segment.start, segment.end)
            given = [o.value for o in segment.outputs]
            head = f"backward_{k}(held{', ' if tangents else ''}{tangents})"
            functions.append(self._handing_over(head, given, drop=True))
        return "\n\n".join(functions)

    def _keep_old_buffers(self, turn: int) -> None:
        """Copies of the buffers that get new content at the turn and are read after it."""
        late = _read_from(self.step, self.schedule, turn) & _renewed_buffers(self.step)
        for i in self.step.inputs:
            storage = self.step.values[i.value].storage
            if storage in late:
                self._free(storage)
                self.dead.remove(i.value)
                self._bring_to_life(i.value)
                self.lines.append(f"{self._name(i.value)} = {self._name(i.value)}.clone()")
        self._drop_dead()

    def _handing_over(self, head: str, values: Sequence[str], drop: bool = False) -> str:
        """The lines so far as a function that returns ``values`` and all else that is held; ``drop``: it does not
        hold on to the values' storages."""
        zero = self.unused.zero if drop else ()
        given = self._tuple("None" if v in zero else self._use(v) for v in values)
        for value in values if drop else ():
            self.alive.pop(self.step.values[value].storage, None)
        self.lines.append(f"return {given}, [{', '.join(self._held())}]")
        return self._function(head)

    def _held(self) -> list[str]:
        return [self._name(v) for values in self.alive.values() for v in values] + sorted(self.states)

    def _steps(self, start: int, end: int) -> None:
        for at in range(start, end):
            one = self.schedule[at]
            if at in self.unused.skipped:
                continue
            if isinstance(one, Free):
                if one.tensor not in self.alive and not self.unused.zero:
                    raise ProblemError(f"step {at}: frees {one.tensor!r}, which is not resident")
                self._free(one.tensor)
            else:
                self._run(one, at)
        self._drop_dead()

    def _take(self, values: Sequence[str]) -> str:
        for value in values:
            self._bring_to_life(value)
        return ", ".join(map(self._name, values))

    def _function(self, head: str) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        self.lines = []
        return f"def {head}:\n{body}"

    @staticmethod
    def _tuple(names: Iterable[str]) -> str:
        return f"({''.join(name + ', ' for name in names).rstrip()})"

    def _run(self, run: Run, at: int) -> None:
        call = self.step.call.get(run.op)
        if call is None:
            raise ProblemError(f"step {at}: {self.step.name} has no op named {run.op!r}")
        for storage in self.step.writes(call):
            self._free(storage)
        self._drop_dead()
        same = dict(self.unused.same).get(call.name)
        expression = self._use(same) if same else self._expression(call)
        if call.seeded and call.name in self.rerun:
            self._replayed(call, expression)
        else:
            self.lines.append(f"{self._results(call)} = {expression}")
        for result in call.results:
            if result:
                self._bring_to_life(result)

    def _replayed(self, call: Call, expression: str) -> None:
        state = f"rng_{self._name(call.name)}"
        assign = f"{self._results(call)} = {expression}"
        self.scope.update(save_rng=save_rng(self.step.device), load_rng=load_rng(self.step.device))
        if state not in self.states:
            self.states.add(state)
            self.lines += [f"{state} = save_rng()", assign]
        else:
            self.lines += [
                "rng_now = save_rng()",
                f"load_rng({state})",
                assign,
                "load_rng(rng_now)",
                "del rng_now",
            ]

    def _results(self, call: Call) -> str:
        if call.single:
            return self._name(call.results[0] or "_")
        left = ", ".join(self._name(r) if r else "_" for r in call.results)
        return left + ("," if len(call.results) == 1 else "")

    def _free(self, storage: str) -> None:
        self.dead += self.alive.pop(storage, ())

    def _drop_dead(self) -> None:
        if self.dead:
            self.lines.append(f"del {', '.join(map(self._name, self.dead))}")
            self.dead.clear()

    def _bring_to_life(self, value: str) -> None:
        self.alive.setdefault(self.step.values[value].storage, {})[value] = None

    def _use(self, value: str) -> str:
        """The variable of a value; a view that does not stand in one yet is made here (an explicit stack,
        since chains of views may be long)."""
        stack = [value]
        while stack:
            top = self.step.values[stack[-1]]
            if top.name in self.alive.get(top.storage, ()):
                stack.pop()
                continue
            if top.name in self.unused.zero:
                self.lines.append(f"{self._name(top.name)} = {self._zeros(top.fake)}")
                self._bring_to_life(top.name)
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
            for result in call.results:
                if result:
                    self._bring_to_life(result)
            stack.pop()
        return self._name(value)

    def _zeros(self, like: torch.Tensor) -> str:
        layout = f"{tuple(like.shape)}, {tuple(like.stride())}, dtype={like.dtype}"
        return f"torch.empty_strided({layout}, device={str(like.device)!r}).zero_()"

    def _expression(self, call: Call) -> str:
        arguments = [self._literal(a) for a in call.args]
        arguments += [f"{k}={self._literal(a)}" for k, a in call.kwargs.items()]
        return f"{self._target(call.target)}({', '.join(arguments)})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._use(value.value)
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
            text = target.__name__ if isinstance(target, Inverse) else str(target)
            name = "_".join(re.sub(r"\W", "_", part) for part in text.split(".") if part != "default")
            name = f"{name}_{len(self.targets)}" if name in self.scope else name
            self.targets[target] = name
            self.scope[name] = target
        return self.targets[target]

    def _name(self, value: str) -> str:
        if value not in self.variable:
            name = "v_" + re.sub(r"\W", "_", value)
            # Values' names are identifiers by construction; a collision after cleaning would be a silent
            # wrong result.
            if name in self.variable.values():
                name += f"_{len(self.variable)}"
            self.variable[value] = name
        return self.variable[value]


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


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each once, as a captured step knows them."""
    return tensors_and_modes(module)[0]


def tensors_and_modes(module: nn.Module) -> tuple[dict[str, torch.Tensor], tuple[bool, ...]]:
    """Parameters and buffers by name, each once, by the name that ``named_parameters`` gives them; and the modules'
    modes. In one pass: it is made at every call."""
    named: dict[str, torch.Tensor] = {}
    modes: list[bool] = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        modes.append(one.training)
        for held in (one._parameters, one._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[prefix + name] = tensor
        children = reversed(one._modules.items())
        waiting += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return named, tuple(modes)


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
