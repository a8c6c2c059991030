"""Seeds of the random numbers in a dataflow pipeline: one for each random call, so that the backward repeats it
without a saved state."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import torch

from rematplan.runtime.graph.compat import TorchDispatchMode

STATE = 5056
"""Bytes of the state of PyTorch's CPU generator."""


def seed_of(seed: int, step: int, microbatch: int, stage: int, draw: int) -> int:
    """Return the seed of a random call in a dataflow pipeline (a pipeline of invertible stages), an integer below
    2⁶³. It depends on all arguments."""
    text = struct.pack("<5q", seed, step, microbatch, stage, draw)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Seeded(TorchDispatchMode):
    """A context in which a single process draws the numbers of one stage's forward in a dataflow pipeline, for
    comparison. It seeds PyTorch's default generator before each random call, and does not restore its state."""

    def __init__(self, seed: int, step: int, microbatch: int, stage: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.draws = (seed, step, microbatch, stage), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            torch.default_generator.manual_seed(seed_of(*self.key, self.draws))
            self.draws += 1
        return function(*args, **(kwargs or {}))
