"""What a model that cannot be captured raises of itself: its own check of a shape is no fault of the tracer's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rematplan.runtime.capture.restore_state import same_attributes, same_buffers, same_draws
from rematplan.runtime.graph.compat import TorchDynamoException, pytree


def own_error(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """The exception that ``forward(*args, **kwargs)`` raises without anything of ours, if it does.

    It runs once, with nothing kept for a backward (again with all kept, if it has a backward of its own), on copies of
    the tensors that it is given; the model's attributes, buffers and gradients, and all random states, are then as
    before.
    """
    asked: list[torch.Tensor] = []

    def nothing(_: Any) -> torch.Tensor:
        return torch.empty(0)

    def missed(kept: torch.Tensor) -> torch.Tensor:
        asked.append(kept)
        return kept

    found = _raised(model, forward, args, kwargs, saved_tensors_hooks(nothing, missed))
    return _raised(model, forward, args, kwargs, nullcontext()) if found and asked else found


def _raised(
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keeping: AbstractContextManager[Any],
) -> Exception | None:
    args, kwargs = pytree.tree_map_only(torch.Tensor, _copy, (args, kwargs))
    with (
        warnings.catch_warnings(),
        same_buffers(model),
        same_draws(),
        same_attributes(model, ""),
        torch.enable_grad(),
        keeping,
    ):
        warnings.simplefilter("ignore")
        try:
            forward(*args, **kwargs)
        except Exception as error:
            return None if isinstance(error, TorchDynamoException) else error  # a tracer's, not the model's
    return None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
