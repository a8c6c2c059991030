"""`audit` of compiled steps: those with an activation memory budget, wholly compiled or in layers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from broken_models import WIDTH, Block, Checkpointed, batch
from torch import nn

from rematplan import audit
from rematplan.auditing.audit import Audit
from rematplan.runtime.graph.compat import OptimizedModule, functorch_config, inductor_config

BACKEND = "aot_eager_decomp_partition"
"""Partitions as Inductor does, by the budget, and compiles no code."""
compiled: Callable[[nn.Module], Any] = partial(torch.compile, backend=BACKEND)


class Residual(nn.Module):
    """Layers whose activations are larger than the parameters."""

    def __init__(self, drop: float = 0.0, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(drop), nn.Linear(64, WIDTH))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class InRegion(Residual):
    """Its budget is stated in the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.1):
            return super().forward(x)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def with_budget(share: float) -> AbstractContextManager[object]:
    return functorch_config.patch(activation_memory_budget=share)


def whole() -> Any:
    return compiled(Residual())


def layer() -> nn.Module:
    model = Residual()
    model.layers[1] = compiled(model.layers[1])
    return model


def in_place() -> nn.Module:
    model = Residual()
    model.compile(backend=BACKEND)
    return model


def function() -> nn.Module:
    model = Checkpointed(Residual())
    model.run = compiled(lambda layer, x: layer(x))
    return model


def region() -> Any:
    return compiled(InRegion())


HAS_REGIONS = hasattr(torch.autograd.graph, "region_activation_memory_budget")  # since PyTorch 2.15


@pytest.mark.parametrize("make", [whole, layer, in_place, function, *([region] if HAS_REGIONS else [])])
def test_a_budget_is_sound(make: Callable[[], Any]) -> None:
    model = make()
    wrapped = [name for name, m in model.named_modules() if isinstance(m, OptimizedModule)]
    with with_budget(0.3):
        found = audit(model, batch(512))
    assert found.sound, found.faults
    assert any(note.startswith("torch.compile with activation_memory_budget 0.3") for note in found.notes)
    assert found.own is not None
    assert found.planned is not None, found.notes
    assert found.planned.peak <= found.own.peak < found.plain.peak
    assert [name for name, m in model.named_modules() if isinstance(m, OptimizedModule)] == wrapped
    assert "_orig_mod" not in str(found.notes)


def redrawn(share: float, fallback: bool) -> bool:
    """Return whether PyTorch gives other gradients with the budget than without one."""
    gradients = []
    for budget in (share, 1.0):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Residual(0.5, depth=2)
        with with_budget(budget), inductor_config.patch(fallback_random=fallback):
            compiled(model)(batch(512)).sum().backward()
        gradients.append(next(model.parameters()).grad)
    torch.compiler.reset()
    return not torch.allclose(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
def test_dropout_that_a_budget_draws_again(share: float) -> None:
    torch.manual_seed(0)
    with with_budget(share):
        found = audit(compiled(Residual(0.5, depth=2)), batch(512), plan=False)
    if not redrawn(share, fallback=False):
        assert found.sound, found.faults
        assert any("without it, as here, it does not" in n for n in found.notes) == redrawn(share, True)
        return
    assert share < 1
    assert str(found) == (
        "Residual: activation_memory_budget lets the backward draw random numbers again in "
        f"{found.faults[0].module}"
    )
    assert found.faults[0].results[0].startswith("gradient layers.")


def test_a_forward_that_asks_whether_it_is_compiled() -> None:
    class Asks(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.01 if torch.compiler.is_compiling() else 1)

    found = audit(compiled(Asks()), batch(), plan=False)
    assert str(found) == "Asks: torch.compile gives other results than eager mode"
    assert "loss" in found.faults[0].results


class Recompute(torch.autograd.Function):
    """A hand-made checkpoint of a product; its backward drops a term of the gradient, if ``share`` is not 1."""

    share = 0.5

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient * (x @ weight).cos()
        return gradient @ weight.t(), Recompute.share * (x.t() @ gradient)


class HandMade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return Recompute.apply(self.first(x), self.weight)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_function_in_a_compiled_model(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recompute, "share", share)
    model = HandMade()
    with with_budget(0.3):
        found: Audit = audit(
            compiled(model), batch(), plan=False, plain=lambda x: (model.first(x) @ model.weight).sin()
        )
    assert found.sound == (share == 1.0), found
    assert found.sound or str(found).startswith("HandMade: the backward of Recompute is not the derivative")


def test_a_checkpoint_in_a_compiled_model() -> None:
    model = Checkpointed(Block(), Block(nn.Dropout(0.5)))
    found = audit(compiled(model), batch(), plan=False)
    assert found.sound, found.faults
    assert found.regions == 2
    assert found.recomputed > 0
