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
"""Stands for both Kronecker factors of a layer: 0 for that of the inputs, 1 for that of the outputs' gradients."""


@dataclass(frozen=True)
class Layer:
    """A weight and its bias, with their two Kronecker factors."""

    name: str
    """The weight's name."""
    weight: Parameter
    bias: Parameter | None
    form: Factors
    """Statistics on the device ``meta``, which define how weight and bias become one matrix."""
    a: Factor
    """The factor of the inputs."""
    g: Factor
    """The factor of the outputs' gradients."""

    @property
    def sides(self) -> tuple[Factor, Factor]:
        """The two Kronecker factors: of the inputs, then of the outputs' gradients."""
        return self.a, self.g

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def inverted(self) -> bool:
        """Whether both factors have been inverted at least once."""
        return self.a.inverse is not None and self.g.inverse is not None

    def gradient(self) -> Tensor | None:
        """Return the gradients of weight and bias (last column; zeros without a gradient) as one matrix; None if the
        weight has none. All processes must call it: sharded gradients are gathered."""
        if self.weight.grad is None:
            return None
        weight = whole(self.weight.grad).to(self.a.dtype)
        bias = None
        if self.form.bias:
            grad = None if self.bias is None else self.bias.grad
            outputs = self.form.groups * self.form.g.shape[-1]
            # A bias without a gradient.
            bias = weight.new_zeros(outputs) if grad is None else whole(grad).to(self.a.dtype)
        return self.form.matrix(weight, bias)

    def empty(self) -> Tensor:
        """Return an uninitialised matrix of `shape`, in the factors' type and on the weight's device."""
        return torch.empty(self.shape, dtype=self.a.dtype, device=self.weight.device)

    @property
    def shape(self) -> torch.Size:
        """The shape of weight and bias as a matrix: (outputs, inputs), or (groups, outputs, inputs) if grouped."""
        blocks = (self.form.groups,) if self.form.groups > 1 else ()
        return torch.Size((*blocks, self.g.size, self.a.size))

    def sums(self, factors: Factors, loss_scale: float, which: tuple[int, ...] = BOTH) -> Tensor:
        """Return statistics as one vector: A and G (without the loss scale), packed or diagonal, then the numbers of
        rows and samples. With one factor in ``which``, the vector has only this one, and the traces of both at its
        end."""
        counts = torch.tensor([factors.rows, factors.samples], dtype=self.a.dtype, device=self.weight.device)
        scale = loss_scale if factors.of_loss else 1.0
        kept = (self.a.kept(factors.a), self.g.kept(factors.g) / scale**2)
        # A process that inverts one factor needs both traces for its damping.
        traces = [torch.stack([side.trace_of(part) for side, part in zip(self.sides, kept, strict=True)])]
        return torch.cat((*(kept[at].flatten() for at in which), counts, *(traces if which != BOTH else ())))

    def no_sums(self, device: torch.device | str | None = None, which: tuple[int, ...] = BOTH) -> Tensor:
        """Return zeros in the format of `sums`. ``device``: None for the weight's."""
        size = sum(torch.Size(self.sides[at].shape).numel() for at in which) + (2 if which == BOTH else 4)
        return torch.zeros(size, dtype=self.a.dtype, device=device or self.weight.device)

    def fold(self, sums: Tensor, decay: float, which: tuple[int, ...] = BOTH) -> None:
        """Add statistics in the format of `sums` to the averages, which are multiplied by ``decay`` first. An
        empty batch changes nothing."""
        numbers = 2 if which == BOTH else 4
        rows, samples, *traces = sums[-numbers:].tolist()
        if not rows or not samples:
            return
        sizes = [torch.Size(self.sides[at].shape).numel() for at in which]
        for at, part in zip(which, sums[:-numbers].split(sizes), strict=True):
            self.sides[at].fold(part.view(self.sides[at].shape), (rows, samples)[at], decay)
        for at in set(BOTH) - set(which):
            self.sides[at].fold_trace(traces[at], (rows, samples)[at], decay)

    def dampings(self, damping: float) -> tuple[float, float]:
        """Return π √λ for A and √λ ÷ π for G. π² is the mean eigenvalue of A ÷ that of G (Martens and Grosse 2015,
        6.3). π is 1 if a factor is zero."""
        like: dict[str, Any] = {"dtype": self.a.dtype, "device": self.weight.device}
        a, g = torch.stack([torch.as_tensor(side.mean_eigenvalue(), **like) for side in self.sides]).tolist()
        quotient = a / g if a > 0 and g > 0 else 1.0
        pi = math.sqrt(quotient) if 0 < quotient < math.inf else 1.0
        return pi * math.sqrt(damping), math.sqrt(damping) / pi

    def precondition(self, gradient: Tensor) -> Tensor:
        """Return (G + √λ/π I)⁻¹ ``gradient`` (A + π√λ I)⁻¹ by the latest inverses, which must exist.
        ``gradient``: (…, outputs, inputs)."""
        assert self.a.inverse is not None
        assert self.g.inverse is not None
        return self.a.inverse.apply(self.g.inverse.apply(gradient).mT).mT

    def updates(self, matrix: Tensor) -> tuple[tuple[Parameter, Tensor], ...]:
        """Split an update (…, outputs, inputs) into pairs (parameter, update in its shape and type, or its shard). A
        bias without a gradient is left out."""
        weight, bias = self.form.tensors(matrix, self.weight.shape)
        parts = [(self.weight, weight)]
        if bias is not None and self.bias is not None and self.bias.grad is not None:
            parts.append((self.bias, bias))
        return tuple((p, part_of(p, t.to(p.dtype))) for p, t in parts)

    def state(self) -> dict[str, Any]:
        """Return the state of both Kronecker factors as a dictionary, which `load` reads."""
        return {"a": self.a.state(), "g": self.g.state()}

    def load(self, state: Mapping[str, Any], averages: tuple[int, ...] = BOTH, inverses: bool = True) -> None:
        """Restore what `state` returned. ``averages``: the factors whose averages this process needs, and whose
        inverses it keeps; ``inverses``: whether it needs both inverses."""
        for at, (side, key) in enumerate(zip(self.sides, "ag", strict=True)):
            side.load(state[key], self.weight.device, at in averages, inverses or at in averages)


def layers_of(model: nn.Module, forms: Mapping[str, Factors], how: str) -> dict[str, Layer]:
    """Return the trained layers with factors, by weight name. ``forms``: their factors on the device ``meta``; ``how``:
    the method of inversion, a name of `INVERSES` or ``auto``."""
    named = dict(model.named_parameters())
    return {
        name: layer(name, forms[name], weight, named.get(forms[name].bias_name or ""), how)
        for name, weight in named.items()  # the same order in all processes
        if name in forms and weight.requires_grad
    }


def layer(name: str, form: Factors, weight: Parameter, bias: Parameter | None, how: str) -> Layer:
    """Return the layer of one weight, without statistics yet. ``how``: how its inverses are computed."""
    blocks = (form.groups,) if form.groups > 1 else ()
    sides = (
        Factor(t.shape[-1], blocks, how, t.dtype, vector=t.dim() == 1 + len(blocks)) for t in (form.a, form.g)
    )
    return Layer(name, weight, bias, form, *sides)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as it is; if it is sharded (a DTensor of FSDP2), gather and return the whole."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def part_of(parameter: Tensor, update: Tensor) -> Tensor:
    """Return this process's shard of ``update`` if ``parameter`` is sharded over processes; otherwise ``update``."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return update
    from torch.distributed.tensor import DTensor, Replicate  # imported here: it is slow to load

    everywhere = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
