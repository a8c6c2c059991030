"""A hashable key of a call of a module: of its arguments, of autocast, and of process-wide settings. Modes in which no
key holds are refused (`check_modes`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import (
    device_mode,
    forward_mode_level,
    function_modes,
    get_cudnn_enabled,
    get_cudnn_sdp_enabled,
    get_flash_sdp_enabled,
    get_math_sdp_enabled,
    get_mem_efficient_sdp_enabled,
    get_mkldnn_enabled,
    get_overrideable_sdp_enabled,
    get_sdp_priority_order,
    peek_interpreter_stack,
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
"""Functions that return the process-wide settings that decide which ops a forward calls: the default type and
device, and which kernels are enabled. Context managers change some of these settings."""


def check_modes(name: str) -> None:
    """Raise `ModelError` inside of torch.func's transforms, forward-mode derivatives and users' modes that change
    functions. Modes of PyTorch and of this package, such as a device's context, are accepted. ``name``: the called
    module's name, for the message."""
    if peek_interpreter_stack() is not None or forward_mode_level() >= 0:
        raise ModelError(
            f"{name} is planned for the backward of a loss; for torch.func's transforms and forward-mode derivatives, "
            f"use the original model, or call rematplan.remove before"
        )
    for mode in function_modes():
        if not type(mode).__module__.startswith(("torch.", "rematplan.")):
            raise ModelError(
                f"{name} is called inside of a {type(mode).__name__}, a mode that changes functions of torch, which a "
                f"planned step does not call; enter it inside of the forward"
            )


def call_key(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Any, ...]:
    """Return a hashable key of a call: of its arguments, flattened to ``leaves`` and ``spec``, without values of
    tensors, and of settings on which a plan depends. `ModelError` if an argument can be neither hashed nor pickled."""
    return _key(leaves, spec, like)


def open_key(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Any, ...]:
    """Return a key like `call_key`'s that is the same for all sizes of the tensors."""
    return _key(leaves, spec, like_of_any_size)


def _key(
    leaves: Sequence[Any], spec: pytree.TreeSpec, like: Callable[[torch.Tensor], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Return a key of arguments (tensors as ``like`` describes them, others exactly), of autocast and of process-wide
    settings. Tensors that are one object have one number."""
    at: dict[int, int] = {}
    described = [
        (at.setdefault(id(leaf), len(at)), *like(leaf)) if isinstance(leaf, torch.Tensor) else _exactly(leaf)
        for leaf in leaves
    ]
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST]
    settings = (torch.is_autocast_cache_enabled(), *[get() for get in SETTINGS])
    return tuple(described), spec, tuple(casts), settings


def like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor, except values, on which ops may depend. A tensor without shape or strides
    gives fewer."""
    try:
        lazy = tensor.is_conj(), tensor.is_neg()  # its memory is conjugated or negated only when it is read
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *_gradient(tensor), lazy
    except RuntimeError:  # the tensor has no shape or no strides
        return tensor.layout, tensor.dtype, tensor.device, *_gradient(tensor)


def like_of_any_size(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's layout, number of dimensions, type, device, how it requires a gradient, and lazy conjugation
    and negation."""
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.layout, tensor.dim(), tensor.dtype, tensor.device, *_gradient(tensor), lazy


def is_cast_anew(tensor: torch.Tensor) -> bool:
    """Return whether autocast casts a tensor that requires a gradient at each use, since its cache has only leaves."""
    return tensor.requires_grad and (not tensor.is_leaf or tensor._is_view())


def _gradient(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a tensor requires a gradient, and whether autocast casts it at each use."""
    return tensor.requires_grad, is_cast_anew(tensor)


def _exactly(leaf: Any) -> Any:
    """Return a hashable key of an argument that is no tensor, pickled if needed; `ModelError` if it cannot be. The key
    distinguishes 1, 1.0 and True, and 0.0 and −0.0."""
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), _pickled(leaf)
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def _pickled(leaf: Any) -> bytes:
    try:
        return pickle.dumps(leaf)
    except Exception as error:  # the object's methods may raise anything
        raise ModelError(
            f"an argument of type {type(leaf).__name__} can be neither hashed nor pickled, so calls cannot be told "
            f"apart by it; pass its content in a tuple or dictionary"
        ) from error
