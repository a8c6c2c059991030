"""A planned training step on a module: run it, check it against plain autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rematplan.planner.core.inversion_error import gradient_error
from rematplan.planner.core.lanes import Lanes
from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.capture.restore_state import same_buffers, same_draws, same_gradients
from rematplan.runtime.execute.compile import bind_inputs, compile_step, named_tensors
from rematplan.runtime.graph.captured_step import CapturedStep


class PlannedStep:
    """A training step of ``module`` that follows a schedule, on two lanes if they are given.

    Calling it with a batch does what ``loss = module(*batch); loss.backward()`` does: gradients are added to
    ``.grad``, buffers get their new content, the loss is returned (detached).
    """

    def __init__(
        self, module: nn.Module, step: CapturedStep, schedule: Schedule, lanes: Lanes | None = None
    ) -> None:
        self.module, self.step = module, step
        self.executable = compile_step(step, schedule, lanes)

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Run the step; the loss as a scalar."""
        named = named_tensors(self.module)
        results = self.executable(bind_inputs(self.step, named, batch))
        loss = None
        with torch.no_grad():
            for output, result in zip(self.step.outputs, results, strict=True):
                if output.kind == "output":
                    loss = result
                elif output.kind == "buffer":
                    named[output.target].copy_(result)
                elif output.kind == "gradient":
                    parameter = named[output.target]
                    parameter.grad = result if parameter.grad is None else parameter.grad.add_(result)
        assert loss is not None
        return loss


def eager_step(module: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same step by plain autograd."""
    loss: torch.Tensor = module(*batch)
    loss.backward()
    return loss.detach()


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that is not bit-equal: its name and the largest absolute and relative (L2) differences.

    A gradient that ought to be 0 is all rounding: ``relative`` is to the tensor's norm, but for a gradient at least to
    `FLOOR` of the norm of all gradients.
    """

    name: str
    absolute: float
    relative: float


FLOOR = 1e-2


@dataclass(frozen=True, slots=True)
class Verification:
    """A planned step compared bit by bit with plain autograd from the same state and seed.

    ``predicted``: the predicted relative error of what the plan's inverses bring back; 0 for a step that has to be
    equal bit by bit.
    """

    compared: int
    differences: tuple[Difference, ...]
    predicted: float = 0.0

    @property
    def bit_equal(self) -> bool:
        """Whether loss, every gradient and every buffer agree in every bit, and so does the random state
        after."""
        return not self.differences

    @property
    def error(self) -> float:
        """The largest relative difference, 0 if there is none."""
        return max((d.relative for d in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether the step is what it was planned to be: bit-equal, or, where inverses run, as near as predicted, and
        the random state bit-equal even so."""
        drawn = any(d.name.startswith("random state") for d in self.differences)
        return self.bit_equal or (not drawn and self.error <= gradient_error(self.predicted))

    def __str__(self) -> str:
        if self.bit_equal:
            return f"loss, gradients and buffers are bit-equal to plain autograd ({self.compared} tensors)"
        worst = max(self.differences, key=lambda d: d.relative)
        differ = f"{len(self.differences)} of {self.compared} tensors differ from plain autograd"
        if self.passed:
            return (
                f"{differ}, as predicted: by {worst.relative:.2e} relative at most ({worst.name}), within the "
                f"{gradient_error(self.predicted):.2e} of gradients that read tensors wrong by {self.predicted:.2e}, "
                f"which may put them on the other side of a ReLU's kink"
            )
        return f"{differ}; the worst, {worst.name}, by {worst.relative:.2e} relative"


def verify(
    planned: PlannedStep, batch: Sequence[torch.Tensor], seed: int = 0, predicted: float = 0.0
) -> Verification:
    """Run the step by plain autograd and as planned, each from the same buffers and seed, and compare
    everything. ``predicted``: see `Verification`.

    The module's buffers, gradients and the random state are put back as they were.
    """
    module = planned.module
    expected = _results(module, lambda: eager_step(module, batch), seed)
    found = _results(module, lambda: planned(*batch), seed)
    gradients = [t.double().norm() for name, t in expected.items() if name.startswith("gradient ")]
    floor = FLOOR * float(torch.stack(gradients).norm()) if gradients else 0.0
    differences = []
    for name in dict.fromkeys((*expected, *found)):
        a, b = expected.get(name), found.get(name)
        if a is None or b is None:
            differences.append(Difference(name, float("inf"), float("inf")))
        elif not same_bits(a, b):
            distance = (a.double() - b.double()).abs()
            scale = max(float(a.double().norm()), floor if name.startswith("gradient ") else 0.0) or 1.0
            differences.append(Difference(name, float(distance.max()), float(distance.norm()) / scale))
    return Verification(len(expected), tuple(differences), predicted)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits (so that NaN equals itself, and 0 is not −0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return torch.equal(a, b)
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(as_integers), b.contiguous().view(as_integers))


def _results(module: nn.Module, run: object, seed: int) -> dict[str, torch.Tensor]:
    assert callable(run)
    with untouched(module):
        torch.manual_seed(seed)
        results = {"loss": run()}
        results |= {f"random state{place}": state for place, state in _random_states().items()}
        results |= {f"gradient {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
        results |= {f"buffer {n}": b.clone() for n, b in module.named_buffers()}
    return results


def _random_states() -> dict[str, torch.Tensor]:
    """The states of all generators by what follows their name."""
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"": torch.get_rng_state(), **{f" of cuda:{at}": state for at, state in enumerate(on_cuda)}}


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """A block that begins without gradients, and after which buffers, gradients and random states are as before."""
    with same_buffers(module), same_gradients(module), same_draws():
        yield
