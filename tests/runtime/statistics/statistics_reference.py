"""Kronecker factors by definition, in eager mode: rows of inputs are derivatives of a layer's outputs in its weight,
rows of gradients are what autograd gives a layer's output."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
ROUNDING = 1e-18
LAYERS = (nn.Linear, *CONVOLUTIONS)


@dataclass
class Expected:
    a: Tensor
    g: Tensor
    rows: int


def layer_of(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """What a layer gives with another weight."""
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight, layer.bias)
    convolve = getattr(functional, f"conv{'_transpose' * isinstance(layer, TRANSPOSED)}{x.dim() - 2}d")
    extra = {"output_padding": layer.output_padding} if isinstance(layer, TRANSPOSED) else {}
    how = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    return convolve(x, weight, layer.bias, groups=layer.groups, **how, **extra)


def input_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """(groups, samples, places, d_in): for one output of each group the derivatives in the weights that lead to it."""
    weight = layer.weight.detach()
    groups = getattr(layer, "groups", 1)
    found = []
    for group in range(groups):
        channel = group * (
            layer.out_channels // groups if isinstance(layer, CONVOLUTIONS) else layer.out_features
        )

        def outputs(w: Tensor, channel: int = channel) -> Tensor:
            out = layer_of(layer, x, w)
            return out[:, channel] if isinstance(layer, CONVOLUTIONS) else out[..., channel]

        slope = torch.autograd.functional.jacobian(outputs, weight)
        slope = slope.flatten(1, -1 - weight.dim()) if slope.dim() > 1 + weight.dim() else slope.unsqueeze(1)
        if isinstance(layer, TRANSPOSED):
            own = slope[:, :, group * weight.shape[0] // groups : (group + 1) * weight.shape[0] // groups, 0]
        else:
            own = slope[:, :, channel]
        found.append(own.flatten(2))
    return torch.stack(found)


def gradient_rows(layer: nn.Module, g: Tensor) -> Tensor:
    """(groups, samples, places, d_out)."""
    if isinstance(layer, CONVOLUTIONS):
        g = g.flatten(2).mT
    g = g.reshape(len(g), -1, g.shape[-1])
    groups = getattr(layer, "groups", 1)
    return g.unflatten(-1, (groups, -1)).movedim(2, 0)


def expected(
    model: nn.Module, backward: Callable[[nn.Module], None], reduce: bool, scale: float = 1.0
) -> dict[str, Expected]:
    """The factors of a model's linear layers and convolutions. ``backward``: runs the model and a backward; ``scale``:
    multiplies the gradients."""
    inputs, gradients = defaultdict(list), defaultdict(list)

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            x = args[0].detach()
            at = len(inputs[name])
            inputs[name].append(
                input_rows(layer, x) if torch.is_grad_enabled() and out.requires_grad else None
            )
            gradients[name].append(None)
            if out.requires_grad:
                out.register_hook(lambda g: gradients[name].__setitem__(at, gradient_rows(layer, g.detach())))

        return hook

    layers = {n: m for n, m in model.named_modules() if isinstance(m, LAYERS)}
    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        backward(model)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, layer in layers.items():
        parts = [
            _sums(a, g, reduce, layer.bias is not None, scale)
            for a, g in zip(inputs[name], gradients[name], strict=True)
            if g is not None
        ]
        if parts and layer.weight.requires_grad:
            found[f"{name}.weight"] = Expected(
                sum(p.a for p in parts), sum(p.g for p in parts), sum(p.rows for p in parts)
            )
    return found


def expected_of_calls(
    model: nn.Module, backward: Callable[[nn.Module], None], scale: float, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Expected]:
    """The factors, each row a sample, of all weights that are given to `torch.nn.functional.linear`, whichever module
    calls it: packed projections of attention, for example.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Expected] = {}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.addmm(bias, x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])
        a = torch.cat([x.detach().flatten(0, -2), torch.ones(x.numel() // x.shape[-1], 1)], 1)

        def seen(g: Tensor) -> None:
            found[names[id(weight)]] = _sums(a[None, None], g.flatten(0, -2)[None, None], False, False, scale)

        out.register_hook(seen)
        return out

    with monkeypatch.context() as patched:
        patched.setattr(functional, "linear", linear)
        backward(model)
    return found


def _sums(a: Tensor, g: Tensor, reduce: bool, ones: bool, scale: float) -> Expected:
    if ones:
        a = torch.cat([a, a.new_ones((*a.shape[:-1], 1))], -1)
    if reduce:
        a, g = a.mean(2, keepdim=True), g.sum(2, keepdim=True)
    a, g = a.flatten(1, 2), g.flatten(1, 2) * scale
    sums = [(rows.mT @ rows) for rows in (a, g)]
    first, second = (s if len(s) > 1 else s[0] for s in sums)
    return Expected(first, second, a.shape[1])


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of norms; what ought to be zero (gradients of keys sum to it) is all rounding."""
    assert found.shape == wanted.shape
    return float((found - wanted).norm() / max(float(wanted.norm()), ROUNDING))
