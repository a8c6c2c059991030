"""A training step as a chain of blocks, to be cut into the stages of a pipeline: each stage is an interval of
blocks.

A backward op is in its home block if that is known and possible, else in the last block at which its operands
are available. A tensor read several blocks later is in each message on its path.
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
"""For each block, the positions of its forward ops in ``graph.ops``."""


@dataclass(frozen=True)
class Passage:
    """The range of blocks that a computed tensor passes, from the block that computes it to those that read it."""

    tensor: int
    """The tensor's position in ``graph.tensors``."""
    forward: bool
    """Whether the forward computes it."""
    made: int
    """The block that computes it."""
    up: int
    """The last block that computes or reads it."""
    down: int
    """The first block that computes or reads it."""


@dataclass(frozen=True)
class StageChain:
    """A training step as a chain of blocks 0 … ``blocks`` − 1, to be cut into the stages of a pipeline."""

    graph: TrainingGraph
    blocks: int
    block: tuple[int, ...]
    """The block of each op, by the op's position in ``graph.ops``."""
    passages: tuple[Passage, ...]
    """One for each tensor that an op computes."""
    readers: Mapping[int, tuple[int, ...]]
    """By position of each input tensor, the blocks that read it, ascending."""
    gradient_of: Mapping[str, str] = field(default_factory=dict)
    """By name of each gradient, the name of its parameter."""
    whole: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By name of each parameter that several blocks read, the first and the last of them, which must be in
    one stage.
    """
    labels: Mapping[str, str] = field(default_factory=dict)
    """By names of parameters, the names for messages to the user."""
    narrow: bool = False
    """Whether a stage may begin only where no more bytes are sent than at the blocks before and after."""

    def __len__(self) -> int:
        return self.blocks

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """For each block, the sum of the forward's microseconds over all blocks before it; then, as one more entry, the
        sum over all blocks."""
        return self._times(True)

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """For each block, the sum of the backward's microseconds over all blocks before it; then, as one more entry,
        the sum over all blocks."""
        return self._times(False)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """For each block b and the chain's end, the bytes that the forward of a micro-batch sends over a cut
        before b; 0 at both ends.
        """
        return tuple(map(self.bytes, self.sent))

    @cached_property
    def returns(self) -> tuple[int, ...]:
        """For each block b and the chain's end, the bytes that the backward of a micro-batch sends back over
        a cut before b; 0 at both ends.
        """
        return tuple(map(self.bytes, self.returned))

    @cached_property
    def sent(self) -> tuple[tuple[int, ...], ...]:
        """For each block b and the chain's end, the positions of the tensors that the forward sends over a
        cut before b.
        """
        return self._tensors_over_cuts(lambda p: (p.made, p.up) if p.forward else (0, 0))

    @cached_property
    def returned(self) -> tuple[tuple[int, ...], ...]:
        """For each block b and the chain's end, the positions of the tensors that the backward sends over a
        cut before b.
        """
        return self._tensors_over_cuts(lambda p: (p.down, p.made))

    def _tensors_over_cuts(self, span: Callable[[Passage], tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        """Return the tensors that cross each cut. ``span``: the first and the last block between which a passage
        crosses all cuts."""
        found: list[list[int]] = [[] for _ in range(self.blocks + 1)]
        for passage in self.passages:
            low, high = span(passage)
            for at in range(low + 1, high + 1):
                found[at].append(passage.tensor)
        return tuple(map(tuple, found))

    def allowed(self) -> tuple[int, ...]:
        """Return the blocks at which a later stage may begin: never between readers of one parameter and,
        with ``narrow``, at local minima of `sends`.
        """
        inside = {at for first, last in self.whole.values() for at in range(first + 1, last + 1)}
        inner = {at: self.sends[at] for at in range(1, self.blocks)}

        def is_narrow(at: int) -> bool:
            return inner[at] <= min(inner.get(at - 1, inner[at]), inner.get(at + 1, inner[at]))

        return tuple(at for at in inner if at not in inside and (not self.narrow or is_narrow(at)))

    def check_cuts(self, cuts: Iterable[int]) -> None:
        """Raise `UsageError` for cuts (the first block of each later stage) that divide the ops that read one
        parameter."""
        for at in cuts:
            for name, (first, last) in self.whole.items():
                if first < at <= last:
                    raise UsageError(
                        f"{self.graph.name}: {self.label(name)} is read by several stages; choose cuts that keep "
                        f"all its readers in one stage, or untie it"
                    )

    def label(self, name: str) -> str:
        """Return the name to use in messages to the user for the parameter ``name``: its label, or ``name`` if it has
        none."""
        return self.labels.get(name, name)

    def inputs_of(self, start: int, end: int) -> tuple[int, ...]:
        """Return the positions of the inputs that ops of blocks ``start`` to ``end`` − 1 read, and of those
        that no op reads.
        """
        return tuple(t for t, at in self.readers.items() if not at or any(start <= b < end for b in at))

    def _times(self, forward: bool) -> tuple[float, ...]:
        ix = indexed(self.graph)
        sums = [0.0] * self.blocks
        for o, b in enumerate(self.block):
            if ix.forward[o] == forward:
                sums[b] += ix.cost[o]
        return (0.0, *accumulate(sums))

    def bytes(self, tensors: Iterable[int]) -> int:
        """Return the sum of the sizes in bytes of the tensors at these positions."""
        sizes = indexed(self.graph).bytes
        return sum(sizes[t] for t in tensors)


def stage_chain(
    graph: TrainingGraph,
    blocks: Groups | int,
    gradient_of: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    homes: Mapping[int, int] | None = None,
) -> StageChain:
    """Divide a training step into a chain of blocks, to be cut into the stages of a pipeline.

    ``blocks``: the forward ops of each block, or the number of blocks. ``gradient_of``: by name of a gradient, the
    parameter's name. ``labels``: by name of a parameter, its name in messages to the user. ``homes``: by backward op,
    the block where it should be.

    Raises ProblemError if the problem lacks a forward or a backward, and UsageError if a forward op reads what a later
    block computes.
    """
    ix = indexed(graph)
    if not any(ix.forward) or all(ix.forward):
        raise ProblemError(
            f"{graph.name}: a pipeline needs a forward and a backward; the problem has only one of them"
        )
    groups = block_chain(graph, blocks).forward if isinstance(blocks, int) else blocks
    of = {o: b for b, ops in enumerate(groups) for o in ops}
    pairs = {g: p for g, p in (gradient_of or {}).items() if g in graph.producer}
    assigned = _Assignment(graph, ix, of, len(groups), pairs, homes or {})
    readers = {
        t: tuple(sorted({assigned.at[o] for o in ix.readers[t]}))
        for t, name in enumerate(ix.tensors)
        if name in set(graph.inputs)
    }
    whole = {}
    for name in pairs.values():
        at = {assigned.at[o] for o in ix.readers[assigned.tensor[name]]}
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
    """Return, for each block, the positions of its forward ops. ``firsts``: the positions at which the later
    blocks begin, ascending.
    """
    ix = indexed(graph)
    forward = [o for o, is_forward in enumerate(ix.forward) if is_forward]
    bounds = (0, *firsts, len(ix.forward))
    return tuple(tuple(o for o in forward if low <= o < high) for low, high in pairwise(bounds))


class _Assignment:
    """Assigns each backward op to a block (``at``). `UsageError` if a forward op reads what a later block computes.

    ``of``: by forward op, its block. ``blocks``: their number. ``pairs``: by name of a gradient, the parameter's name.
    ``homes``: by backward op, the block where it should be.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        ix: Indexed,
        of: Mapping[int, int],
        blocks: int,
        pairs: Mapping[str, str],
        homes: Mapping[int, int],
    ) -> None:
        """Assign all ops. A backward op goes to its home if it can be there, else to the last possible block, then
        perhaps to an earlier one that needs its result."""
        self.ix, self.blocks = ix, blocks
        self.tensor = {name: t for t, name in enumerate(ix.tensors)}
        self.at = [of.get(o, -1) for o in range(len(ix.ops))]
        for o in of:
            for p in (ix.producer[t] for t in ix.reads[o]):
                if p >= 0 and of[p] > of[o]:
                    raise UsageError(
                        f"{graph.name}: {ix.ops[o]} reads a result of {ix.ops[p]}, which is in a later stage"
                    )
        self.span = dict(self._spans(of))
        last = {name: self.span[t][1] for name, t in self.tensor.items() if t in self.span}
        self.owner = {self.tensor[g]: last[p] for g, p in pairs.items() if p in last}
        # A backward op goes to its home if that is known and possible, else to the last block at which all
        # that it reads is available, then perhaps to an earlier block that needs its result.
        at_home = set()
        for o in ix.backward:
            self.at[o] = self._last_block(o)
            if o in homes and self._can_be_in(o, homes[o]):
                self.at[o] = homes[o]
                at_home.add(o)
        for o in reversed(ix.backward):
            if o not in at_home:
                self._sink(o)

    def passages(self) -> Iterable[Passage]:
        """Yield, for each tensor that an op computes, the blocks that compute and read it."""
        ix = self.ix
        for t, p in enumerate(ix.producer):
            if p < 0:
                continue
            made, at = self.at[p], [self.at[r] for r in ix.readers[t]]
            yield Passage(t, ix.forward[p], made, max([made, *at]), min([made, *at]))

    def _spans(self, of: Mapping[int, int]) -> Iterable[tuple[int, tuple[int, int]]]:
        """Yield (tensor, (first, last)): the blocks at which a tensor that the forward computes or reads is
        available.

        Inputs that several blocks read are left out: they count as available everywhere.
        """
        for t, p in enumerate(self.ix.producer):
            at = [of[o] for o in self.ix.readers[t] if o in of]
            if p in of:
                yield t, (of[p], max([of[p], *at]))
            elif p < 0 and at and (len(set(at)) == 1):
                yield t, (at[0], at[0])

    def _can_be_in(self, o: int, block: int) -> bool:
        """Return whether all that the backward op ``o`` reads is available in ``block``, and its results are not needed
        in a later block."""
        ix = self.ix
        spans = (self.span[t] for t in ix.reads[o] if t in self.span)
        return (
            all(self.at[p] >= block for p in ix.backward_before[o])
            and all(first <= block <= last for first, last in spans)
            and all(self.owner.get(t, block) >= block for t in ix.writes[o])
        )

    def _last_block(self, o: int) -> int:
        ix = self.ix
        latest = min((self.at[p] for p in ix.backward_before[o]), default=self.blocks - 1)
        spans = [self.span[t] for t in ix.reads[o] if t in self.span]
        block = min([latest, *(last for _, last in spans)])
        block = max(block, min(latest, max((first for first, _ in spans), default=0)))
        return min([block, *(self.owner[t] for t in ix.writes[o] if t in self.owner)])

    def _sink(self, o: int) -> None:
        """Move a backward op to the last of the blocks that read its results or make its forward operands, if that
        block is earlier and messages do not grow.

        The op stays if an operand is not available there.
        """
        ix = self.ix
        wanted = [self.owner.get(t, self.at[o]) for t in ix.writes[o] if ix.is_output[t]]
        wanted += [self.at[r] for t in ix.writes[o] for r in ix.readers[t]]
        spans = [self.span[t] for t in ix.reads[o] if t in self.span]
        to = max([*wanted, *(first for first, _ in spans)], default=self.at[o])
        if to >= self.at[o] or any(not first <= to <= last for first, last in spans):
            return
        # After the move, gradients that the op reads may be sent further, only for it, but its results need
        # not be sent.
        more = sum(ix.bytes[t] for t in ix.reads[o] if self._comes_only_for(t, o, to))
        if more <= sum(ix.bytes[t] for t in ix.writes[o]):
            self.at[o] = to

    def _comes_only_for(self, t: int, o: int, to: int) -> bool:
        """Return whether tensor ``t`` is a gradient that would be sent to the earlier block ``to`` only for
        op ``o``.
        """
        p = self.ix.producer[t]
        return (
            p >= 0 and not self.ix.forward[p] and all(self.at[r] > to for r in self.ix.readers[t] if r != o)
        )
