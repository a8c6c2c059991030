"""Warn of training that bypasses a plan: by methods other than ``forward``, a replaced ``forward``, or the original
model."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rematplan.runtime.execute.autograd_nodes import NODES
from rematplan.runtime.graph.compat import (
    any_mode,
    at_end_of_backward,
    current_graph_task,
    disable_dynamo,
    pytree,
)
from rematplan.runtime.graph.warn import warn

_NO_PLAN = "that part of the step has no plan and may exceed the budget"


class _Found(threading.local):
    """The number of calls that bypassed a plan, in each thread separately."""

    calls = 0


_FOUND = _Found()
_planned_calls = 0
"""The number of calls of planned modules in this process."""


@dataclass
class BypassWarnings:
    """The warnings that one planned module has given, and its watch for backwards. ``name``: the model's name."""

    name: str
    told: set[str] = field(default_factory=set)
    """The calls for which a warning was given, as texts. Each gets one warning."""
    watched: list[RemovableHandle] = field(default_factory=list)
    """The hooks that wait for a backward before the first planned call."""

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add hooks to the trained parameters, which warn once if a backward gives one a gradient before any planned
        module is called. The end of that backward, a planned call of this module or `end_watch` removes them."""
        before, told = _planned_calls, False

        def tell(_: torch.Tensor) -> None:
            """Warn, at the first gradient only, if no planned module was called since the watch began. The watch ends
            with the backward."""
            nonlocal told
            if told or current_graph_task() < 0:  # weight gradients that come after a planned backward
                return
            told = True
            # FSDP2 may be iterating over the hooks, so they are removed when the backward ends.
            at_end_of_backward(self.end_watch)
            if _planned_calls == before:
                warn(
                    f"a backward gave gradients to parameters of {self.name}, whose planned forward has not run: "
                    f"{_NO_PLAN}; call the planned module itself, not its original model, a part or a method"
                )

        trained = (p for p in parameters if p.requires_grad and p.is_leaf)
        self.watched += [p.register_post_accumulate_grad_hook(tell) for p in trained]

    def begin_planned_call(self) -> None:
        """Record that a planned forward runs: backwards are not watched any longer."""
        global _planned_calls
        _planned_calls += 1
        if self.watched:
            self.end_watch()

    def end_watch(self) -> None:
        """Watch for no backward any longer."""
        while self.watched:
            self.watched.pop().remove()

    def run_and_warn(self, planned: nn.Module, what: str, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, and warn, once for each ``what``, if its backward would give the module's
        parameters gradients without a planned forward. A warning also ends the watch. While gradients are disabled, or
        a dispatch mode (such as a tracer's) is active, nothing is checked."""
        if not torch.is_grad_enabled() or any_mode():
            return call()
        before = _FOUND.calls
        result = call()
        # Of calls inside of each other, only the innermost is warned of.
        if _FOUND.calls == before and (what in self.told or _bypasses_plan(result, planned)):
            _FOUND.calls += 1
            if what not in self.told:
                self.told.add(what)
                self.end_watch()
                warn(
                    f"{what} computes with parameters of the planned {self.name} outside of its planned forward: "
                    f"{_NO_PLAN}; call the planned module itself, or plan the submodules that are called"
                )
        return result


def watched_methods(kind: type[nn.Module], calls: Callable[[Any], BypassWarnings]) -> dict[str, Any]:
    """Return replacements, by name, for the methods of a model's class, without special ones and those of `nn.Module`:
    each runs by `BypassWarnings.run_and_warn`. ``calls``: returns the `BypassWarnings` of a planned module."""
    names = (name for name in dir(kind) if not (name.startswith("__") or hasattr(nn.Module, name)))
    found = {name: inspect.getattr_static(kind, name) for name in names}
    return {name: _watched(kind, m, calls) for name, m in found.items() if isinstance(m, FunctionType)}


def _watched(kind: Any, method: FunctionType, calls: Callable[[Any], BypassWarnings]) -> Any:
    @functools.wraps(method)
    @disable_dynamo
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        present = getattr(kind, method.__name__)  # the class may have got another method since
        what = f"{kind.__name__}.{method.__name__}"
        return calls(self).run_and_warn(self, what, functools.partial(present, self, *args, **kwargs))

    return watched


def _bypasses_plan(result: Any, planned: nn.Module) -> bool:
    """Return whether a backward of the tensors in ``result`` gives gradients to parameters of a planned module other
    than through planned forwards."""
    tensors = (t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
    todo = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen, own = set(todo), None
    while todo:
        node = todo.pop()
        for inner, _ in node.next_functions:
            if inner is None or inner in seen:
                continue
            if type(inner).__name__ != "AccumulateGrad":
                seen.add(inner)
                todo.append(inner)
            elif not isinstance(node, NODES):
                own = {id(p) for p in planned.parameters()} if own is None else own
                if id(inner.variable) in own:  # type: ignore[attr-defined]
                    return True
    return False
