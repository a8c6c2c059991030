"""What a forward depends on, noted while it is traced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rematplan.runtime.guards.attributes import Reads, reads_of
from rematplan.runtime.guards.globals import GlobalReads
from rematplan.runtime.guards.guard import Guard
from rematplan.runtime.guards.values import ValueGuardRecorder


@dataclass(frozen=True)
class Record:
    """``reads``: the attributes that are read. ``outside``: what the code names outside of the modules. ``values``:
    what is decided by the values of inputs and buffers."""

    reads: Reads
    outside: GlobalReads
    values: ValueGuardRecorder

    @property
    def generators(self) -> Collection[Any]:
        """The generators of random numbers that the code names."""
        return self.outside.generators.values()

    def guard(self, model: str) -> Guard:
        """What must hold for what was traced to be the forward's graph. Warns of what the forward sets outside of the
        modules. ``model``: its name."""
        found = (*self.reads.found_in_places(), *self.outside.found_in_places(model))
        return Guard(len(self.reads.modules), found, self.reads.shared(), self.values.guard())


@contextmanager
def recording(
    model: nn.Module,
    leaves: Sequence[Any],
    buffers: Mapping[str, torch.Tensor],
    batch: Sequence[torch.Tensor],
) -> Iterator[Record]:
    """A block in which the forward of ``model`` is traced, and what it depends on is noted.

    ``leaves``: of its arguments. ``buffers``: by name, its parameters and buffers; ``batch``: the tensors among the
    leaves; both real.
    """
    modules = list(model.modules())
    outside = GlobalReads(modules, leaves)
    with reads_of(modules) as reads:
        yield Record(reads, outside, ValueGuardRecorder(buffers, batch))
