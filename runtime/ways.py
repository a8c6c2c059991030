"""What decides which plan a call takes: how a module is called, and the state that it is in."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rematplan.ir import ModelError

AUTOCAST = ("cpu", "cuda")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class ModuleState:
    """``modules``: it and all in it, each once, in one order. ``named``: parameters and buffers, each once, by the name
    that ``named_parameters`` gives them. ``key``: classes, modes, hooks of the parts, and what the tensors are like."""

    modules: list[nn.Module]
    named: dict[str, torch.Tensor]
    key: tuple[Any, ...]


def module_state(module: nn.Module) -> ModuleState:
    """In one pass: it is made at every call."""
    modules: list[nn.Module] = []
    named: dict[str, torch.Tensor] = {}
    kinds: list[Any] = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        state = one.__dict__
        kinds.append((type(one), state["training"]))
        if modules:  # the hooks of the module itself run around its forward, whatever that is
            kinds += [tuple(state[kind]) for kind in HOOKS if state[kind]]
        modules.append(one)
        for held in (state["_parameters"], state["_buffers"]):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[prefix + name] = tensor
        if state["_modules"]:
            children = reversed(state["_modules"].items())
            waiting += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return ModuleState(modules, named, (tuple(kinds), tuple(named), tuple(map(_like, named.values()))))


def call_key(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Any, ...]:
    """What a plan depends on in a call: the arguments but for the numbers in tensors, and autocast."""
    at: dict[int, int] = {}
    described = [
        (at.setdefault(id(leaf), len(at)), *_like(leaf)) if isinstance(leaf, torch.Tensor) else _exactly(leaf)
        for leaf in leaves
    ]
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST]
    return tuple(described), spec, tuple(casts)


def check_no_hidden_tensors(leaves: Sequence[Any], what: str) -> None:
    """Refuse objects with tensors that PyTorch does not look into.

    Raises:
        ModelError: the message begins with ``what``.
    """
    for one in leaves:
        if any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(getattr(one, "__dict__", None))):
            raise ModelError(
                f"{what} a {type(one).__name__}, whose tensors PyTorch does not see; give them in a tuple or "
                f"dictionary, or register the class with torch.utils._pytree"
            )


def hooked(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The parts of a module with hooks, other than those of torch's own that reparametrize a layer."""
    return [
        m
        for m in modules[1:]
        if any(not _reparametrizes(hook) for kind in HOOKS for hook in m.__dict__[kind].values())
    ]


def _reparametrizes(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils")


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _exactly(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), pickle.dumps(leaf)
    return type(leaf), leaf  # 1, 1.0 and True are equal
