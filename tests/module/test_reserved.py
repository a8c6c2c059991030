"""Laws of what others hold beside a planned step: a whole iteration, optimizer included, keeps the budget."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import numpy
import pytest
import pytorch_optimizer
import torch
from torch import nn, optim
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, UsageError
from rematplan.plans.held_by_others import OtherBytes, Reserved
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.graph.tensor_storages import plain_tensors

CPU = torch.device("cpu")
WIDTH, CLASSES = 64, 10
MAKERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "AdamW": optim.AdamW,
    "AdamW, foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True),
    "RMSprop": optim.RMSprop,
    "Adafactor": optim.Adafactor,
    "Adadelta, foreach": lambda p: optim.Adadelta(p, foreach=True),
    "Adam8bit": lambda p: bitsandbytes.optim.Adam8bit(p, lr=1e-3),
    "Lion of pytorch_optimizer": pytorch_optimizer.Lion,
}


def network(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(depth) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.arange(rows) % CLASSES


def state(optimizer: optim.Optimizer) -> int:
    every = (t for of in optimizer.state.values() for t in plain_tensors(of))
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in every}.values())


def planned_within(
    budget: str | int, model: nn.Module, rows: int, reserved: list[object], **options: object
) -> nn.Module:
    options = {"strategy": "approx_dp", "loss_memory": "3x", **options}
    return rematplan.plan_module(model, (batch(rows)[0],), budget=budget, reserved=reserved, **options)


def peaks(model: nn.Module, optimizer: optim.Optimizer, rows: int, backwards: int = 1) -> list[int]:
    """The peaks of three iterations, from the first on, which makes the optimizer's state."""
    x, labels = batch(rows)

    def iteration() -> None:
        for _ in range(backwards):
            functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for _ in range(3):
        resident = x.nbytes + sum(p.nbytes for p in model.parameters()) + state(optimizer)
        found.append(resident + peak_above_entry(iteration, CPU)[0])
    return found


