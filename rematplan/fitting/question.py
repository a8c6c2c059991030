"""What `fit` is asked: a model without data at any size, how it trains, and the memory that it must fit into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from rematplan.ir import UsageError, first_line
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.strategy import Strategy
from rematplan.plans.budgets import parse_budget
from rematplan.plans.held_by_others import OtherBytes, Reserved
from rematplan.plans.op_costs import known_costs
from rematplan.plans.options import stated_strategy
from rematplan.runtime.capture.accelerator_autocast import MixedPrecision
from rematplan.runtime.capture.fake_weights import CPU, empty
from rematplan.runtime.capture.with_loss import with_loss
from rematplan.runtime.costs.device_models import DeviceModel
from rematplan.runtime.costs.optimizer_memory import optimizer_memory

SEARCH: Strategy = Auto(time_limit=4.0)
"""The search for a plan at one size, if the user states no strategy."""
MOST = 1 << 20
"""The largest size that is tried."""
LIBRARIES = 2 * (32 << 20)
"""The bytes that cuBLAS keeps on an accelerator: PyTorch gives it 32 MiB a thread on a Hopper GPU (less on others), and
the backward has a thread of its own."""
BATCH = "batch"
"""The dimension whose size is the number of samples."""
IMAGE = "image"
"""The dimension whose size is the side of images."""
DEPTH = "depth"
"""The dimension whose size is the number of layers."""
DTYPES: Mapping[str, torch.dtype | None] = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-mixed": None}
"""The types of a training, by name. With ``bf16-mixed``, the model's own types stay, and its ops run in autocast."""
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
"""PyTorch's optimizers by their names in lower case."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class WithoutData:
    """A model whose output is its loss, and a batch, whose tensors have no data. ``mode``: their fake mode."""

    module: nn.Module
    batch: tuple[torch.Tensor, ...]
    mode: AbstractContextManager[object]


@dataclass(frozen=True)
class SizedModel:
    """A model that can be made without data for any size of one dimension."""

    name: str
    dimension: str
    size: int
    """The size in question."""
    at: Callable[[int], WithoutData]
    unit: int = 1
    """Sizes are multiples of this number."""
    most: int = MOST
    """The largest size that the model can have."""
    samples: int | None = None
    """The samples of a batch; None if they are the size that varies, or unknown."""

    @property
    def power(self) -> int:
        """The power of the size with which activations grow at least."""
        return 2 if self.dimension == IMAGE else 1

    def samples_at(self, size: int) -> int | None:
        """Return the samples of a batch at a size; None if unknown."""
        return size if self.dimension == BATCH else self.samples


@dataclass(frozen=True)
class Question:
    """What a training must fit into, and how it trains."""

    memory: int
    """The memory that a step must fit into, in bytes."""
    optimizer: MakeOptimizer | None = None
    dtype: str | None = None
    costs: str = "roofline"
    max_overhead: float = math.inf
    """The largest overhead of a plan that counts as fitting."""
    strategy: Strategy = field(default_factory=lambda: SEARCH)

    @cached_property
    def accelerator(self) -> bool:
        """Whether the costs are those of a device model of a GPU."""
        known = known_costs(self.costs)
        return isinstance(known, DeviceModel) and not known.is_cpu

    @property
    def margin(self) -> dict[str, int]:
        """Bytes that the step's tensors do not show, by where they come from."""
        return {"cuBLAS keeps 32 MiB in each of two threads": LIBRARIES} if self.accelerator else {}


def question(
    memory: str | int,
    optimizer: str | MakeOptimizer | None,
    dtype: str | None,
    costs: str,
    max_overhead: float | None,
    strategy: str | Strategy | None = None,
) -> Question:
    """Return what the arguments of `fit` ask; `UsageError` for an unknown type, optimizer, kind of costs or strategy, a
    malformed memory, or a negative overhead."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}")
    if max_overhead is not None and not max_overhead >= 0:
        raise UsageError(f"max_overhead is {max_overhead!r}; write a share of the step's time, such as 0.2")
    known_costs(costs)
    made = Question(
        int(parse_budget(str(memory), ("bytes",), "memory").amount),
        OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        dtype,
        costs,
        math.inf if max_overhead is None else max_overhead,
    )
    return made if strategy is None else replace(made, strategy=stated_strategy(strategy))


def training(
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    mode: AbstractContextManager[object],
    asked: Question,
    loss: str | None,
) -> WithoutData:
    """Return a model without data as it is trained: with its loss, and with the types that were asked for."""
    with mode:
        return typed(WithoutData(*with_loss(module, inputs, loss), mode), asked)


def typed(made: WithoutData, asked: Question) -> WithoutData:
    """Return a model with its loss in the type asked for, if any: its tensors are converted in place, or its forward
    runs in autocast (``bf16-mixed``)."""
    if asked.dtype is None:
        return made
    dtype = DTYPES[asked.dtype]
    if dtype is None:
        return replace(made, module=MixedPrecision(made.module, asked.accelerator))
    empty(made.module, made.mode, dtype=dtype)
    with made.mode:
        batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in made.batch)
    return replace(made, batch=batch)


def optimizer_bytes(made: WithoutData, asked: Question) -> Reserved:
    """Return the bytes of an optimizer's state and of its step's temporaries, on the device that was asked for; none if
    no optimizer is. `UsageError` if it fails on tensors without data."""
    if asked.optimizer is None:
        return Reserved()
    device = torch.device("cuda", 0) if asked.accelerator else CPU
    like = [
        nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device))
        for p in made.module.parameters()
        if p.requires_grad
    ]
    try:
        memory = optimizer_memory(asked.optimizer(like), device)
    except Exception as error:  # of any kind, in the optimizer's code
        raise UsageError(
            f"the bytes of this optimizer are not known, because it fails on tensors without values "
            f"({first_line(error)}); leave it out"
        ) from error
    return Reserved.of([OtherBytes(memory.to_come, memory.transient)])
