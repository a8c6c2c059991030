"""Find the exception that a model raises in eager mode: a forward that fails there is not an error of the tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rematplan.runtime.capture.restore_state import SameObjects
from rematplan.runtime.capture.same_contents import unchanged
from rematplan.runtime.graph.compat import TorchDynamoException, pytree

TRACED, TRACERS = "FunctionalTensor", "torch._subclasses"
"""Of the errors that a tracer's tensors cause outside of its trace: a name in most, and where others are raised."""


def own_error(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """Return the exception that a forward raises in eager mode; None if it raises none, or one that a tracer causes.
    The forward runs on copies; the model and all random states are restored."""
    (error,) = eager_forwards(model, forward, args, kwargs, 1)
    # Errors of TorchDynamo, or of a tensor that a trace left in a cache, are a tracer's, not the model's.
    return None if error is None or isinstance(error, TorchDynamoException) or _is_of_tracer(error) else error


def _is_of_tracer(error: Exception) -> bool:
    """Return whether an error is that of a tracer's tensor, or was raised by a method of one, such as its ``to``."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return TRACED in str(error) or str(frame.f_globals.get("__name__")).startswith(TRACERS)


def eager_forwards(
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    times: int,
    *,
    saving: bool = False,
) -> Iterator[Exception | None]:
    """Run a forward ``times`` times in eager mode on copies of tensors, and yield its exception, or None, after each
    run; afterwards all is restored. ``saving``: whether tensors are saved for a backward; if not, a run that fails is
    not yielded, and all runs begin again with saving."""
    saved = nullcontext() if saving else saved_tensors_hooks(_nothing, lambda kept: kept)
    with unchanged(model, copied=True), torch.enable_grad():
        for _ in range(times):
            given, named = pytree.tree_map_only(torch.Tensor, _copy, (args, kwargs))
            raised, objects = None, SameObjects(pytree.tree_leaves((args, kwargs)))
            try:
                with saved:
                    forward(*given, **named)
            except Exception as error:  # any error of the user's model
                raised = error
            finally:
                objects.restore()
            if raised and not saving:
                break
            yield raised
    if raised and not saving:
        yield from eager_forwards(model, forward, args, kwargs, times, saving=True)


def _nothing(_: torch.Tensor) -> torch.Tensor:
    return torch.empty(0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied if tensor.is_leaf else copied.clone()  # an op in place refuses a leaf
