"""How a device's caching allocator rounds and counts what it gives out."""

from __future__ import annotations

import torch

GRAIN, SEGMENT, REST, LARGE, SHARE = 512, 2 << 20, 1 << 20, 10 << 20, 16
"""Of CUDA's caching allocator, in bytes: what it gives out are multiples of ``GRAIN``; for ``LARGE`` and more it takes
multiples of ``SEGMENT`` from the device; and of a block for more than ``REST`` it gives, and counts, all, if no more
than ``REST`` would be left of it (c10's ``kMinBlockSize``, ``kMinLargeAlloc``, ``kRoundLarge`` and ``kSmallSize``). How
much is left depends on all that went before: one part in ``SHARE`` is more than was seen of any whole step."""


def allocated(size: int, device: torch.device) -> int:
    """Bytes that the device's allocator may count for a tensor of ``size`` bytes: on CUDA up to a mebibyte more."""
    if device.type != "cuda":
        return size
    block = -(-size // GRAIN) * GRAIN
    if block <= REST:
        return block
    segment = -(-size // SEGMENT) * SEGMENT
    whole = segment if size >= LARGE and segment - block <= REST else block
    return max(whole, block + min(REST, block // SHARE // GRAIN * GRAIN))
