"""What the rehearsal of a model's training step has found: the parts, and the bytes of the rest around each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from rematplan.module.captures import ReadyCapture
from rematplan.runtime.capture.flat_module import ResultTensor
from rematplan.runtime.graph.captured_step import CapturedStep, in_model
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.inversion.find_inverses import with_exact_inverses

TOO_SMALL, IS_EQUAL, UNTRAINED = (
    "it is too small",
    "it equals a module that is not planned",
    "it trains nothing in this step",
)


@dataclass(eq=False)
class EqualParts:
    """Parts that one capture serves: modules of one class with equal settings that are called with equal shapes."""

    function: Any
    """The parts' forward: a function of their class, or one that was set in its place."""
    state: Hashable
    """The key of the parts' state."""
    capture: ReadyCapture
    step: CapturedStep
    names: list[str] = field(default_factory=list)
    """The names of the modules, one for each call."""
    held: int = 0
    """The bytes of the inputs and outputs of one call, the largest so far."""

    @property
    def reused(self) -> frozenset[int]:
        """The positions of the tensors among the arguments that several forward ops read."""
        batch = [i.value for i in self.capture.found.step.inputs if i.kind == "batch"]
        return frozenset(at for at, value in enumerate(batch) if self._reads[value] > 1)

    @property
    def reused_weights(self) -> frozenset[str]:
        """The names of the parameters that several forward ops read, such as tied ones."""
        inputs = self.capture.found.step.inputs
        named = ((i.target, i.value) for i in inputs if i.kind == "parameter")
        return frozenset(in_model(name) for name, value in named if self._reads[value] > 1)

    @cached_property
    def _reads(self) -> Counter[str]:
        """By value of the step, how many forward ops read it."""
        step = self.capture.found.step
        reads = Counter(value for call in step.calls if not call.backward for value in set(call.operands))
        reads.update(o.value for o in step.outputs if o.kind == "output")
        return reads

    @cached_property
    def results(self) -> tuple[tuple[bool, bool], ...]:
        """For each leaf of the forward's results, whether it is a tensor that has a gradient, and whether it is one
        that ops of the step read: a plan may hold it until the backward."""
        found = self.capture.found
        results = pytree.tree_unflatten(list(found.constants), found.outputs)[0]
        tangents = {int(i.target) for i in found.step.inputs if i.kind == "tangent"}
        step = with_exact_inverses(found.step)
        read = {storage for call in step.priced_calls for storage in step.reads(call)}
        outputs = (o for o in step.outputs if o.kind == "output")
        held = {int(o.target) for o in outputs if step.values[o.value].storage in read}
        places = [leaf.at if isinstance(leaf, ResultTensor) else None for leaf in pytree.tree_leaves(results)]
        return tuple((at in tangents, at in held) for at in places)


@dataclass(frozen=True)
class Event:
    """The forward (F) or backward (B) of a part, and the bytes that exist outside of the parts."""

    kind: Literal["F", "B"]
    call: int
    """The position of the part in `Rehearsed.calls`."""
    before: int
    """The most bytes since the previous event."""
    during: int
    """The bytes when the event begins."""


@dataclass(frozen=True, eq=False)
class Rehearsed:
    """What a rehearsal has found."""

    groups: tuple[EqualParts, ...]
    calls: tuple[tuple[str, EqualParts], ...]
    """The name and the group of each part, in the order of their forwards."""
    events: tuple[Event, ...]
    """The forwards and backwards in order, one of each for each call.

    Outside of the parts are the arguments and results of the parts, the results of the model, what the rest saves for
    its backward, and the gradients of the rest's parameters; not the model's arguments, parameters and buffers."""
    ending: int
    """The most bytes that exist outside of the parts after the last event."""
    given: int
    """The bytes of the model's arguments and of tensors in attributes outside of the parts, which exist before."""
    changing: tuple[str, ...]
    """The names of modules outside of the parts in whose attributes the forward leaves other tensors."""
    changing_bytes: int
    """The bytes that their attributes have before the call."""
    repeated: int
    """The bytes of the parameters of parts that run several times. Autograd sums their gradients."""
    unread: tuple[torch.Tensor, ...]
    """The outputs of the model, without their data, from which a loss outside of the model is computed."""
    refused: Mapping[str, str]
    """By the name of a module that is not planned, why."""
    complete: bool
    """Whether a whole backward was rehearsed: it was possible, and no result is an object that hides tensors."""

    @property
    def told(self) -> Mapping[str, str]:
        """Of `refused`, what a user can act on: no part is inside of the module, and the reason is not that it is
        small, trains nothing, or equals another one."""
        called = {name for name, _ in self.calls}
        return {
            name: why
            for name, why in self.refused.items()
            if why not in (TOO_SMALL, IS_EQUAL, UNTRAINED) and not inside(name, called)
        }

    @property
    def rest(self) -> int:
        """The most bytes that exist outside of the parts."""
        return self.given + max([self.ending, *(max(one.before, one.during) for one in self.events)])

    def with_calls(self, more: Sequence[tuple[str, EqualParts]], repeated: int | None = None) -> Rehearsed:
        """Return what is assumed of a step with further calls of parts: these run after the others, and hold inputs and
        outputs during the whole step. ``repeated``: the new value of the field; None for no change."""
        if not more:
            return self
        held, first, end = sum(group.held for _, group in more), len(self.calls), len(self.calls) + len(more)
        forwards = [Event("F", call, 0, 0) for call in range(first, end)]
        backwards = [Event("B", call, 0, self.ending) for call in reversed(range(first, end))]
        turned = next((at for at, one in enumerate(self.events) if one.kind == "B"), 0)
        events = (*self.events[:turned], *forwards, *self.events[turned:], *backwards)
        return replace(
            self,
            groups=tuple(dict.fromkeys((*self.groups, *(group for _, group in more)))),
            calls=(*self.calls, *more),
            events=tuple(replace(one, before=one.before + held, during=one.during + held) for one in events),
            ending=self.ending + held,
            repeated=self.repeated if repeated is None else repeated,
        )


def inside(name: str, others: Collection[str]) -> bool:
    """Return whether a module is inside of one of the others, or one of the others is inside of it."""
    return any(f"{a}.".startswith(f"{b}.") for other in others for a, b in ((name, other), (other, name)))
