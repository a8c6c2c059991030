"""A captured training step: ATen calls in a valid order, with the tensors that they read and return. Several tensors
may share a storage."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch

from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.tracked_sizes import OpenSizes

Kind = TypeVar("Kind")
InputKind = Literal["parameter", "buffer", "batch", "constant", "tangent", "answer"]
OutputKind = Literal[
    "output", "gradient", "input gradient", "buffer", "renewed", "check", "statistic", "recovered input"
]

GRADIENT_OF: Mapping[str, OutputKind] = MappingProxyType(
    {"parameter": "gradient", "buffer": "gradient", "batch": "input gradient"}
)
"""For each kind of input, the kind of the output that is its gradient. Both have the same ``target``."""
MODEL = "model."
"""The prefix of a model's names in its captured step, whose module has the model inside."""
COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of ops that all processes of a group must call in the same order."""
WAITS = frozenset({"wait_tensor"})
"""Names of ops, in the namespaces `COLLECTIVES`, that wait for a collective to finish. Each process may call them at
any time."""


def in_model(name: str) -> str:
    """Return the name in the model of a parameter or buffer of its captured step."""
    return name.removeprefix(MODEL)


@dataclass(frozen=True, slots=True)
class Ref:
    """A placeholder for a tensor in the arguments of a call. ``value``: the name of the `Value` that describes the
    tensor."""

    value: str


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a captured step."""

    name: str
    """The tensor's name."""
    storage: str
    """The name of its storage, which all views of it share."""
    call: str | None
    """The name of the call that makes the tensor; None for an input of the step."""
    fake: torch.Tensor
    """A fake tensor with its shape, strides, type and device."""


@dataclass(frozen=True)
class Call:
    """One ATen call of a captured step."""

    name: str
    target: Callable[..., Any]
    """The op."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """With ``args``: its arguments, with a `Ref` in place of each tensor."""
    results: tuple[str | None, ...]
    """The names of its results (`Value`) by position; None where it returns no tensor."""
    single: bool = True
    """Whether it returns one tensor, not a tuple."""
    is_view: bool = False
    """Whether every result shares the storage of an argument. Then the call takes no time and no memory."""
    seeded: bool = False
    """Whether it draws random numbers. If it runs again, the generator's state must be the same."""
    backward: bool = False
    """Whether it belongs to the backward half."""
    module: str = ""
    """The qualified name of the innermost module whose forward or backward makes the call; empty if unknown."""
    gain: float = 1.0
    """The factor by which a relative error of its arguments grows."""
    noise: float | None = None
    """The relative error that its own rounding adds; None if it follows from the dtypes."""
    in_place: bool = False
    """Whether its result is in the memory of its first argument, which no other call reads (`with_sums_in_place`)."""
    late: bool = False
    """Whether it must run after the gradients of the outputs have arrived, even if it reads none of them."""
    indexed: bool = False
    """Whether it comes from an index of several dimensions (``x[a, b]``) or its backward. Only with symbolic sizes."""
    in_piece: bool = field(default=False, compare=False, repr=False)
    """Whether eager mode writes its result into its first argument, which is a piece of a larger storage that traces do
    not know as a view (``unsafe_split``)."""
    written: bool = field(default=False, compare=False, repr=False)
    """Whether eager mode writes its result into its first argument, so that it has the argument's strides."""
    sequence: int | None = field(default=None, compare=False, repr=False)
    """The autograd node's number, which a forward call and the calls of its backward share; None if unknown. The
    addition of the call's gradient to those of other readers has it, too. Numbers of two captures differ."""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the tensors among its arguments, in order; a tensor that occurs twice is there twice."""
        return tuple(ref.value for ref in refs((self.args, self.kwargs)))

    @cached_property
    def made(self) -> tuple[str, ...]:
        """The names of the tensors among its results, in order."""
        return tuple(name for name in self.results if name)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call of an ATen op by the names in the op's schema, defaults included."""
        schema = self.target._schema.arguments  # type: ignore[attr-defined]
        named = {a.name: self.kwargs.get(a.name, a.default_value) for a in schema}
        return named | {a.name: value for a, value in zip(schema, self.args, strict=False)}

    @property
    def collective(self) -> bool:
        """Whether the call communicates with other processes. Waiting for its result is a separate call (`waits`)."""
        # A plan runs it once, in the captured order, since the plans of the other processes may differ.
        return getattr(self.target, "namespace", "") in COLLECTIVES and not self.waits

    @property
    def waits(self) -> bool:
        """Whether the call waits for a collective and returns its result. The result shares the collective's memory."""
        packet = getattr(self.target, "overloadpacket", None)
        named = getattr(packet, "__name__", "") in WAITS
        return named and getattr(self.target, "namespace", "") in COLLECTIVES

    @property
    def ordered(self) -> bool:
        """Whether the call is random or a collective. In every schedule, the first executions of these calls have the
        captured order."""
        return self.seeded or self.collective

    def run(self, value_of: Callable[[str], Any]) -> tuple[Any, ...]:
        """Call the op on the tensors that ``value_of`` returns for the names of its operands; return its results as a
        tuple."""
        args, kwargs = substitute((self.args, self.kwargs), value_of)
        found = self.target(*args, **kwargs)
        return (found,) if self.single else tuple(found)

    def reading(self, instead: Callable[[str], str]) -> Call:
        """Return the call on the tensors whose names ``instead`` returns for the names of its operands."""
        args, kwargs = substitute((self.args, self.kwargs), lambda name: Ref(instead(name)))
        return replace(self, args=args, kwargs=kwargs)


