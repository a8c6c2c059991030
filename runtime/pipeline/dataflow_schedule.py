"""The engine of a dataflow pipeline: it runs a rank's actions in order, with channels to the neighbouring ranks.

With `sync` updates, the gradients of all micro-batches are summed. With `async` updates, a forward and its backward
may use different weights, as in Rivaud et al., «PETRA: parallel end-to-end training with reversible architectures»,
ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rematplan.ir import UsageError
from rematplan.planner.core.inversion_error import gradient_error
from rematplan.runtime.pipeline.channels import Peer, Receiver, Sender
from rematplan.runtime.pipeline.dataflow_stage import DataflowStage, Drift, StageHooks
from rematplan.runtime.pipeline.loss_storage import LossFunction
from rematplan.runtime.pipeline.stage_modules import check_fixed

FORWARD_TAG, BACKWARD_TAG = 7001, 7002
"""The tags that distinguish messages of the two directions from each other and from other messages."""


@dataclass(frozen=True)
class Updates:
    """How a pipeline stage updates its weights asynchronously: after every few backwards."""

    every: int
    """The number of backwards between two updates. An update uses the mean of their gradients."""
    optimizer: torch.optim.Optimizer
    """The optimizer that makes the updates; the budget counts neither its state nor its temporary tensors."""
    most_drift: float = 0.25
    """The largest accepted relative error of a recomputed tensor, whose inverse may use weights updated since."""


@dataclass
class DataflowSchedule:
    """Runs the stage of one rank in a dataflow pipeline, whose inverses recompute the stage's inputs from the
    outputs that the next stage sends."""

    stage: DataflowStage
    """The stage."""
    actions: Sequence[tuple[str, int]]
    """Pairs of F (forward) or B (backward) and a micro-batch, in the order in which they run."""
    microbatches: int
    """The number of micro-batches in a batch."""
    credits: int
    """The largest number of messages in one direction that the receiver has not begun to use."""
    loss_fn: LossFunction
    """A function from the last stage's outputs and a micro-batch of targets to the loss."""
    scale_grads: bool = True
    """Whether gradients are divided by the number of micro-batches after each step. Ignored with ``updates``."""
    updates: Updates | None = None
    """How the stage updates its weights itself (`async`). None for `sync`: the caller updates them after the batch."""
    seed: int = 0
    """The seeds of all random calls are derived from this number and ``steps``."""
    steps: int = 0
    """The number of steps run so far."""
    drift: float = 0.0
    """The largest relative error so far of a recomputed tensor, measured only with ``updates``."""
    backwards: int = field(default=0, init=False)
    """The number of backwards since the last update. It is kept from step to step."""

    def step(
        self,
        *args: Any,
        target: torch.Tensor | None = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run all micro-batches of a batch and add their gradients to ``.grad``. On the last stage, append losses to
        ``losses``, and return the outputs if ``return_outputs``; otherwise return None. With ``updates``, the optimizer
        steps after every ``updates.every`` backwards and zeroes the gradients; backwards since then count for its next
        step, perhaps in the next batch. `UsageError` if the batch (on the first stage) has another shape than planned,
        or ``target`` (on the last) cannot be cut into micro-batches."""
        run = _Step(self, self._batch(args, kwargs), target, [] if losses is None else losses, return_outputs)
        # Random calls seed the default generator, whose state the caller gets again.
        state = torch.get_rng_state() if self.stage.code.draws else None
        try:
            for kind, m in self.actions:
                run.forward(m) if kind == "F" else run.backward(m)
            run.finish()
        finally:
            self.stage.saved.clear()
            if state is not None:
                torch.set_rng_state(state)
        self.steps += 1
        if self.scale_grads and self.updates is None:
            for p in self.stage.submod.parameters():
                if p.grad is not None:
                    p.grad.div_(self.microbatches)
        if run.outputs:
            joined = tuple(torch.cat(parts) for parts in zip(*run.outputs, strict=True))
            return joined[0] if len(joined) == 1 else joined
        return None

    def update(self) -> None:
        """Count a finished backward. With ``updates``, each time that ``updates.every`` backwards have run, let the
        optimizer use their mean gradient, then zero the gradients."""
        self.backwards += 1
        if self.updates is None or self.backwards < self.updates.every:
            return
        self.backwards = 0
        for p in self.stage.submod.parameters():
            if p.grad is not None:
                p.grad.div_(self.updates.every)
        self.updates.optimizer.step()
        # The budget counts the gradients, so they stay allocated.
        self.updates.optimizer.zero_grad(set_to_none=False)

    def _batch(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of each micro-batch of a batch; none except on the first rank. `UsageError` for another
        number or other shapes of arguments than planned, `ModelError` for another value of an argument that is no
        tensor."""
        if not self.stage.is_first:
            return []
        planned = (*self.stage.stage.args, *self.stage.stage.kwargs.values())
        arguments = (*args, *(kwargs[name] for name in self.stage.stage.kwargs if name in kwargs))
        if len(arguments) != len(planned):
            raise UsageError(f"the pipeline was planned for {len(planned)} arguments, not {len(arguments)}")
        parts = []
        for at, (one, like) in enumerate(zip(arguments, planned, strict=True)):
            if not isinstance(like, torch.Tensor):
                check_fixed(one, like, f"argument {at}")
                continue
            wanted = (like.shape[0] * self.microbatches, *like.shape[1:])
            if not isinstance(one, torch.Tensor) or tuple(one.shape) != wanted:
                shape = tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
                raise UsageError(
                    f"argument {at} is {shape}; the pipeline was planned for a batch of {wanted}"
                )
            parts.append(one.tensor_split(self.microbatches))
        return list(zip(*parts, strict=True))


class _Step:
    """One training step of a rank's stage, in progress: channels, kept outputs and, with ``updates``, the drift of
    micro-batches in flight. `UsageError` if the last stage's ``target`` cannot be cut into equal micro-batches."""

    def __init__(
        self,
        owner: DataflowSchedule,
        batch: list[tuple[torch.Tensor, ...]],
        target: torch.Tensor | None,
        losses: list[torch.Tensor],
        return_outputs: bool,
    ) -> None:
        """Open the channels to both neighbours, and cut ``target`` on the last stage. ``losses`` gets the losses;
        outputs are kept if ``return_outputs``."""
        self.owner, self.stage, self.batch, self.losses = owner, owner.stage, batch, losses
        self.outputs: list[tuple[torch.Tensor, ...]] | None = (
            [] if return_outputs and owner.stage.is_last else None
        )
        self.made: dict[int, tuple[torch.Tensor, ...]] = {}  # outputs of the last stage, until the loss
        self.drifts: dict[int, Drift] = {}
        stage, m = owner.stage, owner.microbatches
        if stage.is_last:
            if target is None or target.shape[:1] == () or target.shape[0] % m:
                shape = None if target is None else tuple(target.shape)
                raise UsageError(f"a target of shape {shape} cannot be cut into {m} equal micro-batches")
            self.targets = target.tensor_split(m)
        before, after = stage.number - 1, stage.number + 1

        def peer(rank: int, tag: int) -> Peer:
            return Peer(stage.group, rank, tag)

        self.received = (
            None
            if stage.is_first
            else Receiver(peer(before, FORWARD_TAG), stage.stage.inputs, owner.credits, m)
        )
        self.returned = (
            None if stage.is_first else Sender(peer(before, BACKWARD_TAG), stage.back, owner.credits, m)
        )
        self.sent = (
            None if stage.is_last else Sender(peer(after, FORWARD_TAG), stage.onwards, owner.credits, m)
        )
        self.answered = (
            None
            if stage.is_last
            else Receiver(peer(after, BACKWARD_TAG), stage.answers, owner.credits, m, stage.unused_answers)
        )

    def forward(self, m: int) -> None:
        """Run the stage's forward of micro-batch ``m``, with inputs from the previous stage or from the batch."""
        inputs = self.received.take() if self.received else list(self.batch[m])
        if self.owner.updates:
            self.drifts[m] = Drift(self.stage.number, m, self.owner.updates.most_drift)
        self.stage.forward(m, self._hooks(m), inputs)

    def backward(self, m: int) -> None:
        """Run the backward of micro-batch ``m``. In an `async` pipeline, update the weights if enough have run."""
        answer = self.answered.take() if self.answered else self._loss(m)
        self.stage.backward(m, self._hooks(m), self.batch[m] if self.batch else (), answer)
        if m in self.drifts:
            self.owner.drift = max(self.owner.drift, self.drifts.pop(m).largest)
        self.owner.update()

    def finish(self) -> None:
        """Wait until all messages that this rank sent are received, and all acknowledgements are sent."""
        for channel in (self.sent, self.returned, self.received, self.answered):
            if channel is not None:
                channel.finish()

    def _hooks(self, m: int) -> StageHooks:
        """Return the hooks of micro-batch ``m``: outputs are sent on, or kept by the last stage; gradients are sent
        back unless this is the first."""

        def keep(outputs: Sequence[torch.Tensor]) -> None:
            self.made[m] = tuple(outputs)

        def send_back(message: Sequence[torch.Tensor | None]) -> None:
            if self.returned:
                self.returned.send(message)

        sends = self.sent.send if self.sent else keep
        key = (self.owner.seed, self.owner.steps, m)
        return StageHooks(self.stage, key, sends, send_back, self.drifts.get(m))

    def _loss(self, m: int) -> list[torch.Tensor]:
        """Compute and record the last stage's loss of micro-batch ``m``. Return the gradients of the outputs that
        require one, zeros if unused."""
        made = self.made.pop(m)
        if self.outputs is not None:
            self.outputs.append(made)
        like = self.stage.stage.outputs
        targets = tuple(
            t.detach().requires_grad_(t_like.requires_grad) for t, t_like in zip(made, like, strict=True)
        )
        del made
        with torch.enable_grad():
            loss = self.owner.loss_fn(targets[0] if len(targets) == 1 else targets, self.targets[m])
        self.losses.append(loss.detach())
        loss.backward()
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in targets if t.requires_grad]


def gradient_error_of(stages: Sequence[tuple[float, float]]) -> float:
    """Return an estimate, with a safety factor, of the relative error of a dataflow pipeline's gradients; 0 if no
    inverse rounds. ``stages``: first to last, the error of inputs recomputed from exact outputs, and the factor on an
    error of the outputs."""
    error = worst = 0.0
    for own, gain in reversed(stages):
        error = gain * error + own
        worst = max(worst, error)
    return gradient_error(worst) if worst else 0.0
