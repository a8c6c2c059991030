"""A layer with two Kronecker factors: its weight and bias as one matrix, and the update of both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rematplan.optim.factor import Factor
from rematplan.runtime.statistics.factors import Factors

BOTH = (0, 1)
"""Both factors of a layer: of the inputs, of the outputs' gradients."""


@dataclass(frozen=True)
class Layer:
    """A weight and its bias, with their Kronecker factors.

    ``name``: of the weight. ``form``: the factors on the device ``meta``, which define how weight and bias become one
    matrix. ``a``, ``g``: the factors of the layer's inputs and of the gradients of its outputs.
    """

    name: str
    weight: Parameter
    bias: Parameter | None
    form: Factors
    a: Factor
    g: Factor

    @property
    def sides(self) -> tuple[Factor, Factor]:
        """Both factors: of the inputs, of the outputs' gradients."""
        return self.a, self.g

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def inverted(self) -> bool:
        """Whether both factors have an inverse."""
        return self.a.inverse is not None and self.g.inverse is not None

    def gradient(self) -> Tensor | None:
        """Return the gradient of weight and bias as a matrix (…, outputs, inputs), in the factors' type.

        The gradient of a missing bias is 0. Without a gradient of the weight, return None.
        """
        if self.weight.grad is None:
            return None
        weight = whole(self.weight.grad).to(self.a.dtype)
        bias = None
        if self.form.bias:
            grad = None if self.bias is None else self.bias.grad
            outputs = self.form.groups * self.form.g.shape[-1]
            bias = weight.new_zeros(outputs) if grad is None else whole(grad).to(self.a.dtype)
        return self.form.matrix(weight, bias)

    def empty(self) -> Tensor:
        """Return an uninitialised matrix of `shape`."""
        return torch.empty(self.shape, dtype=self.a.dtype, device=self.weight.device)

    @property
    def shape(self) -> torch.Size:
        """The shape of the gradient matrix: (outputs, inputs), or (groups, outputs, inputs)."""
        blocks = (self.form.groups,) if self.form.groups > 1 else ()
        return torch.Size((*blocks, self.g.size, self.a.size))

    def sums(self, factors: Factors, loss_scale: float, which: tuple[int, ...] = BOTH) -> Tensor:
        """Return the sums of new statistics as one vector.

        It contains the kept part of A, that of G (divided by ``loss_scale``²), the number of rows and that of
        samples. With ``which`` = (0,) or (1,) it contains only that factor, and both traces at the end, since the
        damping of one factor depends on the trace of the other.
        """
        counts = torch.tensor([factors.rows, factors.samples], dtype=self.a.dtype, device=self.weight.device)
        kept = (self.a.kept(factors.a), self.g.kept(factors.g) / loss_scale**2)
        traces = [torch.stack([side.trace_of(part) for side, part in zip(self.sides, kept, strict=True)])]
        return torch.cat((*(kept[at].flatten() for at in which), counts, *(traces if which != BOTH else ())))

    def no_sums(self, device: torch.device | str | None = None, which: tuple[int, ...] = BOTH) -> Tensor:
        """Return the `sums` of no statistics: zeros, on the weight's device if none is named."""
        size = sum(torch.Size(self.sides[at].shape).numel() for at in which) + (2 if which == BOTH else 4)
        return torch.zeros(size, dtype=self.a.dtype, device=device or self.weight.device)

    def fold(self, sums: Tensor, decay: float, which: tuple[int, ...] = BOTH) -> None:
        """Add a vector of `sums` to the moving averages, which are first multiplied by ``decay``."""
        numbers = 2 if which == BOTH else 4
        rows, samples, *traces = sums[-numbers:].tolist()
        sizes = [torch.Size(self.sides[at].shape).numel() for at in which]
        for at, part in zip(which, sums[:-numbers].split(sizes), strict=True):
            self.sides[at].fold(part.view(self.sides[at].shape), (rows, samples)[at], decay)
        for at in set(BOTH) - set(which):
            self.sides[at].fold_trace(traces[at], (rows, samples)[at], decay)

    def dampings(self, damping: float) -> tuple[float, float]:
        """Return the damping of each factor: π √λ for the inputs' and √λ ÷ π for the outputs'.

        π² is the mean eigenvalue of A ÷ that of G (Martens and Grosse 2015, section 6.3). π is 1 if a factor is zero.
        ``damping``: λ.
        """
        like: dict[str, Any] = {"dtype": self.a.dtype, "device": self.weight.device}
        a, g = torch.stack([torch.as_tensor(side.mean_eigenvalue(), **like) for side in self.sides]).tolist()
        quotient = a / g if a > 0 and g > 0 else 1.0
        pi = math.sqrt(quotient) if 0 < quotient < math.inf else 1.0
        return pi * math.sqrt(damping), math.sqrt(damping) / pi

    def precondition(self, gradient: Tensor) -> Tensor:
        """Return (G + √λ/π I)⁻¹ ``gradient`` (A + π√λ I)⁻¹."""
        assert self.a.inverse is not None
        assert self.g.inverse is not None
        return self.a.inverse.apply(self.g.inverse.apply(gradient).mT).mT

    def updates(self, matrix: Tensor) -> tuple[tuple[Parameter, Tensor], ...]:
        """Split a matrix of `shape` into the updates of weight and bias, each in the parameter's type and shape.

        A bias without a gradient is left out. Of a sharded parameter the update is this process's part.
        """
        weight, bias = self.form.tensors(matrix, self.weight.shape)
        parts = [(self.weight, weight)]
        if bias is not None and self.bias is not None and self.bias.grad is not None:
            parts.append((self.bias, bias))
        return tuple((p, part_of(p, t.to(p.dtype))) for p, t in parts)

    def state(self) -> dict[str, Any]:
        """Return the state that `load` takes."""
        return {"a": self.a.state(), "g": self.g.state()}

    def load(self, state: Mapping[str, Any], averages: tuple[int, ...] = BOTH, inverses: bool = True) -> None:
        """Restore what `state` returned.

        ``averages``: the factors that this process averages. ``inverses``: whether it needs both inverses.
        """
        for at, (side, key) in enumerate(zip(self.sides, "ag", strict=True)):
            side.load(state[key], self.weight.device, at in averages, inverses or at in averages)


def layers_of(model: nn.Module, forms: Mapping[str, Factors], how: str) -> dict[str, Layer]:
    """Return the model's layers that are trained and have factors, by weight name.

    Args:
        model: the model.
        forms: the factors of each weight, on the device ``meta``.
        how: how factors are inverted: a name of `INVERSES` or ``auto``.
    """
    named = dict(model.named_parameters())
    return {
        name: layer(name, forms[name], weight, named.get(forms[name].bias_name or ""), how)
        for name, weight in named.items()  # the same order in all processes
        if name in forms and weight.requires_grad
    }


def layer(name: str, form: Factors, weight: Parameter, bias: Parameter | None, how: str) -> Layer:
    """Return the layer of one weight, before its first statistics.

    The arguments are those of `Layer` and `layers_of`.
    """
    blocks = (form.groups,) if form.groups > 1 else ()
    sides = (
        Factor(t.shape[-1], blocks, how, t.dtype, vector=t.dim() == 1 + len(blocks)) for t in (form.a, form.g)
    )
    return Layer(name, weight, bias, form, *sides)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded over processes, as with FSDP2."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def part_of(parameter: Tensor, update: Tensor) -> Tensor:
    """Return this process's part of an update, if ``parameter`` is sharded over processes; otherwise the whole
    update.
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return update
    from torch.distributed.tensor import DTensor, Replicate  # imported here: it is slow to load

    everywhere = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
