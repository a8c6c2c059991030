"""A captured training step: ATen calls in a valid order over values, some of which share a storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch

from rematplan.runtime.graph.allocator_rounding import allocated

InputKind = Literal["parameter", "buffer", "batch", "constant", "tangent", "answer"]
OutputKind = Literal[
    "output", "gradient", "input gradient", "buffer", "renewed", "check", "statistic", "recovered input"
]

GRADIENT_OF: Mapping[str, OutputKind] = MappingProxyType(
    {"parameter": "gradient", "buffer": "gradient", "batch": "input gradient"}
)
"""The kind of the output that is an input's gradient, by the kind of that input. Both have the same
``target``."""


COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of ops that all processes of a group must call in the same order."""
WAITS = frozenset({"wait_tensor"})
"""Names of ops in these namespaces that wait for a collective to finish. Each process may call them at any
time."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A placeholder for a tensor inside a call's arguments: the name of the `Value`."""

    value: str


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a captured step.

    ``name``: its name. ``storage``: the name of its storage, which all views of it share. ``call``: the name of the
    call that makes the tensor; None for an input of the step. ``fake``: a fake tensor with its shape, strides, type
    and device.
    """

    name: str
    storage: str
    call: str | None
    fake: torch.Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call of a captured step.

    ``name``: its name. ``target``: the op. ``args``, ``kwargs``: its arguments, with a `Ref` in place of each tensor.
    ``results``: the names of its results by position; None where it returns no tensor. ``single``: whether it returns
    one tensor, not a tuple. ``is_view``: whether every result shares the storage of an argument, so that the call
    costs nothing and allocates nothing. ``seeded``: whether it draws from the random number generator, whose state
    must be replayed if the call runs again. ``backward``: whether it belongs to the backward half. ``module``: the
    qualified name of the innermost module in whose forward, or in the backward of whose forward, it runs; empty if
    unknown. ``gain``: the factor by which it multiplies a relative error of its arguments. ``noise``: the relative
    error that its rounding adds; None if that follows from the types. ``late``: whether it runs after the outputs'
    gradients have arrived, even if it reads none of them. ``indexed``: whether it belongs to an index of several
    dimensions (``x[a, b]``), or to the backward of one; recorded only where sizes are open.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str | None, ...]
    single: bool = True
    is_view: bool = False
    seeded: bool = False
    backward: bool = False
    module: str = ""
    gain: float = 1.0
    noise: float | None = None
    late: bool = False
    indexed: bool = False

    @property
    def collective(self) -> bool:
        """Whether the call communicates with other processes (waiting for the result is a separate call, see
        `waits`). Their plans may differ, so a plan runs it once, in a fixed order."""
        return getattr(self.target, "namespace", "") in COLLECTIVES and not self.waits

    @property
    def waits(self) -> bool:
        """Whether the call waits for a collective and returns its result. The result shares the collective's
        memory."""
        packet = getattr(self.target, "overloadpacket", None)
        named = getattr(packet, "__name__", "") in WAITS
        return named and getattr(self.target, "namespace", "") in COLLECTIVES

    @property
    def ordered(self) -> bool:
        """Whether the call's first run must keep its position among all calls with this property: random
        calls and collectives."""
        return self.seeded or self.collective


def single_call(
    name: str,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    result: str | None = None,
    **further: Any,
) -> Call:
    """Return a new `Call` with a single result, for passes that add calls to a step.

    Args:
        name: the call's name.
        target: the op.
        args: its positional arguments, with a `Ref` for each tensor.
        kwargs: its keyword arguments; None for none.
        result: the name of its result; None for the call's name.
        further: other fields of `Call`.
    """
    return Call(name, target, args, kwargs or {}, (result or name,), **further)


@dataclass(frozen=True, slots=True)
class StepInput:
    """An input of a captured step.

    ``kind``, ``target``: what it is: a parameter or buffer (by its name), a tensor of the batch (by its position), a
    constant (by its name), a tangent, which is the gradient of an output (by the output's position), or an answer,
    which is an output as the next stage of a pipeline recovers it and sends it back (by the output's position).
    ``value``: the name of its `Value`.
    """

    kind: InputKind
    target: str
    value: str


@dataclass(frozen=True, slots=True)
class StepOutput:
    """An output of a captured step. ``value``: the name of its `Value`. ``kind``, ``target``: what it is:

    - ``output``: an output of the module; ``target`` is its position. If the step has a loss, the loss is
      output 0.
    - ``gradient``, ``input gradient``: the gradient of a parameter (by its name) or of an input (by its
      position in the batch).
    - ``buffer``: the new content of a buffer, by its name.
    - ``renewed``: the new content of an input, which the caller copies into the input.
    - ``check``: an empty tensor that an assertion about values returns, so that the assertion is not removed as
      dead code.
    - ``statistic``: a sum over the rows of a layer, which the backward half computes.
    - ``recovered input``: an input of the batch as the backward half has recomputed it, by its position in the
      batch.
    """

    kind: OutputKind
    target: str
    value: str


@dataclass(frozen=True)
class CapturedStep:
    """A training step: ATen calls in a valid order, with the inputs they read and the outputs they produce.

    ``name``: its name, for messages. ``inputs``, ``outputs``: in the order in which a compiled step takes and returns
    them. ``calls``: forward and backward, in order. ``values``: every `Value` by name. ``constants``: the real
    tensors of inputs of kind ``constant``, by value name.
    """

    name: str
    inputs: tuple[StepInput, ...]
    outputs: tuple[StepOutput, ...]
    calls: tuple[Call, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, torch.Tensor]
    inverses: tuple[Call, ...] = ()
    """Further calls, which the captured program does not make: each can recompute one storage of the forward
    half from tensors that were computed from it."""
    attributes: frozenset[str] = frozenset()
    """Positions of outputs that the forward does not return but assigns to attributes of its modules."""
    left_out: frozenset[str] = frozenset()
    """Positions of outputs that require gradients but have no tangent among the inputs, because a scalar
    output (a loss) is computed from them."""
    arrived: frozenset[str] = frozenset()
    """Positions of outputs from which a scalar output (a loss) is computed, and that nevertheless have a
    tangent."""

    @cached_property
    def call(self) -> dict[str, Call]:
        """All calls of `calls` and `inverses`, by name."""
        return {c.name: c for c in (*self.calls, *self.inverses)}

    @cached_property
    def priced_calls(self) -> tuple[Call, ...]:
        """The calls that take time and allocate storages: those of `calls` and `inverses` that are not views."""
        return tuple(c for c in (*self.calls, *self.inverses) if not c.is_view)

    @cached_property
    def storage_bytes(self) -> dict[str, int]:
        """The bytes of each storage, by its name, as the allocator of its device counts them."""
        return {
            v.storage: allocated(int(v.fake.untyped_storage().nbytes()), v.fake.device)
            for v in self.values.values()
        }

    @cached_property
    def device(self) -> torch.device:
        """The device of the step: the first that is not a CPU, if any value is on one; else the CPU."""
        return next((d for d in self.devices if d.type != "cpu"), self.devices[0])

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of all values, each once."""
        return tuple(dict.fromkeys(v.fake.device for v in self.values.values()))

    def drawing_device(self, call: Call) -> torch.device:
        """Return the device whose random number generator a random call uses: that of the call's first tensor
        result, or the device of the step if the call returns no tensor."""
        return next((self.values[r].fake.device for r in call.results if r), self.device)

    @cached_property
    def drawing_devices(self) -> tuple[torch.device, ...]:
        """The devices whose random number generators the random calls use, each once."""
        return tuple(dict.fromkeys(self.drawing_device(c) for c in self.calls if c.seeded))

    @cached_property
    def after_loss(self) -> frozenset[str]:
        """The names of calls that run after the loss boundary (the moment at which the gradients of the outputs
        arrive): those that depend on such a gradient, directly or not, those marked as late (`Call.late`), and those
        that depend on a late call."""
        after = {i.value for i in self.inputs if i.kind == "tangent"}
        found = set()
        for call in self.calls:
            if call.late or any(r.value in after for r in refs((call.args, call.kwargs))):
                found.add(call.name)
                after.update(r for r in call.results if r)
        return frozenset(found)

    def reads(self, call: Call) -> tuple[str, ...]:
        """Return the names of the storages that a call's arguments are in, each once, in order."""
        return tuple(dict.fromkeys(self.values[r.value].storage for r in refs((call.args, call.kwargs))))

    def writes(self, call: Call) -> tuple[str, ...]:
        """Return the names of the storages that a call allocates for its results, each once, in order; none if the
        call is a view."""
        return (
            tuple(dict.fromkeys(self.values[r].storage for r in call.results if r))
            if not call.is_view
            else ()
        )


def refs(args: Any) -> Iterator[Ref]:
    """Yield the `Ref` objects in nested arguments of a call, in order."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (tuple, list)):
        for a in args:
            yield from refs(a)
    elif isinstance(args, Mapping):
        for a in args.values():
            yield from refs(a)


def substitute(args: Any, value_of: Callable[[str], Any]) -> Any:
    """Return nested arguments of a call with every `Ref` replaced by ``value_of(name)``, where ``name`` is that of
    the value."""
    if isinstance(args, Ref):
        return value_of(args.value)
    if isinstance(args, (tuple, list)):
        return type(args)(substitute(a, value_of) for a in args)
    if isinstance(args, Mapping):
        return {k: substitute(a, value_of) for k, a in args.items()}
    return args
