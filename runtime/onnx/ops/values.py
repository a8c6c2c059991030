"""Conversions between NumPy and torch: arrays and tensors, and torch's types by ONNX number and NumPy name."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import torch

from rematplan.ir.errors import ModelError

# ONNX's TensorProto.DataType numbers, for Cast and similar ops.
ONNX_DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
}
BY_NAME: dict[str, torch.dtype] = {str(d).removeprefix("torch."): d for d in ONNX_DTYPES.values()}


def torch_dtype(name: str, what: str) -> torch.dtype:
    """Return the torch dtype with a NumPy dtype's name, such as ``float32``; else `ModelError` about ``what``."""
    if name not in BY_NAME:
        kind = "string" if name == "object" else name  # numpy's name for the type of arrays of strings
        raise ModelError(f"{what} is of type {kind}, which is not supported")
    return BY_NAME[name]


def to_tensor(array: np.ndarray, what: str = "a value") -> torch.Tensor:
    """Return a copy of a NumPy array as a tensor of its type. ``what`` begins the error for an unsupported type."""
    dtype = torch_dtype(array.dtype.name, what)
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(dtype)
    return torch.from_numpy(np.array(array))


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array, without a copy where possible. bfloat16 becomes `ml_dtypes.bfloat16`."""
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def constant_tensor(array: np.ndarray, what: str) -> torch.Tensor:
    """Return a tensor with an array's content, made by calls that a trace records as a constant. ``what`` begins the
    error for an unsupported type."""
    dtype = torch_dtype(array.dtype.name, what)
    if math.prod(array.shape) == 1:
        return torch.full(array.shape, array.ravel()[0].item(), dtype=dtype)
    wide = array.astype(np.float32) if dtype == torch.bfloat16 else array
    return torch.tensor(wide.tolist(), dtype=dtype).reshape(array.shape)


# Torch supports few ops on unsigned types beyond eight bits. 16 and 32 bits are computed in a wider signed type;
# 64 bits are computed modulo 2^64, which is the same for both, and compared with the sign bit flipped.
WIDER: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}

# For ops that torch supports on signed types only, and that only move elements.
SAME_WIDTH: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def signed(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in a type that torch can compare: unsigned integers of 16 to 64 bits become signed ones of the
    same order."""
    if x.dtype == torch.uint64:
        return x.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return x.to(WIDER.get(x.dtype, x.dtype))
