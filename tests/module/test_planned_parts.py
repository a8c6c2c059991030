"""Laws of several modules planned under one budget: bits equal to eager mode, peaks within the budget of all."""

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from parts_models import (
    ROWS,
    WIDTH,
    Base,
    Dropping,
    Matching,
    as_a_planned_module,
    batch,
    in_parts,
    made,
    planned,
    run,
    same_steps,
    seeded,
)
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import UsageError
from rematplan.module.plan_access import runner_of
from rematplan.runtime.costs.measure import peak_above_entry

pytestmark = pytest.mark.usefixtures("few_searches")


CPU = torch.device("cpu")


class Routing(Base):
    """A router that gathers the rows of each expert."""

    def body(self, x: Tensor) -> Tensor:
        chosen = x.detach()[:16, : len(self.blocks)].argmax(1).tolist() * (len(x) // 16)
        made = torch.zeros_like(x)
        for at, expert in enumerate(self.blocks):
            rows = torch.tensor([row for row, one in enumerate(chosen) if one == at])
            made = made.index_add(0, rows, expert(x[rows]))
        return made


class Gate(nn.Module):
    """A part that returns numbers in addition to tensors: those of rows of each expert, and one of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, experts: int) -> tuple[int, list[int], Tensor, Tensor]:
        gates, chosen = functional.softmax(self.score(x).tanh(), dim=1).max(1)
        return experts, functional.one_hot(chosen, experts).sum(0).tolist(), chosen.argsort(), gates


class Counting(Base):
    """A router that splits sorted rows by the numbers of its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def body(self, x: Tensor) -> Tensor:
        _, counts, order, gates = self.gate(x, len(self.blocks))
        rows = x[order].split(counts)
        found = torch.cat([expert(one) for expert, one in zip(self.blocks, rows, strict=True)])
        return torch.zeros_like(x).index_add(0, order, found * gates[order, None])


class Tail(Base):
    """One part that runs several times with the same weights; the loss is outside."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        np.random.uniform()
        x = self.blocks[0](self.blocks[0](x))
        return self.head(self.body(x))


class Sparse(Matching):
    """Multiplies by sparse matrices outside of the parts."""

    def body(self, x: Tensor) -> Tensor:
        for layout in (torch.sparse_coo, torch.sparse_csr):
            x = super().body(torch.eye(len(x)).to_sparse(layout=layout) @ x)
        return x


class SparseWords(Base):
    """Adds rows of a large embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50_000, WIDTH, sparse=True)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.words((x[:, 0] > 0).long()))


class Branching(Base):
    """Chooses between two functions by an operator that takes functions."""

    def body(self, x: Tensor) -> Tensor:
        made: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (super().body(x),))
        return made


class Curved(Base):
    """Adds second derivatives that hold a tensor of zeros without memory."""

    def body(self, x: Tensor) -> Tensor:
        made: Tensor = super().body(x)
        curvature: Tensor = torch.func.vmap(torch.func.hessian(lambda row: (row**3).sum()))(made[:8])
        return made + 0.01 * curvature.mean((0, 1))


ROUTERS = (Routing, Counting)
"""Their parts get other rows at each step."""


MODELS = (Dropping, Matching, *ROUTERS, Tail, Sparse, Branching, Curved)


def measured(model: nn.Module, at: int, rows: int = ROWS) -> int:
    """The peak of a step, parameters and batch included."""
    seeded(at)
    model.zero_grad()
    given = batch(at, rows)
    peak, _ = peak_above_entry(lambda: run(model, *given), CPU)
    return peak + sum(t.nbytes for t in (*model.parameters(), *given))


@pytest.mark.parametrize(
    ("kind", "plan"), [*((kind, in_parts) for kind in MODELS), (Dropping, as_a_planned_module)]
)
def test_steps_equal_those_of_eager_mode_and_keep_to_the_budget(kind: type[nn.Module], plan: Any) -> None:
    model, plain = made(kind)
    names = list(model.state_dict())
    found = plan(model, "85%" if kind in ROUTERS else "75%")
    same_steps(found, plain, 8 if kind is Dropping else 3)
    assert list(found.state_dict()) == names
    assert all("forward" not in vars(part) for part in model.modules() if part is not found)
    if kind in ROUTERS:
        return
    peaks, eager = ([measured(one, at) for at in range(3)] for one in (found, plain))
    made_of = planned(found)
    assert max(peaks) <= made_of.peak <= made_of.budget < max(eager)
    assert made_of.share > 0.5


