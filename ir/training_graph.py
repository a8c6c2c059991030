"""The planning problem: a training step as ops over storages, with sizes and costs.

The types are plain data and do not depend on torch.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from rematplan.ir.errors import ProblemError

Phase = Literal["forward", "backward"]

MAX_BYTES = 2**63 - 1  # sizes are summed in 64-bit integers
MIN_COST = 1e-300  # the scales by which solvers multiply costs must be finite, if costs are not 0
MAX_COST = 1e300  # a schedule may run an op many times, and the sum of costs must be finite in 64-bit floats


@dataclass(frozen=True, slots=True)
class Tensor:
    """A storage with its name and its size in bytes. All views of one storage are the same tensor."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """An op, or an inverse: an op that recovers a tensor from tensors that were computed from it."""

    name: str
    """Unique among ops and inverses."""
    reads: tuple[str, ...]
    """Names of the tensors that it reads."""
    writes: tuple[str, ...]
    """Names of the tensors that it writes."""
    cost: float
    """Microseconds if profiled or modelled, else any unit."""
    workspace: int = 0
    """Bytes that are resident only while it runs."""
    phase: Phase | None = None
    """The half of the step to which it belongs; None for an inverse, and for an op whose half is not stated."""
    gain: float = 1.0
    """How relative errors grow: from tensors with an error e, an inverse writes one with gain · e + ``noise``, and a
    repeated op one with max(gain · e, √(gain · e · ``noise``))."""
    noise: float = 0.0
    """See ``gain``. An inverse without noise is exact."""


@dataclass(frozen=True)
class TrainingGraph:
    """A planning problem: a training step as ops that read and write tensors (JSON format ``rematplan.problem/1``).

    ``name``: for messages. ``tensors``: all tensors with their sizes. ``inputs``: names of tensors that are resident
    from start to end (parameters, buffers, batch). ``outputs``: names of tensors that must be resident at the end
    (loss, gradients, new buffers). ``ops``: in a valid order, that of a step without recomputation. ``inverses``:
    additional ops, each of which recovers a tensor from tensors that were computed from it. ``ordered``: names of ops
    that draw random numbers or communicate; in every schedule their *first* executions must have this order.
    ``never_rerun``: names of ops that may run only once, because they have side effects or the user asked for it.

    Raises:
        ProblemError: the parts contradict each other; see `check`.
    """

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[Op, ...]
    inverses: tuple[Op, ...] = ()
    ordered: tuple[str, ...] = ()
    never_rerun: tuple[str, ...] = ()
    fixed_split: Mapping[str, int] = field(default_factory=dict)
    """How many bytes of ``inputs`` are of each kind (``parameters``, ``buffers``, ``batch``, ...).

    For reports only; may be empty.
    """

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def size(self) -> dict[str, int]:
        """The size of each tensor in bytes, by name."""
        return {t.name: t.bytes for t in self.tensors}

    @cached_property
    def recipes(self) -> tuple[Op, ...]:
        """All ops, then all inverses: everything that can write a tensor."""
        return (*self.ops, *self.inverses)

    def once(self, *names: str) -> tuple[str, ...]:
        """Return ``never_rerun`` with the ``names`` of further ops that may run only once."""
        return tuple(dict.fromkeys((*self.never_rerun, *names)))

    @cached_property
    def op(self) -> dict[str, Op]:
        """All ops and inverses, by name, in the order of ``recipes``."""
        return {o.name: o for o in self.recipes}

    @cached_property
    def producer(self) -> dict[str, int]:
        """For each tensor that an op writes, the position of that op in ``ops``. Keyed by tensor name."""
        return {t: i for i, o in enumerate(self.ops) for t in o.writes}

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """By tensor, the names of the ops that read it, in order. Inverses and tensors that no op reads are left
        out."""
        found: dict[str, list[str]] = {}
        for op in self.ops:
            for tensor in op.reads:
                found.setdefault(tensor, []).append(op.name)
        return found

    @cached_property
    def base_cost(self) -> float:
        """The cost of running every op once, without inverses, in the unit of `Op.cost`."""
        return math.fsum(o.cost for o in self.ops)

    @cached_property
    def input_bytes(self) -> int:
        """The bytes of all inputs, which are resident during the whole step."""
        return sum(self.size[t] for t in self.inputs)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides which schedules are valid: equal fingerprints mean the same valid schedules.

        It covers the names, reads, writes and phases of ops and inverses, the inputs and outputs, and which ops are
        ordered or may not run again. It does not cover sizes, workspaces, costs and error models.
        """
        rows = [[o.name, o.reads, o.writes, o.phase] for o in self.recipes]
        parts = [rows, self.inputs, self.outputs, self.ordered, self.never_rerun]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def structure(self) -> str:
        """A hash of the dependencies between ops, inverses and outputs, by positions instead of names.

        Tensors are numbered in the order in which ops write them, and ops by their position. The hash ignores names,
        inputs, sizes, workspaces, costs, error models and ``never_rerun``. Between two problems of the same hash, a
        schedule that is written with these numbers is valid for both. The exception: it repeats an op that may run only
        once in one of them.
        """
        number = {t: i for i, t in enumerate(self.producer)}
        op_number = {o.name: i for i, o in enumerate(self.ops)}
        rows = [
            [[number[t] for t in o.reads if t in number], [number.get(t, -1) for t in o.writes], o.phase]
            for o in self.recipes
        ]
        outputs = sorted(number[t] for t in self.outputs if t in number)
        parts = [len(self.ops), rows, outputs, [op_number[name] for name in self.ordered]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def has_phases(self) -> bool:
        """Whether at least one op is marked as backward."""
        return any(o.phase == "backward" for o in self.ops)


def check(graph: TrainingGraph) -> None:
    """Raise `ProblemError` unless a planning problem is valid: unique names, known tensors, an order in which each
    read is written before, figures in range."""
    sizes = _unique((t.name for t in graph.tensors), "tensor")
    for tensor in graph.tensors:
        _check_bytes(tensor.bytes, f"tensor {tensor.name!r}: bytes")
    if sum(t.bytes for t in graph.tensors) > MAX_BYTES:
        raise ProblemError(f"the tensors' sizes sum to more than 2^63 − 1 bytes in problem {graph.name!r}")
    _unique((o.name for o in graph.recipes), "op")
    for kind, names in (("input", graph.inputs), ("output", graph.outputs)):
        _unique(names, kind)
        for t in names:
            if t not in sizes:
                raise ProblemError(f"{kind} {t!r} is not among the tensors")
    for op in graph.recipes:
        _check_op(op, sizes)
    most = max((o.workspace for o in graph.recipes), default=0)
    if sum(t.bytes for t in graph.tensors) + most > MAX_BYTES:  # a peak is a number of 64 bits
        raise ProblemError(f"sizes and a workspace sum to more than 2^63 − 1 bytes in problem {graph.name!r}")
    if sum(o.cost for o in graph.recipes) > MAX_COST:
        raise ProblemError(f"the ops' costs sum to more than {MAX_COST:g} in problem {graph.name!r}")
    written = _check_order(graph)
    for t in graph.outputs:
        if t not in written:
            raise ProblemError(f"output {t!r} is neither an input nor written by an op")
    for inverse in graph.inverses:
        for t in (*inverse.reads, *inverse.writes):
            if t not in written:
                raise ProblemError(f"inverse {inverse.name!r}: no op writes {t!r}")
    known = {o.name for o in graph.ops}
    for what, names in (("ordered", graph.ordered), ("never_rerun", graph.never_rerun)):
        for name in names:
            if name not in known:
                raise ProblemError(f"{what} op {name!r} is not among the ops")
    _unique(graph.never_rerun, "never_rerun op")
    position = {o.name: i for i, o in enumerate(graph.ops)}
    for first, then in pairwise(graph.ordered):
        if position[first] >= position[then]:
            raise ProblemError(
                f"ordered: {first!r} comes before {then!r}; the list must have the order of the ops"
            )


def _check_order(graph: TrainingGraph) -> set[str]:
    """Return all inputs and written tensors. `ProblemError` for an op that reads what no earlier op writes, or
    writes an input or a tensor that another op writes."""
    inputs = set(graph.inputs)
    written = set(inputs)
    later = {t: o.name for o in graph.ops for t in o.writes}
    writer: dict[str, str] = {}
    for op in graph.ops:
        for t in op.reads:
            if t not in written:
                why = (
                    f"only {later[t]!r} writes, which is the same or a later op (is there a cycle?)"
                    if t in later
                    else "nothing writes"
                )
                raise ProblemError(f"op {op.name!r} reads {t!r}, which {why}")
        for t in op.writes:
            if t in inputs:
                raise ProblemError(f"op {op.name!r} writes {t!r}, which is an input")
            if t in writer:
                raise ProblemError(f"tensor {t!r} is written twice, by {writer[t]!r} and by {op.name!r}")
            writer[t] = op.name
        written.update(op.writes)
    return written


def _check_op(op: Op, known: set[str]) -> None:
    """Raise `ProblemError` unless an op names only ``known`` tensors, writes each once, and has figures in range."""
    for t in (*op.reads, *op.writes):
        if t not in known:
            raise ProblemError(f"op {op.name!r} names {t!r}, which is not among the tensors")
    if len(set(op.writes)) != len(op.writes):
        raise ProblemError(f"op {op.name!r} writes a tensor twice")
    if 0 < op.cost < MIN_COST:
        raise ProblemError(f"op {op.name!r}: cost is {op.cost}; it must be 0 or at least {MIN_COST:g}")
    if not (math.isfinite(op.cost) and op.cost >= 0):
        raise ProblemError(f"op {op.name!r}: cost is {op.cost}; it must be finite and not negative")
    for what, amount in (("gain", op.gain), ("noise", op.noise)):
        if not (math.isfinite(amount) and amount >= 0):
            raise ProblemError(f"op {op.name!r}: {what} is {amount}; it must be finite and not negative")
    _check_bytes(op.workspace, f"op {op.name!r}: workspace")


def _check_bytes(n: int, what: str) -> None:
    if not 0 <= n <= MAX_BYTES:
        raise ProblemError(f"{what} is {n}; it must be between 0 and 2^63 − 1")


def _unique(names: Iterable[str], kind: str) -> set[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ProblemError(f"two {kind}s share the name {name!r}")
        seen.add(name)
    return seen


LIBRARIES = "library_workspaces"
"""The name of the problem's input that represents the memory which libraries such as cuBLAS keep allocated."""
THREADS = 2
"""The number of threads for which a library such as cuBLAS allocates memory: the caller's thread runs the forward half,
and a thread of autograd runs the backward half."""


def topological_order(before: Sequence[Collection[int]]) -> list[int]:
    """Return the positions in ``before``, each after all positions that its entry lists. Of several that can be next,
    the smallest comes first. Positions in a circle, or after one, are missing."""
    waits = [len(found) for found in before]
    after: list[list[int]] = [[] for _ in before]
    for at, found in enumerate(before):
        for other in found:
            after[other].append(at)
    ready = [at for at, count in enumerate(waits) if not count]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for at in after[order[-1]]:
            waits[at] -= 1
            if not waits[at]:
                heapq.heappush(ready, at)
    return order
