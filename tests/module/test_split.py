"""The option ``split``: of `plan_module`, of `apply` and of the command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_compiler import NEEDS_COMPILER
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, ProblemError, UsageError
from rematplan.module.captures import capture_call
from rematplan.module.plan_access import runner_of
from rematplan.plans import splitting
from rematplan.plans.options import PlanOptions, stated_splits
from rematplan.plans.planner import Planner
from rematplan.runtime.costs.measure import peak_above_entry

QUICK = rematplan.Anneal(moves=1000)


class Head(nn.Module):
    """A large vocabulary, whose scores and their gradients are most of the step."""

    def __init__(self, vocabulary: int = 4000) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        scores = self.head(x + self.mlp(x))
        return functional.cross_entropy(scores.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Attention(nn.Module):
    """Attention without a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)).square().mean()


@pytest.fixture(autouse=True)
def _few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers of parts are tried, and each with few moves."""
    monkeypatch.setattr(splitting, "PARTS", (2, 4, 8))
    monkeypatch.setattr(splitting, "strategy_of_trials", lambda _: rematplan.Auto(moves=1000))


@pytest.fixture
def model() -> Head:
    torch.manual_seed(0)
    return Head()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(4000, (4, 128), generator=torch.Generator().manual_seed(0))


def planned(model: Head, tokens: Tensor, **options: Any) -> Any:
    return rematplan.plan_module(
        model, (tokens,), costs="roofline", refine=False, **{"strategy": QUICK, **options}
    )


def gradients(model: nn.Module, called: Callable[[Tensor], Tensor], tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = called(tokens)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("split", [{"head": 4, "mlp": 2}, "auto"])
def test_a_budget_below_one_tensor_of_scores(model: Head, tokens: Tensor, split: Any) -> None:
    expected = gradients(model, model, tokens)
    scores = 4 * 128 * 4000 * 4
    fixed = sum(2 * p.nbytes for p in model.parameters())
    found = planned(model, tokens, budget=fixed + scores, split=split)
    assert found.plan.peak <= fixed + scores
    got = gradients(model, found, tokens)
    differ = {name for name in expected if not torch.equal(expected[name], got[name])}
    assert differ <= {"head.weight", *(f"mlp.{k}.{kind}" for k in (0, 2) for kind in ("weight", "bias"))}
    for name in differ:
        assert (got[name] - expected[name]).norm() < 1e-6 * expected[name].norm()


@NEEDS_COMPILER
@pytest.mark.parametrize("split", [{"0": 4}, {"0": 3, "2": 4}])
def test_weight_gradients_of_split_convolutions_with_fused_kernels(split: dict[str, int]) -> None:
    torch.manual_seed(0)
    first, second = (nn.Conv2d(channels, 8, 3, padding=1) for channels in (3, 8))
    model = nn.Sequential(first, nn.LeakyReLU(), second, nn.LeakyReLU())
    images = torch.randn(4, 3, 16, 16)
    fixed = images.nbytes + sum(p.nbytes for p in model.parameters())

    def step(called: Any) -> None:
        called(images).square().sum().backward()

    def gradients_of(called: Any) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        step(called)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    eager, known = gradients_of(model), list[Tensor]()
    for budget in ("100%", "least"):
        options = {"kernels": "fused", "strategy": QUICK, "refine": False}
        found = rematplan.plan_module(model, (images,), budget=budget, split=split, **options)
        got = gradients_of(found)
        known = known or got
        assert all(map(torch.equal, got, known))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(got, eager, strict=True))
        del got
        model.zero_grad(set_to_none=True)
        peak, _ = peak_above_entry(lambda found=found: step(found), torch.device("cpu"))
        assert fixed + peak <= found.plan.peak


@NEEDS_COMPILER
def test_fused_kernels_of_parts(model: Head, tokens: Tensor, tmp_path: Path) -> None:
    expected = gradients(model, model, tokens)
    scores, fixed = 4 * 128 * 4000 * 4, sum(2 * p.nbytes for p in model.parameters())
    options = {"split": {"head": 4}, "kernels": "fused"}
    found = planned(model, tokens, budget=fixed + scores, **options)
    loose = planned(model, tokens, budget=fixed + 3 * scores, **options)
    rematplan.save_plan(loose.plan, tmp_path / "plan.json")
    saved = rematplan.SavedPlan(tmp_path / "plan.json")
    again = planned(model, tokens, budget=None, strategy=saved, split="auto", kernels="fused")
    assert again.plan.schedule == loose.plan.schedule
    got, others = gradients(model, found, tokens), gradients(model, loose, tokens)
    assert "fused_" in found.source
    assert all(torch.equal(got[name], others[name]) for name in expected)
    assert all(torch.allclose(got[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)
    model.zero_grad(set_to_none=True)
    del got, others
    peak, _ = peak_above_entry(lambda: found(tokens).backward(), torch.device("cpu"))
    assert 0 <= found.plan.peak - (fixed // 2 + tokens.nbytes + peak) <= 64
    assert found.plan.peak <= fixed + scores
    with pytest.raises(InfeasibleBudget, match="with fused kernels and these splits"):
        planned(model, tokens, budget=fixed // 2, **options)


def test_a_refusal_says_what_splits_would_need(model: Head, tokens: Tensor) -> None:
    fixed = sum(2 * p.nbytes for p in model.parameters())
    with pytest.raises(InfeasibleBudget, match=r"with split=auto: [0-9.]+ MiB \([0-9]+ bytes\)") as refused:
        planned(model, tokens, budget=fixed + 4 * 128 * 4000 * 4)
    bytes_ = int(str(refused.value).split("split=auto: ")[1].split("(")[1].split(" ")[0])
    longer = rematplan.Anneal(moves=4000)
    found = planned(model, tokens, budget=bytes_ + bytes_ // 50, split="auto", strategy=longer)
    assert found.plan.peak <= 1.02 * bytes_


def test_proven_of_chosen_splits_is_what_no_other_splits_reach(model: Head, tokens: Tensor) -> None:
    fixed = sum(2 * p.nbytes for p in model.parameters())
    for budget, known in ((fixed + 50_000, "searched"), (fixed // 2, "proven")):
        with pytest.raises(InfeasibleBudget, match="whatever is split: what the end holds") as refused:
            planned(model, tokens, budget=budget, split="auto")
        assert refused.value.known == known
    with pytest.raises(
        InfeasibleBudget, match=r"in addition to the inputs, with the stated splits$"
    ) as refused:
        planned(model, tokens, budget=fixed + 1000, split={"loss": 2})
    assert refused.value.known == "proven"


def test_nothing_is_split_within_a_large_budget(model: Head, tokens: Tensor) -> None:
    whole = planned(model, tokens, budget="100%")
    found = planned(model, tokens, budget="100%", split="auto")
    assert found.plan.peak == whole.plan.peak


def test_of_choices_without_recomputation_the_fewest_parts_are_taken(model: Head, tokens: Tensor) -> None:
    step = capture_call(model, (tokens,), {})[1]
    fixed = sum(2 * p.nbytes for p in model.parameters())
    options = PlanOptions(
        budget=str(fixed + 5 * 128 * 4000 * 4), strategy=QUICK, costs="roofline", refine=False, split="auto"
    )
    (note,) = Planner(options).plan(step).notes
    assert re.search(
        r"loss in 2 parts \(.* of tensors exist in parts only, [01]\.\d{3} of the step's time\)", note
    )


def test_splits_are_chosen_with_room_for_the_gradients_of_earlier_steps(model: Head, tokens: Tensor) -> None:
    """Two parts fit only without those gradients."""
    alone = planned(model, tokens, budget="min", split={"loss": 2}).plan.peak
    budget = alone + sum(p.nbytes for p in model.parameters()) // 2
    assert planned(model, tokens, budget=budget, split="auto", reserved=["gradients"]).plan.peak <= budget


def test_a_note_names_what_is_split(model: Head, tokens: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rematplan")
    step = capture_call(model, (tokens,), {})[1]
    options = PlanOptions(budget="60%", strategy=QUICK, costs="roofline", refine=False, split=(("loss", 4),))
    (note,) = Planner(options).plan(step).notes
    assert "loss in 4 parts" in note
    assert note in caplog.messages
    assert "differ from the unsplit ones by rounding" in note


def test_a_note_says_whether_rows_keep_their_bits_here() -> None:
    """A small image alone has another kernel of convolutions on many CPUs, so that its part rounds."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 24, 1), nn.Tanh(), nn.Conv2d(24, 2, 1)), torch.randn(2, 3, 8, 8)
    step = capture_call(model, (x,), {})[1]
    options = PlanOptions(budget="min", strategy=QUICK, refine=False, split=(("model", 2),))
    (note,) = Planner(options).plan(step).notes
    parts = torch.cat([model[0](one) for one in x.split(1)])
    changes = not torch.equal(parts, model[0](x))
    said = "other bits in parts here: aten.convolution.default" if changes else "have the same bits in parts"
    assert said in note
    (note,) = Planner(replace(options, costs="roofline")).plan(step).notes
    assert "which is tested only with costs='profile'; parts of fewer than 16 may round" in note


