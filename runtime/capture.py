"""A module and a batch become one joint graph of ATen calls, forward and backward, and from it the problem.

PyTorch differentiates (`aot_export_joint_with_descriptors`); this file only reads the result: which call
makes which storage, which calls are views, what goes in and what comes out. Nothing of the module is changed
by it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.func import functional_call

from rematplan.ir import ModelError, Op, Tensor, TrainingGraph
from rematplan.runtime.native_kernels import native_kernels
from rematplan.runtime.quiet import quiet

InputKind = Literal["parameter", "buffer", "batch", "constant", "tangent"]
OutputKind = Literal["output", "gradient", "input gradient", "buffer"]


@dataclass(frozen=True, slots=True)
class Ref:
    """In a call's arguments: the value of that name."""

    value: str


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: its storage (views share one), the call that makes it (None for inputs), its fake."""

    name: str
    storage: str
    call: str | None
    fake: torch.Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call. ``results`` are value names by position (None where it returns no tensor).

    ``is_view``: every result shares the storage of an argument, so that it costs nothing and makes nothing.
    ``seeded``: it draws from the random number generator, whose state must be replayed when it runs again.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str | None, ...]
    single: bool
    is_view: bool
    seeded: bool
    backward: bool


@dataclass(frozen=True, slots=True)
class StepInput:
    """An input of the step: ``target`` is the parameter's or buffer's name, the position in the batch, or for a tangent
    (the gradient of an output) the output's position."""

    kind: InputKind
    target: str
    value: str


@dataclass(frozen=True, slots=True)
class StepOutput:
    """An output of the step: one of the module's outputs (``target``: its position; the loss is 0), the gradient of a
    parameter or of an input (its position in the batch), or a buffer's new content."""

    kind: OutputKind
    target: str
    value: str


@dataclass(frozen=True)
class CapturedStep:
    """A training step as ATen calls in a valid order, with what it reads and what it gives back."""

    name: str
    inputs: tuple[StepInput, ...]
    outputs: tuple[StepOutput, ...]
    calls: tuple[Call, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, torch.Tensor]

    @cached_property
    def call(self) -> dict[str, Call]:
        """Calls by name."""
        return {c.name: c for c in self.calls}

    @cached_property
    def storage_bytes(self) -> dict[str, int]:
        """Bytes by storage."""
        return {v.storage: v.fake.untyped_storage().nbytes() for v in self.values.values()}

    @cached_property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.values[self.inputs[0].value].fake.device

    @cached_property
    def after_turn(self) -> frozenset[str]:
        """The calls that need a tangent, directly or not: they run after the turn from forward to backward."""
        after = {i.value for i in self.inputs if i.kind == "tangent"}
        found = set()
        for call in self.calls:
            if any(r.value in after for r in refs((call.args, call.kwargs))):
                found.add(call.name)
                after.update(r for r in call.results if r)
        return frozenset(found)

    def reads(self, call: Call) -> tuple[str, ...]:
        """The storages that a call reads, each once."""
        return tuple(dict.fromkeys(self.values[r.value].storage for r in refs((call.args, call.kwargs))))

    def writes(self, call: Call) -> tuple[str, ...]:
        """The storages that a call makes, each once."""
        return (
            tuple(dict.fromkeys(self.values[r].storage for r in call.results if r))
            if not call.is_view
            else ()
        )


@dataclass(frozen=True, slots=True)
class CallCost:
    """``time`` in microseconds; ``workspace`` in bytes held only while the call runs.

    ``results``: the real sizes of its results' storages, bytes, by position; 0 where unknown. Some kernels return a
    small tensor in a large storage, which the trace does not see.
    """

    time: float
    workspace: int = 0
    results: tuple[int, ...] = ()


RNG_STATES = "rng_states"

