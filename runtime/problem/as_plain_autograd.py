"""What plain autograd holds in another way than a step that may recompute: scores, masks of dropout, random states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from rematplan.ir import Op, TrainingGraph
from rematplan.runtime.capture.loss_in_place import CrossEntropyBackward
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import OLD_BUFFERS
from rematplan.runtime.problem.planning_problem import RNG_STATES
from rematplan.runtime.problem.random_states import without_random_states

COPIES = (RNG_STATES, OLD_BUFFERS)
"""The tensors of a problem from which ops run again: states of random generators, and buffers before the step."""
DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(frozen=True)
class PlainAutograd:
    """The ops of a captured step for which plain autograd needs more bytes."""

    losses: frozenset[str] = frozenset()
    """The names of the backwards of cross entropies, which have a second tensor of scores."""
    masks: Mapping[str, int] = field(default_factory=dict)
    """By storage name, the bytes of an element of the input of a dropout. A mask of the step has one byte an
    element."""

    @classmethod
    def of(cls, step: CapturedStep) -> PlainAutograd:
        """Return those of a captured step."""
        losses = frozenset(call.name for call in step.calls if isinstance(call.target, CrossEntropyBackward))
        masks = {
            step.values[mask].storage: step.values[result].fake.itemsize
            for call in step.calls
            if call.target is DROPOUT
            for result, mask in [call.results[:2]]
            if result and mask
        }
        return cls(losses, masks)

    def __or__(self, other: PlainAutograd) -> PlainAutograd:
        """Return the ops of both."""
        return PlainAutograd(self.losses | other.losses, {**self.masks, **other.masks})

    def losses_apart(self, graph: TrainingGraph) -> TrainingGraph:
        """Return a problem in which each backward of a cross entropy needs a second tensor of its result's size."""

        def apart(op: Op) -> Op:
            more = sum(graph.size[t] for t in op.writes) if op.name in self.losses else 0
            return replace(op, workspace=op.workspace + more) if more else op

        return replace(graph, ops=tuple(map(apart, graph.ops)))

    def problem(self, graph: TrainingGraph, wide_masks: bool) -> TrainingGraph:
        """Return the problem of plain autograd, for a problem with `losses_apart`.

        ``wide_masks``: whether masks of dropout have the type of their inputs.
        """
        graph = without_random_states(graph)
        factors = {**(self.masks if wide_masks else {}), **dict.fromkeys(COPIES, 0)}
        tensors = (replace(t, bytes=t.bytes * factors.get(t.name, 1)) for t in graph.tensors)
        split = {kind: size for kind, size in graph.fixed_split.items() if kind not in COPIES}
        return replace(graph, tensors=tuple(tensors), fixed_split=split)
