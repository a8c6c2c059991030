"""Random numbers of a dataflow pipeline: each random call has a seed of its own, so that no state of a generator is
kept from a forward to its backward, and one process can draw the same numbers."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import torch

from rematplan.runtime.graph.compat import TorchDispatchMode

STATE = 5056
"""Bytes of the state of PyTorch's generator on a CPU."""


def seed_of(seed: int, step: int, microbatch: int, stage: int, draw: int) -> int:
    """The seed of a random call: the ``draw``-th of its stage's forward, for a micro-batch of a step."""
    text = struct.pack("<5q", seed, step, microbatch, stage, draw)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Seeded(TorchDispatchMode):
    """A block in which one process draws what a stage of a dataflow pipeline draws in one forward.

    Args:
        seed, step, microbatch, stage: as in `seed_of`.
    """

    def __init__(self, seed: int, step: int, microbatch: int, stage: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.draws = (seed, step, microbatch, stage), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            torch.default_generator.manual_seed(seed_of(*self.key, self.draws))
            self.draws += 1
        return function(*args, **(kwargs or {}))
