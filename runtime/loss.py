"""A model with a loss on top: what a training step differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from rematplan.ir import ModelError, UsageError
from rematplan.runtime.machine_memory import check_fits
from rematplan.runtime.quiet import quiet
from rematplan.runtime.stateless import call_with, slots


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by name. ``apply``: output and targets to a scalar. ``target``: an output's fake to a random
    target, or None where the loss needs none. ``fits``: whether outputs of that shape have such a loss."""

    name: str
    summary: str
    apply: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
    target: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None
    fits: Callable[[torch.Tensor], bool]


def _classes_last(output: torch.Tensor) -> bool:
    # (N, C, H, W) and (N, C) have their classes second; a sequence model's (N, T, C) has them last.
    return output.dim() == 3


def _cross_entropy(output: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    scores = output.flatten(0, 1) if _classes_last(output) else output
    return functional.cross_entropy(scores, targets[0].flatten() if _classes_last(output) else targets[0])


def _class_target(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    at = 2 if _classes_last(output) else 1
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
    """``model`` with a loss on its first real output: ``forward(*inputs, *targets)`` gives a scalar."""

    def __init__(self, model: nn.Module, loss: Loss, inputs: int) -> None:
        super().__init__()
        self.model, self.loss, self.inputs = model, loss, inputs

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        output = first_real(self.model(*batch[: self.inputs]))
        return self.loss.apply(output, batch[self.inputs :])


def first_real(outputs: Any) -> torch.Tensor:
    """The first floating-point tensor of a model's outputs (a tensor, or nested sequences and mappings of
    them).

    Raises:
        ModelError: there is none, so nothing to differentiate.
    """
    found = next(_reals(outputs), None)
    if found is None:
        raise ModelError("the model has no floating-point output, so no loss to differentiate")
    return found


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

    ``loss``: a name of `LOSSES`; None takes ``output`` for a scalar output, ``cross_entropy`` for scores,
    else ``mse``.

    Raises:
        UsageError: an unknown loss, or one that does not fit the output.
    """
    if loss is not None and loss not in LOSSES:
        raise UsageError(f"unknown loss {loss!r}; known: {', '.join(LOSSES)}")
    output = first_real(_fake_outputs(model, inputs))
    if loss is None:
        loss = "output" if output.dim() == 0 else "cross_entropy" if output.dim() >= 2 else "mse"
    chosen = LOSSES[loss]
    if not chosen.fits(output):
        raise UsageError(f"loss {loss} does not fit an output of shape {tuple(output.shape)}; try --loss mse")
    targets: tuple[torch.Tensor, ...] = ()
    if chosen.target is not None:
        if not any(isinstance(t, FakeTensor) for t in inputs):
            check_fits(output.numel() * output.element_size(), "the targets of its loss")
        targets = (chosen.target(output, torch.Generator().manual_seed(seed)).to(output.device),)
    return WithLoss(model, chosen, len(inputs)), (*inputs, *targets)


def _fake_outputs(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """The outputs' shapes and types, computed without data and without touching the model's buffers.

    Raises:
        ModelError: the model does not run on inputs of these shapes.
    """
    state = slots(model)
    mode = detect_fake_mode((*state.values(), *inputs)) or FakeTensorMode()

    def fake(t: torch.Tensor) -> torch.Tensor:
        return t if isinstance(t, FakeTensor) else mode.from_tensor(t.detach())

    once = {id(t): fake(t) for t in state.values()}
    fakes, batch = {slot: once[id(t)] for slot, t in state.items()}, tuple(map(fake, inputs))
    with mode, torch.no_grad(), quiet():
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
