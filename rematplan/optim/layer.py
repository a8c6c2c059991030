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
    """A weight and its bias, with their two Kronecker factors.

    ``name``: the weight's name. ``weight``, ``bias``: the parameters; ``bias`` is None if there is none. ``form``: the
    statistics of the layer as tensors of the device ``meta``; they define how weight and bias become one matrix. ``a``:
    the factor of the layer's inputs. ``g``: the factor of the gradients of its outputs.
    """

    name: str
    weight: Parameter
    bias: Parameter | None
    form: Factors
    a: Factor
    g: Factor

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
        """Return the gradient of weight and bias as one matrix, in the Kronecker factors' data type; None if the weight
        has none.

        The shape is (outputs, inputs), or (groups, outputs, inputs) for a grouped layer. The bias is the last column.
        If only the bias has no gradient, its column is 0.
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
        """Return an uninitialised matrix in the shape of weight and bias as one matrix, which is the layer's property
        `shape`.

        It has the data type of the Kronecker factors, and is on the weight's device.
        """
        return torch.empty(self.shape, dtype=self.a.dtype, device=self.weight.device)

    @property
    def shape(self) -> torch.Size:
        """The shape of weight and bias as one matrix: (outputs, inputs), or (groups, outputs, inputs) for a grouped
        layer."""
        blocks = (self.form.groups,) if self.form.groups > 1 else ()
        return torch.Size((*blocks, self.g.size, self.a.size))

    def sums(self, factors: Factors, loss_scale: float, which: tuple[int, ...] = BOTH) -> Tensor:
        """Return the statistics of a step as one vector, to be added over processes.

        It contains the sums of outer products A (of the inputs) and G (of the outputs' gradients), each as a packed
        triangle or a diagonal, then the numbers of rows and of samples. G is divided by ``loss_scale``² if it comes
        from the backward of the loss (``factors.of_loss``).

        If ``which`` is (0,) or (1,), the vector contains only A or only G, and then the traces of both at its end. A
        process that inverts only one of the two factors needs both traces for its damping.

        Args:
            factors: the statistics.
            loss_scale: the factor by which the loss was multiplied before the backward.
            which: the factors to include: 0 for A, 1 for G.
        """
        counts = torch.tensor([factors.rows, factors.samples], dtype=self.a.dtype, device=self.weight.device)
        scale = loss_scale if factors.of_loss else 1.0
        kept = (self.a.kept(factors.a), self.g.kept(factors.g) / scale**2)
        traces = [torch.stack([side.trace_of(part) for side, part in zip(self.sides, kept, strict=True)])]
        return torch.cat((*(kept[at].flatten() for at in which), counts, *(traces if which != BOTH else ())))

    def no_sums(self, device: torch.device | str | None = None, which: tuple[int, ...] = BOTH) -> Tensor:
        """Return a vector of zeros in the format of `sums`, as if there were no statistics.

        ``device``: None for the weight's device. ``which``: the factors that the vector includes: 0 for that of the
        inputs, 1 for that of the outputs' gradients.
        """
        size = sum(torch.Size(self.sides[at].shape).numel() for at in which) + (2 if which == BOTH else 4)
        return torch.zeros(size, dtype=self.a.dtype, device=device or self.weight.device)

    def fold(self, sums: Tensor, decay: float, which: tuple[int, ...] = BOTH) -> None:
        """Add statistics to the moving averages of the Kronecker factors. Statistics of an empty batch change nothing.

        Args:
            sums: the statistics as a vector in the format of the method `sums`, added over the processes.
            decay: the factor by which the earlier averages are multiplied first.
            which: the factors that the vector includes: 0 for that of the inputs, 1 for that of the outputs' gradients.
                Of a factor that is not included only the trace is added.
        """
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
        """Return the damping of each Kronecker factor: π √λ for A (of the inputs), √λ ÷ π for G (of the outputs'
        gradients).

        π² is the mean eigenvalue of A ÷ that of G (Martens and Grosse 2015, section 6.3). π is 1 if a factor is zero,
        or if π² is not finite.

        ``damping``: λ.
        """
        like: dict[str, Any] = {"dtype": self.a.dtype, "device": self.weight.device}
        a, g = torch.stack([torch.as_tensor(side.mean_eigenvalue(), **like) for side in self.sides]).tolist()
        quotient = a / g if a > 0 and g > 0 else 1.0
        pi = math.sqrt(quotient) if 0 < quotient < math.inf else 1.0
        return pi * math.sqrt(damping), math.sqrt(damping) / pi

    def precondition(self, gradient: Tensor) -> Tensor:
        """Multiply a gradient by the latest damped inverses: (G + √λ/π I)⁻¹ ``gradient`` (A + π√λ I)⁻¹.

        A and G are the Kronecker factors of the inputs and of the outputs' gradients, λ is the damping, and π is as in
        `dampings`. Both factors must have been inverted.

        ``gradient``: the gradient of weight and bias as one matrix, (…, outputs, inputs).
        """
        assert self.a.inverse is not None
        assert self.g.inverse is not None
        return self.a.inverse.apply(self.g.inverse.apply(gradient).mT).mT

    def updates(self, matrix: Tensor) -> tuple[tuple[Parameter, Tensor], ...]:
        """Split an update of weight and bias as one matrix into pairs of a parameter and its update.

        An update has its parameter's data type and shape. A bias without a gradient is left out. For a sharded
        parameter the update is this process's shard.

        ``matrix``: (…, outputs, inputs), with the bias as the last column.
        """
        weight, bias = self.form.tensors(matrix, self.weight.shape)
        parts = [(self.weight, weight)]
        if bias is not None and self.bias is not None and self.bias.grad is not None:
            parts.append((self.bias, bias))
        return tuple((p, part_of(p, t.to(p.dtype))) for p, t in parts)

    def state(self) -> dict[str, Any]:
        """Return the state of both Kronecker factors as a dictionary, which `load` reads."""
        return {"a": self.a.state(), "g": self.g.state()}

    def load(self, state: Mapping[str, Any], averages: tuple[int, ...] = BOTH, inverses: bool = True) -> None:
        """Restore the state of both Kronecker factors from a dictionary that `state` returned.

        Args:
            state: the dictionary.
            averages: the factors (0: of the inputs, 1: of the outputs' gradients) whose moving averages this process
                needs. It then gets their inverses, too.
            inverses: whether this process needs the inverses of both factors.
        """
        for at, (side, key) in enumerate(zip(self.sides, "ag", strict=True)):
            side.load(state[key], self.weight.device, at in averages, inverses or at in averages)


def layers_of(model: nn.Module, forms: Mapping[str, Factors], how: str) -> dict[str, Layer]:
    """Return the model's layers that are trained and have Kronecker factors, by weight name.

    Args:
        model: the model.
        forms: the factors of each weight, as tensors of the device ``meta``, by weight name.
        how: the method of inversion: a name of `INVERSES` or ``auto``.
    """
    named = dict(model.named_parameters())
    return {
        name: layer(name, forms[name], weight, named.get(forms[name].bias_name or ""), how)
        for name, weight in named.items()  # the same order in all processes
        if name in forms and weight.requires_grad
    }


def layer(name: str, form: Factors, weight: Parameter, bias: Parameter | None, how: str) -> Layer:
    """Return the layer of one weight, without statistics yet.

    Args:
        name: the weight's name.
        form: the layer's factors, as tensors of the device ``meta``.
        weight: the weight.
        bias: the bias, or None.
        how: the method of inversion: a name of `INVERSES` or ``auto``.
    """
    blocks = (form.groups,) if form.groups > 1 else ()
    sides = (
        Factor(t.shape[-1], blocks, how, t.dtype, vector=t.dim() == 1 + len(blocks)) for t in (form.a, form.g)
    )
    return Layer(name, weight, bias, form, *sides)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor unchanged; if it is sharded over processes (a DTensor of FSDP2), gather and return the whole
    tensor.
    """
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
