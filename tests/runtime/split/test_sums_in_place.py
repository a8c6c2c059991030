"""Sums over parts are computed in the memory of the first summand: the same bits in fewer bytes, also if a backward
runs twice or lacks gradients, and never twice in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planned_steps import PlannedStep, problem, verify
from split_models import CASES, Decoder, captured, case, planned, split, tokens
from torch import Tensor, nn
from torch.nn import functional

from rematplan.ir import InfeasibleBudget, ProblemError
from rematplan.planner.core.schedule import Run
from rematplan.planner.core.simulator import simulate
from rematplan.planner.overlap.place_on_lanes import on_two_lanes
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep, Ref, single_call, substitute
from rematplan.runtime.split.split_step import split_regions
from rematplan.runtime.split.sums_in_place import with_sums_in_place


class Penalised(Decoder):
    """A head whose backward is not linear in the loss's gradient, so that it stays in the backward half."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.token(tokens)).flatten(0, 1)
        return functional.cross_entropy(scores, targets.flatten()) + scores.logsumexp(-1).square().mean()


class Wide(nn.Module):
    """A head whose weight is larger than all scores of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2000, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x), targets)


class TwoLosses(Decoder):
    """Two heads with losses of their own, of which a caller may use one. The first stays in the backward half."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.other = nn.Linear(self.head.in_features, self.head.out_features)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x, targets = self.token(tokens).flatten(0, 1), targets.flatten()
        scores = self.head(x)
        first = functional.cross_entropy(scores, targets) + scores.logsumexp(-1).square().mean()
        return first, functional.cross_entropy(self.other(x), targets)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def free_costs(step: CapturedStep) -> dict[str, CallCost]:
    return {c.name: CallCost(1.0) for c in step.priced_calls}


@pytest.mark.parametrize("name", CASES)
def test_all_bits_are_those_of_new_tensors(name: str) -> None:
    module, batch, step, regions = case(name)
    found, parts = [], 5
    for one in (split_regions(step, dict.fromkeys(regions, parts)), split(step, regions, parts)):
        module.zero_grad(set_to_none=True)
        (3 * planned(module, one)(*batch)).backward()
        found.append(gradients(module))
        assert any(c.in_place for c in one.calls) == (len(found) == 2)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_the_promised_one(dtype: torch.dtype) -> None:
    """A wide head with few rows: two of its gradients exist with new tensors, and one in place."""
    torch.manual_seed(0)
    module, batch = Wide().to(dtype), (torch.randn(64, 64, dtype=dtype), torch.randint(2000, (64,)))
    step, head = captured(module, batch)
    held = sum(t.nbytes for t in (*module.parameters(), *batch))
    peaks = []
    for one in (split_regions(step, dict.fromkeys(head, 4)), split(step, head, 4)):
        plan = no_recompute(problem(one, profile_costs(one)))
        run = PlannedStep(module, one, plan.schedule)
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            above, _ = peak_above_entry(lambda run=run: run(*batch).backward(), step.device)
        assert 0 <= plan.estimate.peak - held - above <= 128
        peaks.append(held + above)
    assert peaks[0] - peaks[1] >= 0.7 * module.head.weight.nbytes


