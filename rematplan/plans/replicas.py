"""The memory of `DistributedDataParallel` (DDP) in addition to the model that it replicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rematplan.plans.held_by_others import GRADIENTS, OtherBytes, Reserved
from rematplan.plans.options import PlanOptions
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.compat import replicated_parameters

GLOO_THREADS = 2
"""The threads of a gloo process group. Each may hold the buffers of its last operation until it begins the next one."""


@dataclass(frozen=True)
class HeldByReplica(OtherBytes):
    """The bytes that DDP holds during the whole step, as an item of `Reserved`."""


def bucket_bytes(trained: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes of the buckets from which the gradients of parameters are reduced: as large as these."""
    return sum(allocated(p.nbytes, device) for p in trained if p.requires_grad)


def broadcast_bytes(buffers: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes of the copies in which buffers are broadcast before each forward, one for each type; a thread
    of gloo may free its last one late."""
    copies: Counter[torch.dtype] = Counter()
    for buffer in buffers:
        copies[buffer.dtype] += buffer.nbytes
    sizes = [allocated(size, device) for size in copies.values()]
    return sum(sizes) + GLOO_THREADS * max(sizes, default=0)


def in_replica(asked: PlanOptions, wrapper: DistributedDataParallel, model: nn.Module) -> PlanOptions:
    """Return the options of plans that count what ``wrapper`` holds for a model; ``asked`` itself if it counts that, or
    if ``wrapper`` replicates none of the model's weights. If gradients are views of buckets
    (``gradient_as_bucket_view``), buckets count as gradients of earlier backwards, to which new ones are copied."""
    items, reduced = asked.reserved.items, {id(p) for p in replicated_parameters(wrapper)}
    trained = [p for p in model.parameters() if id(p) in reduced]
    if not trained or any(isinstance(one, HeldByReplica) for one in items):
        return asked
    held = broadcast_bytes(model.buffers(), trained[0].device)
    if wrapper.gradient_as_bucket_view:
        items = (*items, *[GRADIENTS] * (not asked.reserved.gradients))
    else:
        held += bucket_bytes(trained, trained[0].device)
    return replace(asked, reserved=Reserved((*items, HeldByReplica(held, 0))))
