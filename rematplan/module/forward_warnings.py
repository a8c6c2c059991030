"""Warnings about what a planned forward does otherwise: side effects of hooks, and code that `torch.compile` made."""

from __future__ import annotations

from typing import Any

from torch import nn

from rematplan.runtime.capture.capture import compiled_modules
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.guards.module_state import HOOKS

COMPUTING = ("torch.nn.utils.", "transformers.utils.output_capturing")
"""How names of modules begin whose hooks only compute: they reparametrise weights or collect inner outputs."""


def warn_of_hooks(model: nn.Module, name: str) -> None:
    """Warn if submodules of the model called ``name`` have hooks with possible side effects. Hooks that are defined in
    Python modules of `COMPUTING` are taken to have none."""
    names = [
        inner
        for inner, m in model.named_modules()
        if m is not model
        and any(not _only_computes(hook) for kind in HOOKS for hook in m.__dict__[kind].values())
    ]
    if names:
        warn(
            f"{name} has hooks on {', '.join(names[:3])}{' and others' * (len(names) > 3)}: they run only "
            f"when a step is planned; what they compute is part of the plan, other effects happen only then"
        )


def warn_of_compiled_code(model: nn.Module, name: str) -> None:
    """Warn if ``model``, called ``name``, or submodules of it are compiled: a plan has the ops of eager mode."""
    names = compiled_modules(model)
    if names:
        warn(
            f"{', '.join(names[:3])}{' and others' * (len(names) > 3)} of {name}: planned calls do not use what "
            f"torch.compile made of them; kernels='fused' fuses kernels within a plan, and rematplan.backend plans "
            f"inside of torch.compile"
        )


def _only_computes(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(COMPUTING)