@pytest.mark.parametrize(
    ("name", "accumulate", "rows"),
    [(name, bool(at % 2), (8, 512)[at // 2 % 2]) for at, name in enumerate(MAKERS)],
)
def test_whole_iterations_keep_the_budget_and_use_it(name: str, accumulate: bool, rows: int) -> None:
    for budget in ("100%", "80%") if rows > 8 else ("100%", "min"):
        model = network(depth=8 if rows > 8 else 4)
        optimizer = MAKERS[name](list(model.parameters()))
        planned = planned_within(budget, model, rows, [optimizer, *["gradients"] * accumulate])
        most = max(peaks(planned, optimizer, rows, 1 + accumulate))
        assert most <= planned.plan.budget
        assert most >= 0.9 * planned.plan.peak
        assert len(planned.plans) == 1


def test_training_is_the_same() -> None:
    ours, plain = network(), network()
    mine, theirs = optim.AdamW(ours.parameters()), optim.AdamW(plain.parameters())
    planned = planned_within("70%", ours, 512, [mine])
    peaks(planned, mine, 512)
    peaks(plain, theirs, 512)
    assert planned.plan.estimate.overhead > 0
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": rematplan.Auto(time_limit=0.2)},
        {"strategy": rematplan.Auto(time_limit=0.2, two_lanes="on")},
    ],
)
def test_other_plans_end_with_the_optimizer_too(options: dict[str, object]) -> None:
    model = network()
    optimizer = optim.Adam(model.parameters(), foreach=True)
    planned = planned_within("75%", model, 512, [optimizer], **options)
    assert max(peaks(planned, optimizer, 512)) <= planned.plan.budget


def test_where_the_optimizer_holds_most_the_least_recomputes_nothing() -> None:
    model = network()
    optimizer = optim.Adadelta(model.parameters(), foreach=True)
    planned = planned_within("min", model, 8, [optimizer])
    assert planned.plan.estimate.reruns == 0
    with pytest.raises(InfeasibleBudget, match=r"op '\(optimizer\)'"):
        planned_within(planned.plan.peak - 1, network(), 8, [optimizer])


def test_modules_count_what_they_do_not_share() -> None:
    model = network()
    alone = planned_within("100%", model, 8, []).plan.peak
    teacher = copy.deepcopy(model)
    size = sum(p.nbytes for p in model.parameters())
    for reserved, more in (
        ([teacher], size),
        ([teacher, teacher], size),
        ([teacher, teacher[0]], size),
        ([model], 0),
        ([nn.Sequential(model[0], teacher[0])], sum(p.nbytes for p in teacher[0].parameters())),
        ([copy.deepcopy(teacher).to("meta")], 0),
    ):
        assert planned_within("100%", model, 8, reserved).plan.peak == alone + more


class Says:
    def __init__(self, said: object = 1234) -> None:
        self.said = said

    def reserved_bytes(self) -> object:
        return self.said


def test_bytes_are_stated_as_numbers_texts_and_by_a_method() -> None:
    alone = planned_within("100%", network(), 8, []).plan.peak
    assert planned_within("100%", network(), 8, [100, "1KiB", Says()]).plan.peak == alone + 100 + 1024 + 1234
    assert planned_within("100%", network(), 8, [numpy.int64(100), "1KiB", "1KiB"]).plan.peak == alone + 2148


def test_an_object_that_is_listed_twice_counts_once() -> None:
    model, says = network(), Says()
    optimizer = optim.AdamW(model.parameters())
    once = planned_within("100%", model, 8, [optimizer, says]).plan.peak
    assert planned_within("100%", model, 8, [optimizer, says, optimizer, says]).plan.peak == once


@pytest.mark.parametrize(
    ("reserved", "said"),
    [
        (["60%"], "not a number of bytes"),
        (["much"], "'much' is not a number of bytes"),
        ([-5], "-5 is not a number of bytes"),
        ([True], "True is not a number of bytes"),
        ([Says(-5)], r"reserved_bytes\(\) of a Says returned -5, not a whole number of bytes"),
        ([Says(None)], "returned None, not a whole number of bytes"),
        ([object()], "the bytes of a object"),
        ([3.5], "the bytes of a float"),
        ([Says], "cannot tell the bytes of"),
        ("1GiB", r"write reserved=\[optimizer\]"),
        (None, r"write reserved=\[optimizer\]"),
    ],
)
def test_what_is_no_bytes_is_refused(reserved: list[object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned_within("100%", network(), 8, reserved)


def test_an_optimizer_that_reads_values_is_refused_until_its_bytes_are_stated() -> None:
    class Unknown(optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params, {})

        def step(self, closure: object = None) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p]["kept"] = torch.full_like(p, float(p.sum()))

    model = network()
    optimizer = Unknown(list(model.parameters()))
    for _ in range(2):  # without and with its state
        with pytest.raises(UsageError, match=r"a Unknown are not known.* such as '1GiB'"):
            planned_within("100%", model, 512, [optimizer])
        optimizer.step()
    planned = planned_within("100%", model, 512, [state(optimizer)])
    assert max(peaks(planned, optimizer, 512)) <= planned.plan.budget


def test_a_pickle_takes_bytes_with_it_and_no_optimizer() -> None:
    model, teacher = network(), network()
    optimizer = optim.AdamW(model.parameters())
    planned = planned_within("100%", model, 8, [optimizer, teacher, 100])
    data = pickle.dumps(planned)
    assert b"AdamW" not in data
    assert len(data) < 3 * sum(p.nbytes for p in model.parameters())
    twin = pickle.loads(data)
    twin.prepare(batch(8)[0])
    assert (twin.plan.peak, twin.plan.budget) == (planned.plan.peak, planned.plan.budget)


class Engine:
    """An object that is neither an optimizer nor a module."""

    def reserved_bytes(self) -> int:
        return 1 << 20


def test_a_copy_counts_the_bytes_that_objects_state() -> None:
    reserved = Reserved.of([Engine(), 100])
    for twin in (copy.deepcopy(reserved), pickle.loads(pickle.dumps(reserved))):
        assert twin.on(CPU, {}) == reserved.on(CPU, {}) == OtherBytes((1 << 20) + 100)


def test_a_saved_plan_is_loaded_with_the_same_kinds_of_things(tmp_path: Path) -> None:
    model = network()
    optimizer = optim.AdamW(model.parameters())
    planned = planned_within("80%", model, 512, [optimizer])
    rematplan.save_plan(planned.plan, tmp_path / "plan.json")
    model = network()
    optimizer = optim.AdamW(model.parameters())
    x = batch(512)[0]
    again = rematplan.plan_module(
        model,
        (x,),
        reserved=[optimizer],
        loss_memory="3x",
        strategy=rematplan.SavedPlan(tmp_path / "plan.json"),
    )
    assert again.plan.schedule == planned.plan.schedule
    assert max(peaks(again, optimizer, 512)) <= planned.plan.budget


def test_a_saved_plan_is_loaded_without_the_bytes_that_others_held(tmp_path: Path) -> None:
    x, known = batch(512)[0], {"loss_memory": "3x", "costs": "roofline"}
    planned = rematplan.plan_module(
        network(), (x,), budget="80%", reserved=["1MiB"], strategy="approx_dp", **known
    )
    rematplan.save_plan(planned.plan, tmp_path / "plan.json")
    again = rematplan.plan_module(
        network(), (x,), strategy=rematplan.SavedPlan(tmp_path / "plan.json"), **known
    )
    assert again.plan.schedule == planned.plan.schedule
