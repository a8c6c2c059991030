"""A rehearsal of a model's training step: which of its modules can be planned, and what the rest of the step holds.

The model runs forward and backward once, and is restored. Placeholders of the parts hold their inputs and outputs
and give zero gradients, so the bytes outside of the parts are those of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from rematplan.ir import ModelError, NoGradients
from rematplan.module.capture_lock import LOCK
from rematplan.module.captures import Captures, ReadyCapture
from rematplan.module.forward_capture import Original, Tracing
from rematplan.module.symbolic_forward import Found
from rematplan.parts.forward_patches import Patches
from rematplan.parts.left_tensors import AttributeTensors, left_tensors, nodes_of_tensors, not_part_of, reach
from rematplan.parts.live_bytes import LiveBytes, allocated_bytes
from rematplan.parts.rehearsed import IS_EQUAL, TOO_SMALL, UNTRAINED, EqualParts, Event, Rehearsed, inside
from rematplan.parts.sharded_weights import Substitutes
from rematplan.runtime import guards
from rematplan.runtime.capture.flat_module import flattened_call, tensors_in
from rematplan.runtime.capture.hidden_tensors import hides_tensors
from rematplan.runtime.capture.left_out_tangents import with_expected_tangents
from rematplan.runtime.capture.restore_state import SameObjects
from rematplan.runtime.capture.same_contents import unchanged
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.compat import disable_current_modes, pytree

FEW = 2
"""The number of ops in a forward below which nothing can be saved by planning it."""
MIXED = (
    "it uses an input or a parameter several times that is used elsewhere, too, so its gradients would be summed in "
    "another order"
)
SLICE = "it returns a slice, of which a plan would return a dense copy, and ops may round otherwise there"
TWICE = "its backward is differentiated again"
UNKNOWN = 2
"""The factor by which the rest's bytes are multiplied if its backward cannot be rehearsed."""


