"""A layer with factors: its weight and bias as one matrix between the two, and the update of both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rematplan.optim.side import Side
from rematplan.runtime.statistics.factors import Factors


@dataclass(frozen=True)
class Layer:
    """``form``: the layer's factors on the device ``meta``, which knows how the weight becomes a matrix.

    ``a``, ``g``: the sides of its inputs and of its outputs' gradients.
    """

    name: str
    weight: Parameter
    bias: Parameter | None
    form: Factors
    a: Side
    g: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both sides."""
        return self.a, self.g

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def inverted(self) -> bool:
        """Whether both inverses are there."""
        return self.a.inverse is not None and self.g.inverse is not None

    def gradient(self) -> Tensor | None:
        """The gradient as a matrix (…, outputs, inputs), in the type of the factors; None without one."""
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
        """A matrix of the shape of `gradient`, not filled."""
        return torch.empty(self.shape, dtype=self.a.dtype, device=self.weight.device)

    @property
    def shape(self) -> torch.Size:
        """The shape of `gradient`."""
        blocks = (self.form.groups,) if self.form.groups > 1 else ()
        return torch.Size((*blocks, self.g.size, self.a.size))

    def sums(self, factors: Factors, loss_scale: float) -> Tensor:
        """The sums of some statistics as one vector: what is kept of A and of G, the numbers of rows and samples."""
        counts = torch.tensor([factors.rows, factors.samples], dtype=self.a.dtype, device=self.weight.device)
        kept = (self.a.kept(factors.a), self.g.kept(factors.g) / loss_scale**2)
        return torch.cat((*(t.flatten() for t in kept), counts))

    def fold(self, sums: Tensor, decay: float) -> None:
        """Add `sums` to the averages."""
        a = torch.Size(self.a.shape).numel()
        rows, samples = sums[-2:].tolist()
        self.a.fold(sums[:a].view(self.a.shape), rows, decay)
        self.g.fold(sums[a:-2].view(self.g.shape), samples, decay)

    def dampings(self, damping: float) -> tuple[float, float]:
        """λ of each side: π √λ and √λ / π, where π² is the quotient of the mean eigenvalues.

        Martens and Grosse (2015), section 6.3. π is 1 where a factor is zero.
        """
        a, g = torch.stack((self.a.mean_eigenvalue(), self.g.mean_eigenvalue())).tolist()
        quotient = a / g if a > 0 and g > 0 else 1.0
        pi = math.sqrt(quotient) if 0 < quotient < math.inf else 1.0
        return pi * math.sqrt(damping), math.sqrt(damping) / pi

    def precondition(self, gradient: Tensor) -> Tensor:
        """(G + √λ/π I)⁻¹ ``gradient`` (A + π√λ I)⁻¹."""
        assert self.a.inverse is not None
        assert self.g.inverse is not None
        return self.a.inverse.apply(self.g.inverse.apply(gradient).mT).mT

    def updates(self, matrix: Tensor) -> tuple[tuple[Parameter, Tensor], ...]:
        """Each parameter with its part of a matrix, in the parameter's type."""
        weight, bias = self.form.tensors(matrix, self.weight.shape)
        parts = [(self.weight, weight)]
        if bias is not None and self.bias is not None and self.bias.grad is not None:
            parts.append((self.bias, bias))
        return tuple((p, part_of(p, t.to(p.dtype))) for p, t in parts)

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        return {"a": self.a.state(), "g": self.g.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.a.load(state["a"], self.weight.device)
        self.g.load(state["g"], self.weight.device)


def layers_of(model: nn.Module, forms: Mapping[str, Factors], how: str) -> dict[str, Layer]:
    """The layers of the model's trained weights that have factors of these forms.

    ``how``: the inverses, a name of `INVERSES` or ``auto``.
    """
    named = dict(model.named_parameters())
    return {
        name: layer(name, forms[name], weight, named.get(forms[name].bias_name or ""), how)
        for name, weight in named.items()  # an order that is the same in all processes
        if name in forms and weight.requires_grad
    }


def layer(name: str, form: Factors, weight: Parameter, bias: Parameter | None, how: str) -> Layer:
    """The layer of a weight, before its first statistics.

    ``how``: a name of `INVERSES`, or ``auto``.
    """
    blocks = (form.groups,) if form.groups > 1 else ()
    sides = (
        Side(t.shape[-1], blocks, how, t.dtype, vector=t.dim() == 1 + len(blocks)) for t in (form.a, form.g)
    )
    return Layer(name, weight, bias, form, *sides)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over processes, as FSDP2's are."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def part_of(parameter: Tensor, update: Tensor) -> Tensor:
    """The part of an update that this process has of a parameter, which may be sharded."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return update
    from torch.distributed.tensor import DTensor, Replicate  # slow to load, and only for sharded parameters

    everywhere = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
