"""The rounding of a device's caching allocator: how many bytes it counts for a tensor."""

from __future__ import annotations

import torch

GRAIN, SEGMENT, REST, LARGE, SHARE = 512, 2 << 20, 1 << 20, 10 << 20, 16
"""Constants of CUDA's caching allocator, in bytes except ``SHARE``. The allocator rounds each request up to a
multiple of ``GRAIN``. For requests of ``LARGE`` bytes or more it reserves a multiple of ``SEGMENT`` from the
device. For a request above ``REST`` bytes it does not split a cached block of which at most ``REST`` bytes would be
left over: the whole block counts as allocated. (In c10: ``kMinBlockSize``, ``kMinLargeAlloc``, ``kRoundLarge`` and
``kSmallSize``.)

How many bytes of a block are left over depends on all earlier requests. The assumption is ``1 / SHARE`` of the block,
more than was measured for any whole step.
"""


def allocated(size: int, device: torch.device) -> int:
    """Return an upper estimate of the bytes that CUDA's caching allocator counts for a tensor of ``size`` bytes;
    ``size`` itself if ``device`` is no CUDA device."""
    if device.type != "cuda":
        return size
    block = -(-size // GRAIN) * GRAIN
    if block <= REST:
        return block
    # A cached block that the allocator does not split may be larger by up to about a mebibyte.
    segment = -(-size // SEGMENT) * SEGMENT
    whole = segment if size >= LARGE and segment - block <= REST else block
    return max(whole, block + min(REST, block // SHARE // GRAIN * GRAIN))
