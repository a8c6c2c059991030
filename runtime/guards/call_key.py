"""What decides which plan a call takes: how a module is called, and the state that it is in."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import (
    device_mode,
    get_cudnn_enabled,
    get_cudnn_sdp_enabled,
    get_flash_sdp_enabled,
    get_math_sdp_enabled,
    get_mem_efficient_sdp_enabled,
    get_mkldnn_enabled,
    get_overrideable_sdp_enabled,
    get_sdp_priority_order,
    pytree,
)

AUTOCAST = ("cpu", "cuda")
SETTINGS = (
    torch.get_default_dtype,
    torch.get_deterministic_debug_mode,
    get_mkldnn_enabled,
    get_cudnn_enabled,
    get_flash_sdp_enabled,
    get_mem_efficient_sdp_enabled,
    get_math_sdp_enabled,
    get_cudnn_sdp_enabled,
    get_overrideable_sdp_enabled,
    lambda: tuple(get_sdp_priority_order()),
    lambda: device_mode.CURRENT_DEVICE or torch.device("cpu"),
)
"""What is set for the whole process, or a block of it, and decides which ops a forward makes: its default type and
device, and which kernels it may use."""
COMPUTING = ("torch.nn.utils.", "transformers.utils.output_capturing")
"""Where hooks come from that do nothing but compute: reparametrizations, outputs of inner layers."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class ModuleState:
    """``attributes``: of a module and all in it, each once, in one order. ``named``: parameters and buffers, each once,
    by the name that ``named_parameters`` gives them. ``key``: classes, modes, hooks of the parts, and what the tensors
    are like."""

    attributes: list[dict[str, Any]]
    named: dict[str, torch.Tensor]
    key: tuple[Any, ...]


class ModuleTree:
    """The way through a module and its parts, found once and checked at every call."""

    def __init__(self, module: nn.Module) -> None:
        prefixes = [f"{name}." if name else "" for name, _ in module.named_modules()]
        self.parts = [m for _, m in module.named_modules()][1:]  # not the module: it would hold itself
        self.attributes = [m.__dict__ for m in module.modules()]
        self.children = [a["_modules"] for a in self.attributes]
        self.hooks = [a[kind] for a in self.attributes[1:] for kind in HOOKS]
        self.holders = [a[kind] for kind in ("_parameters", "_buffers") for a in self.attributes]
        self.expected = _flat(self.children), _keys(self.children), _keys(self.holders)
        names = [f"{p}{key}" for p, held in zip(2 * prefixes, self.holders, strict=True) for key in held]
        first: dict[int, int] = {}
        self.places = [first.setdefault(id(t), at) for at, t in enumerate(_flat(self.holders))]
        self.names = [names[at] for at in first.values()]
        self.firsts = list(first.values())

    def state(self, module: nn.Module) -> ModuleState | None:
        """The module's state; None if the way is another by now."""
        tensors = _flat(self.holders)
        if (
            self.attributes[0] is not module.__dict__
            or (_flat(self.children), _keys(self.children), _keys(self.holders)) != self.expected
            or len(set(map(id, tensors))) != len(self.firsts)
            or any(tensors[a] is not tensors[b] for b, a in enumerate(self.places) if a != b)
        ):
            return None
        own = [tensors[at] for at in self.firsts]
        named = {n: t for n, t in zip(self.names, own, strict=True) if t is not None}
        kinds = (type(module), *map(type, self.parts), *[a.get("training") for a in self.attributes])
        hooks = tuple((at, *hooks) for at, hooks in enumerate(self.hooks) if hooks) if any(self.hooks) else ()
        return ModuleState(
            self.attributes, named, (kinds, hooks, tuple(named), tuple(map(_like, named.values())))
        )


def _flat(held: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, held)))


def _keys(held: list[dict[str, Any]]) -> list[str]:
    return list(chain.from_iterable(held))


def call_key(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Any, ...]:
    """What a plan depends on in a call: the arguments but for the numbers in tensors, autocast and `SETTINGS`."""
    at: dict[int, int] = {}
    described = [
        (at.setdefault(id(leaf), len(at)), *_like(leaf)) if isinstance(leaf, torch.Tensor) else _exactly(leaf)
        for leaf in leaves
    ]
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST]
    settings = (torch.is_autocast_cache_enabled(), *[get() for get in SETTINGS])
    return tuple(described), spec, tuple(casts), settings


def check_dense(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Refuse tensors without strides.

    Raises:
        ModelError: the message begins with ``what``.
    """
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
            raise ModelError(f"{what} a {kind}; plans are for dense ones")


def check_no_hidden_tensors(leaves: Sequence[Any], what: str, called_later: bool = False) -> None:
    """Refuse objects with tensors that PyTorch does not look into; see `hides_tensors`.

    Raises:
        ModelError: the message begins with ``what``.
    """
    for one in leaves:
        if hides_tensors(one, called_later):
            raise ModelError(
                f"{what} a {type(one).__name__}, whose tensors PyTorch does not see; give them in a tuple or "
                f"dictionary, or register the class with torch.utils._pytree"
            )


def hides_tensors(one: Any, called_later: bool = False) -> bool:
    """Whether something leads to a tensor by its attributes, through containers and other objects, or is an iterator,
    which computes when it is asked. ``called_later``: or whether a function does by what it has of those around it."""
    if isinstance(one, Iterator):
        return True
    seen: set[int] = set()
    todo = _behind(one) if called_later else [getattr(one, "__dict__", None)]
    while todo:
        held = todo.pop()
        if isinstance(held, torch.Tensor):
            return True
        if id(held) in seen or isinstance(held, (type, ModuleType, FunctionType, nn.Module)):
            continue
        seen.add(id(held))
        leaves = pytree.tree_leaves(held)
        todo += leaves if leaves != [held] else [getattr(held, "__dict__", None)]
    return False


def _behind(one: Any) -> list[Any]:
    """An object's attributes, or what a function has of those around it and a method of its object."""
    held = [getattr(one, "__self__", None), getattr(one, "__dict__", None)]
    for cell in getattr(one, "__closure__", None) or ():
        with suppress(ValueError):  # nothing is in it yet
            held.append(cell.cell_contents)
    return held


class NotGiven(ModelError, AttributeError):
    """What is asked of an output that a planned step does not give; such an output has no attributes."""


class Withheld:
    """Stands in the place of an output that hides tensors: whoever uses it is told."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling look for
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotGiven(
            f"{self._what}, whose tensors PyTorch does not see, and a planned step does not give; register the class "
            f"with torch.utils._pytree, or call the model without gradients"
        )

    __call__ = __iter__ = _refuse


def hooked(module: nn.Module) -> list[str]:
    """The names of the parts of a module that have hooks, other than those that only compute."""
    return [
        name
        for name, m in module.named_modules()
        if m is not module
        and any(not _only_computes(hook) for kind in HOOKS for hook in m.__dict__[kind].values())
    ]


def _only_computes(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(COMPUTING)


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        lazy = tensor.is_conj(), tensor.is_neg()  # what its memory holds is still to be conjugated, negated
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, lazy
    except RuntimeError:  # it has no shape or no strides
        return tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad


def _exactly(leaf: Any) -> Any:
    """A key in which 1, 1.0 and True are told apart, and 0.0 from −0.0."""
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), _pickled(leaf)
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def _pickled(leaf: Any) -> bytes:
    try:
        return pickle.dumps(leaf)
    except Exception as error:  # whatever the object's own methods raise
        raise ModelError(
            f"an argument of type {type(leaf).__name__} can be neither hashed nor pickled, so that no call can be told "
            f"from another; give what it holds in a tuple or dictionary"
        ) from error
