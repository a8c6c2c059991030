"""A call of a compiled plan as nodes of the autograd graph, one for each segment of the backward half.

The first runs the forward half. An empty tensor links each further node to the one before, so that autograd runs its
backward next; values pass between them in a `ForwardAndBackward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rematplan.runtime.graph.compat import DelayedError, keeps_graph


def as_nodes(call: Any, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run the forward half of a call, and return the module's outputs as nodes of the autograd graph. ``call``: a
    `ForwardAndBackward`. ``inputs``: the step's, without tangents, in order."""
    plan = call.plan
    link = torch.empty(0, device=plan.like.device)
    for k in range(len(plan.wanting) - 1, 0, -1):
        into = [inputs[at] for at in plan.wanting[k]]
        if k >= plan.halves.early:
            # Autograd gets no gradient for these parameters, but would run their hooks all the same.
            into = [t.detach().requires_grad_() for t in into]
        link = _BackwardSegment.apply(call, k, link, *into)
    first = (inputs[at] for at in plan.wanting[0])
    outputs: tuple[torch.Tensor, ...] = _ForwardNode.apply(call, link, *first)
    return outputs[:-1]


def _once_differentiable(backward: Any) -> Any:
    """Return a ``backward`` method of an autograd function whose results raise an error if they are differentiated
    again. ``backward``: the method."""

    def checked(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Run ``backward``. If gradients are enabled, its results raise an error when they are differentiated."""
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        given = [r for r in results if r is not None]
        # In the autograd graph, the error must be between the gradients and all tensors that they depend on.
        # Otherwise autograd would return zero as the derivative by such a tensor.
        depend_on = [*ctx.saved_tensors, *(g for g in gradients if g is not None)]
        error = DelayedError(
            f"{ctx.call.plan.like.name}: a planned step has no second derivatives; compute them with the "
            f"original model, or after rematplan.remove",
            len(given) + len(depend_on),
        )
        last = iter(error(*given, *depend_on))
        return tuple(None if r is None else next(last) for r in results)

    return staticmethod(checked)


class _ForwardNode(torch.autograd.Function):
    """The autograd node that runs the forward half and, in its backward, the first segment of the backward half. It
    saves an empty tensor that depends on all inputs. Differentiating the gradients again is then an error, not zero."""

    @staticmethod
    def forward(ctx: Any, call: Any, link: torch.Tensor, *inputs: torch.Tensor) -> Any:
        """Run the forward half of ``call``, and return its outputs, those without gradients marked, and an empty tensor
        that links later segments to this node."""
        del inputs
        ctx.call, ctx.link = call, link.device
        ctx.set_materialize_grads(False)  # gradients of unused outputs stay None
        results = call.forward()
        ctx.mark_non_differentiable(*(results[at] for at in call.plan.constant_outputs))
        after_all = torch.empty_like(link)
        ctx.save_for_backward(after_all)
        return *results, after_all

    @_once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        tangents = ctx.call.begin(gradients, keeps_graph())
        if tangents is None:
            return (None,) * len(ctx.needs_input_grad)
        del gradients
        return None, torch.empty(0, device=ctx.link), *ctx.call.backward(0, *tangents)


class _BackwardSegment(torch.autograd.Function):
    """An autograd node whose backward runs one later segment of the backward half, and whose forward computes nothing.
    Segments of the second part of a split backward wait in `ForwardAndBackward.deferred` for `finish_backward`."""

    @staticmethod
    def forward(ctx: Any, call: Any, k: int, link: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        del inputs
        ctx.call, ctx.k = call, k
        ctx.set_materialize_grads(False)
        return torch.empty_like(link)

    @_once_differentiable
    def backward(ctx: Any, link: torch.Tensor | None) -> Any:
        """Run this segment of the backward and return its gradients; all None if no ``link`` arrives. From segment
        ``early`` on, nothing runs, and the call is put off to ``deferred``, once."""
        if link is None:
            return (None,) * len(ctx.needs_input_grad)
        call, early = ctx.call, ctx.call.plan.halves.early
        if ctx.k >= early:
            if ctx.k == early:
                call.deferred.append(call)
            return None, None, link, *(None,) * len(call.plan.wanting[ctx.k])
        return None, None, link, *call.backward(ctx.k)


NODES: tuple[type, ...] = tuple(f._backward_cls for f in (_ForwardNode, _BackwardSegment))
"""The classes of the nodes of planned steps in the autograd graph."""