def free_name(name: str, *taken: Container[str]) -> str:
    """Return ``name``, with underscores after it if that is in one of ``taken``."""
    while any(name in names for names in taken):
        name += "_"
    return name


def single_call(
    name: str,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    result: str | None = None,
    **further: Any,
) -> Call:
    """Return a new `Call` with one result, for code that adds calls to a captured step."""
    return Call(name, target, args, kwargs or {}, (result or name,), **further)


@dataclass(frozen=True, slots=True)
class StepInput:
    """An input of a captured step."""

    kind: InputKind
    """The meaning of ``target``.

    - ``parameter``, ``buffer``: its name.
    - ``batch``: the position of a tensor among the module's arguments.
    - ``constant``: the name of a tensor that was captured with its content.
    - ``tangent``: the position of the output whose gradient it is.
    - ``answer``: the position of a pipeline stage's output that the next stage has recomputed and sent.
    """
    target: str
    value: str
    """The name of its `Value`."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """An output of a captured step."""

    kind: OutputKind
    """What it is, and the meaning of ``target``.

    - ``output``: an output of the module, by position. If the step has a loss, the loss is output 0.
    - ``gradient``: the gradient of a parameter or buffer, by name.
    - ``input gradient``: the gradient of a tensor in the batch, by position.
    - ``buffer``: the new content of a buffer, by name.
    - ``renewed``: the new content of an input, which the caller copies into the input.
    - ``check``: an empty tensor of an assertion about values, which is not removed as dead code because of it.
    - ``statistic``: a sum over the rows of a layer, for Kronecker factors.
    - ``recovered input``: a tensor of the batch that the backward half has recomputed, by position.
    """
    target: str
    value: str
    """The name of its `Value`."""


@dataclass(frozen=True)
class CapturedStep:
    """A training step: ATen calls in a valid order, with the inputs they read and the outputs they produce."""

    name: str
    """The step's name, for messages."""
    inputs: tuple[StepInput, ...]
    outputs: tuple[StepOutput, ...]
    """With ``inputs``: in the order in which a compiled step takes and returns them."""
    calls: tuple[Call, ...]
    """The calls of the forward and then of the backward half."""
    values: Mapping[str, Value]
    """By name, a `Value` for each tensor."""
    constants: Mapping[str, torch.Tensor]
    """The real tensors of inputs of kind ``constant``, by value name."""
    inverses: tuple[Call, ...] = ()
    """Further calls, which the captured step does not make. Each can recompute one storage of the forward half from
    tensors that were computed from it."""
    attributes: frozenset[str] = frozenset()
    """Positions (as text) of outputs that the forward does not return, but assigns to attributes of its modules."""
    left_out: frozenset[str] = frozenset()
    """Positions (as text) of outputs whose gradients are no inputs of the step although the outputs require gradients.
    A scalar output, the loss, is computed from these outputs, so a training loop does not compute their gradients."""
    arrived: frozenset[str] = frozenset()
    """Positions (as text) of outputs from which a scalar output, the loss, is computed, and whose gradients are inputs
    of the step nevertheless: an earlier backward got them."""
    open_sizes: OpenSizes | None = None
    """The expressions whose values are the step's tracked sizes; None if it has none."""

    @cached_property
    def call(self) -> dict[str, Call]:
        """All calls of the step and all its inverses (calls that can recompute a tensor from later ones), by name."""
        return {c.name: c for c in (*self.calls, *self.inverses)}

    def given(self, *kinds: InputKind) -> Set[str]:
        """Return the storages of the inputs of ``kinds``, in order; of all inputs if no kind is given."""
        ends = (i for i in self.inputs if not kinds or i.kind in kinds)
        return dict.fromkeys(self.values[i.value].storage for i in ends).keys()

    def returned(self, *kinds: OutputKind) -> Set[str]:
        """Return the storages of the outputs of ``kinds``, in order; of all outputs if no kind is given."""
        ends = (o for o in self.outputs if not kinds or o.kind in kinds)
        return dict.fromkeys(self.values[o.value].storage for o in ends).keys()

    @cached_property
    def renewed(self) -> Set[str]:
        """The storages of the buffers, and frozen parameters, for which the step computes new content. The caller
        copies it into them after the forward. A backward that reads them gets copies of the old content."""
        new = {o.target for o in self.outputs if o.kind == "buffer"}
        ends = (i for i in self.inputs if i.kind in ("buffer", "parameter") and i.target in new)
        return dict.fromkeys(self.values[i.value].storage for i in ends).keys()

    @cached_property
    def makers(self) -> Mapping[str, Call]:
        """By the name of a value, the call that makes it; inputs are left out."""
        return {name: call for call in self.calls for name in call.made}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Call]]:
        """By a value's name, the calls that read it, each once and in order; values that none reads are left out."""
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            for name in dict.fromkeys(call.operands):
                found.setdefault(name, []).append(call)
        return found

    @cached_property
    def priced_calls(self) -> tuple[Call, ...]:
        """The calls that take time and allocate storages: all calls and inverses that are not views."""
        return tuple(c for c in (*self.calls, *self.inverses) if not c.is_view)

    @cached_property
    def storage_bytes(self) -> dict[str, int]:
        """The bytes of each storage, by the storage's name, as the allocator of its device counts them."""
        return {
            v.storage: allocated(int(v.fake.untyped_storage().nbytes()), v.fake.device)
            for v in self.values.values()
        }

    @cached_property
    def device(self) -> torch.device:
        """The main device of the step: the first device of its tensors that is not a CPU; else the CPU."""
        return next((d for d in self.devices if d.type != "cpu"), self.devices[0])

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of all tensors of the step, each once."""
        return tuple(dict.fromkeys(v.fake.device for v in self.values.values()))

    def drawing_device(self, call: Call) -> torch.device:
        """Return the device whose generator a random call uses: that of its first result, or the step's main device if
        it returns no tensor."""
        return next((self.values[r].fake.device for r in call.made), self.device)

    @cached_property
    def drawing_devices(self) -> tuple[torch.device, ...]:
        """The devices whose random number generators the step's random calls use, each once."""
        return tuple(dict.fromkeys(self.drawing_device(c) for c in self.calls if c.seeded))

    @cached_property
    def checks(self) -> bool:
        """Whether the step checks values, and so may raise an error midway."""
        return any(o.kind == "check" for o in self.outputs)

    @cached_property
    def after_loss(self) -> frozenset[str]:
        """The names of the calls that run after the loss boundary: those that read an output's gradient or are
        `Call.late`, and all that depend on such calls."""
        after = {i.value for i in self.inputs if i.kind == "tangent"}
        found = set()
        for call in self.calls:
            if call.late or not after.isdisjoint(call.operands):
                found.add(call.name)
                after.update(call.made)
        return frozenset(found)

    def reads(self, call: Call) -> tuple[str, ...]:
        """Return the names of the storages of a call's tensor arguments, each once, in order."""
        return tuple(dict.fromkeys(self.values[name].storage for name in call.operands))

    def writes(self, call: Call) -> tuple[str, ...]:
        """Return the names of the storages that a call allocates for its results, each once, in order; none if the
        call is a view or writes in place."""
        if call.is_view or call.in_place:
            return ()
        return tuple(dict.fromkeys(self.values[r].storage for r in call.made))


def refs(args: Any) -> Iterator[Ref]:
    """Yield the `Ref` objects (placeholders for tensors) in the arguments of a call, in order. ``args``: the
    arguments, with nested tuples, lists and dicts."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (tuple, list)):
        for a in args:
            yield from refs(a)
    elif isinstance(args, Mapping):
        for a in args.values():
            yield from refs(a)


def substitute(args: Any, value_of: Callable[[str], Any]) -> Any:
    """Return a call's nested arguments with every `Ref` replaced by ``value_of`` of its tensor's name."""
    return replaced(args, Ref, lambda ref: value_of(ref.value))


def replaced(args: Any, kind: type[Kind], new: Callable[[Kind], Any]) -> Any:
    """Return a call's nested arguments with ``new(a)`` in place of each ``a`` of type ``kind``."""
    if isinstance(args, kind):
        return new(args)
    if isinstance(args, (tuple, list)):
        return type(args)(replaced(a, kind, new) for a in args)
    if isinstance(args, Mapping):
        return {k: replaced(a, kind, new) for k, a in args.items()}
    return args
