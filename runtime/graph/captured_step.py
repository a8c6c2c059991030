"""A captured training step: ATen calls in a valid order over values, some of which share a storage. Only types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch

from rematplan.runtime.graph.allocator import allocated

InputKind = Literal["parameter", "buffer", "batch", "constant", "tangent"]
OutputKind = Literal["output", "gradient", "input gradient", "buffer", "renewed", "check", "statistic"]

GRADIENT_OF: Mapping[str, OutputKind] = MappingProxyType(
    {"parameter": "gradient", "buffer": "gradient", "batch": "input gradient"}
)
"""The kind of an input's gradient among the outputs, by the kind of the input. Both have the same target."""


COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of ops that all processes of a group must call in the same order."""
WAITS = frozenset({"wait_tensor"})
"""Names of ops among these that wait for a collective, which each process may do when it likes."""


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
    ``module``: the name of the innermost module whose forward, or its backward, it belongs to.
    ``gain``: the factor by which it multiplies a relative error of what it reads. ``noise``: the relative error that
    its own rounding adds; None where it follows from the types. ``late``: it runs after the outputs' gradients are
    there, whether or not it reads one.
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

    @property
    def collective(self) -> bool:
        """Whether it communicates with other processes, whose plans may differ: it runs once, and in order."""
        return getattr(self.target, "namespace", "") in COLLECTIVES and not self.waits

    @property
    def waits(self) -> bool:
        """Whether it gives the result of a collective when that is there; it is the same memory."""
        packet = getattr(self.target, "overloadpacket", None)
        named = getattr(packet, "__name__", "") in WAITS
        return named and getattr(self.target, "namespace", "") in COLLECTIVES

    @property
    def ordered(self) -> bool:
        """Whether its first run must keep its place among others of which this holds."""
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
    """A call that a pass adds to a step, with one result. That has the call's name, unless ``result`` is another.

    ``further``: fields of `Call`.
    """
    return Call(name, target, args, kwargs or {}, (result or name,), **further)


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
    parameter or of an input (its position in the batch), a buffer's new content, an input's that somebody
    else copies into it (``renewed``), the empty tensor that a check of values gives (``check``; nobody gets it), or a
    sum over the rows of a layer that the backward half makes (``statistic``)."""

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
    inverses: tuple[Call, ...] = ()
    """Further recipes: each brings one storage of the forward half back from later ones."""
    attributes: frozenset[str] = frozenset()
    """The positions of outputs that the forward does not return, but sets as attributes of its modules."""
    left_out: frozenset[str] = frozenset()
    """The positions of outputs with gradients that have no tangent among the inputs, since a scalar output is made of
    them."""
    brought: frozenset[str] = frozenset()
    """The positions of outputs that a scalar output is made of, and that have a tangent all the same."""

    @cached_property
    def call(self) -> dict[str, Call]:
        """Calls and inverses by name."""
        return {c.name: c for c in (*self.calls, *self.inverses)}

    @cached_property
    def priced_calls(self) -> tuple[Call, ...]:
        """The calls that cost time and make storages: all but views, inverses included."""
        return tuple(c for c in (*self.calls, *self.inverses) if not c.is_view)

    @cached_property
    def storage_bytes(self) -> dict[str, int]:
        """Bytes by storage, as the allocator of its device counts them."""
        return {
            v.storage: allocated(v.fake.untyped_storage().nbytes(), v.fake.device)
            for v in self.values.values()
        }

    @cached_property
    def device(self) -> torch.device:
        """Where it runs: the accelerator that its inputs are on, if any is, else a CPU."""
        return next((d for d in self.devices if d.type != "cpu"), self.devices[0])

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of all values, each once."""
        return tuple(dict.fromkeys(v.fake.device for v in self.values.values()))

    def drawing_device(self, call: Call) -> torch.device:
        """The device whose generator a random call draws from."""
        return next((self.values[r].fake.device for r in call.results if r), self.device)

    @cached_property
    def drawing_devices(self) -> tuple[torch.device, ...]:
        """The devices whose generators the random calls draw from, each once."""
        return tuple(dict.fromkeys(self.drawing_device(c) for c in self.calls if c.seeded))

    @cached_property
    def after_turn(self) -> frozenset[str]:
        """The calls that need a tangent, directly or not, or are marked as late: they run after the turn from forward
        to backward."""
        after = {i.value for i in self.inputs if i.kind == "tangent"}
        found = set()
        for call in self.calls:
            if call.late or any(r.value in after for r in refs((call.args, call.kwargs))):
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
