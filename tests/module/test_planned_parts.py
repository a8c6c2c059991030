"""Laws of several modules planned under one budget: bits equal to eager mode, peaks within the budget of all."""

import copy
import ctypes
import itertools
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from planned_tasks import FEW
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, ModelError, NotCaptured, UsageError
from rematplan.module.plan_access import runner_of
from rematplan.planner.pipeline import rank_search
from rematplan.runtime.costs.measure import peak_above_entry

WIDTH, ROWS = 16, 192
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _few_searches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_search, "LIMITS", FEW)
        yield


class Block(nn.Module):
    """A residual block. ``slope``: a setting that the forward reads."""

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__()
        self.slope = slope
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = functional.gelu(self.wide(self.norm(x)))
        return x + self.drop(self.back(functional.leaky_relu(wide, self.slope)))


class Base(nn.Module):
    """Blocks, and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x)), labels)


class Dropping(Base):
    """Layers that NumPy's draws leave out."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if np.random.uniform() >= 0.3:
                x = block(x)
        return x


class Matching(Base):
    """A loss that assigns labels to rows by values."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(x))
        taken: list[int] = []
        for row in (-logits[:64, labels[:3]]).detach().T.tolist():
            taken.append(min((i for i in range(len(row)) if i not in taken), key=row.__getitem__))
        return functional.cross_entropy(logits[taken], labels[:3]) + logits.square().mean()


class Routing(Base):
    """A router that gathers the rows of each expert."""

    def body(self, x: Tensor) -> Tensor:
        chosen = x.detach()[:, : len(self.blocks)].argmax(1).tolist()
        made = torch.zeros_like(x)
        for at, expert in enumerate(self.blocks):
            rows = torch.tensor([row for row, one in enumerate(chosen) if one == at])
            made = made.index_add(0, rows, expert(x[rows]))
        return made


class Gate(nn.Module):
    """A part that returns numbers in addition to tensors: those of rows of each expert, and one of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 4)

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


class Settings(Dropping):
    """Layers that are equal but for a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].slope = 0.5


class Skips(Base):
    """An input that a block uses twice, and that is used after it, too: the order of the gradients' sum counts."""

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        kept = torch.tanh(self.blocks[0](x))
        return self.blocks[2](self.blocks[1](kept)) + kept


class Headless(Base):
    """The last block's output is the result."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        np.random.uniform()
        return self.body(x)


class Features(Skips):
    """Features that a loss outside reads; how the forward hands them over."""

    how = "results"

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        np.random.uniform()
        first = torch.tanh(self.blocks[0](x))
        found = self.head(self.blocks[2](self.blocks[1](first)))
        if self.how == "an attribute":
            self.features = [first]
        return (found, first) if self.how == "results" else found

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        found = self(x, labels)
        logits, first = found if self.how == "results" else (found, None)
        first = self.features.pop() if first is None else first
        return functional.cross_entropy(logits, labels) + first.square().mean()


class Result:
    """An object that pytrees do not open."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Objects(Matching):
    """Returns its loss in an object."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return Result(super().forward(x, labels))


class Tied(nn.Module):
    """A block that uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(torch.sin(x))))


