"""Run what `torch.compile` compiled in eager mode, or as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rematplan.runtime.graph.compat import (
    OptimizedModule,
    callback_from_stance,
    functorch_config,
    inductor_config,
)

REGION = "region_activation_memory_budget"
"""The name in `torch.autograd.graph` of a budget's context, an error in eager mode; PyTorch 2.15 has it."""

Context = Callable[[], AbstractContextManager[object]]


@contextmanager
def in_eager_mode() -> Iterator[list[object]]:
    """Run compiled code in eager mode inside the block. Yield a list with an entry for each call of such code."""
    calls: list[object] = []

    def told(callback: Any) -> Any:
        calls.extend([callback] if callback else [])
        return callback_from_stance(callback)

    name = f"{callback_from_stance.__module__}.{callback_from_stance.__name__}"
    with torch.compiler.set_stance("force_eager"), patch(name, told), _without_regions():
        yield calls


def _without_regions() -> AbstractContextManager[object]:
    if not hasattr(torch.autograd.graph, REGION):
        return nullcontext()
    return patch.object(torch.autograd.graph, REGION, lambda _budget: nullcontext())


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any], Context]]:
    """Take compiled modules out of their wrappers inside the block, so that results have the names of the originals.
    Yield the original model, what is called in its place, and a context that puts the wrappers back."""
    original = model._orig_mod if isinstance(model, OptimizedModule) else model
    places = [
        (parent._modules, name, module)
        for parent in original.modules()
        if not isinstance(parent, OptimizedModule)
        for name, module in parent._modules.items()
        if isinstance(module, OptimizedModule)
    ]

    def put(wrapped: bool) -> None:
        for modules, name, module in places:
            modules[name] = module if wrapped else module._orig_mod

    @contextmanager
    def as_wrapped() -> Iterator[None]:
        put(True)
        try:
            yield
        finally:
            put(False)

    put(False)
    try:
        yield original, model if original is model else model.__call__, as_wrapped
    finally:
        put(True)


@contextmanager
def compiled_anew(without_budget: bool = False) -> Iterator[None]:
    """Drop compiled code when the block begins and ends: it would not follow changed settings. ``without_budget``:
    whether ``activation_memory_budget`` is 1 meanwhile."""
    with ExitStack() as stack:
        if without_budget:
            stack.enter_context(functorch_config.patch(activation_memory_budget=1.0))
            stack.enter_context(_without_regions())
        stack.callback(torch.compiler.reset)
        torch.compiler.reset()
        yield


@contextmanager
def same_random_numbers(wrapped: Context) -> Iterator[None]:
    """Let what Inductor compiles inside the block draw the numbers of eager mode."""
    with wrapped(), inductor_config.patch(fallback_random=True):
        yield


def note_of_compiled(draws: bool) -> str:
    """Return a note on how a compiled step is audited."""
    drawn = ", compared with the random numbers of eager mode (fallback_random)" if draws else ""
    return (
        f"torch.compile with activation_memory_budget {functorch_config.activation_memory_budget:g}{drawn}; "
        "how often hooks of modules run is not compared"
    )
