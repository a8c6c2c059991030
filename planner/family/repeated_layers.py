"""The problem of a network with any number of equal layers, from problems of three depths in succession.

The ops of a further layer are found where the forward, and where the backward, of two depths differ. The third depth
checks the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby

from rematplan.ir import Op, ProblemError, TrainingGraph

SHALLOW = (5, 6, 7)
"""The depths from which problems of other depths are made."""
Rename = Callable[[str], str]


@dataclass(frozen=True, eq=False)
class RepeatedLayers:
    """Three layers in succession of a problem, of which the middle one is repeated."""

    graph: TrainingGraph
    deeper: TrainingGraph
    """The problem with one layer more."""

    def problem(self, more: int) -> TrainingGraph:
        """Return the problem with ``more`` further layers. `ProblemError` if the layers are not equal, or one reads
        tensors of a layer that is not next to it. `KeyError` if a name has no counterpart in another layer."""
        graph, deeper, ops = self.graph, self.deeper, list[Op]()
        parts = zip(self._parts(graph), self._parts(deeper), strict=True)
        for at, (part, other) in enumerate(parts):
            if at in (1, 3):
                size = len(part) // 3
                a, b, c = (part[k * size : (k + 1) * size] for k in range(3))
                names = (f for f in self._repeated(more)[:: 1 if at == 1 else -1])
                ops += [*self._renamed(a, more), *(self._op(op, f) for f in names for op in b)]
                ops += self._renamed(c, more)
            else:
                changed = [_on_line(op, next_, more) for op, next_ in zip(part, other, strict=True)]
                ops += self._renamed(changed, more)
        held = {t.name: t.bytes for t in deeper.tensors if t.name in deeper.inputs}
        read = {t for op in (*graph.recipes, *deeper.recipes) for t in op.reads}
        alone = {name for name in graph.inputs if name in held and name not in read}
        tensors = [
            replace(t, bytes=t.bytes + more * (held[t.name] - t.bytes)) if t.name in alone else t
            for t in graph.tensors
        ]
        split = graph.fixed_split
        return replace(
            graph,
            ops=tuple(ops),
            inverses=tuple(self._op(op, f) for op in graph.inverses for f in self.copies(op.name, more)),
            tensors=tuple(replace(t, name=f(t.name)) for t in tensors for f in self.copies(t.name, more)),
            inputs=self._all(graph.inputs, more),
            outputs=self._all(graph.outputs, more),
            ordered=self._all(graph.ordered, more),
            never_rerun=self._all(graph.never_rerun, more),
            fixed_split={k: n + more * (deeper.fixed_split.get(k, n) - n) for k, n in split.items()},
        )

    def copies(self, name: str, more: int) -> list[Rename]:
        """Return a function for each copy that the op or tensor ``name`` has with ``more`` further layers. It renames
        names of the same and of neighbouring layers for this copy. Outside of the middle layer there is one copy."""
        layer = self._place.get(name, (None, 0))[1]
        if layer == 2:
            return self._repeated(more)
        place = {1: -1, 3: more + 1}.get(layer)
        return [lambda other: other if place is None else self._at(other, place + 2 - layer, more)]

    def _repeated(self, more: int) -> list[Rename]:
        return [partial(self._at, middle=middle, more=more) for middle in range(more + 1)]

    def _at(self, name: str, middle: int, more: int) -> str:
        """Return what ``name`` is called if copy number ``middle`` (0 to ``more``) takes the middle layer's place;
        names outside of layers stay. `ProblemError` if it would be beyond the neighbouring layers; `KeyError` if that
        layer has no counterpart of it."""
        key, layer = self._place.get(name, (None, 0))
        if key is None:
            return name
        place = middle + layer - 2
        if not -1 <= place <= more + 1:
            raise ProblemError("a layer reads tensors of a layer that is not next to it")
        own = self._named[key, 1 if place < 0 else 3 if place > more else 2]
        return f"{own}@{place}" if 0 < place <= more else own

    def _all(self, names: Sequence[str], more: int) -> tuple[str, ...]:
        """Return ``names`` for ``more`` further layers: those of the middle layer once for each copy, in the order of
        the layers."""
        groups = groupby(names, key=lambda name: self._place.get(name, (None, 0))[1])
        return tuple(
            f(name)
            for _, row in groups
            for group in [list(row)]
            for f in self.copies(group[0], more)
            for name in group
        )

    def _renamed(self, ops: Sequence[Op], more: int) -> list[Op]:
        """Return ops that are not repeated, with names for ``more`` further layers. Those of no layer read all copies
        of what they read."""
        return [
            self._op(op, self.copies(op.name, more)[0])
            if op.name in self._place
            else replace(op, reads=self._all(op.reads, more))
            for op in ops
        ]

    def _op(self, op: Op, name: Rename) -> Op:
        reads, writes = (tuple(map(name, row)) for row in (op.reads, op.writes))
        return replace(op, name=name(op.name), reads=reads, writes=writes)

    @cached_property
    def _regions(self) -> tuple[tuple[int, int], ...]:
        """For the forward and the backward of ``graph``: the position in this half after the last of the three layers,
        and the number of ops of one layer. `ProblemError` if the layers are not equal."""
        halves = []
        for phase in ("forward", "backward"):
            few, many = (
                [_kind(g, op) for op in g.ops if op.phase == phase] for g in (self.graph, self.deeper)
            )
            length = len(many) - len(few)
            end = next((at for at, (a, b) in enumerate(zip(few, many, strict=False)) if a != b), len(few))
            end -= length  # the middle one of five layers is the same one in both halves
            layers = [few[end - k * length : end - (k - 1) * length] for k in (3, 2, 1)]
            if length < 1 or end < 3 * length or layers[0] != layers[1] or layers[1] != layers[2]:
                raise ProblemError("its layers are not equal")
            halves.append((end, length))
        return tuple(halves)

    def _parts(self, graph: TrainingGraph) -> list[list[Op]]:
        """Return a problem's ops in five parts: before the forward's layers, the forward's layers, the ops between the
        layers of both halves, the backward's layers, and the rest."""
        (end, length), (end_, length_) = self._regions
        ops, forward = list(graph.ops), sum(op.phase == "forward" for op in graph.ops)
        more = graph is self.deeper
        cuts = [end - 3 * length, end + more * length]
        cuts += [forward + end_ - 3 * length_, forward + end_ + more * length_]
        return [ops[a:b] for a, b in zip([0, *cuts], [*cuts, len(ops)], strict=True)]

    @cached_property
    def _place(self) -> dict[str, tuple[object, int]]:
        """For ops and tensors of the three layers, a key that counterparts share, and the layer, 1 to 3."""
        found: dict[str, tuple[object, int]] = {}
        parts, graph = self._parts(self.graph), self.graph
        for half, part in (("forward", parts[1]), ("backward", parts[3])):
            size = len(part) // 3
            for at, op in enumerate(part):
                layer = at // size + 1 if half == "forward" else 3 - at // size
                found[op.name] = (half, at % size), layer
                found |= {t: ((half, at % size, k), layer) for k, t in enumerate(op.writes)}
        for op in graph.inverses:
            written = [found[t] for t in op.writes if t in found]
            if written:
                found[op.name] = ("inverse", written[0][0]), written[0][1]
        readers: dict[str, list[tuple[Op, int]]] = {t: [] for t in graph.inputs}
        for op in graph.ops:
            for k, t in enumerate(op.reads):
                if t in readers:
                    readers[t].append((op, k))
        for t, rows in readers.items():
            first = [row for row in rows if row[0].phase == "forward"] or rows
            layers = {found.get(op.name, (None, 0))[1] for op, _ in first}
            if len(layers) == 1 and 0 not in layers:
                found[t] = ("input", found[first[0][0].name][0], first[0][1]), layers.pop()
        return found

    @cached_property
    def _named(self) -> Mapping[tuple[object, int], str]:
        return {place: name for name, place in self._place.items()}


def repeated_layers(graphs: Sequence[TrainingGraph]) -> RepeatedLayers | None:
    """Return the layers of problems of three depths in succession; None if the layers are not equal, or the third
    problem is not the one that the first two predict."""
    found = RepeatedLayers(graphs[0], graphs[1])
    try:
        return found if all(_alike(found.problem(k), graph) for k, graph in enumerate(graphs)) else None
    except (ProblemError, KeyError):
        return None


def _alike(made: TrainingGraph, true: TrainingGraph) -> bool:
    return (
        made.structure == true.structure
        and [_kind(made, op)[1:] for op in made.recipes] == [_kind(true, op)[1:] for op in true.recipes]
        and made.input_bytes == true.input_bytes
        and made.fixed_split == true.fixed_split
    )


def _kind(graph: TrainingGraph, op: Op) -> tuple[object, ...]:
    moved = (tuple(graph.size[t] for t in row) for row in (op.reads, op.writes))
    return re.sub(r"_\d+$", "", op.name), *moved


def _on_line(op: Op, deeper: Op, more: int) -> Op:
    """Return an op whose workspace changes with each layer as from ``op`` to ``deeper``."""
    return replace(op, workspace=max(0, math.ceil(op.workspace + more * (deeper.workspace - op.workspace))))
