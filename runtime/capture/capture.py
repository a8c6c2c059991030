"""Capture a training step: trace a module on a batch, forward and backward, as a list of ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.capture.joint_trace import TraceRequest, trace_joint_graph
from rematplan.runtime.capture.read_fx import finished
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import OptimizedModule, is_compiled_in_place
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder


def capture(
    module: nn.Module,
    batch: Sequence[torch.Tensor],
    name: str,
    root: nn.Module | None = None,
    decisions: ValueGuardRecorder | None = None,
    check: Callable[[], None] = lambda: None,
) -> CapturedStep:
    """Trace ``module(*batch)``, which returns a tensor or a tuple of tensors, with its backward as one step of ATen
    calls, and leave the module unchanged. No output may be a view of an input, a parameter or another output. ``root``:
    each call has the name of its submodule within it; None: within ``module``. ``decisions``: records the forward's
    decisions by values of tensors; None forbids them. ``check``: called after the backward. Raises `ModelError` if the
    module cannot be traced."""
    root = module if root is None else root  # not `or`: an empty module list is false
    return finished(trace_joint_graph(TraceRequest(module, batch, name, root, decisions, check=check)).step)


def check_traceable(module: nn.Module) -> None:
    """Raise `ModelError` for a module that cannot be traced as one graph: with scripted or sharded parts, or lazy
    tensors."""
    name = type(module).__name__
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise ModelError(f"{name} is scripted, or has a scripted submodule; plan the module before scripting")
    if any(hasattr(m, "reshard") for m in list(module.modules())[1:]) or any(
        map(_is_sharded, module.parameters())
    ):
        raise ModelError(
            f"{name} is sharded, or has a sharded submodule; plan it in place (rematplan.apply), or plan first, then "
            f"shard the planned module as one unit"
        )
    if any(nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise ModelError(f"{name} has parameters whose shape is not known yet; call it once before planning")


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of compiled modules in ``model``, and its class's name if it is an `OptimizedModule`. If it was
    compiled in place, only its call is: a plan replaces the forward that this calls."""
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if isinstance(module, OptimizedModule) or (module is not model and is_compiled_in_place(module))
    ]


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements")
