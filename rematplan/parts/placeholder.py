"""`Placeholder`: a part in the autograd graph of a rehearsal, which holds what the part may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