class Rehearsal:
    """Rehearses the training steps of one model. Of ``parts`` inside of each other, the outer is planned if it can be
    captured. ``stated``: whether each must be. ``earlier``: a rehearsal of the same call with other parts."""

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, nn.Module],
        *,
        stated: bool,
        earlier: Rehearsal | None = None,
    ) -> None:
        """Prepare the replacement of the parts' forwards. What ``earlier`` has captured, or found impossible, is shared
        and extended."""
        self.model, self.parts, self.stated = model, parts, stated
        self._captured: list[EqualParts] = earlier._captured if earlier else []
        """What has been captured, also in earlier rehearsals of this call."""
        self._unsuited: dict[Hashable, str] = earlier._unsuited if earlier else {}
        """By what equal modules have in common, why they cannot be planned."""
        self._groups: list[EqualParts] = []
        self._calls: list[tuple[str, EqualParts]] = []
        self._events: list[Event] = []
        self._refused: dict[str, str] = {}
        self._failed: set[Hashable] = set()
        """The keys of ``_unsuited`` that this rehearsal has met."""
        self.unfit: dict[str, str] = {}
        """By the name of a part that cannot be planned in this step, although it is captured, why."""
        self._live = LiveBytes(())
        self._substitutes = Substitutes(model, lambda made: self._live.leave_out(made))
        self._anchors: list[torch.Tensor] = []
        self._given: Sequence[torch.Tensor] = ()
        self._earlier: set[Any] = set()
        """The autograd nodes from before the forward."""
        self._attributes: AttributeTensors
        self._nodes: dict[Any, tuple[str, frozenset[int]]] = {}
        """The nodes of placeholders, with the part's name and the positions of inputs that it uses several times."""
        own = {name: Original(part, part.forward) for name, part in parts.items()}
        self._patches = Patches({one.model: partial(self._part, name, one) for name, one in own.items()})

    def run(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsed:
        """Rehearse a call of the model, restore all state, and return what was measured, which is valid only if
        ``unfit`` is empty afterwards."""
        self._live = LiveBytes([*named_tensors(self.model).values()])
        leaves = flattened_call(args, kwargs)[0]
        self._given = tensors_in(leaves)
        self._attributes = AttributeTensors(self.model)
        self._earlier = nodes_of_tensors()
        objects = SameObjects(pytree.tree_leaves((args, kwargs)))
        try:
            with guards.python_state_restored(self.model, leaves), unchanged(self.model):
                return self._measured(original, args, kwargs)
        finally:
            objects.restore()
            torch.clear_autocast_cache()  # it keeps tensors of this forward
            self._nodes.clear()  # a node keeps this rehearsal
            self._earlier.clear()
            self._given = ()

    def _measured(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsed:
        """Run the model forwards and backwards with placeholders in its parts' places, and return what the rest holds
        around each."""
        live = self._live
        with torch.enable_grad(), live, self._substitutes:
            given, named = pytree.tree_map_only(torch.Tensor, self._copy, (args, kwargs))
            with self._patches:
                results = original.forward(*given, **named)
            leaves = pytree.tree_leaves(results)
            outputs = [one for one in leaves if isinstance(one, torch.Tensor)]
            hidden = any(hides_tensors(one) for one in leaves if not isinstance(one, torch.Tensor))
            left = left_tensors(self._nodes.keys() - {None}, outputs)
            # A result may be an object that pytrees do not open, or the loss may be an attribute.
            trained = [one for one in outputs if one.requires_grad] or left
            losses = [one for one in trained if one.numel() == 1]
            # A loss outside of the model may use these tensors in addition to the uses inside of it.
            read = not_part_of(losses, trained)
            self.unfit |= dict.fromkeys(sorted(self._mixed([*losses, *read], [*read, *left])), MIXED)
            arguments = tensors_in(flattened_call(given, named)[0])
            has_run = self._backward([*losses, *read], arguments)
            factor = 1 if has_run else UNKNOWN
        ending = live.peak_since()
        unread = tuple(torch.empty_like(one, device="meta") for one in read)
        counted, parts = [*named_tensors(self.model).values()], [name for name, _ in self._calls]
        resting = self._attributes.of(self._attributes.in_rest(parts))
        changed = self._attributes.changed(parts)
        done = {event.call for event in self._events if event.kind == "B"}
        for call in reversed(range(len(self._calls))):
            if call not in done:
                self._events.append(Event("B", call, 0, ending))
        every = (replace(one, before=factor * one.before, during=factor * one.during) for one in self._events)
        return Rehearsed(
            tuple(self._groups),
            tuple(self._calls),
            tuple(every),
            factor * ending,
            allocated_bytes((*counted, *self._given, *resting)) - allocated_bytes(counted),
            changed,
            allocated_bytes(self._attributes.of(changed)),
            repeated_bytes(self.parts, (name for name, _ in self._calls)),
            unread,
            dict(self._refused),
            has_run and not hidden,
        ).with_calls(self._uncalled())

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._live.paused():
            copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for one in (tensor, copied):
            self._live.leave_out(one)
        return copied

    def _event(self, kind: Literal["F", "B"], call: int) -> None:
        if kind == "B" and torch.is_grad_enabled():
            self.unfit[self._calls[call][0]] = TWICE
        self._events.append(Event(kind, call, self._live.peak_since(), self._live.live))

    def _mixed(self, outputs: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> frozenset[str]:
        """Return the parts with an input or a parameter that they use several times and that is used elsewhere, or in
        another call, too. ``read``: tensors that are also used outside of the model.

        Autograd adds the gradients of all uses one by one; a plan would add those inside of the part first, with other
        rounding errors.
        """
        todo = [*dict.fromkeys(one.grad_fn for one in (*outputs, *read))]
        seen, uses = set(todo), Counter[Any]((one.grad_fn, one.output_nr) for one in read)
        while todo:
            node = todo.pop()
            edges = [edge for edge in node.next_functions if edge[0] is not None] if node is not None else []
            uses.update(edges)
            new = {inner for inner, _ in edges} - seen
            seen |= new
            todo += new
        elsewhere = Counter(id(p) for name, _ in self._calls for p in self.parts[name].parameters())
        leaves = (getattr(node, "variable", None) for node in seen)
        elsewhere.update(id(self._substitutes.weight(leaf)) for leaf in leaves)  # those that the rest reads
        by_inputs = (
            name
            for node, (name, reused) in self._nodes.items()
            if node is not None and any(uses[node.next_functions[1 + at]] > 1 for at in reused)
        )
        by_weights = (
            name
            for name, group in self._calls
            if any(elsewhere[id(self.parts[name].get_parameter(p))] > 1 for p in group.reused_weights)
        )
        return frozenset((*by_inputs, *by_weights))

    def _uncalled(self) -> list[tuple[str, EqualParts]]:
        """Return the name and the group of each module that did not run but equals a part, since layers may be dropped
        by chance. Refused modules, and those inside or around a called part, are left out. The names are added to the
        groups."""
        called = {name for name, _ in self._calls}
        found = []
        for name, part in self.parts.items():
            has_run = name in self._refused or inside(name, called)
            group = None if has_run else self._equal(part)
            if group is not None:
                found.append((name, group))
                called.add(name)
                group.names.append(name)
        return found

    def _equal(self, part: nn.Module) -> EqualParts | None:
        """Return the known parts that have the forward function and the state of ``part``, and may equal it; None if
        there are none."""
        with self._patches.away():
            state = guards.ModuleTree(part).state(part)
            function = function_of(Original(part, part.forward))
        for group in self._groups:
            if group.function is function and state is not None and state.key == group.state:
                return group
        return None

    def _backward(self, outputs: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> bool:
        """Run the backward. Return whether that was possible: false without outputs, if an op of the user raises an
        error, or if the forward continues the graph of an earlier call, which a backward would free."""
        if reach(outputs, self._earlier):
            return False
        every = (*self.model.parameters(), *self._substitutes.leaves, *arguments, *self._anchors)
        leaves = [one for one in every if one.requires_grad and one.is_leaf]
        tangents = [torch.ones_like(one) for one in outputs]
        try:
            if outputs and leaves:
                torch.autograd.grad(outputs, leaves, tangents, allow_unused=True)
        except Exception:  # any error of a user's op; its forward has run
            return False
        return bool(outputs)

    def _part(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Run a module that may be planned, with a placeholder in the graph if it can be and gradients are enabled."""
        if not torch.is_grad_enabled() or LOCK.is_mine:  # inside of a part, or captured
            return original.forward(*args, **kwargs)
        group = self._group(name, original, args, kwargs)
        if group is None:
            return original.forward(*args, **kwargs)
        group.names.append(name)
        self._calls.append((name, group))
        return self._placed(group, original, args, kwargs)

    def _group(
        self, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> EqualParts | None:
        """Return the parts that are equal to a module in this call, new ones if needed. If the module is not planned,
        note why and return None; `ModelError` if a stated one cannot be captured."""
        with disable_current_modes(), self._patches.away(), LOCK.alone(), torch.enable_grad():
            leaves, spec = flattened_call(args, kwargs)
            state = guards.ModuleTree(original.model).state(original.model)
            assert state is not None
            if not any(t.requires_grad for t in (*state.named.values(), *tensors_in(leaves))):
                self._refused[name] = UNTRAINED
                return None
            tracing = Tracing(name, original, leaves, spec, state)
            function = function_of(original)
            for group in self._groups:
                if group.function is function and group.capture.serves(tracing):
                    return group
            key = function, tracing.key
            if key in self._failed:
                self._refused[name] = IS_EQUAL
                return None
            found = next(
                (one for one in self._captured if one.function is function and one.capture.serves(tracing)),
                None,
            )
            if found is None and key not in self._unsuited:
                found = self._capture(name, tracing, function, key)
            if found is None:
                self._refused[name] = self._unsuited[key]
                if self._unsuited[key] != UNTRAINED:
                    self._failed.add(key)
                return None
            self._groups.append(EqualParts(function, state.key, found.capture, found.step))
            return self._groups[-1]

    def _capture(self, name: str, tracing: Tracing, function: Any, key: Hashable) -> EqualParts | None:
        """Capture a module, and return the new parts that the capture serves. If the module is not planned, note why
        and return None; `ModelError` if a stated one cannot be captured."""
        try:
            found = Captures(name, most=1).captured(tracing)
            why = "" if self.stated else _unsuitable(found)
        except NoGradients:
            why = UNTRAINED
        except ModelError as error:
            if self.stated:
                raise
            why = str(error).removeprefix(f"{name}: ")
        if why:
            self._unsuited[key] = why
            return None
        ready = ReadyCapture(tracing.key, found)
        self._captured.append(
            EqualParts(function, tracing.state.key, ready, with_expected_tangents(found.step))
        )
        return self._captured[-1]

    def _placed(
        self, group: EqualParts, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a part's forward without a graph, and return its results as outputs of one placeholder node. Its forward
        and the node's backward are recorded as events."""
        call = len(self._calls) - 1
        self._event("F", call)
        structure: list[Any] = []

        def run() -> list[tuple[torch.Tensor, bool, bool]]:
            """Run the part's forward and return its tensors, which count as live now, each with what is known of that
            result. A slice makes the part unfit, unless parts are stated."""
            with self._live.paused():
                leaves, spec = pytree.tree_flatten(original.forward(*args, **kwargs))
            structure[:] = leaves, spec
            every = zip(leaves, group.results, strict=True)
            made = [(leaf, *of) for leaf, of in every if isinstance(leaf, torch.Tensor)]
            if not self.stated and any(_is_slice(leaf) for leaf, _, _ in made):
                self.unfit[self._calls[call][0]] = SLICE
            self._live.count([leaf for leaf, _, _ in made])
            return made

        anchor = torch.zeros(0, requires_grad=True)
        self._anchors.append(anchor)
        given = tensors_in(flattened_call(args, kwargs)[0])
        began = partial(self._event, "B", call)
        results = Placeholder.apply(run, began, anchor, *given)
        node = next((one.grad_fn for one in results if one.grad_fn is not None), None)
        self._nodes[node] = self._calls[call][0], group.reused
        made = iter(results)
        leaves, spec = structure
        leaves = [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        group.held = max(group.held, allocated_bytes((*given, *tensors_in(leaves))))
        return pytree.tree_unflatten(leaves, spec)


def _unsuitable(found: Found) -> str:
    """Return why a module is not planned although it can be captured; an empty text if it is."""
    if found.guard.decided.may_change:
        return "it decides by values or draws, and each outcome needs a capture"
    few = sum(not call.is_view and not call.backward for call in found.step.calls) < FEW
    return TOO_SMALL if few else ""


def _is_slice(tensor: torch.Tensor) -> bool:
    """Return whether a copy of a tensor has other strides, along dimensions with several elements."""
    if tensor.layout is not torch.strided:
        return False
    copied = torch.empty_like(tensor, device="meta").stride()
    return any(n > 1 and a != b for n, a, b in zip(tensor.shape, tensor.stride(), copied, strict=True))


def repeated_bytes(parts: Mapping[str, nn.Module], calls: Iterable[str]) -> int:
    """Return the bytes of trained parameters that occur in several calls of parts. ``calls``: the name of the part of
    each call."""
    times = Counter(p for name in calls for p in parts[name].parameters() if p.requires_grad)
    return sum(allocated(p.nbytes, p.device) for p, count in times.items() if count > 1)


def function_of(original: Original) -> Any:
    """Return the function that is a module's forward, without the module to which it is bound."""
    return getattr(original.forward, "__func__", original.forward)


class Placeholder(torch.autograd.Function):
    """A part in the autograd graph of a rehearsal."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], list[tuple[torch.Tensor, bool, bool]]],
        began: Callable[[], None],
        anchor: torch.Tensor,
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the part, and return its tensors. ``run`` returns each with two flags: whether it has a gradient, and
        whether a plan may hold it. ``began`` is called when the backward begins; ``anchor`` requires a gradient, so
        that the backward runs."""
        del anchor
        made = run()
        ctx.began, ctx.held = began, [tensor.detach() for tensor, _, held in made if held]
        ctx.save_for_backward(*given)
        ctx.mark_non_differentiable(*(tensor for tensor, learned, _ in made if not learned))
        return tuple(tensor for tensor, _, _ in made)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        """Return zeros as the gradients of the part's inputs."""
        del tangents
        ctx.began()
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        found = [torch.zeros_like(one) if needed else None for one, needed in wanted]
        ctx.held = None
        return None, None, None, *found