def test_each_shape_is_split_anew(model: Head, tokens: Tensor) -> None:
    found = planned(model, tokens, budget="50%", split={"loss": 4})
    for batch in (tokens, tokens[:2], tokens[:3, :77], tokens[:1, :1], tokens[:0], tokens):
        plain = copy.deepcopy(model)
        expected, got = gradients(plain, plain, batch), gradients(model, found, batch)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6, equal_nan=True)
        assert found.plan.peak <= runner_of(found).last.plan.budget


def test_in_place(model: Head, tokens: Tensor) -> None:
    expected = gradients(model, model, tokens)
    rematplan.apply(model, "40%", split={"loss": 8}, costs="roofline", strategy=QUICK, refine=False)
    got = gradients(model, model, tokens)
    rematplan.remove(model)
    assert torch.equal(got["loss"], expected["loss"])
    assert torch.equal(got["token.weight"], expected["token.weight"])


def test_the_backend_of_torch_compile_splits(model: Head, tokens: Tensor) -> None:
    torch._dynamo.reset()
    asked: dict[str, Any] = {"budget": "min", "costs": "roofline", "strategy": QUICK}
    whole, parts = rematplan.backend(**asked), rematplan.backend(**asked, split={"head": 8})
    for batch in (tokens, tokens[:3, :77]):
        expected = gradients(model, model, batch)
        for backend in (whole, parts):
            got = gradients(model, torch.compile(model, backend=backend), batch)
            assert torch.equal(got["loss"], expected["loss"])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert len(whole.plans) == len(parts.plans) == 2
    assert all(one.peak < 0.75 * other.peak for one, other in zip(parts.plans, whole.plans, strict=True))
    compiled = torch.compile(model, backend=parts)
    model.zero_grad(set_to_none=True)
    resident = sum(p.nbytes for p in model.parameters()) + tokens.nbytes
    peak, _ = peak_above_entry(lambda: compiled(tokens).backward(), torch.device("cpu"))
    assert resident + peak <= parts.plans[0].peak