@pytest.mark.parametrize("kind", [Decoder, Penalised])
def test_a_backward_that_runs_twice_reads_unchanged_tensors(kind: type[Decoder]) -> None:
    torch.manual_seed(0)
    module, batch = kind(), tokens(2, 64)
    step, regions = captured(module, batch)
    run, found = planned(module, split(step, regions, 4)), []
    for called in (module, run):
        module.zero_grad(set_to_none=True)
        loss = called(*batch)
        for factor in (3.0, 3.0, 0.5):
            (factor * loss).backward(retain_graph=True)
        found.append(gradients(module))
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        assert expected is None or (got - expected).norm() < 3e-6 * expected.norm()


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_gradient_that_does_not_arrive_adds_nothing(used: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, batch = TwoLosses(), tokens(2, 64)
    step, regions = captured(module, batch)
    run, found = planned(module, split(step, regions, 4)), []
    for called in (module, lambda *given: run.compiled(named(module), given)):
        module.zero_grad(set_to_none=True)
        losses = called(*batch)
        sum(2.0 * losses[k] for k in used).backward()
        found.append(gradients(module))
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        assert expected is None or (got - expected).norm() < 3e-6 * expected.norm()


def named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def test_a_sum_that_was_written_into_is_never_computed_again() -> None:
    module, batch = Decoder(), tokens(2, 64)
    step, regions = captured(module, batch)
    made = split(step, regions, 4)
    graph = problem(made, free_costs(made))
    for call in (c for c in made.calls if c.in_place):
        memory = made.values[call.results[0] or ""].storage
        assert {call.name, graph.ops[graph.producer[memory]].name} <= {*graph.never_rerun}


def test_what_reads_a_sum_waits_for_its_last_summand() -> None:
    module, batch = Decoder(tied=False), tokens(2, 64)
    step, regions = captured(module, batch)
    made = split(step, regions, 4)
    graph = problem(made, free_costs(made))
    schedule = no_recompute(graph).schedule
    for call in (c for c in made.calls if c.in_place):
        left_out = tuple(one for one in schedule if one != Run(call.name))
        with pytest.raises(ProblemError):
            simulate(graph, left_out)


@pytest.mark.parametrize("seed", range(3))
def test_plans_that_recompute_have_the_same_gradients(seed: int) -> None:
    torch.manual_seed(0)
    module, batch = Decoder(), tokens(2, 64)
    step, regions = captured(module, batch)
    made = split(step, regions, 4)
    graph = problem(made, free_costs(made))
    search = Anneal(moves=20_000, seed=seed)
    with pytest.raises(InfeasibleBudget) as refused:
        search.plan(graph, graph.input_bytes)
    plan = search.plan(graph, (refused.value.smallest + 3 * no_recompute(graph).estimate.peak) // 4)
    assert plan.estimate.reruns
    found = []
    for one in (planned(module, made), PlannedStep(module, made, plan.schedule)):
        assert verify(one, batch).error < 3e-6
        module.zero_grad(set_to_none=True)
        one(*batch).backward()
        found.append(gradients(module))
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_lanes_add_in_order() -> None:
    torch.manual_seed(0)
    module, batch = Decoder(), tokens(2, 64)
    step, regions = captured(module, batch)
    made = split(step, regions, 4)
    graph = problem(made, free_costs(made))
    peak = no_recompute(graph).estimate.peak
    found = Anneal(moves=20_000).plan(graph, peak - (peak - graph.input_bytes) // 8)
    laned = on_two_lanes(graph, found, 2 * peak)
    assert laned is not None
    run = PlannedStep(module, made, laned.schedule, laned.lanes)
    assert verify(run, batch).error < 3e-6


def test_only_gradients_of_weights_are_summed_in_place() -> None:
    module, batch = Decoder(tied=False), tokens(2, 64)
    step, regions = captured(module, batch)
    made = split(step, regions, 4)
    sums = [c for c in made.calls if c.in_place]
    gradients = {made.values[o.value].storage for o in made.outputs if o.kind == "gradient"}
    assert {made.values[c.results[0] or ""].storage for c in sums} <= gradients
    written = [c.args[0].value for c in sums]
    read = [name for c in made.calls for name in c.operands]
    assert all(read.count(value) == 1 for value in written)


class Shared(nn.Module):
    """Two weights whose gradients have a summand in common."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x.cos() @ self.a + x.sin() @ self.b + x @ (self.a + self.b)).square().mean()


def test_a_summand_of_two_sums_is_not_overwritten() -> None:
    module, batch = Shared(), (torch.randn(4, 8),)
    step = capture(module, batch, "shared")
    made = with_sums_in_place(step)
    written = [c.args[0].value for c in made.calls if c.in_place]
    read = [name for c in made.calls for name in c.operands]
    assert [read.count(value) for value in written] == [1, 1]
    assert verify(planned(module, made), batch).error == 0


def test_a_call_that_reads_an_overwritten_sum_does_not_compile() -> None:
    torch.manual_seed(0)
    module, batch = Decoder(tied=False), tokens(2, 64)
    step, regions = captured(module, batch)
    made = split(step, regions, 4)
    added = [c for c in made.calls if c.in_place and c.module == "head" and not c.backward]
    first, last = added[0].args[0].value, added[-1]
    doubled = single_call("doubled", torch.ops.aten.add.Tensor, (Ref(last.results[0] or ""), Ref(first)))
    values = {
        **made.values,
        "doubled": replace(made.values[last.results[0] or ""], name="doubled", call="doubled"),
    }
    calls = [*made.calls]
    at = calls.index(last) + 1
    calls[at:] = [
        doubled,
        *(
            replace(c, args=substitute(c.args, lambda v: Ref("doubled" if v == last.results[0] else v)))
            for c in calls[at:]
        ),
    ]
    with pytest.raises(ProblemError):
        planned(module, replace(made, calls=tuple(calls), values=values))
