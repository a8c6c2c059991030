"""Watch `torch.autograd.Function`s of libraries and users, or differentiate their forward by autograd instead of by
their own backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Function

from rematplan.runtime.capture.patches.checkpoint import EachRun

Kind = type[Function]


@contextmanager
def watched_functions(watch: Callable[[Kind], EachRun]) -> Iterator[None]:
    """Call ``watch`` with the class for each call of a Function that is not PyTorch's or rematplan's, if its forward
    runs in this thread. ``watch`` returns a function that makes a context for each run: of the forward, then of the
    backward."""
    thread = get_ident()
    contexts: dict[
        int, tuple[Any, EachRun]
    ] = {}  # each context is the node of the graph: kept, so that its id is

    def watched(kind: Kind) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Return methods of ``kind`` (forward, backward, setup_context). For each call in this thread, they run inside
        contexts that ``watch`` gives."""
        first, again, set_up = kind.forward, kind.backward, kind.setup_context
        pending: list[EachRun] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Run the forward inside a context from ``watch``, kept for the backward. Other threads, and other classes
            that inherit the method, run it without one."""
            if get_ident() != thread or not (_has_set_up(set_up) or _is_of(args[0], kind)):
                return first(*args, **kwargs)
            each_run = watch(kind)
            if _has_set_up(set_up):
                pending.append(each_run)
            else:
                contexts[id(args[0])] = args[0], each_run
            with each_run():
                return first(*args, **kwargs)

        def setup_context(context: Any, *args: Any, **kwargs: Any) -> Any:
            if pending:
                contexts[id(context)] = context, pending.pop()
            return set_up(context, *args, **kwargs)

        def backward(context: Any, *gradients: Any) -> Any:
            _, each_run = contexts.get(id(context), (None, nullcontext))
            with each_run() if _is_of(context, kind) else nullcontext():
                return again(context, *gradients)

        return forward, backward, setup_context if _has_set_up(set_up) else set_up

    with _replaced({kind: watched(kind) for kind in _kinds()}):
        yield


@contextmanager
def without_own_backwards(kinds: Collection[Kind]) -> Iterator[None]:
    """Differentiate these classes' forwards by autograd, inside the block and in this thread, also where they enter
    ``no_grad``. A ``kind.apply`` taken before the block makes a node whose backward differentiates the forward's graph
    by itself."""
    thread, no_grad, applied = get_ident(), torch.no_grad, vars(Function)["apply"]
    forwards = {kind: (kind.forward, _has_set_up(kind.setup_context)) for kind in kinds}
    codes = {forward.__code__ for forward, _ in forwards.values() if hasattr(forward, "__code__")}

    def entered(*args: Any) -> Any:
        own = get_ident() == thread and sys._getframe(1).f_code in codes
        return nullcontext() if own and not args else no_grad(*args)

    def run(kind: Kind, args: tuple[Any, ...]) -> Any:
        forward, has_set_up = forwards[kind]
        return forward(*args) if has_set_up else forward(_Context(args), *args)

    def apply(kind: Kind, *args: Any, **kwargs: Any) -> Any:
        if kind not in forwards or get_ident() != thread:
            return applied.__get__(None, kind)(*args, **kwargs)
        return run(kind, args)

    def apart(kind: Kind) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Return methods of ``kind`` (forward, backward, setup_context). The forward keeps the graph of a run on
        detached inputs; the backward differentiates that graph."""

        def forward(context: Any, *args: Any) -> Any:
            """Run the forward with gradients on detached inputs. Keep these and the outputs, with their graph, in
            ``context``, and return the outputs without it."""
            if not _is_of(context, kind):
                return forwards[kind][0](context, *args)
            context.inputs = [_detached(a) for a in args]
            with torch.enable_grad():
                context.outputs = run(kind, tuple(context.inputs))
            if isinstance(context.outputs, tuple):
                return tuple(map(_without_graph, context.outputs))
            return _without_graph(context.outputs)

        def backward(context: Any, *gradients: Any) -> Any:
            outputs = context.outputs if isinstance(context.outputs, tuple) else (context.outputs,)
            trained = [
                (o, g) for o, g in zip(outputs, gradients, strict=True) if getattr(o, "requires_grad", False)
            ]
            torch.autograd.backward([o for o, _ in trained], [g for _, g in trained])
            return tuple(getattr(a, "grad", None) for a in context.inputs)

        return forward, backward, Function.setup_context

    with (
        _replaced({kind: apart(kind) for kind in kinds}),
        patch.object(Function, "apply", classmethod(apply)),
        patch.object(torch, "no_grad", entered),
    ):
        yield


@contextmanager
def _replaced(
    methods: dict[Kind, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]],
) -> Iterator[None]:
    """Replace ``forward``, ``backward`` and ``setup_context`` of classes inside the block. All threads see it."""
    with ExitStack() as stack:
        for kind, replacements in methods.items():
            for name, new in zip(("forward", "backward", "setup_context"), replacements, strict=True):
                stack.enter_context(patch.object(kind, name, staticmethod(new)))
        yield


def _kinds() -> list[Kind]:
    """Return all Functions that exist, except PyTorch's and rematplan's own and those without a method ``backward``."""
    found, todo = [], list(Function.__subclasses__())
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if (
            not kind.__module__.startswith(("torch.", "rematplan."))
            and kind.backward is not Function.backward
        ):
            found.append(kind)
    return list(dict.fromkeys(found))


def _is_of(context: Any, kind: Kind) -> bool:
    """Return whether a context is that of a call of this class, and not of a derived one that calls its methods."""
    return getattr(type(context), "_forward_cls", None) is kind


def _has_set_up(set_up: Callable[..., Any]) -> bool:
    return set_up is not Function.setup_context


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


class _Context:
    """Is passed to a forward in place of the context that its own backward would read."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *_tensors: torch.Tensor) -> None:
        pass

    mark_non_differentiable = mark_dirty

    def set_materialize_grads(self, _value: bool) -> None:
        pass
