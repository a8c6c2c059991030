"""A training step as a chain of blocks that pipeline stages are made of.

A stage is an interval of blocks, with their forward ops and the backward ops that belong to them. A backward op belongs
to the last block at which all that it reads is there: gradients travel from the last block to the first, tensors of the
forward half are there from the block that makes them to the last that reads them, and a parameter only where the
forward half reads it. An op that waits for nothing of its block (the sum that a bias's gradient is) belongs to an
earlier one where that makes no message larger.

A tensor that is read further on passes through every block between, and so through every stage: it is part of each
message on its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from rematplan.ir import ProblemError, TrainingGraph, UsageError
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.blocks.block_chain import block_chain

Groups = Sequence[Sequence[int]]
"""Forward ops by base position, for each block."""


@dataclass(frozen=True)
class Passage:
    """A tensor's path: made in a block of the forward half, or of the backward one; it is there up to block ``up``, and
    comes down again to block ``down``."""

    tensor: int
    forward: bool
    made: int
    up: int
    down: int


@dataclass(frozen=True)
class StageChain:
    """Blocks 0 .. n − 1 of a step.

    ``block``: of each op, by base position. ``passages``: of each tensor that an op makes and that is read or given.
    ``readers``: of each input the blocks that read it, ascending. ``gradient_of``: the parameter of each gradient, by
    tensor names. ``whole``: for a parameter that several blocks read, the first and last of them. ``labels``: what
    parameters are called before people.
    """

    graph: TrainingGraph
    blocks: int
    block: tuple[int, ...]
    passages: tuple[Passage, ...]
    readers: Mapping[int, tuple[int, ...]]
    gradient_of: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.blocks

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """Microseconds of the forward half before each block, and in all (n + 1 of them)."""
        return self._times(True)

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """Microseconds of the backward half of all blocks before each block (n + 1 of them)."""
        return self._times(False)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """Bytes of a micro-batch's message to the stage that begins at each block (n + 1 of them, 0 at both ends)."""
        return self._crossing(lambda p: (p.made, p.up) if p.forward else (0, 0))

    @cached_property
    def returns(self) -> tuple[int, ...]:
        """Bytes of the message back from the stage that begins at each block."""
        return self._crossing(lambda p: (p.down, p.made))

    def allowed(self) -> tuple[int, ...]:
        """The blocks at which a second or later stage may begin: those that part no two readers of a parameter."""
        parted = {at for first, last in self.whole.values() for at in range(first + 1, last + 1)}
        return tuple(at for at in range(1, self.blocks) if at not in parted)

    def check_cuts(self, cuts: Iterable[int]) -> None:
        """Refuse cuts between the readers of one parameter.

        Raises:
            UsageError: names the parameter.
        """
        for at in cuts:
            for name, (first, last) in self.whole.items():
                if first < at <= last:
                    raise UsageError(
                        f"{self.graph.name}: {self.label(name)} is read by several stages; cut where all that read "
                        f"it are in one, or untie it"
                    )

    def label(self, name: str) -> str:
        """What a parameter is called before people."""
        return self.labels.get(name, name)

    def inputs_of(self, start: int, end: int) -> tuple[int, ...]:
        """The inputs that blocks ``start`` to ``end`` − 1 read; those that no op reads are everybody's."""
        return tuple(t for t, at in self.readers.items() if not at or any(start <= b < end for b in at))

    def _times(self, forward: bool) -> tuple[float, ...]:
        ix = indexed(self.graph)
        sums = [0.0] * self.blocks
        for o, b in enumerate(self.block):
            if ix.forward[o] == forward:
                sums[b] += ix.cost[o]
        return (0.0, *accumulate(sums))

    def _crossing(self, span: Callable[[Passage], tuple[int, int]]) -> tuple[int, ...]:
        """Bytes at each place between blocks of the tensors that cross it from the one block to the other."""
        ix = indexed(self.graph)
        change = [0] * (self.blocks + 2)
        for passage in self.passages:
            low, high = span(passage)
            change[low + 1] += ix.bytes[passage.tensor]
            change[high + 1] -= ix.bytes[passage.tensor]
        return tuple(accumulate(change[: self.blocks + 1]))