def test_the_budget_min_holds_the_gradients_but_not_sparse_ones_as_if_they_were_dense() -> None:
    model, plain = made(SparseWords)
    in_parts(model, "min")
    for at in range(2):
        peak = measured(model, at)
        seeded(at)
        run(plain, *batch(at))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(p.grad.to_dense(), q.grad.to_dense()) for p, q in pairs)
        plain.zero_grad()
        assert peak <= planned(model).budget
    dense = model.words.weight.nbytes
    assert planned(model).budget < dense + sum(p.nbytes for p in model.parameters())


def test_the_budget_min_holds_the_optimizer_s_step() -> None:
    model, _ = made(Matching)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    in_parts(model, "min", reserved=[optimizer])
    few = 2  # rows: the parameters take more than the activations

    def step() -> None:
        run(model, *batch(0, few))
        optimizer.step()

    step()
    model.zero_grad()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    peak, _ = peak_above_entry(step, CPU)
    held = sum(p.nbytes for p in model.parameters())
    assert 0.9 * planned(model).budget < peak + held + states <= planned(model).budget


def test_a_percentage_is_of_the_step_that_trains() -> None:
    model, plain = made(Matching)
    found = as_a_planned_module(model, "85%")
    first = planned(found).budget
    for at in range(2):
        for one in (found, plain):
            seeded(at)
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(*batch(at))
            loss.backward()
    for p, q in zip(found.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert planned(found).budget < first


def test_layers_that_did_not_run_count_as_if_they_had_and_all_plans_can_be_read() -> None:
    model, _ = made(Dropping)
    in_parts(model, "90%")
    assert rematplan.planning(model).plans == ()
    seeded(3)
    run(model, *batch(3))
    names = sorted(name for group in planned(model).parts for name in group.names)
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    found = rematplan.planning(model)
    assert 1 <= len(found.plans) <= 3
    assert found.stats().plans == len(found.plans)
    with pytest.raises(UsageError, match="planned in parts"):
        _ = found.plan


STAGE = {"times": 1, "late": 0}


class Growing(Base):
    """Runs its blocks several times, and later one more module."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        for _ in range(STAGE["times"] + int(np.random.uniform() > 1)):
            x = super().body(x)
        return self.late(x) if STAGE["late"] else x


def test_what_runs_later_or_more_often_is_told_of_once_and_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = made(Growing)
    in_parts(model, "2MiB")
    same_steps(model, plain, 2)
    for change, value, words in (
        ("times", 2, "blocks.0 runs 2 times"),
        ("late", 1, "late runs 1 times in a step"),
    ):
        monkeypatch.setitem(STAGE, change, value)
        with pytest.warns(UserWarning, match=words):
            same_steps(model, plain, 1)
        with warnings.catch_warnings(action="error"):
            same_steps(model, plain, 3)
    calls = Counter(name for name, _ in planned(model).rehearsed.calls)
    assert calls == {**{f"blocks.{k}": 2 for k in range(3)}, "late": 1}
    assert measured(model, 0) <= planned(model).peak


class Around(Base):
    """Draws, and runs its blocks by a module around them, which is found after them."""

    def __init__(self) -> None:
        super().__init__()
        self.every = nn.Sequential(*self.blocks)

    def body(self, x: Tensor) -> Tensor:
        return self.every(x) if np.random.uniform() < 2 else x


def test_a_part_whose_inner_modules_have_second_names_needs_no_further_captures() -> None:
    model, plain = made(Around)
    in_parts(model, "2MiB")
    same_steps(model, plain, 3)
    assert {name for name, _ in planned(model).rehearsed.calls} == {"every"}
    assert rematplan.planning(model).stats().captures == 0  # the rehearsal's serves all


class LaterMatching(Matching):
    """Matches only if a first number is positive."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x, labels) if x[0, 0] > 0 else Base.forward(self, x, labels)


def test_a_model_of_which_a_later_call_cannot_be_captured_is_planned_in_parts_then() -> None:
    model, plain = made(LaterMatching)
    signs = [bool(batch(at)[0][0, 0] > 0) for at in range(6)]
    assert not signs[0]
    assert any(signs)
    in_parts(model, "1MiB")
    run(model, *batch(0))
    assert runner_of(model).parts is None
    run(plain, *batch(0))
    same_steps(model, plain, 6)
    assert planned(model).budget == 1 << 20


def test_batches_of_any_size_equal_eager_mode_and_stay_within_the_budget() -> None:
    model, plain = made(Dropping)
    in_parts(model, "1MiB")
    sizes = [ROWS, ROWS - 7, 40, ROWS + 16, ROWS + 9, ROWS]
    same_steps(model, plain, len(sizes), sizes.__getitem__)
    assert max(measured(model, at, rows) for at, rows in enumerate(sizes)) <= 1 << 20