class TiedElsewhere(Base):
    """A weight that a block uses twice, and that is used after it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Tied()

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        kept = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](kept) @ self.blocks[1].linear.weight


class TiedTwice(TiedElsewhere):
    """A block that uses a weight twice, and is called twice."""

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        return self.blocks[1](self.blocks[2](self.blocks[1](self.blocks[0](x))))


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


ROUTERS = (Routing, Counting)
"""Their parts get other rows at each step."""
MODELS = (Dropping, Matching, *ROUTERS, Tail, Sparse)

ASKED: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
in_parts = partial(rematplan.apply, **ASKED)


def as_a_planned_module(model: nn.Module, budget: str) -> nn.Module:
    return rematplan.plan_module(model, batch(0), budget=budget, **ASKED)


def seeded(at: int) -> None:
    torch.manual_seed(at)
    np.random.seed(at)
    random.seed(at)


def batch(at: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(at)
    return torch.randn(rows, WIDTH, generator=made), torch.randint(5, (rows,), generator=made)


def run(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    made = model(x, labels)
    loss: Tensor = made if made.dim() == 0 else functional.cross_entropy(made, labels)
    loss.backward()
    return loss.detach()


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def same_steps(
    model: nn.Module, plain: nn.Module, steps: int = 20, rows: Callable[[int], int] = lambda _: ROWS
) -> None:
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, plain)]
    for at in range(steps):
        losses = []
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            seeded(at)
            optimizer.zero_grad()
            losses.append(run(one, *batch(at, rows(at))))
        assert torch.equal(*losses)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name
        for optimizer in optimizers:
            optimizer.step()


def measured(model: nn.Module, at: int, rows: int = ROWS) -> int:
    """The peak of a step, parameters and batch included."""
    seeded(at)
    model.zero_grad()
    given = batch(at, rows)
    peak, _ = peak_above_entry(lambda: run(model, *given), CPU)
    return peak + sum(t.nbytes for t in (*model.parameters(), *given))


def planned(model: nn.Module) -> Any:
    return runner_of(model).parts.last.plan


@pytest.mark.parametrize(
    ("kind", "plan"), [*((kind, in_parts) for kind in MODELS), (Dropping, as_a_planned_module)]
)
def test_steps_equal_those_of_eager_mode_and_keep_to_the_budget(kind: type[nn.Module], plan: Any) -> None:
    model, plain = made(kind)
    names = list(model.state_dict())
    found = plan(model, "85%" if kind in ROUTERS else "75%")
    same_steps(found, plain, 20 if kind is Dropping else 3)
    assert list(found.state_dict()) == names
    assert all("forward" not in vars(part) for part in model.modules() if part is not found)
    if kind in ROUTERS:
        return
    peaks, eager = ([measured(one, at) for at in range(6)] for one in (found, plain))
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


def test_a_planned_module_makes_its_plans_at_once_and_leaves_the_model_as_it_was() -> None:
    model, plain = made(Matching)
    state = torch.get_rng_state()
    found = as_a_planned_module(model, "85%")
    assert torch.equal(state, torch.get_rng_state())
    assert rematplan.planning(found).plans == ()  # a part is compiled when it is called
    assert planned(found).share > 0.5
    assert isinstance(found, Matching)
    assert all(p.grad is None for p in model.parameters())
    for one in (model, plain):  # both in eager mode
        seeded(0)
        run(one, *batch(0))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


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
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert planned(found).budget < first


def test_layers_that_did_not_run_count_as_if_they_had_and_all_plans_can_be_read() -> None:
    model, _ = made(Dropping)
    in_parts(model, "90%")
    assert rematplan.planning(model).plans == ()
    seeded(3)
    run(model, *batch(3))
    assert sorted(n for group in planned(model).parts for n in group.names) == [
        f"blocks.{k}" for k in range(4)
    ]
    found = rematplan.planning(model)
    assert 1 <= len(found.plans) <= 4
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
    assert calls == {**{f"blocks.{k}": 2 for k in range(4)}, "late": 1}
    assert measured(model, 0) <= planned(model).peak


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


def test_a_refusal_says_why_there_are_no_parts() -> None:
    with pytest.raises(NotCaptured, match=r"nor in parts: statistics cannot be combined"):
        rematplan.plan_module(Matching(), batch(0), budget="1MiB", statistics=rematplan.Kronecker())
    model = Matching(blocks=0)
    model.head = nn.Sequential(nn.Linear(WIDTH, 5))
    with pytest.raises(ModelError, match=r"no part of it can be planned \(head: it is too small\)"):
        run(in_parts(model, "1MiB"), *batch(0))


class Replacing(Base):
    """Replaces a module in its first call, and remembers that."""

    ready = False

    def body(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.blocks[1].drop, self.ready = nn.Dropout(0.5), True
        return super().body(x)


def test_a_forward_that_replaces_a_module_is_planned_in_parts() -> None:
    model, plain = made(Replacing)
    same_steps(in_parts(model, "1MiB"), plain, 3)


SHARED = {"calls": 0}


class Stateful(Base):
    """Changes state of each kind in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.numbers = random.Random(0), np.random.default_rng(0)
        self.draws = torch.Generator().manual_seed(0)
        self.mean, self.calls, self.kept = torch.zeros(WIDTH), 0, []
        self.shadow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        self.calls += 1
        SHARED["calls"] += 1
        self.kept.append(SHARED["calls"])
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
            self.shadow.weight.data = self.shadow.weight.data * 0.9 + 0.01
            self.shadow.bias.mul_(0.9).add_(0.01)
        noise = torch.rand(WIDTH, generator=self.draws) + self.own.random() + self.numbers.random()
        return super().body(x + self.shadow(self.mean + noise) * self.calls * len(self.kept))