# Calls whose result is their argument once autograd no longer looks.
SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def training_graph(step: CapturedStep, costs: Mapping[str, CallCost]) -> TrainingGraph:
    """The planning problem of a captured step, priced by ``costs`` (one entry a call that is no view).

    Views are folded into the storage they view. The saved generator states of the random calls, needed to
    draw the same numbers when they run again, are charged as one more input.
    """
    seeded = [c.name for c in step.calls if c.seeded]
    sizes = dict(step.storage_bytes)
    for name, cost in costs.items():
        for result, real in zip(step.call[name].results, cost.results, strict=False):
            if result:
                storage = step.values[result].storage
                sizes[storage] = max(sizes[storage], real)
    inputs: dict[str, InputKind] = {}
    for i in step.inputs:
        inputs.setdefault(step.values[i.value].storage, i.kind)
    split: dict[str, int] = dict.fromkeys(inputs.values(), 0)
    for storage, kind in inputs.items():
        split[kind] += sizes[storage]
    if seeded:
        state = torch.get_rng_state() if step.device.type == "cpu" else torch.cuda.get_rng_state(step.device)
        sizes[RNG_STATES] = split[RNG_STATES] = (len(seeded) + 1) * state.numel()
    ops = tuple(
        Op(
            name=c.name,
            reads=step.reads(c),
            writes=step.writes(c),
            cost=costs[c.name].time,
            workspace=costs[c.name].workspace,
            phase="backward" if c.backward else "forward",
        )
        for c in step.calls
        if not c.is_view
    )
    used = dict.fromkeys(inputs) | dict.fromkeys(t for o in ops for t in (*o.reads, *o.writes))
    used |= dict.fromkeys([RNG_STATES] if seeded else [])
    return TrainingGraph(
        name=step.name,
        tensors=tuple(Tensor(name, sizes[name]) for name in used),
        inputs=tuple(inputs) + ((RNG_STATES,) if seeded else ()),
        outputs=tuple(dict.fromkeys(step.values[o.value].storage for o in step.outputs)),
        ops=ops,
        ordered=tuple(seeded),
        fixed_split=split,
    )


def refs(args: Any) -> Iterator[Ref]:
    """The references in nested arguments, in order."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (tuple, list)):
        for a in args:
            yield from refs(a)
    elif isinstance(args, Mapping):
        for a in args.values():
            yield from refs(a)


def substitute(args: Any, value_of: Callable[[str], Any]) -> Any:
    """Nested arguments with every reference replaced by ``value_of`` its name."""
    if isinstance(args, Ref):
        return value_of(args.value)
    if isinstance(args, (tuple, list)):
        return type(args)(substitute(a, value_of) for a in args)
    if isinstance(args, Mapping):
        return {k: substitute(a, value_of) for k, a in args.items()}
    return args


def capture(module: nn.Module, batch: Sequence[torch.Tensor], name: str) -> CapturedStep:
    """Trace ``module(*batch)``, which must return a tensor (the loss, say) or a tuple of them, with its backward.

    No output may be a view of an input, of a parameter or of another output.

    The module's parameters, buffers, gradients and random state are left as they are.

    Raises:
        ModelError: no parameter is trainable (nor does an input want a gradient), no output depends on one, the module
            changes an input in place, or PyTorch cannot trace it.
    """
    if not any(t.requires_grad for t in (*module.parameters(), *batch)):
        raise ModelError(f"{name}: no trainable parameter, so there is no training step to plan")
    try:
        with ExitStack() as stack, warnings.catch_warnings(), native_kernels(), quiet():
            warnings.simplefilter("ignore")
            untied = _Untied(module)
            try:
                joint = aot_export_joint_with_descriptors(stack, untied, tuple(batch))
            except DataDependentOutputException:
                # Models that look into their data to take a shortcut often do not when they are being compiled.
                stack.enter_context(_as_if_compiling())
                joint = aot_export_joint_with_descriptors(stack, untied, tuple(batch))
    except ModelError:
        raise
    except Exception as error:  # whatever the tracer meets in the user's model, say it in one line
        first = str(error).strip().splitlines()
        raise ModelError(
            f"{name}: cannot be traced: {type(error).__name__}: {first[0] if first else ''}"
        ) from error
    return _Reader(joint.graph_module, untied.names).read(name)


@contextmanager
def _as_if_compiling() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _Untied(nn.Module):
    """A module as a function of its distinct parameters and buffers.

    The tracer takes a tied weight for two, with a gradient each; plain autograd knows one, and adds where it adds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = module  # not a child: its names must not be seen beside these
        self.names: dict[str, str] = {}
        short: dict[int, str] = {}
        for at, (name, parameter) in enumerate(module.named_parameters()):
            self.register_parameter(f"p{at}", parameter)
            short[id(parameter)], self.names[f"p{at}"] = f"p{at}", name
        for at, (name, buffer) in enumerate(module.named_buffers()):
            self.register_buffer(f"b{at}", buffer)
            short[id(buffer)], self.names[f"b{at}"] = f"b{at}", name
        everything = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        self.short_of = {name: short[id(tensor)] for name, tensor in everything}

    def forward(self, *batch: torch.Tensor) -> Any:
        state = {name: getattr(self, short) for name, short in self.short_of.items()}
        return functional_call(self.__dict__["inner"], state, batch)


