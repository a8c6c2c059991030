"""A problem without inverses whose least peak is at most that of a problem with them.

What an inverse recovers counts as a part of a tensor that it reads: whoever holds the whole holds the part, too.
"""

from __future__ import annotations

from dataclasses import replace

from rematplan.ir import Op, TrainingGraph


def inverses_as_parts(graph: TrainingGraph) -> TrainingGraph | None:
    """Return a problem without inverses whose least peak is at most that of ``graph``. None without inverses, or if
    an inverse reads no tensor that is computed from what it recovers and still has room for it.

    Proof: take any schedule of ``graph``, and count the parts as resident whenever the whole is. An inverse then does
    nothing, every op finds what it reads, and no more bytes are held: the whole is its parts and a rest that has the
    bytes left.
    """
    parts, rest = dict[str, list[str]](), dict(graph.size)
    for inverse in graph.inverses:
        for made in inverse.writes:
            whole = _whole(graph, inverse, made, rest)
            if whole is None:
                return None
            if made not in parts.setdefault(whole, []):
                parts[whole].append(made)
                rest[whole] -= graph.size[made]
    if not parts:
        return None

    def with_parts(names: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``names`` with all their parts, and the parts of these, each once."""
        found: dict[str, None] = {}
        waiting = list(reversed(names))
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = None
                waiting += parts.get(name, ())
        return tuple(found)

    return replace(
        graph,
        tensors=tuple(replace(t, bytes=rest[t.name]) for t in graph.tensors),
        outputs=with_parts(graph.outputs),
        ops=tuple(replace(op, reads=with_parts(op.reads)) for op in graph.ops),
        inverses=(),
    )


def _whole(graph: TrainingGraph, inverse: Op, made: str, rest: dict[str, int]) -> str | None:
    """Return the tensor with most room, of those that ``inverse`` reads and that are computed from ``made``; None if
    none has room for it."""
    position = graph.producer
    computed = [t for t in inverse.reads if t in position and made in graph.ops[position[t]].reads]
    return max((t for t in computed if rest[t] >= graph.size[made]), key=rest.__getitem__, default=None)
