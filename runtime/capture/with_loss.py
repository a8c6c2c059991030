"""A model with a loss on top: what a training step differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rematplan.ir import ModelError, UsageError
from rematplan.runtime.capture.functional_call import call_with, slots
from rematplan.runtime.costs.measure import check_fits
from rematplan.runtime.graph.compat import FakeTensor, FakeTensorMode, detect_fake_mode
from rematplan.runtime.graph.quiet_logs import quiet


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by name. ``apply``: output and targets to a scalar. ``target``: an output's fake to a random
    target, or None where the loss needs none. ``fits``: whether outputs of that shape have such a loss."""

    name: str
    summary: str
    apply: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
    target: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None
    fits: Callable[[torch.Tensor], bool]


def _class_axis(output: torch.Tensor) -> int:
    # (N, C, H, W) and (N, C) have their classes second; a sequence model's (N, T, C) has them last.
    return 2 if output.dim() == 3 else 1


def _cross_entropy(output: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    last = _class_axis(output) == 2
    scores = output.flatten(0, 1) if last else output
    return functional.cross_entropy(scores, targets[0].flatten() if last else targets[0])


def _class_target(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    at = _class_axis(output)
    shape = tuple(n for i, n in enumerate(output.shape) if i != at)
    return torch.randint(output.shape[at], shape, generator=generator)


def _mse(output: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, targets[0])


def _noise_target(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(output.shape), generator=generator).to(output.dtype)


def _sum(output: torch.Tensor, _targets: Sequence[torch.Tensor]) -> torch.Tensor:
    # Of a scalar too: a loss that is a view of something else would not be a result of its own.
    return output.sum()


_LOSSES = (
    Loss("output", "the output itself (its sum, if it is no scalar)", _sum, None, lambda o: True),
    Loss(
        "cross_entropy",
        "cross entropy with random labels",
        _cross_entropy,
        _class_target,
        lambda o: o.dim() >= 2,
    ),
    Loss("mse", "mean square distance to random targets", _mse, _noise_target, lambda o: True),
)
LOSSES: Mapping[str, Loss] = {loss.name: loss for loss in _LOSSES}


class WithLoss(nn.Module):
    """``model`` with a loss on one of its real outputs: ``forward(*inputs, *targets)`` gives a scalar.

    ``place``: which of the floating-point tensors among its outputs (a tensor, or nested sequences and mappings of
    them) that is.
    """

    def __init__(self, model: nn.Module, loss: Loss, inputs: int, place: int) -> None:
        super().__init__()
        self.model, self.loss, self.inputs, self.place = model, loss, inputs, place

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return self.of(self.model(*batch[: self.inputs]), *batch[self.inputs :])

    def of(self, outputs: Any, *targets: torch.Tensor) -> torch.Tensor:
        """The loss of what the model gave."""
        output = next(islice(_reals(outputs), self.place, None))
        return self.loss.apply(output, targets)


def _place_of_loss(reals: Sequence[torch.Tensor]) -> int:
    """The first output that is computed from what is trained; the first one where none is, which capture refuses.

    Raises:
        ModelError: there is none, so nothing to differentiate.
    """
    if not reals:
        raise ModelError("the model has no floating-point output, so no loss to differentiate")
    return next((at for at, output in enumerate(reals) if output.grad_fn is not None), 0)


def _reals(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _reals(value)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from _reals(value)


def with_loss(
    model: nn.Module, inputs: Sequence[torch.Tensor], loss: str | None = None, seed: int = 0
) -> tuple[WithLoss, tuple[torch.Tensor, ...]]:
    """The model with a loss, and a batch for it: the inputs, and random targets if the loss needs them.

    The loss is of the first real output that is computed from a trainable parameter. ``loss``: a name of `LOSSES`;
    None takes ``output`` for a scalar output, ``cross_entropy`` for scores of two classes or more, else ``mse``.

    Raises:
        UsageError: an unknown loss, or one that does not fit the output.
    """
    if loss is not None and loss not in LOSSES:
        raise UsageError(f"unknown loss {loss!r}; known: {', '.join(LOSSES)}")
    reals = tuple(_reals(_fake_outputs(model, inputs)))
    place = _place_of_loss(reals)
    output = reals[place].detach()
    if loss is None:
        # The cross entropy of one class is zero, and so are its gradients.
        scores = output.dim() >= 2 and output.shape[_class_axis(output)] > 1
        loss = "output" if output.dim() == 0 else "cross_entropy" if scores else "mse"
    chosen = LOSSES[loss]
    if not chosen.fits(output):
        raise UsageError(f"loss {loss} does not fit an output of shape {tuple(output.shape)}; try --loss mse")
    targets: tuple[torch.Tensor, ...] = ()
    if chosen.target is not None:
        if not any(isinstance(t, FakeTensor) for t in inputs):
            check_fits(output.numel() * output.element_size(), "the targets of its loss")
        targets = (chosen.target(output, torch.Generator().manual_seed(seed)).to(output.device),)
    return WithLoss(model, chosen, len(inputs), place), (*inputs, *targets)


def _fake_outputs(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """The outputs' shapes and types, and what they are computed from, without data and without touching the model's
    buffers.

    Raises:
        ModelError: the model does not run on inputs of these shapes.
    """
    state = slots(model)
    mode = detect_fake_mode((*state.values(), *inputs)) or FakeTensorMode()

    def fake(t: torch.Tensor) -> torch.Tensor:
        return (
            t if isinstance(t, FakeTensor) else mode.from_tensor(t.detach()).requires_grad_(t.requires_grad)
        )

    once = {id(t): fake(t) for t in state.values()}
    fakes, batch = {slot: once[id(t)] for slot, t in state.items()}, tuple(map(fake, inputs))
    with mode, torch.enable_grad(), quiet():
        try:
            return call_with(model, fakes, batch)
        except ModelError:
            raise
        except Exception as error:
            first = str(error).strip().splitlines()
            shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
            raise ModelError(
                f"the model does not run on inputs of shapes {shapes}: "
                f"{type(error).__name__}: {first[0] if first else ''}"
            ) from error
