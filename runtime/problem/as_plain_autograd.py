"""What plain autograd holds in another way than a step that may recompute: scores, masks of dropout, random states,
and all that a node of its graph touches until the node ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from rematplan.ir import Op, TrainingGraph
from rematplan.runtime.capture.loss_in_place import CrossEntropyBackward
from rematplan.runtime.capture.output_storages import is_whole
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.problem.loss_boundary import OLD_BUFFERS
from rematplan.runtime.problem.planning_problem import RNG_STATES
from rematplan.runtime.problem.random_states import without_random_states

COPIES = (RNG_STATES, OLD_BUFFERS)
"""The tensors of a problem from which ops run again: states of random generators, and buffers before the step."""
ATEN = torch.ops.aten
ADD = ATEN.add.Tensor
ZEROS, SCATTER = ATEN.new_zeros.default, ATEN.slice_scatter.default
DROPOUT = ATEN.native_dropout.default
ONLY_SHAPES: Mapping[Any, tuple[int, ...]] = {
    ATEN.gather.default: (0,),
    ATEN.take.default: (0,),
    ATEN.index_add.default: (3,),
    ATEN.index_copy.default: (3,),
    ATEN.scatter_reduce.two: (0, 3),
    ATEN.cummax.default: (0,),
    ATEN.linalg_solve_ex.default: (0,),
    ATEN._linalg_solve_ex.default: (0,),
    ATEN._linalg_slogdet.default: (0,),
    ATEN._fft_r2c.default: (0,),
    ATEN.pow.Scalar: (1,),
}
"""By op, the arguments that autograd saves although its formula reads no more than their shapes."""


@dataclass(frozen=True)
class PlainAutograd:
    """The ops and storages of a captured step for which plain autograd needs other bytes: more, or fewer with `sums`
    and `pieces`."""

    losses: frozenset[str] = frozenset()
    """The names of the backwards of cross entropies, which have a second tensor of scores."""
    masks: Mapping[str, int] = field(default_factory=dict)
    """By storage name, the bytes of an element of a dropout's input. A mask of the step has one byte an element."""
    nodes: tuple[tuple[str, ...], ...] = ()
    """For each node of the backward that calls several ops, their names."""
    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For ops of the backward, the storages that their nodes have saved without reading them (`ONLY_SHAPES`)."""
    sums: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By the name of each op that sums two gradients: the storages of the older gradient and of the result. Likewise,
    for each write into a part of new zeros: those of the zeros and of the result."""
    pieces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By the name of each forward op that writes into a piece of a larger storage (`Call.in_piece`): that storage and
    the piece's. The storage stays as long as the piece."""

    @classmethod
    def of(cls, step: CapturedStep) -> PlainAutograd:
        """Return the ops and storages of a captured step for which plain autograd needs other bytes."""
        losses = frozenset(call.name for call in step.calls if isinstance(call.target, CrossEntropyBackward))
        masks = {
            step.values[mask].storage: step.values[result].fake.itemsize
            for call in step.calls
            if call.target is DROPOUT
            for result, mask in [call.results[:2]]
            if result and mask
        }
        nodes = [tuple(calls) for _, calls in groupby(_in_backward(step), key=lambda call: call.sequence)]
        made = {step.values[name].storage for call in step.calls if call.backward for name in call.made}
        sums = dict(one for node in nodes for one in (*_sums(step, node, made), *_writes(step, node)))
        whole = tuple(tuple(call.name for call in node if call.name not in sums) for node in nodes)
        unread = {c.sequence: _only_shapes(step, c) for c in step.calls if c.target in ONLY_SHAPES}
        saved = {node[0].name: unread[node[0].sequence] for node in nodes if node[0].sequence in unread}
        pieces = {
            call.name: _places(step, call) for call in step.calls if call.in_piece and not call.backward
        }
        return cls(losses, masks, tuple(names for names in whole if len(names) > 1), saved, sums, pieces)

    def repeated(self, copies: Callable[[str], Iterable[Callable[[str], str]]]) -> PlainAutograd:
        """Return these ops and storages for a problem in which they have copies. ``copies``: from an original's name to
        functions, one for each copy, that rename what belongs to that copy."""
        return PlainAutograd(
            frozenset(f(name) for name in self.losses for f in copies(name)),
            {f(name): size for name, size in self.masks.items() for f in copies(name)},
            tuple(tuple(map(f, node)) for node in self.nodes for f in copies(node[0])),
            {f(name): tuple(map(f, kept)) for name, kept in self.saved.items() for f in copies(name)},
            *(
                {f(name): (f(old), f(new)) for name, (old, new) in places.items() for f in copies(name)}
                for places in (self.sums, self.pieces)
            ),
        )

    def losses_apart(self, graph: TrainingGraph) -> TrainingGraph:
        """Return a problem in which each backward of a cross entropy needs a second tensor of its result's size."""

        def apart(op: Op) -> Op:
            more = sum(graph.size[t] for t in op.writes) if op.name in self.losses else 0
            return replace(op, workspace=op.workspace + more) if more else op

        return replace(graph, ops=tuple(map(apart, graph.ops)))

    def problem(self, graph: TrainingGraph, wide_masks: bool) -> TrainingGraph:
        """Return the problem of plain autograd, for a problem with `losses_apart`.

        ``wide_masks``: whether masks of dropout have the type of their inputs, not one byte an element."""
        graph = without_random_states(graph)
        factors = {**(self.masks if wide_masks else {}), **dict.fromkeys(COPIES, 0)}
        tensors = (replace(t, bytes=t.bytes * factors.get(t.name, 1)) for t in graph.tensors)
        split = {kind: size for kind, size in graph.fixed_split.items() if kind not in COPIES}
        return self._whole_nodes(self._in_place(replace(graph, tensors=tuple(tensors), fixed_split=split)))

    def _whole_nodes(self, graph: TrainingGraph) -> TrainingGraph:
        """Return the problem in which the last op of a node reads all that the node touches: autograd frees neither the
        saved tensors nor the temporaries of a formula before the node ends."""
        more = {name: dict.fromkeys(storages) for name, storages in self.saved.items()}
        for node in self.nodes:
            ops = [graph.op[name] for name in node if name in graph.op]
            if len(ops) > 1:
                touched = dict.fromkeys(
                    t for op in ops for t in (*self.saved.get(op.name, ()), *op.reads, *op.writes)
                )
                more[ops[-1].name] = {t: None for t in touched if t not in ops[-1].writes}
        whole = tuple(
            replace(op, reads=tuple({**dict.fromkeys(op.reads), **more.get(op.name, {})})) for op in graph.ops
        )
        return replace(graph, ops=whole)

    def _in_place(self, graph: TrainingGraph) -> TrainingGraph:
        """Return the problem in which a sum of gradients is in the older gradient's memory, if their sizes are equal
        and nothing needs the older one later. Pieces are always in the memory of the storage that they are written
        into."""
        last = {t: op.name for op in graph.ops for t in op.reads}
        kept = {*graph.inputs, *graph.outputs}
        place = {
            new: old
            for name, (old, new) in self.sums.items()
            if last.get(old) == name and old not in kept and graph.size.get(old) == graph.size.get(new)
        }
        place |= {new: old for old, new in self.pieces.values() if new in graph.size}
        if not place:
            return graph

        def first(tensor: str) -> str:
            while tensor in place:
                tensor = place[tensor]
            return tensor

        ops = tuple(
            replace(op, reads=tuple(dict.fromkeys(t for read in op.reads for t in (read, first(read)))))
            for op in graph.ops
        )
        outputs = tuple(dict.fromkeys(t for output in graph.outputs for t in (output, first(output))))
        tensors = tuple(replace(t, bytes=0) if t.name in place else t for t in graph.tensors)
        return replace(graph, tensors=tensors, ops=ops, outputs=outputs)


