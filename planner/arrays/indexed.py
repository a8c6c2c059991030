"""The planning problem with positions of ops and tensors in place of names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rematplan.ir import TrainingGraph
from rematplan.planner.caches.graph_cache import cached_on


@dataclass(frozen=True)
class Indexed:
    """A planning problem with positions in ``graph.ops`` and ``graph.tensors`` in place of names."""

    ops: tuple[str, ...]
    """The names of the ops."""
    reads: tuple[tuple[int, ...], ...]
    """By op: the tensors that it reads. ``writes``: likewise."""
    writes: tuple[tuple[int, ...], ...]
    cost: tuple[float, ...]
    bytes: tuple[int, ...]
    tensors: tuple[str, ...]
    """The names of the tensors."""
    is_output: tuple[bool, ...]
    """By tensor: whether it must be resident at the end."""
    producer: tuple[int, ...]
    """By tensor: the op that writes it, -1 for an input."""
    readers: tuple[tuple[int, ...], ...]
    """By tensor: the ops that read it, ascending."""
    after: tuple[int, ...]
    """By op: the op before it in ``graph.ordered``; -1 for the first there, and for ops that are not there."""
    forward: tuple[bool, ...]
    """By op: whether it is not marked as backward and depends on no backward op."""

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """The numbers of the ops that do not belong to the forward half, ascending."""
        return tuple(o for o, forward in enumerate(self.forward) if not forward)

    @cached_property
    def backward_before(self) -> tuple[tuple[int, ...], ...]:
        """By op: those ops of the backward half that write what it reads, and its entry in ``after`` if that is one."""
        return tuple(
            tuple(
                p
                for p in dict.fromkeys((*(self.producer[t] for t in reads), after))
                if p >= 0 and not self.forward[p]
            )
            for reads, after in zip(self.reads, self.after, strict=True)
        )


def indexed(graph: TrainingGraph) -> Indexed:
    """Return the planning problem with integers in place of names, as an `Indexed`. It is computed once per graph
    object."""
    return cached_on(graph, "indexed", lambda: _index(graph))


def _index(graph: TrainingGraph) -> Indexed:
    id_of = {t.name: i for i, t in enumerate(graph.tensors)}
    reads = tuple(tuple(id_of[t] for t in o.reads) for o in graph.ops)
    writes = tuple(tuple(id_of[t] for t in o.writes) for o in graph.ops)
    producer = [-1] * len(id_of)
    readers: list[list[int]] = [[] for _ in id_of]
    for i in range(len(graph.ops)):
        for t in writes[i]:
            producer[t] = i
        for t in dict.fromkeys(reads[i]):
            readers[t].append(i)
    outputs = {id_of[t] for t in graph.outputs}
    after = _order(graph)
    return Indexed(
        ops=tuple(o.name for o in graph.ops),
        reads=reads,
        writes=writes,
        cost=tuple(o.cost for o in graph.ops),
        bytes=tuple(t.bytes for t in graph.tensors),
        tensors=tuple(t.name for t in graph.tensors),
        is_output=tuple(i in outputs for i in range(len(id_of))),
        producer=tuple(producer),
        readers=tuple(map(tuple, readers)),
        after=after,
        forward=_forward_half(graph, reads, producer, after),
    )


def _order(graph: TrainingGraph) -> tuple[int, ...]:
    """Return, for each op in ``ordered``, the one before it there; -1 for the first and for other ops."""
    ordered = set(graph.ordered)
    after, last = [-1] * len(graph.ops), -1
    for i, op in enumerate(graph.ops):
        if op.name in ordered:
            after[i], last = last, i
    return tuple(after)


def _forward_half(
    graph: TrainingGraph, reads: tuple[tuple[int, ...], ...], producer: list[int], after: tuple[int, ...]
) -> tuple[bool, ...]:
    """Return, for each op, whether it is not marked as backward and depends on no op outside of the forward half."""
    forward: list[bool] = []
    for i, op in enumerate(graph.ops):
        before = [producer[t] for t in reads[i] if producer[t] >= 0]
        if after[i] >= 0:
            before.append(after[i])
        forward.append(op.phase != "backward" and all(forward[j] for j in before))
    return tuple(forward)
