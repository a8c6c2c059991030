"""Couplings are found in plain graphs however they are written, in files as in modules, and give the gradients."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reversed_steps import (
    Functions,
    MeanSquare,
    activations,
    gradient_error,
    pairs,
    priced,
    reversed_step,
    reversible,
)
from torch import Tensor, nn
from torch.nn import functional

from rematplan.api import load_step
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.strategies.store_all import no_recompute

ROWS = 256
"""Of a batch: enough for a dropout's results to take more than the random state it would run again from; smaller ones
are never run again."""
STYLES: dict[str, Callable[[Functions, Tensor], Tensor]] = {}
"""From the functions F and a tensor of both halves to the tensor after all blocks."""


def style(f: Callable[[Functions, Tensor], Tensor]) -> Callable[[Functions, Tensor], Tensor]:
    STYLES[f.__name__] = f
    return f


@style
def chunks(functions: Functions, x: Tensor) -> Tensor:
    for f, g in pairs(functions):
        a, b = x.chunk(2, -1)
        a = a + f(b)
        x = torch.cat([a, b + g(a)], -1)
    return x


@style
def swapped_halves(functions: Functions, x: Tensor) -> Tensor:
    for f in functions:
        a, b = x.split(x.shape[-1] // 2, -1)
        x = torch.cat([b, f(b) + a], -1)
    return x


@style
def slices_and_differences(functions: Functions, x: Tensor) -> Tensor:
    for f, g in pairs(functions):
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        a = f(b) - a
        x = torch.cat((a, torch.sub(b, g(a), alpha=0.5)), -1)
    return x


@style
def every_other(functions: Functions, x: Tensor) -> Tensor:
    for f, g in pairs(functions):
        a, b = x[..., ::2], x[..., 1::2]
        a = a + f(b)
        x = torch.stack([a, b + g(a)], -1).flatten(-2)
    return x


@style
def reshaped(functions: Functions, x: Tensor) -> Tensor:
    n = x.shape[0]
    for f, g in pairs(functions):
        y = x.view(n, 2, -1)
        a, b = y[:, 0], y[:, 1]
        a = a + f(b)
        x = torch.stack([a, b + g(a)], 1).reshape(n, -1)
    return x


@style
def two_streams(functions: Functions, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    for f, g in pairs(functions):
        a = a + functional.dropout(f(b), 0.2)
        a, b = b + g(a), a
    return torch.cat([a, b], -1)


@style
def scaled(functions: Functions, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    gamma = torch.linspace(0.8, 1.2, a.shape[-1], dtype=x.dtype)
    for f, g in pairs(functions):
        a = functional.leaky_relu(gamma * a + f(b), 0.4)
        b = g(a) - b * 0.9
    return torch.cat([a, b], -1)


@style
def momentum(functions: Functions, x: Tensor) -> Tensor:
    v, y = x.chunk(2, -1)
    for f in functions:
        v = 0.9 * v + 0.1 * f(y)
        y = y + v
    return torch.cat([v, y], -1)


@style
def columns(functions: Functions, x: Tensor) -> Tensor:
    """x_t = F_t(x_{t−1} + x_{t−2}) + γ x_{t−3}, as in RevCol."""
    a, b = x.chunk(2, -1)
    last = [a, b, torch.tanh(a)]
    for f in functions:
        last = [*last[1:], f(last[2] + last[1]) + 0.9 * last[0]]
    return torch.cat(last[1:], -1)


@style
def affine(functions: Functions, x: Tensor) -> Tensor:
    """One stream scaled and shifted by functions of the other, as in RealNVP; the scale has bounds."""
    a, b = x.chunk(2, -1)
    for scale, shift in pairs(functions):
        a, b = b, a * torch.exp(torch.tanh(scale(b))) + shift(b)
    return torch.cat([a, b], -1)


class Network(nn.Module):
    """A stem, 2n couplings of two-layer functions, a head."""

    def __init__(self, name: str, n: int = 2, d: int = 8) -> None:
        super().__init__()
        self.style = name
        self.stem, self.head = nn.Linear(5, 2 * d), nn.Linear(2 * d, 3)
        self.functions = nn.ModuleList(
            nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(2 * n)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(STYLES[self.style](list(self.functions), self.stem(x)))


def network(name: str, n: int = 2, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MeanSquare(Network(name, n)).to(dtype), torch.randn(ROWS, 5, dtype=dtype)


@pytest.mark.parametrize("name", STYLES)
def test_every_style_of_coupling_is_found_and_has_the_eager_gradients(name: str) -> None:
    held = []
    for n in (2, 3):
        model, x = network(name, n)
        step, graph, plan = reversed_step(model, x)
        held.append(activations(plan, graph))
        assert 0 < worst_error(graph, plan.schedule) < 1e-13
        assert 0 < gradient_error(model, step, plan, x) < 1e-10
        # one more evaluation of every F, shared between the inversion and the gradient
        assert plan.estimate.overhead < 0.5
        assert all(runs <= 2 for runs in Counter(runs_of(plan.schedule)).values())
    assert held[1] <= 1.05 * held[0]  # what is held does not grow with the depth


@pytest.mark.parametrize(("name", "dynamo"), [("chunks", False), ("columns", True), ("every_other", True)])
def test_they_are_found_in_onnx_files_too(name: str, dynamo: bool, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    torch.manual_seed(0)
    export(Network(name, 3), torch.randn(ROWS, 5), path, dynamo)
    loaded = load_step(path, loss="mse")
    step, graph, plan = reversible(loaded.step, loaded.module)
    assert activations(plan, graph) < 0.6 * activations(no_recompute(priced(loaded.step)), graph)
    assert 0 < gradient_error(loaded.module, step, plan, *loaded.batch) < 1e-4


def export(model: nn.Module, x: Tensor, path: Path, dynamo: bool) -> None:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            if dynamo:
                torch.onnx.export(model.train(), (x,), str(path), dynamo=True)
            else:
                torch.onnx.export(
                    model.train(),
                    (x,),
                    str(path),
                    dynamo=False,
                    training=torch.onnx.TrainingMode.TRAINING,
                    do_constant_folding=False,
                    opset_version=17,
                )
    finally:
        logging.disable(logging.NOTSET)
