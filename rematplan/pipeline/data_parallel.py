"""The memory that data parallelism of a pipeline's stages needs in each process, in addition to the pipeline itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.plans.options import check_counts
from rematplan.plans.replicas import broadcast_bytes, bucket_bytes
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.pipeline.stage_modules import StageModule

GLOO_SCALARS = 16
"""Bytes of the number by which gloo divides a sum to make a mean: as a double, and in the tensor's type."""


@dataclass(frozen=True)
class DataParallel:
    """How many processes have the same stage of a pipeline; UsageError if a number is below 1 or both are above 1."""

    shards: int = 1
    """The number of processes over which FSDP2 divides the stage's parameters; 1 without FSDP2."""
    replicas: int = 1
    """The number of processes in which DistributedDataParallel averages gradients; 1 without it."""

    def __post_init__(self) -> None:
        check_counts(1, shards=self.shards, replicas=self.replicas)
        if self.shards > 1 and self.replicas > 1:
            raise UsageError("state shards (FSDP2) or replicas (DistributedDataParallel), not both")

    def resident(self, stage: StageModule, device: torch.device) -> int:
        """Return the bytes that FSDP2 or DDP holds for a stage during the whole step in addition to the whole
        parameters; 0 without both. With FSDP2 these are this process's shards and the padding."""
        if self.shards > 1:
            # This process's shard, and padding: the first dimension is divided evenly, rounded up.
            every = list(stage.module.parameters())
            padding = self._gathered(every) - sum(p.nbytes for p in every)
            return padding + sum(allocated(self._shard(p), device) for p in every)
        if self.replicas == 1:
            return 0
        module = stage.module
        return bucket_bytes(module.parameters(), device) + broadcast_bytes(module.buffers(), device)

    def reducing(self, stage: StageModule, device: torch.device) -> int:
        """Return the bytes by which FSDP2's reduction of gradients exceeds the gathered parameters and gradients, which
        it replaces; 0 without FSDP2 or gradients."""
        trained = [p for p in stage.module.parameters() if p.requires_grad]
        if self.shards == 1 or not trained:
            return 0
        gradients = sum(p.nbytes for p in trained)
        # Gradients are copied into one padded tensor, which gloo copies again on a CPU, and freed except the
        # last; then the shard is allocated.
        padded = self._gathered(trained)
        shard = padded // self.shards
        copy = padded + GLOO_SCALARS if device.type == "cpu" else 0
        needed = padded + max(gradients, shard + copy + trained[-1].nbytes)
        return max(0, needed - gradients - self._gathered(stage.module.parameters()))

    def copied(self, outputs: int) -> int:
        """Return the bytes of the outputs' copies that DDP holds per micro-batch from forward to backward; 0 without
        DDP."""
        return outputs if self.replicas > 1 else 0

    def _gathered(self, parameters: Iterable[torch.Tensor]) -> int:
        return self.shards * sum(map(self._shard, parameters))

    def _shard(self, parameter: torch.Tensor) -> int:
        rows = parameter.shape[0] if parameter.ndim else 1
        return -(-rows // self.shards) * (parameter.nbytes // max(1, rows))


ALONE = DataParallel()
"""No data parallelism."""


def check_precision(number: int, stage: nn.Module) -> None:
    """Raise a UsageError, which names stage ``number``, if FSDP2 converts the stage's parameters, outputs or gradients,
    whose types the plan relies on."""
    for part in stage.modules():
        state = getattr(part, "_get_fsdp_state", None)
        policy = getattr(state(), "_mp_policy", None) if state else None
        asked = {getattr(policy, name, None) for name in ("param_dtype", "output_dtype", "reduce_dtype")} - {
            None
        }
        if asked and asked != {p.dtype for p in part.parameters()}:
            raise UsageError(
                f"stage {number} is sharded with a policy of mixed precision, but it is planned for the types of the "
                f"model's parameters; convert the model before you plan it, and leave the policy out"
            )
