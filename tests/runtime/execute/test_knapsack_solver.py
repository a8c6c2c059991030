"""`KnapsackSolver` in `torch.compile`: never over its capacity, and never worse than PyTorch's own solvers."""

from __future__ import annotations

import inspect
import math
import random
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch import config
from torch._functorch._activation_checkpointing import knapsack as stock
from torch._functorch.partitioners import _size_of
from torch._inductor.custom_graph_pass import CustomKnapsackSolver

import rematplan
from rematplan.knapsack_solver import saved_nodes


def instance(rng: random.Random) -> tuple[list[float], list[float], float]:
    """Return normalised sizes, times and a capacity, as the partitioner passes them. Often, many sizes are equal."""
    kinds = [rng.choice([rng.random(), rng.randint(1, 64) / 64, 10 ** -rng.uniform(0, 7)]) for _ in range(40)]
    memory = [rng.choice(kinds[: rng.choice([5, 40])]) for _ in range(rng.randint(1, 30))]
    scale = rng.choice([1.0, sum(memory)])
    high = rng.choice([1, 100, 10**9])
    times = [rng.choice([float(rng.randint(1, high)), high * rng.random()]) for _ in memory]
    memory = sorted((m / scale for m in memory), reverse=True)
    # A capacity just below the sum of some sizes: rounded, they fit.
    below = sum(m for m in memory if rng.random() < 0.5) * (1 - 1e-6)
    return memory, times, rng.choice([rng.random(), below])


def test_no_random_instance_is_over_its_capacity_or_below_stock_solvers() -> None:
    rng, over = random.Random(0), 0
    for _ in range(1000):
        memory, times, most = instance(rng)
        found = saved_nodes(memory, [0] * len(memory), times, most)
        assert found == saved_nodes(memory, [0] * len(memory), times, most)
        assert sum(memory[at] for at in found) <= most
        assert math.fsum(memory[at] for at in found) <= most
        for solver in STOCK:
            _, saved, _ = solver(memory, times, most)
            if sum(memory[at] for at in saved) > most:
                over += 1
            else:
                assert sum(times[i] for i in found) >= sum(times[i] for i in saved) * (1 - 1e-12)
    assert over > 50  # the instances are such that rounding to 1/10000 shows


@pytest.mark.parametrize(
    ("memory", "most", "expected"),
    [
        ([0.1] * 10, 0.3, 2),  # in floats, three of them are more than 0.3
        ([0.00004] * 9, 0.0002, 5),  # rounded to 1/10000, all of them weigh nothing
        ([0.125] * 8, 0.5, 4),
        ([1e-18] * 3, 0.0, 0),
        ([], 0.5, 0),
    ],
)
def test_sizes_that_rounding_gets_wrong(memory: list[float], most: float, expected: int) -> None:
    assert len(saved_nodes(memory, [0] * len(memory), [1.0] * len(memory), most)) == expected


def test_sizes_in_bytes_are_exact() -> None:
    sizes = [3 << 20, 3 << 20, 1 << 20, 8, 4]
    memory = [size / 1e9 / 0.0421 for size in sizes]
    assert saved_nodes(memory, sizes, [5.0, 5.0, 4.0, 1.0, 1.0], (4 << 20) / 1e9 / 0.0421) == [0, 2]


def test_the_signature_is_that_of_pytorch() -> None:
    ours, theirs = rematplan.KnapsackSolver, CustomKnapsackSolver
    assert issubclass(ours, theirs)
    names = [list(inspect.signature(one.__call__).parameters) for one in (ours, theirs)]
    assert names[0] == names[1]
    assert ours().uuid() == ours().uuid()


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(self.norms[0](x)).chunk(3, -1)
        x = x + self.back((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def test_torch_compile_saves_less_with_a_smaller_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, float, float]] = []

    class Recorded(rematplan.KnapsackSolver):
        def __call__(self, memory: Any, graph: Any, most: float, info: Any, nodes: list[fx.Node]) -> Any:
            assert isinstance(graph, fx.Graph)
            assert memory == sorted(memory, reverse=True)
            saved, again = super().__call__(memory, graph, most, info, nodes)
            assert sorted([*saved, *again]) == list(range(len(nodes)))
            assert sum(memory[at] for at in saved) <= most
            scale = sum(map(_size_of, nodes)) / sum(memory)
            taken = sum(_size_of(nodes[at]) for at in saved)
            assert taken <= most * scale * (1 + 1e-9)
            products = [at for at in saved if nodes[at].target in PRODUCTS]
            calls.append((most, taken, len(products)))
            return saved, again

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(2))), torch.randn(2, 16, 16)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for budget in (0.3, 0.6):
        torch._dynamo.reset()
        model.zero_grad()
        with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=Recorded()):
            torch.compile(model, backend="aot_eager_decomp_partition")(x).square().sum().backward()
        for p, e in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, e, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2
    # PyTorch's estimate counts FLOPs; without them, no product would be saved rather than other results.
    assert all(products for _, _, products in calls)
    assert calls == sorted(calls)


STOCK = (stock.dp_knapsack, stock.dp_knapsack_sliding_hirschberg, stock.greedy_knapsack)
PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