def stage_chain(
    graph: TrainingGraph,
    blocks: Groups | int,
    gradient_of: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> StageChain:
    """The chain of a training step.

    Args:
        blocks: of the forward ops, in an order in which they can run; or at most how many, chosen where little crosses.
        gradient_of: the parameter of each gradient, by tensor names, where that is known.
        labels: see `StageChain`.

    Raises:
        ProblemError: the problem has no backward half.
        UsageError: an op reads what a later block makes.
    """
    ix = indexed(graph)
    if not any(ix.forward) or all(ix.forward):
        raise ProblemError(
            f"{graph.name}: stages are made of a forward and a backward half; there is only one"
        )
    groups = block_chain(graph, blocks).forward if isinstance(blocks, int) else blocks
    of = {o: b for b, ops in enumerate(groups) for o in ops}
    pairs = {g: p for g, p in (gradient_of or {}).items() if g in graph.producer}
    assigned = _Assignment(graph, ix, of, len(groups), pairs)
    readers = {
        t: tuple(sorted({assigned.at[o] for o in ix.readers[t]}))
        for t, name in enumerate(ix.tensors)
        if name in set(graph.inputs)
    }
    whole = {}
    for name in pairs.values():
        at = {of[o] for o in ix.readers[assigned.tensor[name]] if o in of}
        if len(at) > 1:
            whole[name] = min(at), max(at)
    return StageChain(
        graph,
        len(groups),
        tuple(assigned.at),
        tuple(assigned.passages()),
        readers,
        pairs,
        whole,
        labels or {},
    )


def blocks_at(graph: TrainingGraph, firsts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The forward ops of each block where later ones begin at the forward ops ``firsts``, by base position."""
    ix = indexed(graph)
    forward = [o for o, is_forward in enumerate(ix.forward) if is_forward]
    bounds = (0, *firsts, len(ix.forward))
    return tuple(tuple(o for o in forward if low <= o < high) for low, high in pairwise(bounds))


class _Assignment:
    """The block of each op: ``at``."""

    def __init__(
        self, graph: TrainingGraph, ix: Indexed, of: Mapping[int, int], blocks: int, pairs: Mapping[str, str]
    ) -> None:
        self.ix, self.blocks = ix, blocks
        self.tensor = {name: t for t, name in enumerate(ix.tensors)}
        self.at = [of.get(o, -1) for o in range(len(ix.ops))]
        for o in of:
            for p in (ix.producer[t] for t in ix.reads[o]):
                if p >= 0 and of[p] > of[o]:
                    raise UsageError(
                        f"{graph.name}: {ix.ops[o]} reads what {ix.ops[p]} makes, in a later stage"
                    )
        self.span = dict(self._spans(of))
        last = {name: self.span[t][1] for name, t in self.tensor.items() if t in self.span}
        self.owner = {self.tensor[g]: last[p] for g, p in pairs.items() if p in last}
        for o in ix.backward:
            self.at[o] = self._last_block(o)
        for o in reversed(ix.backward):
            self._sink(o)

    def passages(self) -> Iterable[Passage]:
        """The paths of all that ops make."""
        ix = self.ix
        for t, p in enumerate(ix.producer):
            if p < 0:
                continue
            made, at = self.at[p], [self.at[r] for r in ix.readers[t]]
            yield Passage(t, ix.forward[p], made, max([made, *at]), min([made, *at]))

    def _spans(self, of: Mapping[int, int]) -> Iterable[tuple[int, tuple[int, int]]]:
        """The first and last block at which a tensor of the forward half is. An input that only one block reads is of
        that block; one that several read is at all of them, unless it is a parameter."""
        for t, p in enumerate(self.ix.producer):
            at = [of[o] for o in self.ix.readers[t] if o in of]
            if p in of:
                yield t, (of[p], max([of[p], *at]))
            elif p < 0 and at and (len(set(at)) == 1):
                yield t, (at[0], at[0])

    def _last_block(self, o: int) -> int:
        ix = self.ix
        latest = min((self.at[p] for p in ix.backward_before[o]), default=self.blocks - 1)
        spans = [self.span[t] for t in ix.reads[o] if t in self.span]
        block = min([latest, *(last for _, last in spans)])
        block = max(block, min(latest, max((first for first, _ in spans), default=0)))
        return min([block, *(self.owner[t] for t in ix.writes[o] if t in self.owner)])

    def _sink(self, o: int) -> None:
        """Move an op to the last block that reads what it makes, if nothing keeps it and no message grows."""
        ix = self.ix
        wanted = [self.owner.get(t, self.at[o]) for t in ix.writes[o] if ix.is_output[t]]
        wanted += [self.at[r] for t in ix.writes[o] for r in ix.readers[t]]
        to = max(wanted, default=self.at[o])
        spans = [self.span[t] for t in ix.reads[o] if t in self.span]
        if to >= self.at[o] or any(not first <= to <= last for first, last in spans):
            return
        more = sum(ix.bytes[t] for t in ix.reads[o] if self._comes_only_for(t, o, to))
        if more <= sum(ix.bytes[t] for t in ix.writes[o]):
            self.at[o] = to

    def _comes_only_for(self, t: int, o: int, to: int) -> bool:
        """Whether a gradient would go down to a block for one op alone."""
        p = self.ix.producer[t]
        return (
            p >= 0 and not self.ix.forward[p] and all(self.at[r] > to for r in self.ix.readers[t] if r != o)
        )
