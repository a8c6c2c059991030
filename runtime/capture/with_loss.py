"""A model and a loss of one of its outputs as one module: the function that a training step differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rematplan.ir import ModelError, UsageError
from rematplan.runtime.capture.functional_call import replaced, slots
from rematplan.runtime.costs.measure import check_fits
from rematplan.runtime.graph.compat import FakeTensor, FakeTensorMode, detect_fake_mode
from rematplan.runtime.graph.quiet_logs import quiet


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss that `with_loss` can apply to a model's output."""

    name: str
    """The loss's name."""
    summary: str
    """What it computes, in a few words."""
    apply: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
    """A function from the output and the targets to a scalar."""
    target: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None
    """A function from a fake output and a generator to a random target; None if the loss needs none."""
    fits: Callable[[torch.Tensor], bool]
    """Whether the loss can be computed of a given output."""


def _class_axis(output: torch.Tensor) -> int:
    # Classes are the second dimension of (N, C, H, W) and (N, C), but the last of a sequence model's (N, T, C).
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
    # Also for a scalar: the loss must not be a view of another tensor.
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
    """A model and a loss of one of its outputs: ``forward(*inputs, *targets)`` returns a scalar. ``inputs``: their
    number. ``place``: the output's position among the floating-point tensors in the outputs."""

    def __init__(self, model: nn.Module, loss: Loss, inputs: int, place: int) -> None:
        super().__init__()
        self.model, self.loss, self.inputs, self.place = model, loss, inputs, place

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """Run the model on a batch and return its loss. ``batch``: the inputs followed by the targets."""
        return self.of(self.model(*batch[: self.inputs]), *batch[self.inputs :])

    def of(self, outputs: Any, *targets: torch.Tensor) -> torch.Tensor:
        """Return the loss for given outputs of the model, a scalar, without running the model."""
        output = next(islice(_reals(outputs), self.place, None))
        return self.loss.apply(output, targets)


def _place_of_loss(reals: Sequence[torch.Tensor]) -> int:
    """Return the position of the first tensor in ``reals`` that depends on a trained parameter, else 0; `ModelError`
    if it is empty."""
    if not reals:
        raise ModelError("the model has no floating-point output, so no loss to differentiate")
    return next((at for at, output in enumerate(reals) if output.grad_fn is not None), 0)


def _reals(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in nested outputs, in order; those under the key ``loss`` come first in their
    mapping."""
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        for name in sorted(outputs, key=lambda name: name != "loss"):
            yield from _reals(outputs[name])
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from _reals(value)


def with_loss(
    model: nn.Module, inputs: Sequence[torch.Tensor], loss: str | None = None, seed: int = 0
) -> tuple[WithLoss, tuple[torch.Tensor, ...]]:
    """Return a module of a model and a loss of its first trained floating-point output, and a batch with random
    targets, from ``seed``, for it. Without a name of a loss: a scalar output itself, the cross entropy of several
    classes, else ``mse``. Raises `UsageError` if the loss is unknown or does not fit, `ModelError` if the model does
    not run or has no such output."""
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
    """Return the model's outputs as fake tensors with a graph, buffers unchanged; `ModelError` if the model does not
    run."""
    state = slots(model)
    mode = detect_fake_mode((*state.values(), *inputs)) or FakeTensorMode()

    def fake(t: torch.Tensor) -> torch.Tensor:
        return (
            t if isinstance(t, FakeTensor) else mode.from_tensor(t.detach()).requires_grad_(t.requires_grad)
        )

    once = {id(t): fake(t) for t in state.values()}
    fakes, batch = {slot: once[id(t)] for slot, t in state.items()}, tuple(map(fake, inputs))
    with mode, torch.enable_grad(), quiet(), replaced(model, fakes):
        try:
            return model(*batch)
        except ModelError:
            raise
        except Exception as error:
            if refusal := getattr(error, "refusal", None):
                raise refusal from error
            first = str(error).strip().splitlines()
            shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
            raise ModelError(
                f"the model does not run on inputs of shapes {shapes}: "
                f"{type(error).__name__}: {first[0] if first else ''}"
            ) from error