def _only_shapes(step: CapturedStep, call: Call) -> tuple[str, ...]:
    saved = (call.args[at] for at in ONLY_SHAPES[call.target])
    return tuple(step.values[ref.value].storage for ref in saved if isinstance(ref, Ref))


def _in_backward(step: CapturedStep) -> list[Call]:
    return [call for call in step.calls if call.backward and call.sequence is not None and not call.is_view]


def _sums(
    step: CapturedStep, node: Sequence[Call], made: AbstractSet[str]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield, last first, each call at a node's end that adds the node's gradient to an older one, its first argument,
    with the call's `_places`. ``made``: the storages that the backward makes, of which the older gradient must fill
    one."""
    own = {step.values[name].storage for call in node for name in call.made}
    for call in reversed(node):
        older = call.args[0] if call.target is ADD and not call.kwargs else None
        if not isinstance(older, Ref) or not isinstance(call.args[1], Ref) or call.results[0] is None:
            return
        value = step.values[older.value]
        if value.storage in own or value.storage not in made or not is_whole(value):
            return
        yield call.name, _places(step, call)


def _writes(step: CapturedStep, node: Sequence[Call]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the calls of a node that write into a part of zeros from the same node, with their `_places`: in autograd
    they copy in place."""
    zeros = {step.values[name].storage for call in node if call.target is ZEROS for name in call.made}
    for call in node:
        into = call.args[0] if call.target is SCATTER else None
        if isinstance(into, Ref) and step.values[into.value].storage in zeros and call.results[0]:
            yield call.name, _places(step, call)


def _places(step: CapturedStep, call: Call) -> tuple[str, str]:
    """Return the storages of a call's first argument and of its result."""
    return step.values[call.operands[0]].storage, step.values[call.made[0]].storage
