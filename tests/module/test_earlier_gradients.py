"""Laws of gradients that are there when a planned module is called: accumulated ones, or those of the last step."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, ProblemError, show_bytes
from rematplan.plans.planner import Planner
from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")
WIDTH, ROWS, CLASSES = 64, 256, 10


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(
        0, CLASSES, (ROWS,), generator=generator
    )


def gradients(model: nn.Module) -> int:
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def peaks_of_accumulation(
    model: nn.Module, steps: int = 3, batches: Callable[[int], tuple[Tensor, Tensor]] = batch
) -> list[int]:
    """The peaks of steps that add their gradients up, from none on."""
    model.zero_grad(set_to_none=True)
    peaks = []
    for k in range(steps):
        x, labels = batches(k)
        resident = x.nbytes + sum(p.nbytes for p in model.parameters()) + gradients(model)
        above, _ = peak_above_entry(
            lambda x=x, labels=labels: functional.cross_entropy(model(x), labels).backward(), CPU
        )
        peaks.append(resident + above)
    return peaks


def tight(model: nn.Module, share: float) -> int:
    """A budget between what a step can do with and what it wants."""
    with pytest.raises(InfeasibleBudget) as refused:
        planned_within(1000, copy.deepcopy(model))
    least = refused.value.smallest
    most = rematplan.plan_module(model, (batch()[0],), budget="100%", strategy="store_all").plan.peak
    return least + int(share * (most - least))


def planned_within(budget: str | int, model: nn.Module, **options: object) -> nn.Module:
    return rematplan.plan_module(model, (batch()[0],), budget=budget, strategy="approx_dp", **options)


def test_accumulated_gradients_are_within_the_budget() -> None:
    model = network()
    plain = copy.deepcopy(model)
    budget = tight(model, 0.5)
    planned = planned_within(budget, model)
    alone = planned.plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, *later = peaks_of_accumulation(planned)
    assert first <= budget
    assert later[0] <= budget
    assert later[1] == later[0]
    peaks_of_accumulation(plain)
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)
    assert [p.budget for p in planned.plans] == [budget, budget - gradients(planned)]
    assert planned.plan is planned.plans[1]
    planned.zero_grad(set_to_none=True)
    planned(batch()[0])
    assert planned.plan is alone


def test_a_plan_that_fits_with_earlier_gradients_is_kept() -> None:
    planned = planned_within("1GiB", network(), dynamic_shapes=False)
    peaks_of_accumulation(planned)
    assert len(planned.plans) == 1


def test_gradients_that_go_before_the_backward_are_counted_while_they_are_there() -> None:
    model = network()
    budget = tight(model, 0.5)
    planned = planned_within(budget, model)
    x, labels = batch()

    def step() -> None:
        loss = functional.cross_entropy(planned(x), labels)
        planned.zero_grad()
        loss.backward()

    for _ in range(3):
        resident = x.nbytes + sum(p.nbytes for p in planned.parameters()) + gradients(planned)
        assert resident + peak_above_entry(step, CPU)[0] <= budget


@pytest.mark.parametrize("saved", [False, True])
def test_if_no_plan_fits_with_earlier_gradients_there_is_one_warning(saved: bool, tmp_path: Path) -> None:
    model = network()
    plain = copy.deepcopy(model)
    budget = tight(model, 0.001)
    planned = planned_within(budget, model)
    if saved:
        rematplan.save_plan(planned.plan, tmp_path / "plan.json")
        planned = rematplan.plan_module(
            copy.deepcopy(plain), (batch()[0],), strategy=rematplan.SavedPlan(tmp_path / "plan.json")
        )
    with pytest.warns(
        UserWarning,
        match="Sequential: parameters have .* of gradients of earlier steps, and no plan fits the budget",
    ) as said:
        first, *_ = peaks_of_accumulation(planned)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert first <= budget
    assert len(planned.plans) == (1 if saved else 2)  # the second one has the smallest peak found with them
    if not saved:
        assert f"takes {show_bytes(planned.plan.peak + gradients(planned))}" in str(said[0].message)
    peaks_of_accumulation(plain)
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


FEW = 8
"""Rows with which a step of the network holds more bytes of gradients than of activations."""


def few(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, labels = batch(seed)
    return x[:FEW], labels[:FEW]


def narrow(share: float, **options: object) -> tuple[nn.Module, int]:
    """A planned network whose budget lets it hold the old gradients or the new, not both; and the budget."""
    model, (x, _) = network(), few()
    with pytest.raises(InfeasibleBudget) as refused:
        rematplan.plan_module(copy.deepcopy(model), (x,), budget=1000, strategy="approx_dp", **options)
    budget = refused.value.smallest + int(share * sum(p.nbytes for p in model.parameters()))
    return rematplan.plan_module(model, (x,), budget=budget, strategy="approx_dp", **options), budget


@pytest.mark.parametrize("share", [0.35, 0.9])
def test_new_gradients_go_into_earlier_ones_as_they_leave(share: float) -> None:
    planned, budget = narrow(share)
    plain = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peaks = peaks_of_accumulation(planned, 4, few)
    assert max(peaks) <= budget
    assert len(planned.plans) == 2
    peaks_of_accumulation(plain, 4, few)
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)
    both = planned.plan.peak + gradients(planned) + sum(p.nbytes for p in planned.parameters())
    assert both > budget  # the new ones beside the old to the end would not fit


def test_gradients_that_some_lack_or_that_go_early_fit_the_same_plan() -> None:
    planned, budget = narrow(0.7)
    plain = network()
    x, labels = few()
    peaks = []
    for model in (planned, plain):
        peaks_of_accumulation(model, 2, few)
        for kind in ("some", "early"):
            for at, p in enumerate(model.parameters()):
                p.grad = None if kind == "some" and at % 3 else p.grad

            def step(model: nn.Module = model, kind: str = kind) -> None:
                loss = functional.cross_entropy(model(x), labels)
                if kind == "early":
                    model.zero_grad()
                loss.backward()

            resident = x.nbytes + sum(p.nbytes for p in model.parameters()) + gradients(model)
            peaks.append(resident + peak_above_entry(step, CPU)[0])
    assert max(peaks[:2]) <= budget
    assert len(planned.plans) == 2
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


def test_a_plan_with_earlier_gradients_says_so_and_fits_no_other_step(tmp_path: Path) -> None:
    planned, _ = narrow(0.7)
    peaks_of_accumulation(planned, 2, few)
    assert "with earlier gradients" in str(planned.plan)
    assert "beside" not in str(planned.plans[0])
    rematplan.save_plan(planned.plan, tmp_path / "plan.json")
    with pytest.raises(ProblemError, match="made for another graph, 'Sequential with earlier"):
        rematplan.plan_module(network(), (few()[0],), strategy=rematplan.SavedPlan(tmp_path / "plan.json"))


def test_gradients_that_are_given_and_not_added_are_the_same() -> None:
    planned, plain = narrow(0.7)[0], network()
    found = []
    for model in (planned, plain):
        peaks_of_accumulation(model, 2, few)
        x, labels = few(5)
        found.append(
            torch.autograd.grad(functional.cross_entropy(model(x), labels), list(model.parameters()))
        )
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (planned, plain))))


def test_gradients_of_inputs_count_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(16, 16), nn.GELU())))
    x = torch.randn(512, 16, requires_grad=True)
    with pytest.raises(InfeasibleBudget) as refused:
        rematplan.plan_module(copy.deepcopy(model), (x,), budget=1000, strategy="approx_dp")
    budget = refused.value.smallest + x.nbytes + 20_000
    planned = rematplan.plan_module(model, (x,), budget=budget, strategy="approx_dp")
    for _ in range(3):
        resident = x.nbytes + sum(p.nbytes for p in planned.parameters()) + gradients(planned)
        resident += 0 if x.grad is None else x.grad.nbytes
        assert resident + peak_above_entry(lambda: planned(x).sum().backward(), CPU)[0] <= budget
    assert len(planned.plans) == 2


def accumulating(budget: str | int, **options: object) -> nn.Module:
    return rematplan.plan_module(
        network(), (few()[0],), budget=budget, strategy="approx_dp", reserved=["gradients"], **options
    )


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_accumulation_that_is_stated_makes_one_plan(share: float) -> None:
    with pytest.raises(InfeasibleBudget) as refused:
        accumulating(1000)
    most = accumulating("100%").plan.peak
    budget = refused.value.smallest + int(share * (most - refused.value.smallest))
    planned, plain = accumulating(budget, dynamic_shapes=False), network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peaks = peaks_of_accumulation(planned, 4, few)
        planned.prepare(few()[0])
        peaks += peaks_of_accumulation(planned, 3, few)
    assert max(peaks) <= budget
    assert len(planned.plans) == 1
    assert planned.plan.budget == budget
    assert gradients(planned) + sum(p.nbytes for p in planned.parameters()) < planned.plan.peak
    peaks_of_accumulation(plain, 3, few)
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


def test_a_percentage_is_of_a_peak_with_earlier_gradients() -> None:
    planned = accumulating("100%")
    alone = rematplan.plan_module(network(), (few()[0],), budget="100%", strategy="store_all")
    eager = max(peaks_of_accumulation(network(), 3, few))
    assert planned.plan.estimate.reruns == 0
    assert alone.plan.peak < planned.plan.peak
    assert eager <= planned.plan.peak
    assert max(peaks_of_accumulation(planned, 3, few)) <= planned.plan.peak


def test_gradients_of_parameters_that_a_step_does_not_use_are_counted() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = network(), nn.ModuleList(nn.Linear(CLASSES, 900) for _ in range(2))

        def forward(self, x: Tensor, at: int) -> Tensor:
            return self.heads[at](self.body(x)).square().mean()

    planned = rematplan.plan_module(
        Heads(), (few()[0], 0), budget="100%", strategy="approx_dp", reserved=["gradients"]
    )
    x = few()[0]
    planned.prepare(x, 1)
    for k in range(4):
        used = [*planned.body.parameters(), *planned.heads[k % 2].parameters()]
        resident = sum(p.nbytes for p in used) + gradients(planned) + x.nbytes
        above, _ = peak_above_entry(lambda k=k: planned(x, k % 2).backward(), CPU)
        assert resident + above <= planned.plan.budget
    assert len(planned.plans) == 2  # one a head


def test_a_saved_plan_that_counts_them_is_for_accumulation(tmp_path: Path) -> None:
    planned = accumulating("98%")
    rematplan.save_plan(planned.plan, tmp_path / "plan.json")
    loaded = rematplan.plan_module(
        network(), (few()[0],), strategy=rematplan.SavedPlan(tmp_path / "plan.json"), reserved=["gradients"]
    )
    assert loaded.plan.schedule == planned.plan.schedule
    assert max(peaks_of_accumulation(loaded, 3, few)) <= planned.plan.budget
    assert len(loaded.plans) == 1


def test_between_sizes_with_plans_for_earlier_gradients_no_further_step_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched, search = list[str](), Planner.with_gradients
    monkeypatch.setattr(Planner, "with_gradients", lambda *given: searched.append("") or search(*given))
    model = network()
    plain, budget = copy.deepcopy(model), tight(model, 0.5)
    asked = rematplan.Auto(time_limit=1)
    planned = rematplan.plan_module(model, (batch()[0],), budget=budget, strategy=asked, costs="roofline")
    rows = [ROWS, 240, 255, 244, 252, 241, 248, 254]
    peaks, counts = list[int](), list[int]()
    for one in rows:
        x, labels = (t[:one].clone() for t in batch(one))
        for network_ in (planned, plain):
            resident = x.nbytes + sum(p.nbytes for p in network_.parameters()) + gradients(network_)

            def step(x: Tensor = x, labels: Tensor = labels, network_: nn.Module = network_) -> None:
                functional.cross_entropy(network_(x), labels).backward()

            peaks.append(resident + peak_above_entry(step, CPU)[0])
        counts.append(len(searched))
        assert all(
            torch.equal(ours.grad, eager.grad)
            for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True)
        )
    assert max(peaks[::2]) <= budget < min(peaks[3::2])
    assert counts[:3] == [0, 1, 2]
    assert counts[-1] == 2
    assert planned.plan.budget == budget - gradients(planned)
