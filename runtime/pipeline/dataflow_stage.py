"""A stage of a dataflow pipeline that runs its compiled plan: one forward and one backward for each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from rematplan.ir import ModelError
from rematplan.runtime.execute.compile import tensors_in_step
from rematplan.runtime.execute.compiled_plan import add_gradient
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.pipeline.dataflow_code import StageCode
from rematplan.runtime.pipeline.random_seeds import seed_of
from rematplan.runtime.pipeline.stage_modules import StageModule

SAMPLED = 32
"""The largest number of elements by which a recovered tensor is compared with the original one."""


@dataclass(eq=False)
class DataflowStage:
    """One stage of a dataflow pipeline, on its rank."""

    number: int
    """The stage's index."""
    stages: int
    """The number of stages."""
    stage: StageModule
    """The stage's module and the shapes of its messages."""
    step: CapturedStep
    """The captured training step of the module."""
    code: StageCode
    """The compiled forward and backward of the stage."""
    group: ProcessGroup
    """The processes of the pipeline."""
    kept: int = 0
    """The bytes for each micro-batch that are kept from its forward to its backward."""
    error: float = 0.0
    """The predicted relative error of the recomputed inputs if the outputs that the next stage sends are exact."""
    gain: float = 1.0
    """The factor by which the stage multiplies an error of these outputs."""
    saved: dict[int, list[Any]] = field(default_factory=dict)
    """The values kept for the backward, by number of the micro-batch."""

    def __post_init__(self) -> None:
        self.named = tensors_in_step(self.submod)

    @property
    def submod(self) -> nn.Module:
        """The stage's module, with the model's parameters and buffers."""
        return self.stage.module

    @property
    def is_first(self) -> bool:
        """Whether the stage is the first: it reads the batch instead of messages."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last: the loss is computed from its outputs."""
        return self.number == self.stages - 1

    @property
    def onwards(self) -> list[torch.Tensor]:
        """Meta tensors with the shapes and types of the message that this stage sends to the next one in the forward:
        its outputs."""
        return list(self.stage.outputs)

    @property
    def back(self) -> list[torch.Tensor]:
        """Meta tensors like the message to the previous stage in the backward: all inputs, then the gradients of
        those that require one."""
        return [*self.stage.inputs, *(t for t in self.stage.inputs if t.requires_grad)]

    @property
    def answers(self) -> list[torch.Tensor]:
        """Meta tensors like the message from the next stage in the backward: all outputs, then the gradients of
        those that require one."""
        return [*self.stage.outputs, *(t for t in self.stage.outputs if t.requires_grad)]

    @property
    def unused_answers(self) -> frozenset[int]:
        """The positions in the message of `answers` of tensors that the stage's backward does not read."""
        outputs = range(len(self.stage.outputs))
        kinds = [("answer", k) for k in outputs]
        kinds += [("tangent", k) for k in outputs if self.stage.outputs[k].requires_grad]
        read = {(i.kind, int(i.target)) for i in self.step.inputs if i.value in self.code.handed}
        return frozenset(at for at, one in enumerate(kinds) if one not in read)

    def forward(self, microbatch: int, hooks: StageHooks, inputs: list[torch.Tensor]) -> None:
        """Run the forward of a micro-batch, and keep the values that its backward needs in ``saved``. The list
        ``inputs`` is emptied."""
        batch = dict(enumerate(inputs)) if self.is_first else {}
        received = {} if self.is_first else self._handed("batch", inputs)
        inputs.clear()
        with torch.no_grad():
            self.saved[microbatch] = self.code.forward(received, hooks, *self._fixed(batch))

    def backward(
        self, microbatch: int, hooks: StageHooks, batch: Sequence[torch.Tensor], answer: list[torch.Tensor]
    ) -> None:
        """Run the backward of a micro-batch whose forward has run. ``batch``: the micro-batch on the first stage, else
        empty. The list ``answer``, the next stage's message or the loss's gradients, is emptied."""
        received = self._answered(answer)
        answer.clear()  # so that each tensor is freed after its last use in the backward
        with torch.no_grad():
            self.code.backward(
                received, hooks, self.saved.pop(microbatch), *self._fixed(dict(enumerate(batch)))
            )

    def _answered(self, answer: list[torch.Tensor]) -> dict[str, Any]:
        outputs = [] if self.is_last else answer[: len(self.stage.outputs)]
        gradients = answer[len(outputs) :]
        every = [gradients.pop(0) if t.requires_grad else None for t in self.stage.outputs]
        return self._handed("answer", outputs) | self._handed("tangent", every)

    def _handed(self, kind: str, tensors: Sequence[torch.Tensor | None]) -> dict[str, Any]:
        """Return the received tensors that the compiled functions read, by name, in the strides of the captured
        step; None becomes zeros."""
        wanted = [i for i in self.step.inputs if i.kind == kind and i.value in self.code.handed]
        return {i.value: _laid_out(tensors[int(i.target)], self.step.values[i.value].fake) for i in wanted}

    def _fixed(self, batch: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        take: dict[str, Callable[[Any], torch.Tensor]] = {
            "parameter": lambda i: self.named[i.target].detach(),
            "buffer": lambda i: self.named[i.target],
            "constant": lambda i: self.step.constants[i.value],
            "batch": lambda i: batch[int(i.target)],
        }
        return [take[i.kind](i) for i in self.code.inputs]


def _laid_out(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of ``like``: the given one if they fit, else a copy; zeros for None."""
    if tensor is not None and tensor.stride() == like.stride():
        return tensor
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.zero_() if tensor is None else made.copy_(tensor)


@dataclass(frozen=True)
class StageHooks:
    """Callbacks by which the compiled functions of a stage deliver the results of one forward or backward, at the
    positions in the schedule that the plan chose."""

    stage: DataflowStage
    """The stage."""
    key: tuple[int, int, int]
    """The pipeline's seed and the numbers of step and micro-batch, from which random calls are seeded."""
    send: Callable[[Sequence[torch.Tensor]], None]
    """The function that is called with the stage's outputs."""
    returns: Callable[[Sequence[torch.Tensor | None]], None]
    """The function that is called with the recomputed inputs, then the gradient of each input that requires one, or
    None if not computed."""
    drift: Drift | None = None
    """Compares recomputed tensors with the original ones; None: they are not compared."""

    def renew(self, buffers: Sequence[torch.Tensor]) -> None:
        """Write new contents into the stage's buffers, in the order of `StageCode.buffers`."""
        for o, new in zip(self.stage.code.buffers, buffers, strict=True):
            self.stage.named[o.target].copy_(new)

    def send_back(self, recovered: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Pass the recomputed inputs and the inputs' gradients to ``returns``, with None for each missing gradient."""
        found = dict(zip(self.stage.code.returned, gradients, strict=True))
        wanted = (at for at, t in enumerate(self.stage.stage.inputs) if t.requires_grad)
        self.returns([*recovered, *(found.get(at) for at in wanted)])

    def add(self, parameter: str, gradient: torch.Tensor) -> None:
        """Add a gradient to ``.grad`` of a parameter. ``parameter``: the parameter's name in the captured step."""
        add_gradient(self.stage.named[parameter], gradient)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Pass a tensor of the forward to ``drift``. ``name``: its name in the captured step."""
        if self.drift:
            self.drift.watch(name, tensor)

    def recovered(self, name: str, tensor: torch.Tensor) -> None:
        """Pass a recomputed tensor to ``drift``. ``name``: its name in the captured step."""
        if self.drift:
            self.drift.recovered(name, tensor)

    def seed(self, draw: int) -> None:
        """Seed PyTorch's default generator for a random call. ``draw``: the position of that call among the random
        calls of the stage."""
        torch.default_generator.manual_seed(seed_of(*self.key, self.stage.number, draw))


@dataclass
class Drift:
    """The errors of tensors that inverses recompute in a micro-batch's backward, estimated from a few elements."""

    stage: int
    microbatch: int
    """The number of the micro-batch; ``stage``: that of the stage. Both are for the error message."""
    most: float
    """The largest accepted relative error."""
    largest: float = 0.0
    """The largest relative error so far."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Elements of tensors of the forward, by name."""

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Remember elements of a tensor of the forward."""
        self.samples[name] = sample(tensor)

    def recovered(self, name: str, tensor: torch.Tensor) -> None:
        """Compare a recomputed tensor with the one that `watch` got; `ModelError` if the error exceeds ``most``."""
        wrong = distance(sample(tensor), self.samples[name])
        self.largest = max(self.largest, wrong)
        if not wrong <= self.most:  # also if it is NaN
            raise ModelError(
                f"stage {self.stage} recovers {name} of micro-batch {self.microbatch} wrong by {wrong:.2g}, more than "
                f"{self.most:g}: its weights have changed too much since the forward; update less often or in smaller "
                f"steps"
            )


def sample(tensor: torch.Tensor) -> list[float]:
    """Return at most `SAMPLED` elements of a float tensor, evenly spaced along each dimension, without an allocation of
    tensors; of other types none."""
    if not tensor.is_floating_point():
        return []
    while tensor.numel() > SAMPLED:
        longest = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim])
        tensor = tensor[(slice(None),) * longest + (slice(None, None, 2),)]
    return pytree.tree_leaves(tensor.tolist())


def distance(found: Sequence[float], true: Sequence[float]) -> float:
    """Return the relative error of sampled elements, ‖found − true‖ / ‖true‖ in the L2 norm; 0 if ``true`` is zero."""
    norm = math.hypot(*true)
    return math.hypot(*(a - b for a, b in zip(found, true, strict=True))) / norm if norm else 0.0
