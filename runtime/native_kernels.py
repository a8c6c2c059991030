"""Keep ATen calls whole while a step is traced.

For some ops PyTorch registers a Python decomposition that replaces the C++ kernel under tracing alone: an
``upsample_bilinear2d`` becomes forty index calls, slower, with other rounding, and keeping several times the
memory. Eager mode runs the kernel, so the step that is planned has to as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

PREFIXES = ("upsample_", "_upsample_", "hardshrink", "softshrink")
KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def _overloads() -> Iterator[OpOverload]:
    for name in dir(torch.ops.aten):
        if name.startswith(PREFIXES):
            packet = getattr(torch.ops.aten, name)
            yield from (getattr(packet, overload) for overload in packet.overloads())


@contextmanager
def native_kernels() -> Iterator[None]:
    """Within it, tracing sees these ops as eager mode runs them."""
    removed = []
    for op in _overloads():
        for key in KEYS:
            if key in op.py_kernels:
                removed.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
