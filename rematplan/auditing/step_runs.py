"""Run a training step again and again from the same state, and collect all that it leaves behind."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from rematplan.auditing.compiled import Context, same_random_numbers
from rematplan.auditing.python_state import Holder, copied_state, holders_of, hook_places, same_state, title
from rematplan.auditing.recomputations import Autocast, autocast_state
from rematplan.ir import UsageError
from rematplan.runtime.capture.restore_state import same_draws, same_gradients
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.generator_states import global_generators, states_of

STEPS = 2
"""The steps of a run; their gradients accumulate."""
GOLDEN_ANGLE = 2.399963229728653
SUMS = 100
"""The largest relative rounding error without a run in float64, as a multiple of the type's epsilon."""


@dataclass(frozen=True)
class Step:
    """A training step: a model, its inputs, and the loss of its output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor]
    called: Callable[..., Any]
    """What is called with the inputs: the model, or another implementation of it."""
    autocast: Autocast = field(default_factory=autocast_state)
    """The autocast state of the forward; the backward runs without autocast."""
    wrapped: Context = nullcontext
    """The context in which the step runs with its own checkpointing, and compiled as it is."""
    compiled: bool = False
    """Whether `torch.compile` compiled a part of it."""

    @cached_property
    def models(self) -> list[nn.Module]:
        """The modules whose state the step may change."""
        other = isinstance(self.called, nn.Module) and self.called is not self.model
        return [self.model, *([self.called] if other else [])]  # type: ignore[list-item]

    @cached_property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def as_it_is(self) -> Context:
        """The context in which the step is compared."""
        return partial(same_random_numbers, self.wrapped) if self.compiled else self.wrapped

    def of(self, called: Callable[..., Any]) -> Step:
        """Return the same step with another implementation of the model."""
        return replace(self, called=called, wrapped=nullcontext)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Run forward and backward, and return the loss, detached; `UsageError` unless it is one number that trains."""
        with torch.enable_grad():
            loss = self.loss(self.called(*args, **kwargs))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                "the loss must be a tensor with one element; state loss=, a function of the output"
            )
        if not loss.requires_grad:
            raise UsageError("the loss depends on no parameter that is trained")
        with ExitStack() as stack:
            for kind, enabled, _ in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            loss.backward()
        return loss.detach()

    def fresh(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return copies of the inputs."""
        return pytree.tree_map_only(torch.Tensor, _copy, (self.args, dict(self.kwargs)))  # type: ignore[no-any-return]


@dataclass
class Results:
    """What one step leaves behind, by name. ``tensors`` are compared by their error, ``others`` for equality."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def default_loss(output: Any) -> torch.Tensor:
    """Return the tensor ``loss`` of an output, or the output's first floating-point tensor if it has one element.
    Otherwise return a weighted sum of all tensors that require gradients; `UsageError` if there are none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if found and found[0].numel() == 1:
        return found[0].sum()
    sums = [_weighted_sum(t) for t in found if t.requires_grad]
    if not sums:
        raise UsageError("the model has no output that depends on a trained parameter; state a loss")
    return torch.stack(sums).sum()


def _weighted_sum(t: torch.Tensor) -> torch.Tensor:
    # Equal weights would give zero gradients to a softmax or a norm at the end.
    weights = torch.arange(t.numel(), device=t.device).mul(GOLDEN_ANGLE).cos().view(t.shape)
    return (t * weights.to(t)).sum()


@contextmanager
def restored(step: Step) -> Iterator[list[Holder]]:
    """Begin without gradients, and restore all that a step may change. Yield what holds Python state."""
    holders = [holder for model in step.models for holder in holders_of(model)]
    with ExitStack() as stack:
        for model in step.models:
            stack.enter_context(same_gradients(model))
        stack.enter_context(same_draws())
        stack.enter_context(same_state(holders))
        yield holders


def results_of(step: Step, path: Context | None = None) -> list[Results]:
    """Run `STEPS` steps inside of ``path``, or as they are, and restore the state. Return what each leaves behind."""
    found = []
    with restored(step) as holders, _counted_hooks(step) as firings:
        before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
        for _ in range(STEPS):
            firings.clear()
            args, kwargs = step.fresh()
            with (path or step.as_it_is)():
                loss = step.run(args, kwargs)
            found.append(_results(step, loss, (args, kwargs), holders, before, dict(firings)))
    return found


def _results(
    step: Step,
    loss: torch.Tensor,
    inputs: Any,
    holders: list[Holder],
    before: Mapping[str, torch.Tensor],
    firings: Mapping[str, int],
) -> Results:
    """Return what a step leaves behind: loss, gradients, changed parameters, buffers, attributes, random states, and
    how often hooks ran."""
    tensors = {"loss": loss}
    for kind, named in (
        ("gradient", step.models[-1].named_parameters()),
        ("parameter", step.model.named_parameters()),
    ):
        for name, p in named:
            value = p.grad if kind == "gradient" else None if torch.equal(p, before[name]) else p
            if value is not None:
                tensors[f"{kind} {name}"] = value.detach().clone()
    leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    tensors |= {f"gradient input {i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    tensors |= {f"buffer {name}": b.clone() for name, b in step.model.named_buffers()}
    others: dict[str, Any] = {**random_states()}
    others |= {f"firings {name}": count for name, count in firings.items()}
    for name, value in copied_state(holders).items():
        if isinstance(value, torch.Tensor):
            tensors[f"attribute {name}"] = value
        else:
            others[f"attribute {name}"] = value
    return Results(tensors, others)


def rounding_of(step: Step) -> float:
    """Return the largest relative difference that may be rounding, from the types of parameters and autocast."""
    kinds = {p.dtype for p in step.model.parameters() if p.is_floating_point()}
    kinds |= {kind for _, enabled, kind in step.autocast if enabled}
    eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    return min(SUMS * eps, math.sqrt(eps))


def random_states() -> dict[str, bytes]:
    """Return the states of all global random number generators, by name."""
    return {f"random state of {k}": _bytes(v) for k, v in states_of(global_generators()).items()}


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


@contextmanager
def _counted_hooks(step: Step) -> Iterator[dict[str, int]]:
    """Count inside the block how often each hook of the model runs, by the hook's name and what it belongs to. Of a
    compiled step, only hooks of parameters count."""
    counts: dict[str, int] = {}

    def counted(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return hook(*args, **kwargs)

        return run

    # Compiled code has the hooks that modules had when it was compiled.
    parameters = dict(step.model.named_parameters())
    places = [place for place in hook_places(step.model) if not step.compiled or place.of in parameters]
    originals = [dict(place.hooks) for place in places]
    for place in places:
        kind = "gradient hook" if place.of_gradients else "forward hook"
        for number, hook in place.hooks.items():
            place.hooks[number] = counted(hook, f"{kind} {title(hook)} of {place.of}")
    try:
        yield counts
    finally:
        for place, hooks in zip(places, originals, strict=True):
            place.hooks.update({number: hook for number, hook in hooks.items() if number in place.hooks})


@contextmanager
def in_float64(step: Step) -> Iterator[Step]:
    """Convert parameters and buffers to float64 (complex128) inside the block, and yield the step with such inputs.
    Gradients are None meanwhile."""
    tensors = {id(t): t for model in step.models for t in (*model.parameters(), *model.buffers())}
    before = [(t, t.data) for t in tensors.values()]
    gradients = [(t, t.grad) for t in tensors.values()]
    try:
        for t, _ in before:
            t.grad = None
            t.data = _widened(t.data)
        args, kwargs = pytree.tree_map_only(torch.Tensor, _wide_input, (step.args, dict(step.kwargs)))
        yield replace(step, args=args, kwargs=kwargs)
    finally:
        for t, data in before:
            t.grad = None
            t.data = data
        for t, gradient in gradients:
            t.grad = gradient


def _wide_input(t: torch.Tensor) -> torch.Tensor:
    return _widened(t.detach()).requires_grad_(t.requires_grad)


def _widened(t: torch.Tensor) -> torch.Tensor:
    if t.is_complex():
        return t.to(torch.complex128)
    return t.double() if t.is_floating_point() else t


def _copy(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)