@pytest.mark.parametrize("stated", ["on", {}, {"head": 1}, {"head": 2.0}, {3: 4}, None, 8])
def test_other_values_are_refused(stated: object) -> None:
    with pytest.raises(UsageError, match="must be 'off', 'auto', or a mapping"):
        stated_splits(stated)


def test_what_a_refusal_names_can_be_stated() -> None:
    """Ops that the model's own forward calls are in no submodule."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 64, 16)
    with pytest.raises(UsageError, match="what can be split is in model"):
        planned(model, x, budget="50%", split={"k": 2})
    found = planned(model, x, budget="min", split={"model": 4})
    assert torch.equal(found(x), model(x))
    assert found.plan.peak < planned(model, x, budget="min").plan.peak


def test_a_module_without_a_region_is_refused(model: Head, tokens: Tensor) -> None:
    with pytest.raises(
        UsageError, match="no ops of 'token' can be split in Head; what can be split is in loss"
    ):
        planned(model, tokens, budget="50%", split={"token": 4})


def test_a_refusal_says_that_the_model_returns_what_a_module_computes(tokens: Tensor) -> None:
    class Scores(Head):
        def forward(self, tokens: Tensor) -> Any:
            scores = self.head(self.token(tokens))
            return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()), scores

    with pytest.raises(UsageError, match="the model returns what 'head' computes, so that exists whole"):
        planned(Scores(), tokens, budget="80%", split={"head": 4})


def test_every_size_in_a_range_is_split_before_training(model: Head, tokens: Tensor) -> None:
    ranges = {"tokens": {0: torch.export.Dim("n", min=2, max=4)}}
    found = planned(model, tokens, budget="50%", split={"loss": 4}, dynamic_shapes=ranges)
    plans = rematplan.planning(found).plans
    assert len(plans) == 3
    for rows in (2, 3, 4):
        assert torch.equal(found(tokens[:rows]), model(tokens[:rows]))
        assert found.plan.peak <= found.plan.budget == plans[0].budget
    assert len(rematplan.planning(found).plans) == 3
    with pytest.raises(UsageError, match="tokens has size 5"):
        found(tokens.new_zeros(5, 128))


def test_a_saved_plan_says_what_is_split(model: Head, tokens: Tensor, tmp_path: Path) -> None:
    for split, name in (("auto", "auto.json"), ({"head": 4, "mlp": 2}, "stated.json"), ("off", "off.json")):
        found = planned(model, tokens, budget="min" if split == "off" else "80%", split=split)
        rematplan.save_plan(found.plan, tmp_path / name)
        expected = gradients(model, found, tokens)
        for stated in ("auto", split):
            again = planned(
                model, tokens, budget=None, strategy=rematplan.SavedPlan(tmp_path / name), split=stated
            )
            assert again.plan.schedule == found.plan.schedule
            torch.testing.assert_close(gradients(model, again, tokens), expected, rtol=0, atol=0)
    with pytest.raises(ProblemError, match="or an option"):
        planned(model, tokens, budget=None, strategy=rematplan.SavedPlan(tmp_path / "stated.json"))


def test_of_equal_choices_one_whose_rows_keep_their_bits_is_taken(
    model: Head, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts would do, but their rows change."""
    step = capture_call(model, (tokens,), {})[1]
    fixed = sum(2 * p.nbytes for p in model.parameters())
    budget = str(fixed + 5 * 128 * 4000 * 4)
    options = PlanOptions(budget=budget, strategy=QUICK, costs="roofline", refine=False, split="auto")

    def changed(problems: object, step: object, choice: Any) -> tuple[str, ...]:
        return ("mm",) if 2 in choice.values() else ()

    monkeypatch.setattr(splitting, "_changed", changed)
    monkeypatch.setattr(splitting, "ALIKE_MODELLED", 1.0)
    (note,) = Planner(options).plan(step).notes
    assert "loss in 4 parts" in note


class Pieces(nn.Module):
    """Writes into a part of a new tensor, of which it reads that part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.new_zeros(x.shape[0] + 8, 256)
        rows[: x.shape[0]] = self.wide(x).tanh()
        return self.back(rows[: x.shape[0]].sin()).square().mean()


def test_a_part_of_a_new_buffer_is_not_split() -> None:
    with pytest.raises(InfeasibleBudget):
        rematplan.plan_module(Pieces(), (torch.randn(64, 16),), budget="10%", costs="roofline")