@pytest.mark.parametrize("plan", [in_parts, as_a_planned_module])
def test_planning_in_parts_leaves_all_state_as_it_was(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = made(Stateful)
    model = plan(model, "2MiB")
    for one, calls in ((model, {"calls": 0}), (plain, {"calls": 0})):
        monkeypatch.setitem(globals(), "SHARED", calls)
        for at in range(3):
            seeded(at)
            run(one, *batch(at))
    assert (model.calls, model.kept) == (plain.calls, plain.kept) == (3, [1, 2, 3])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


class Cycling(Base):
    """Reads an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 2.0])

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * next(self.scales))


def test_a_forward_that_reads_an_iterator_is_refused_and_leaves_it() -> None:
    model = Cycling()
    with pytest.raises(ModelError, match="reads scales, a cycle"):
        as_a_planned_module(model, "2MiB")
    assert next(model.scales) == 1.0


class Undropped(Matching):
    """Draws for layers that are left out, but with a probability of 0, inside of a part."""

    class Body(Base):
        dropped = 0.0

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            for block in self.blocks:
                if not torch.rand([]) < self.dropped:
                    x = block(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Body()

    def body(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def test_a_part_may_decide_by_draws_whose_outcome_is_known() -> None:
    model, plain = made(Undropped)
    in_parts(model, "1MiB")
    same_steps(model, plain, 3)
    assert {name for name, _ in planned(model).rehearsed.calls} == {"inner"}


class Cache:
    """What layers have computed, as a list in an object."""

    def __init__(self) -> None:
        self.entries: list[Tensor] = []


class CachingBlock(Block):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        made = super().forward(x)
        if cache is not None:
            cache.entries.append(made)
        return made


class Caching(Base):
    """Blocks that leave what they compute in an object that they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachingBlock() for _ in range(4))
        self.tail = nn.ModuleList(CachingBlock() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cache, few = Cache(), np.random.uniform() < 0.5
        for block in [*self.tail, *self.blocks[: 2 if few else 4]]:
            x = block(x, cache if block in self.blocks else None)
        return functional.cross_entropy(self.head(x + sum(cache.entries)), labels)


def test_a_module_that_changes_an_object_is_no_part() -> None:
    model, plain = made(Caching)
    in_parts(model, "2MiB")
    same_steps(model, plain, 6)
    names = {name for name, _ in planned(model).rehearsed.calls}
    assert {f"tail.{k}" for k in range(3)} <= names
    assert not {name for name in names if name.startswith("blocks") and name.count(".") < 2}
    text = planned(model).text()
    assert "; not planned: blocks.0 (the forward changes an object that it is called with, a Cache" in text
    assert "use_cache=False" in text


def test_a_model_that_changes_an_object_is_refused_and_leaves_it_as_it_was() -> None:
    block, cache = CachingBlock(), Cache()
    with pytest.raises(ModelError, match="changes an object that it is called with, a Cache"):
        rematplan.plan_module(block, (torch.randn(4, WIDTH), cache), budget="1MiB", costs="roofline")
    assert cache.entries == []


def test_equal_layers_are_captured_once_and_told_of_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    model, plain = made(Matching)
    in_parts(model, "85%")
    for at in range(4):  # gradients are summed over several backwards
        for one in (model, plain):
            seeded(at)
            run(one, *batch(at))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    first, later = planned(model).parts  # the first one's input needs no gradient
    assert first.names == ["blocks.0"]
    assert later.names == ["blocks.1", "blocks.2", "blocks.3"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "planned in parts: blocks.0, blocks.1 and 2 equal" in line
    assert "% of the activations; the rest is charged" in line


def test_layers_with_other_settings_have_other_plans() -> None:
    model, plain = made(Settings)
    in_parts(model, "90%")
    same_steps(model, plain, 6)
    assert ["blocks.1"] in [group.names for group in planned(model).parts]


@pytest.mark.parametrize("kind", [Skips, TiedElsewhere, TiedTwice])
def test_a_module_whose_input_or_weight_has_several_uses_is_no_part(kind: type[Base]) -> None:
    model, plain = made(kind)
    in_parts(model, "1MiB")
    same_steps(model, plain, 4)
    assert all("blocks.1" not in group.names for group in planned(model).parts)
    assert "; not planned: blocks.1 (it uses an input or a parameter several times" in planned(model).text()


def test_a_named_module_that_cannot_be_a_part_is_refused() -> None:
    model, _ = made(Skips)
    in_parts(model, "1MiB", modules="blocks.1")
    with pytest.raises(ModelError, match="uses an input or a parameter several times"):
        run(model, *batch(0))


def test_a_last_module_whose_result_a_loss_outside_reads_is_a_part() -> None:
    model, plain = made(Headless)
    in_parts(model, "1MiB")
    same_steps(model, plain, 2)
    assert sum(len(group.names) for group in planned(model).parts) == 4


def test_a_loss_in_an_object_is_found() -> None:
    model, plain = made(Objects)
    in_parts(model, "2MiB")
    for at in range(3):
        for one in (model, plain):
            seeded(at)
            one.zero_grad()
            one(*batch(at)).loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    found = planned(model).rehearsed
    kinds = "".join(event.kind for event in found.events)
    assert kinds == "FFFFBBBB"
    assert len({event.during for event in found.events if event.kind == "B"}) > 1  # measured


@pytest.mark.parametrize("how", ["results", "an attribute"])
def test_a_module_whose_input_a_loss_outside_reads_too_is_no_part(how: str) -> None:
    model, plain = made(Features)
    in_parts(model, "1MiB")
    for one in (model, plain):
        one.how = how
        for at in range(3):
            seeded(at)
            one.loss(*batch(at)).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
    assert {name for name, _ in planned(model).rehearsed.calls} >= {"blocks.0", "blocks.2"}
    assert "; not planned: blocks.1 (it uses an input or a parameter several times" in planned(model).text()


class Penalising(Base):
    """Differentiates the backward of its first blocks, and of all if ``whole``."""

    whole = False

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        x = x.clone().requires_grad_()
        made = super().body(x) if self.whole else self.blocks[1](self.blocks[0](x))
        (slope,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        made = made + slope + again
        return made if self.whole else self.blocks[3](self.blocks[2](made))


def test_a_module_whose_backward_is_differentiated_is_no_part() -> None:
    model, plain = made(Penalising)
    in_parts(model, "8MiB")
    same_steps(model, plain, 2)
    assert {name for name, _ in planned(model).rehearsed.calls} == {"blocks.2", "blocks.3"}
    assert "; not planned: blocks.1 (its backward is differentiated again)" in planned(model).text()
    whole = Penalising()
    whole.whole = True
    with pytest.raises(ModelError, match="no part of it can be planned"):
        run(in_parts(whole, "8MiB"), *batch(0))


def test_modules_may_be_exchanged_between_steps() -> None:
    model, plain = made(Matching)
    in_parts(model, "2MiB")
    same_steps(model, plain, 2)
    torch.manual_seed(1)
    fresh, other = Block(), nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
    for changed in (fresh, other, None):
        for one in (model, plain):
            if changed is None:
                one.blocks = nn.ModuleList([one.blocks[2], one.blocks[0]])
            else:
                one.blocks[1] = copy.deepcopy(changed)
        same_steps(model, plain, 1)
        assert len(rematplan.planning(model).plans) >= len(model.blocks)
    for one in (model, plain):
        one.blocks.append(copy.deepcopy(fresh))
    same_steps(model, plain, 1)
    for one in (model, plain):
        del one.blocks[2]
    same_steps(model, plain, 1)
    named, _ = made(Base)
    in_parts(named, "2MiB", modules="blocks.3")
    run(named, *batch(0))
    del named.blocks[3]
    with pytest.raises(ModelError, match=r"has no module blocks\.3 any longer"):
        run(named, *batch(0))


def test_batches_of_any_size_equal_eager_mode_and_stay_within_the_budget() -> None:
    model, plain = made(Dropping)
    in_parts(model, "1MiB")
    sizes = [ROWS, ROWS - 7, 40, ROWS + 16, ROWS + 9, ROWS]
    same_steps(model, plain, len(sizes), sizes.__getitem__)
    assert max(measured(model, at, rows) for at, rows in enumerate(sizes)) <= 1 << 20


def test_evaluation_copies_and_removal() -> None:
    model, plain = made(Dropping)
    in_parts(model, "90%")
    run(model, *batch(0))
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        fresh = copy.deepcopy(plain)
        one.zero_grad()
        same_steps(one, fresh, 2)
    with torch.no_grad():
        seeded(1)
        found = model(*batch(1))
        seeded(1)
        assert torch.equal(found, plain(*batch(1)))
    rematplan.remove(model)
    assert all("forward" not in vars(part) for part in model.modules())


class Kernel(torch.autograd.Function):
    """A copy by a function that takes addresses."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        return y

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return 1 * gradient


class Copied(nn.Module):
    """A module that calls a kernel by its address."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Kernel.apply(x)
        return found


class Fused(Base):
    """Such modules before and after blocks; the first trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Copied(), Copied()

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.after(super().body(self.before(x))))


@pytest.mark.filterwarnings("error")
def test_a_kernel_that_is_no_op_is_told_and_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model, plain = made(Fused)
    same_steps(in_parts(model, "95%"), plain, 3)
    (said,) = capsys.readouterr().err.splitlines()
    assert "not planned: after (it calls a kernel with the address of a tensor (data_ptr)" in said


def test_refusals() -> None:
    model, _ = made(Dropping)
    with pytest.raises(UsageError, match="no module 'layers"):
        in_parts(model, "80%", modules="layers.*")
    for options, name in (
        ({"statistics": rematplan.Kronecker()}, "statistics"),
        ({"strategy": rematplan.Auto(keep_order=True)}, "keep_order of auto"),
    ):
        with pytest.raises(UsageError, match=f"{name} cannot be combined"):
            in_parts(model, "80%", modules="blocks.*", **options)
    in_parts(model, "100KiB")
    with pytest.raises(InfeasibleBudget):
        run(model, *batch(0))
    alone, _ = made(Base)
    in_parts(alone, "90%", modules="blocks.0.drop")
    alone.blocks[0].drop.p = 0.0
    with pytest.raises((ModelError, InfeasibleBudget)):
        model(batch(0)[0], "text")