class _Reader:
    """Reads one joint fx graph into a `CapturedStep`."""

    def __init__(self, module: fx.GraphModule, names: Mapping[str, str]) -> None:
        self.module, self.names = (
            module,
            names,
        )  # names: of parameters and buffers, by what the tracer calls them
        self.values: dict[str, Value] = {}
        self.calls: list[Call] = []
        self.inputs: list[StepInput] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.item: dict[tuple[str, int], str] = {}  # (call, position) → value name
        self.alias: dict[str, str] = {}  # fx name → value name
        self.storages: dict[int, str] = {}  # address of a fake's storage → its name

    def read(self, name: str) -> CapturedStep:
        graph = self.module.graph
        for node in graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
        outputs = self._outputs(graph.find_nodes(op="output")[0])
        step = CapturedStep(
            name, tuple(self.inputs), outputs, tuple(self.calls), dict(self.values), dict(self.constants)
        )
        return _without_dead_calls(_with_phases(_with_own_outputs(step)))

    def _value(self, name: str, fake: torch.Tensor, call: str | None) -> Value:
        # Addresses of fakes' storages are unique while the graph keeps the fakes alive.
        storage = self.storages.setdefault(fake.untyped_storage()._cdata, name)
        self.values[name] = value = Value(name, storage, call, fake)
        return value

    def _placeholder(self, node: fx.Node) -> None:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return
        kind, target = _describe_input(node.meta["desc"])
        target = self.names.get(target, target) if kind in ("parameter", "buffer") else target
        self._value(node.name, node.meta["val"], None)
        self.inputs.append(StepInput(kind, target, node.name))

    def _constant(self, node: fx.Node) -> None:
        tensor = getattr(self.module, str(node.target))
        self.constants[node.name] = tensor
        self._value(node.name, node.meta.get("val", tensor), None)
        self.inputs.append(StepInput("constant", node.name, node.name))

    def _call(self, node: fx.Node) -> None:
        if getattr(node.target, "__name__", "") == "getitem":
            source, at = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(at, int)
            self.alias[node.name] = self.item[source.name, at]
            return
        if node.target in SAME:
            self.alias[node.name] = self._refs(node.args[0]).value
            return
        args, kwargs = self._refs(node.args), self._refs(node.kwargs)
        read = {self.values[r.value].storage for r in refs((args, kwargs))}
        val = node.meta["val"]
        single = isinstance(val, torch.Tensor)
        names: list[str | None] = []
        for at, fake in enumerate((val,) if single else val):
            name = node.name if single else f"{node.name}_{at}_"
            names.append(name if isinstance(fake, torch.Tensor) else None)
            if isinstance(fake, torch.Tensor):
                self._value(name, fake, node.name)
                self.item[node.name, at] = name
        made = [self.values[n] for n in names if n]
        is_view = bool(made) and all(v.storage in read for v in made)
        if not is_view:
            # A result that shares an argument's storage beside fresh ones is counted as a storage of its own:
            # more than it takes, never less.
            for v in made:
                if v.storage in read:
                    self.values[v.name] = replace(v, storage=v.name)
        target = node.target
        tags = getattr(target, "tags", ())
        self.calls.append(
            Call(
                name=node.name,
                target=target,  # type: ignore[arg-type]
                args=args,
                kwargs=kwargs,
                results=tuple(names),
                single=single,
                is_view=is_view,
                seeded=torch.Tag.nondeterministic_seeded in tags and _draws(node),
                backward=False,
            )
        )

    def _refs(self, args: Any) -> Any:
        if isinstance(args, fx.Node):
            return Ref(self.alias.get(args.name, args.name))
        if isinstance(args, (tuple, list)):
            return type(args)(self._refs(a) for a in args)
        if isinstance(args, Mapping):
            return {k: self._refs(a) for k, a in args.items()}
        return args

    def _outputs(self, node: fx.Node) -> tuple[StepOutput, ...]:
        outputs = []
        results: Any = node.args[0]
        for result, description in zip(results, node.meta["desc"], strict=True):
            found = _describe_output(description)
            if isinstance(result, fx.Node) and found:
                kind, target = found
                target = self.names.get(target, target) if kind in ("gradient", "buffer") else target
                outputs.append(StepOutput(kind, target, self.alias.get(result.name, result.name)))
        if not any("gradient" in o.kind for o in outputs):
            raise ModelError("nothing that the model gives depends on a trainable parameter")
        return tuple(outputs)


