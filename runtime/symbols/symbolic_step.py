"""A step whose sizes are expressions of the batch's sizes, and how to make one with integer sizes from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import (
    Call,
    CapturedStep,
    StepInput,
    StepOutput,
    Value,
    free_name,
)
from rematplan.runtime.graph.compat import FakeTensor, FakeTensorMode
from rematplan.runtime.graph.tracked_sizes import OpenSizes, TrackedSize, track
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, OpenSize, has_open, tracked
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols, FixedSize, SizeGuard

Size = int | OpenSize
AS_STRIDED = torch.ops.aten.as_strided


@dataclass(frozen=True, slots=True)
class OpenValue:
    """A tensor of a captured step whose sizes are integers or positions of expressions of the batch's sizes."""

    storage: str
    """The name of the tensor's storage."""
    call: str | None
    """The name of the call that makes the tensor; None for an input."""
    memory: int
    """The number of PyTorch's storage that contains it. A call that returns an argument with new results puts
    several storages in one."""
    dtype: torch.dtype
    device: torch.device
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    """Where the tensor begins in its storage, in elements, as ``stride``."""


@dataclass(frozen=True)
class OpenStep:
    """A step, valid for all batches that satisfy ``guard``, whose sizes are expressions of the batch's sizes."""

    name: str
    inputs: tuple[StepInput, ...]
    outputs: tuple[StepOutput, ...]
    calls: tuple[Call, ...]
    """The calls, with `OpenSize` in place of symbolic sizes among their arguments."""
    values: Mapping[str, OpenValue]
    """The tensors by name."""
    memories: tuple[Size, ...]
    """The bytes of each memory, by its number."""
    constants: Mapping[str, torch.Tensor]
    """The fields ``name``, ``inputs``, ``outputs`` and ``constants`` are those of the `CapturedStep`."""
    guard: SizeGuard
    """The condition on the batch's sizes and strides."""
    expressions: Callable[..., tuple[int, ...]]
    """A function from the batch's symbolic sizes to the values of all expressions, by position."""
    places: tuple[tuple[int, int], ...]
    """For each argument of ``expressions``, the position of the tensor in the batch and the dimension."""
    fixed: tuple[FixedSize, ...]
    """The sizes of the batch that are not symbolic."""
    positions: Mapping[Any, int] = field(default_factory=dict, repr=False)
    """By SymPy expression, its position among those of ``expressions``; empty if symbols may be missing there."""

    @staticmethod
    def of(step: CapturedStep, symbols: BatchSymbols, table: ExpressionTable) -> OpenStep:
        """Make a step with open sizes from a captured step that was read from a trace with symbolic sizes."""
        values, memories = _opened(step, table)
        for at, dim in symbols.places.values():
            table.add(symbols.fakes[at].shape[dim])
        return OpenStep(
            step.name,
            step.inputs,
            step.outputs,
            step.calls,
            values,
            memories,
            step.constants,
            symbols.guard(),
            table.compiled(),
            tuple(symbols.places.values()),
            symbols.fixed,
            table.expressions,
        )

    @staticmethod
    def of_graph(step: CapturedStep, table: ExpressionTable) -> OpenStep:
        """Make a symbolic step from the joint graph of another compiler, such as torch.compile, which guards the sizes
        itself. It has no ``places``: call ``expressions`` with the compiler's sizes, then `at_sizes`, instead of
        `sizes`."""
        values, memories = _opened(step, table)
        always, none = SizeGuard("True"), ()
        parts = (step.inputs, step.outputs, step.calls, values, memories, step.constants)
        return OpenStep(step.name, *parts, always, table.compiled(), none, none)

    def sizes(self, batch: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the values of all expressions, by position, for a batch that satisfies the guard; `NotSymbolic` if
        one is no integer."""
        found = self.expressions(*[batch[at].shape[dim] for at, dim in self.places])
        if any(type(size) is not int for size in found):
            raise NotSymbolic("a size is not an integer")
        return found

    def at(self, batch: Sequence[torch.Tensor], sizes: Sequence[int]) -> CapturedStep:
        """Return the captured step with integer sizes, tracked if they come from expressions, as a trace of this batch
        would give it. Inputs have the storages and offsets of the batch, which may be larger than its tensors."""
        base = self.bases(batch)
        nbytes = {memory: tensor.untyped_storage().nbytes() for memory, tensor in base.items()}
        offsets = {memory: int(tensor.storage_offset()) for memory, tensor in base.items()}
        return self._plain(sizes, nbytes, offsets)

    def at_sizes(self, sizes: Sequence[int], nbytes: Mapping[str, int]) -> CapturedStep:
        """Return the captured step with integer sizes, without a batch. ``nbytes``: by name of an input, the bytes of
        its storage if these may be more than its tensor's."""
        held = {self.values[i.value].memory: nbytes[i.target] for i in self.inputs if i.target in nbytes}
        return self._plain(sizes, held, {})

    def excerpt(self, sizes: Sequence[int], calls: Sequence[Call]) -> CapturedStep:
        """Return a step of only these of the calls, with fixed sizes, without inputs and outputs."""
        names = {name for call in calls for name in (*call.operands, *call.made)}
        some = {name: value for name, value in self.values.items() if name in names}
        return replace(self, inputs=(), outputs=(), calls=tuple(calls), values=some)._plain(sizes, {}, {})

    def _plain(
        self, sizes: Sequence[int], held: Mapping[int, int], offsets: Mapping[int, int]
    ) -> CapturedStep:
        """Return the captured step at the values ``sizes`` of the expressions. ``held``: by memory, its least bytes.
        ``offsets``: by memory, where its tensors begin, in elements."""
        nbytes = [sizes[m.at] if isinstance(m, OpenSize) else m for m in self.memories]
        for memory, found in held.items():
            nbytes[memory] = max(nbytes[memory], found)
        fakes = _Fakes(nbytes, offsets)
        values = {
            name: Value(name, value.storage, value.call, fakes.of(value, sizes))
            for name, value in self.values.items()
        }
        calls = tuple(
            replace(call, args=tracked(call.args, sizes), kwargs=tracked(call.kwargs, sizes))
            if call.name in self._open
            else call
            for call in self.calls
        )
        step = CapturedStep(self.name, self.inputs, self.outputs, calls, values, self.constants)
        return replace(step, open_sizes=OpenSizes(self.positions, sizes)) if self.positions else step

    def bases(self, batch: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return a batch's tensors by memory; `NotSymbolic` if two share memory or the step relies on offsets."""
        given = [(i, batch[int(i.target)]) for i in self.inputs if i.kind == "batch"]
        storages = {tensor.untyped_storage()._cdata for _, tensor in given}
        moved = any(tensor.storage_offset() for _, tensor in given)
        if len(storages) < len(given):
            raise NotSymbolic("two of its arguments share memory")
        if moved and any(getattr(c.target, "overloadpacket", None) is AS_STRIDED for c in self.calls):
            raise NotSymbolic("it refers to positions in a storage (as_strided)")
        return {self.values[i.value].memory: tensor for i, tensor in given}

    @cached_property
    def _open(self) -> frozenset[str]:
        """The names of the calls that have open sizes (expressions of the batch's sizes) among their arguments."""
        return frozenset(c.name for c in self.calls if has_open((c.args, dict(c.kwargs))))

    def renamed(self, names: Mapping[str, str]) -> OpenStep:
        """Return the step with other names for calls, values and storages. A name that is not in ``names`` stays, or
        gets ``_`` if taken."""
        taken = set(names.values())
        every = {*self.values, *(c.name for c in self.calls)}
        new = {name: names.get(name) or free_name(name, taken) for name in every}
        new |= {v.storage: new.get(v.storage, v.storage) for v in self.values.values()}

        def call(one: Call) -> Call:
            results = tuple(None if r is None else new[r] for r in one.results)
            return replace(one.reading(new.__getitem__), name=new[one.name], results=results)

        return replace(
            self,
            inputs=tuple(replace(i, value=new[i.value]) for i in self.inputs),
            outputs=tuple(replace(o, value=new[o.value]) for o in self.outputs),
            calls=tuple(map(call, self.calls)),
            values={
                new[name]: replace(v, storage=new[v.storage], call=v.call and new[v.call])
                for name, v in self.values.items()
            },
        )


def _opened(step: CapturedStep, table: ExpressionTable) -> tuple[dict[str, OpenValue], tuple[Size, ...]]:
    """Return a step's tensors with expressions added to ``table`` in place of symbolic sizes, and the bytes of each
    memory; `NotSymbolic` for lazily conjugated or negated tensors."""
    memories: dict[int, tuple[int, Size]] = {}
    values = {}
    for value in step.values.values():
        fake, storage = value.fake, value.fake.untyped_storage()
        if fake.is_conj() or fake.is_neg():
            raise NotSymbolic("it has lazily conjugated or negated tensors")
        memory = memories.setdefault(storage._cdata, (len(memories), table.add(storage.nbytes())))
        values[value.name] = OpenValue(
            value.storage,
            value.call,
            memory[0],
            fake.dtype,
            fake.device,
            tuple(map(table.add, fake.shape)),
            tuple(map(table.add, fake.stride())),
            table.add(fake.storage_offset()),
        )
    return values, tuple(size for _, size in memories.values())


class _Fakes:
    """Makes fake tensors with integer sizes, which share a storage if they have one `OpenValue.memory`. ``nbytes``: the
    bytes of each memory. ``offsets``: of memories whose tensors do not begin at 0, in elements."""

    def __init__(self, nbytes: Sequence[int], offsets: Mapping[int, int]) -> None:
        self.nbytes, self.offsets = nbytes, offsets
        self.mode = FakeTensorMode()
        self.made: dict[int, torch.UntypedStorage] = {}

    def of(self, value: OpenValue, sizes: Sequence[int]) -> torch.Tensor:
        """Return a fake tensor for a symbolic one, with tracked sizes. ``sizes``: expressions' values, by position."""
        storage = self.made.get(value.memory)
        if storage is None:
            storage = torch.UntypedStorage(self.nbytes[value.memory], device="meta")
            self.made[value.memory] = storage

        def plain(size: Size) -> int:
            return TrackedSize(sizes[size.at], size.at) if isinstance(size, OpenSize) else size

        offset = plain(value.offset) + self.offsets.get(value.memory, 0)
        shape, stride = [plain(s) for s in value.shape], [plain(s) for s in value.stride]
        real = torch.empty(0, dtype=value.dtype, device="meta").set_(storage, offset, shape, stride)
        fake = FakeTensor(self.mode, real, value.device)
        track(fake, shape, stride)
        return fake
