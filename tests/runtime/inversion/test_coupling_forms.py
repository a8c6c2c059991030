"""Couplings written in place, by indices, through permutations and with fused calls are found as any others; what takes
scatters for concatenations changes no bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_steps import PlannedStep, run_once, verify
from reversed_steps import Functions, activations, pairs, priced
from torch import Tensor, nn

from rematplan.ir import ModelError
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.graph.index_to_slice import Slice, picked_slice
from rematplan.runtime.inversion.find_inverses import with_inverses
from rematplan.runtime.inversion.scatter_to_cat import scatter_to_cat

aten = torch.ops.aten
HALF, ROWS = 8, 32
FORMS: dict[str, Callable[[Functions, Tensor], Tensor]] = {}


def form(f: Callable[[Functions, Tensor], Tensor]) -> Callable[[Functions, Tensor], Tensor]:
    FORMS[f.__name__] = f
    return f


@form
def added_in_place(functions: Functions, x: Tensor) -> Tensor:
    for f, g in pairs(functions):
        y = x.clone()
        y[:, :HALF] += f(x[:, HALF:])
        x = y.clone()
        x[:, HALF:] -= g(y[:, :HALF])
    return x


@form
def one_buffer(functions: Functions, x: Tensor) -> Tensor:
    x = x.clone()
    for f, g in pairs(functions):
        x[:, :HALF] = x[:, :HALF] + f(x[:, HALF:].clone())
        x[:, HALF:] += g(x[:, :HALF].clone())
    return x


@form
def filled(functions: Functions, x: Tensor) -> Tensor:
    for f, g in pairs(functions):
        y, z = torch.zeros_like(x), x[:, HALF:]
        y[:, :HALF] = a = x[:, :HALF] + f(z)
        y[:, HALF:] = z + g(a)
        x = y
    return x


@form
def selected(functions: Functions, x: Tensor) -> Tensor:
    y = x.view(-1, 2, HALF).clone()
    for f, g in pairs(functions):
        y[:, 0] += f(y[:, 1].clone())
        y[:, 1] += g(y[:, 0].clone())
    return y.flatten(1)


@form
def every_other_in_place(functions: Functions, x: Tensor) -> Tensor:
    x = x.clone()
    for f, g in pairs(functions):
        x[:, ::2] += f(x[:, 1::2].clone())
        x[:, 1::2] -= g(x[:, ::2].clone())
    return x


@form
def turned_in_place(functions: Functions, x: Tensor) -> Tensor:
    """As exporters write it: what is written into lies the other way."""
    for f, g in pairs(functions):
        y = x.t().slice_scatter((x[:, :HALF] + f(x[:, HALF:])).t(), 0, 0, HALF).t()
        x = y.t().slice_scatter((y[:, HALF:] + g(y[:, :HALF])).t(), 0, HALF).t()
    return x


@form
def by_indices(functions: Functions, x: Tensor) -> Tensor:
    even, odd = torch.arange(0, 2 * HALF, 2), torch.arange(1, 2 * HALF, 2)
    for f, g in pairs(functions):
        a, b = x[:, even], x.index_select(1, odd)
        a = a + f(b)
        y = torch.empty_like(x)
        y[:, even] = a
        y[:, odd] = b + g(a)
        x = y
    return x


@form
def permuted(functions: Functions, x: Tensor) -> Tensor:
    order = torch.tensor([(5 * k + 3) % (2 * HALF) for k in range(2 * HALF)])
    for k, f in enumerate(functions):
        a, b = x.chunk(2, 1)
        x = torch.cat([a + f(b), b], 1)
        x = x[:, order] if k % 2 else x.index_select(1, order)
    return x


@form
def interpolated(functions: Functions, x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    weight = torch.linspace(0.6, 0.9, HALF, dtype=x.dtype)
    for f, g in pairs(functions):
        a = torch.lerp(a, f(b), 0.1)
        b = torch.lerp(g(a), b, weight)
    return torch.cat([a, b], 1)


@form
def fused(functions: Functions, x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    scale = torch.linspace(0.5, 1, HALF, dtype=x.dtype)
    mix = torch.linspace(-1, 1, HALF * HALF, dtype=x.dtype).view(HALF, HALF)
    for f, g in pairs(functions):
        a = torch.addcmul(torch.addmm(a, f(b), mix, beta=0.9, alpha=0.5), f(b), scale, value=0.7)
        b = torch.addcdiv(b, g(a), scale)
    return torch.cat([a, b], 1)


@form
def subtracted_from(functions: Functions, x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    for f, g in pairs(functions):
        a = torch.rsub(a, f(b), alpha=0.9)
        b = torch.rsub(g(a), b)
    return torch.cat([a, b], 1)


class Network(nn.Module):
    """A stem, 2n functions, a mean square."""

    def __init__(self, body: Callable[[Functions, Tensor], Tensor], n: int) -> None:
        super().__init__()
        self.body, self.stem = body, nn.Linear(5, 2 * HALF)
        self.functions = nn.ModuleList(
            nn.Sequential(nn.Linear(HALF, 2 * HALF), nn.GELU(), nn.Linear(2 * HALF, HALF))
            for _ in range(2 * n)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(list(self.functions), self.stem(x)).square().mean()


def network(body: Callable[[Functions, Tensor], Tensor], n: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Network(body, n).double(), torch.randn(ROWS, 5, dtype=torch.float64)


@pytest.mark.parametrize("name", FORMS)
def test_it_is_found_and_gives_the_gradients(name: str) -> None:
    held = []
    for n in (2, 3):
        model, x = network(FORMS[name], n)
        found = capture(model, (x,), name)
        step = with_inverses(found, named_tensors(model)).step
        graph = priced(step)
        plan = Reversible().curve(graph, ())[-1]
        held.append(activations(plan, graph))
    kept = priced(found)
    assert held[1] <= 1.05 * held[0]  # what is held does not grow with the depth
    assert held[1] < 0.6 * activations(no_recompute(kept), kept)
    outcome = verify(
        PlannedStep(model, step, plan.schedule), (x,), predicted=worst_error(graph, plan.schedule)
    )
    assert outcome.passed, outcome.differences
    assert 0 < outcome.error < 1e-12


def in_place(x: Tensor, f: Tensor) -> Tensor:
    y = x.clone()
    y[:, :HALF] += f[:, :HALF]
    y[:, HALF:] += f[:, HALF:]
    return y


RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lerp": lambda x, f: torch.lerp(x, f, 0.3),
    "addmm": lambda x, f: torch.addmm(x, f, torch.eye(2 * HALF, dtype=x.dtype)),
    "addcmul": lambda x, f: torch.addcmul(x, f, f.sigmoid()),
    "rsub": torch.rsub,
    "in place": in_place,
    "halves": lambda x, f: torch.cat([p + q for p, q in zip(x.chunk(2, 1), f.chunk(2, 1), strict=True)], 1),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_an_ordinary_residual_block_is_not_taken_for_one(name: str) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.functions = nn.ModuleList(nn.Linear(2 * HALF, 2 * HALF) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for f in self.functions:
                x = RESIDUALS[name](x, f(x).sin())
            return x.square().mean()

    model, x = Residual(), torch.randn(ROWS, 2 * HALF)
    assert with_inverses(capture(model, (x,), name), named_tensors(model)).step.inverses == ()


def test_indices_that_change_after_planning_are_refused_where_they_lose_something() -> None:
    def body(functions: Functions, x: Tensor) -> Tensor:
        for f in functions:
            a, b = x.chunk(2, 1)
            x = torch.cat([a + f(b), b], 1)[:, model.order]
        return x

    model, x = network(body, 2)
    model.register_buffer("order", torch.arange(2 * HALF).flip(0).roll(3))
    step = with_inverses(capture(model, (x,), "permuted"), named_tensors(model)).step
    planned = PlannedStep(model, step, Reversible().curve(priced(step), ())[-1].schedule)
    model.order.copy_(model.order.roll(2))
    assert verify(planned, (x,), predicted=1e-15).passed
    model.order[0] = model.order[1]
    with pytest.raises(ModelError, match="has an entry twice"):
        run_once(planned, (x,))


@pytest.mark.parametrize(
    ("indices", "shape", "found"),
    [
        ([[2, 3, 4]], (6,), Slice(0, 2, 5, 1)),
        ([None, [1, -1]], (2, 4), Slice(1, 1, 4, 2)),
        ([[0, 0, 1, 1], [1, 2, 1, 2]], (2, 4), Slice(1, 1, 3, 1)),
        ([[1, 1, 1], [0, 1, 2]], (2, 3), Slice(0, 1, 2, 1)),
        ([[0, 1, 0, 1], [1, 1, 2, 2]], (2, 4), None),  # the other way round
        ([[3, 2, 1]], (4,), None),
        ([[0, 1, 3]], (4,), None),
        ([[0, 4]], (4,), None),  # out of range: for the op to refuse
        ([[[0, 1]]], (4,), None),
        ([], (4,), None),
    ],
)
def test_indices_that_are_a_slice(
    indices: list[list[int] | None], shape: tuple[int, ...], found: Slice | None
) -> None:
    import numpy as np

    assert picked_slice([None if i is None else np.array(i) for i in indices], shape) == found


class Writes(nn.Module):
    """Random writes into copies of random slices, and reads of others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.weight = seed, nn.Parameter(torch.randn(4, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        rng = random.Random(self.seed)
        known = [x * self.weight, x.t().contiguous().t() + self.weight, (x - self.weight).sin()]
        for _ in range(rng.randint(2, 5)):
            y, z = rng.choice(known), rng.choice(known)
            y = y.clone() if rng.random() < 0.8 else y.contiguous().clone()
            at: object = rng.choice([slice(0, 2), slice(2, None), slice(None, None, 2), slice(1, None, 2), 1])
            place = (slice(None), at) if rng.random() < 0.5 else at
            if rng.random() < 0.3:
                index = torch.arange(1, 6, 2) if isinstance(place, tuple) else torch.tensor([0, 1])
                place = (slice(None), index) if isinstance(place, tuple) else index
            if rng.random() < 0.5:
                y[place] = z[place].cos()
            else:
                y[place] *= z[place].clone() + 2
            known += [y, y + z] if rng.random() < 0.5 else [y]
        return torch.stack(known).sin().mean()


@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_said_otherwise_is_the_same_bit_by_bit(seed: int) -> None:
    model, x = Writes(seed), torch.randn(4, 6, dtype=torch.float64)
    step = capture(model, (x,), "writes")
    plain = scatter_to_cat(step, named_tensors(model))
    kinds = {getattr(c.target, "overloadpacket", None) for c in plain.calls if not c.backward}
    assert not kinds & {aten.slice_scatter, aten.select_scatter, aten.index_put}
    graph = priced(plain)
    assert graph.base_cost <= priced(step).base_cost * 1.001
    assert verify(PlannedStep(model, plain, no_recompute(graph).schedule), (x,)).bit_equal
