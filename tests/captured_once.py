"""Models that are alike are captured and exported once: a trace takes longer than most tests that begin with one.

A capture serves another model where a plan would: if the call has the same key and the guard holds. So where a guard is
too lax, a test gets another model's step, and fails.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import ismethod
from typing import Any

import pytest
import torch
from torch import fx, nn

from rematplan.module.forward_capture import Tracing
from rematplan.module.runner import Runner
from rematplan.module.symbolic_forward import Found, OpenForward
from rematplan.pipeline import auto_cuts
from rematplan.runtime.pipeline import stage_modules


def _shown(one: Any) -> Any:
    """A tensor as what a trace knows of it; a function as it is; anything else as it shows itself."""
    if isinstance(one, torch.Tensor):
        return type(one), one.shape, one.stride(), one.dtype, one.device, one.requires_grad
    return one if callable(one) else repr(one)


def _module(module: nn.Module) -> Hashable:
    """What a module is apart from its attributes; stages have a class each, so they are what their code is."""
    return module.code if isinstance(module, fx.GraphModule) else type(module)


def _modules(model: nn.Module) -> tuple[Hashable, ...]:
    return tuple((name, _module(module)) for name, module in model.named_modules())


@contextmanager
def captured_once() -> Iterator[None]:
    """Inside the block, `Tracing` and `exported` return what they made of a model that is alike."""
    fixed, symbolic, exported = Tracing.fixed, Tracing.symbolic, stage_modules.exported
    distrust = Runner._distrust
    found: dict[Hashable, list[Found]] = {}
    opened: dict[Hashable, list[OpenForward]] = {}
    graphs: dict[Hashable, fx.Graph] = {}

    def key(tracing: Tracing) -> Hashable:
        own = tracing.original.forward
        function = own.__func__ if ismethod(own) else own
        return tracing.name, _modules(tracing.model), function, tracing.packed, tracing.key

    def fixed_once(tracing: Tracing) -> Found:
        known = found.setdefault((key(tracing), tracing.assumed), [])
        for one in known:
            if one.guard.holds(tracing.state, tracing.batch, tracing.assumed):
                return one
        known.append(fixed(tracing))
        return known[-1]

    def symbolic_once(tracing: Tracing, *how: Any) -> OpenForward:
        known = opened.setdefault((key(tracing), tracing.assumed, how), [])
        for one in known:
            if one.accepted(tracing.state, tracing.batch, *how[1:]):
                return replace(one)  # plans belong to the copy
        known.append(symbolic(tracing, *how))
        return replace(known[-1])

    def exported_once(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Graph:
        plain = [
            (name, one)
            for module in model.modules()
            for name, one in vars(module).items()
            if name == "training" or not name.startswith("_")
        ]
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        values = (*plain, *tensors, *enumerate(args), *kwargs.items())
        at = _modules(model), tuple((name, _shown(one)) for name, one in values)
        if at not in graphs:
            graphs[at] = exported(model, args, kwargs)
        return graphs[at]

    def distrusting(runner: Runner, results: Any) -> None:
        """After ops gave other results than captured, all is captured anew."""
        found.clear()
        opened.clear()
        distrust(runner, results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_distrust", distrusting)
        patch.setattr(Tracing, "fixed", fixed_once)
        patch.setattr(Tracing, "symbolic", symbolic_once)
        for room in (stage_modules, auto_cuts):
            patch.setattr(room, "exported", exported_once)
        yield
