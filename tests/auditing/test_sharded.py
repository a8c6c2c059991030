"""`audit` takes models that FSDP2 shards or DDP wraps, and tells right checkpointing from wrong in them."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from broken_models import Block, Checkpointed, batch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rematplan import audit


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("preserve", [True, False])
def test_layers_that_fsdp2_shards(preserve: bool) -> None:
    torch.manual_seed(0)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve)
    layers = [checkpoint_wrapper(Block(nn.Dropout(0.5)), checkpoint_fn=again) for _ in range(2)]
    model = Checkpointed(*layers, run=lambda block, x: block(x))
    for layer in layers:
        fully_shard(layer)
    found = audit(fully_shard(model), (batch(),), plan=False)
    assert found.sound == preserve, found.faults
    if not preserve:
        assert "random numbers are drawn again" in str(found)
    assert found.own is not None
    assert found.own.peak > 0
    model(batch()).sum().backward()  # it trains as before


def test_a_model_in_ddp() -> None:
    model = DistributedDataParallel(Checkpointed(Block(nn.Dropout(0.5)), Block()))
    assert audit(model, (batch(),), plan=False).faults == ()