def _draws(node: fx.Node) -> bool:
    """Whether a call tagged as random really draws: attention without dropout is tagged too."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0) != 0


def _describe_input(description: Any) -> tuple[InputKind, str]:
    kind = type(description).__name__
    if kind == "ParamAOTInput":
        return "parameter", description.target
    if kind == "BufferAOTInput":
        return "buffer", description.target
    if kind == "TangentAOTInput":
        return "tangent", str(description.output.idx)
    return "batch", str(description.idx)


def _describe_output(description: Any) -> tuple[OutputKind, str] | None:
    kind = type(description).__name__
    if kind == "PlainAOTOutput":
        return "output", str(description.idx)
    if kind == "InputMutationAOTOutput":
        if not hasattr(description.mutated_input, "target"):
            raise ModelError(f"the model changes its input {description.mutated_input.idx} in place")
        return "buffer", description.mutated_input.target
    if kind == "GradAOTOutput":
        of = description.grad_of
        return ("gradient", of.target) if hasattr(of, "target") else ("input gradient", str(of.idx))
    return None


def _with_own_outputs(step: CapturedStep) -> CapturedStep:
    """Give every output a dense storage of its own: copy an input, an expanded or a shared tensor.

    ``.grad`` of two parameters must not be one memory, and an expanded gradient cannot be accumulated into.
    """
    taken = {step.values[i.value].storage for i in step.inputs}
    values, outputs = dict(step.values), []
    copies: dict[str | None, list[Call]] = {}  # by the call that makes what is copied
    for output in step.outputs:
        value = values[output.value]
        dense = value.fake.untyped_storage().nbytes() == value.fake.numel() * value.fake.element_size()
        if value.storage in taken or not dense:
            name = re.sub(r"\W", "_", f"own_{output.kind}_{output.target}")
            while name in values:
                name += "_"
            with torch.no_grad():
                fake = torch.empty_like(value.fake, memory_format=torch.contiguous_format)
            values[name] = Value(name, name, name, fake)
            copies.setdefault(value.call, []).append(
                Call(
                    name=name,
                    target=torch.ops.aten.clone.default,
                    args=(Ref(output.value),),
                    kwargs={"memory_format": torch.contiguous_format},
                    results=(name,),
                    single=True,
                    is_view=False,
                    seeded=False,
                    backward="gradient" in output.kind,
                )
            )
            output = replace(output, value=name)
        taken.add(values[output.value].storage)
        outputs.append(output)
    calls = [*copies.pop(None, [])]
    for call in step.calls:
        calls += [call, *copies.get(call.name, [])]
    return replace(step, calls=tuple(calls), values=values, outputs=tuple(outputs))


def _with_phases(step: CapturedStep) -> CapturedStep:
    """Mark as backward what needs the loss's gradient, and what nothing of the forward's results needs."""
    late = step.after_turn
    needed = {o.value for o in step.outputs if step.values[o.value].call not in late}
    backward = set()
    for call in reversed(step.calls):
        if call.name in late or not (call.seeded or any(r in needed for r in call.results)):
            backward.add(call.name)
        else:
            needed.update(r.value for r in refs((call.args, call.kwargs)))
    return replace(step, calls=tuple(replace(c, backward=c.name in backward) for c in step.calls))


def _without_dead_calls(step: CapturedStep) -> CapturedStep:
    """Drop calls whose results nothing needs; random ones stay, since those after them draw from what they
    leave."""
    needed = {o.value for o in step.outputs}
    kept = []
    for call in reversed(step.calls):
        if call.seeded or any(r in needed for r in call.results):
            kept.append(call)
            needed.update(r.value for r in refs((call.args, call.kwargs)))
    kept.reverse()
    alive = {r for c in kept for r in c.results if r} | {i.value for i in step.inputs}
    values = {name: v for name, v in step.values.items() if name in alive}
    return replace(step, calls=tuple(kept), values=values)
