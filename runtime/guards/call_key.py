"""How a module is called, as a key: its arguments, autocast, and what is set for the whole process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

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


def call_key(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Any, ...]:
    """What a plan depends on in a call: the arguments but for the numbers in tensors, autocast and `SETTINGS`."""
    at: dict[int, int] = {}
    described = [
        (at.setdefault(id(leaf), len(at)), *like(leaf)) if isinstance(leaf, torch.Tensor) else _exactly(leaf)
        for leaf in leaves
    ]
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST]
    settings = (torch.is_autocast_cache_enabled(), *[get() for get in SETTINGS])
    return tuple(described), spec, tuple(casts), settings


def like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the ops that a forward makes depend on of a tensor, but for its numbers."""
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
