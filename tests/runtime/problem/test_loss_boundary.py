"""Laws of a loss outside of a planned module: what it holds is within the budget too."""

import copy
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, UsageError
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.options import PlanOptions
from rematplan.plans.step_problems import StepProblems
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.problem.loss_boundary import reserved_for_loss

CPU = torch.device("cpu")
OUT, CLASSES = 24, 600
"""So that the second model's outputs are its largest tensors."""


def small_outputs(depth: int = 10) -> nn.Module:
    layers = [m for _ in range(depth) for m in (nn.Conv2d(8, 8, 1), nn.GELU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 12, 1))


def large_outputs() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(CLASSES, 64),
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in "abcd"),
        nn.Linear(64, CLASSES),
    )


def images() -> Tensor:
    return torch.randn(4, 3, OUT, OUT, generator=torch.Generator().manual_seed(1))


def words() -> Tensor:
    return torch.randint(0, CLASSES, (2, 128), generator=torch.Generator().manual_seed(1))


def pixels(y: Tensor) -> Tensor:
    return torch.ones(y.shape[0], *y.shape[2:], dtype=torch.long)


SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(),
    "cross entropy": lambda y: functional.cross_entropy(y, pixels(y)),
    "cross entropy of rows": lambda y: functional.cross_entropy(
        y.permute(0, 2, 3, 1).reshape(-1, y.shape[1]), pixels(y).flatten()
    ),
    "mean of squares": lambda y: y.pow(2).mean(),
    "l1": lambda y: functional.l1_loss(y, torch.ones(()).expand_as(y)),
    "written out": lambda y: ((y - 1) ** 2).mean(),
    "binary": lambda y: functional.binary_cross_entropy_with_logits(y, torch.ones(()).expand_as(y)),
}
LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda y: functional.cross_entropy(y.view(-1, CLASSES), words().flatten()),
    "channels second": lambda y: functional.cross_entropy(y.transpose(1, 2), words()),
    "shifted": lambda y: functional.cross_entropy(y[:, :-1].reshape(-1, CLASSES), words()[:, 1:].flatten()),
    "mean of squares": lambda y: y.float().square().mean(),
    "squared error": lambda y: functional.mse_loss(y, torch.zeros(()).expand_as(y)),
}
MODELS = {"small": (small_outputs, images, SMALL), "large": (large_outputs, words, LARGE)}


def measured(planned: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> int:
    """The peak of a whole step, the loss in it; what the loss is compared with is made within and counts."""
    resident = x.nbytes + sum(t.nbytes for t in (*planned.parameters(), *planned.buffers()))
    planned.zero_grad(set_to_none=True)
    return resident + peak_above_entry(lambda: loss(planned(x)).backward(), CPU)[0]


def smallest(model: nn.Module, x: Tensor, **options: object) -> int:
    with pytest.raises(InfeasibleBudget) as refused:
        rematplan.plan_module(model, (x,), budget=1000, strategy="approx_dp", **options)
    return refused.value.smallest


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_is_within_the_budget_with_its_loss(kind: str) -> None:
    made, given, losses = MODELS[kind]
    model, x = made(), given()
    least = smallest(model, x)
    for budget in (least, "100%"):
        planned = rematplan.plan_module(copy.deepcopy(model), (x,), budget=budget, strategy="approx_dp")
        for name, loss in losses.items():
            measured(planned, x, loss)
            peak = measured(planned, x, loss)
            assert peak <= planned.plan.budget, (name, peak, planned.plan.budget)


def test_a_loss_and_its_gradient_are_within_the_least_budget_while_the_backward_runs() -> None:
    """The peak of these is after all but those of the loss is gone."""
    narrow = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    deep = nn.Sequential(nn.Linear(4, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 1))
    for model, x in ((narrow, torch.randn(7, 9, 4)), (deep, torch.randn(64, 4))):
        planned = rematplan.plan_module(
            copy.deepcopy(model), (x,), budget=smallest(model, x), strategy="approx_dp"
        )
        for loss in (lambda y: y.pow(2).mean(), lambda y: functional.mse_loss(y, torch.zeros_like(y))):
            measured(planned, x, loss)
            assert measured(planned, x, loss) <= planned.plan.budget


KEEPING = {"mse": functional.mse_loss, "smooth_l1": nn.functional.smooth_l1_loss}
"""Losses whose one number lies in a storage of the outputs' size, which stays until the backward ends."""


@pytest.mark.parametrize(("kind", "dtype"), [("mse", torch.bfloat16), ("smooth_l1", torch.float32)])
def test_a_loss_that_keeps_memory_is_within_the_least_budget(kind: str, dtype: torch.dtype) -> None:
    target = torch.zeros(2, 3, 32, 32)
    # Which is charged for this.
    assert KEEPING[kind](target, target).untyped_storage().nbytes() == target.nbytes
    widths = (3, 16, 32, 16, 3)
    layers = (nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.SiLU()) for i, o in pairwise(widths))
    model, x = nn.Sequential(*layers).to(dtype), target.to(dtype)
    planned = rematplan.plan_module(model, (x,), budget=smallest(model, x), strategy="approx_dp")
    for _ in range(2):
        peak = measured(planned, x, lambda y: KEEPING[kind](y.float(), target))
    assert peak <= planned.plan.budget


def aside(model: nn.Module, *args: object, **options: object) -> int:
    """Bytes that a plan leaves for the loss."""
    planned = rematplan.plan_module(model, args, budget="100%", strategy="store_all", **options)
    runner = planned._rematplan
    return reserved_for_loss(runner.planner.problem(runner.last.compiled.step))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = large_outputs()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.model(x)
        return functional.cross_entropy(y.view(-1, CLASSES), x.flatten()), y


class WithAuxiliaryLoss(nn.Module):
    """A loss of its own that is not made of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.model = large_outputs()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        inner = self.model[:-1](x)
        return {"logits": self.model[-1](inner), "auxiliary": inner.square().mean()}


def test_room_for_a_loss_follows_the_outputs() -> None:
    outputs, scalars = 4 * 4 * 12 * OUT * OUT, 64
    # And the gradient, charged as a tangent.
    assert aside(small_outputs(30), images()) == 4 * outputs + scalars
    logits = 4 * words().numel() * CLASSES
    assert aside(large_outputs(), words()) == 3 * logits + scalars
    assert aside(large_outputs().bfloat16(), words()) == 7 * logits // 2 + scalars  # the loss is in float32
    assert aside(WithLoss(), words()) == 16  # its gradient, until the end
    assert aside(WithAuxiliaryLoss(), words()) == 3 * logits + scalars
    assert aside(large_outputs(), words(), loss_memory="3x") == 2 * logits + scalars
    assert aside(large_outputs(), words(), loss_memory="4.5X") == 3.5 * logits + scalars
    copied_and_kept = 2 * logits + 16  # gradients that lie otherwise, and what the loss's one number lies in
    assert aside(large_outputs(), words(), loss_memory="2X") == copied_and_kept
    assert aside(large_outputs(), words(), loss_memory=3 * logits) == 3 * logits


class Setting(nn.Module):
    """Sets a tensor as an attribute, as layers with hooks on their weights do; gives it too, or puts it into a
    dictionary of the caller, if it is to."""

    def __init__(self, giving: str = "") -> None:
        super().__init__()
        self.model, self.giving = small_outputs(30), giving

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, ...]:
        self.doubled = 2 * x
        y = self.model(self.doubled)
        if self.giving == "dictionary":
            more["doubled"] = self.doubled
        return (y, self.doubled) if self.giving == "returned" else (y,)


def test_what_is_set_as_an_attribute_needs_no_room() -> None:
    outputs, scalars = 4 * 4 * 12 * OUT * OUT, 64
    both = outputs + images().nbytes
    for giving, read in {"": outputs, "returned": both, "dictionary": both}.items():
        room = aside(Setting(giving), images().requires_grad_(), {})
        assert room == 4 * read + scalars


def test_a_step_with_an_auxiliary_loss_is_within_the_budget_with_both() -> None:
    model, x = WithAuxiliaryLoss(), words()
    planned = rematplan.plan_module(model, (x,), budget=smallest(model, x), strategy="approx_dp")
    for loss in LARGE.values():
        measured(planned, x, lambda y, loss=loss: loss(y["logits"]) + y["auxiliary"])
        peak = measured(planned, x, lambda y, loss=loss: loss(y["logits"]) + y["auxiliary"])
        assert peak <= planned.plan.budget


def test_room_for_a_loss_may_be_stated() -> None:
    model, x = large_outputs(), words()
    least = smallest(model, x)
    without = smallest(model, x, loss_memory=0)
    assert without < least
    assert smallest(model, x, loss_memory="2MiB") > smallest(model, x, loss_memory=2**20) > without
    planned = rematplan.plan_module(model, (x,), budget=without, loss_memory="0", strategy="approx_dp")
    ready = torch.ones(*x.shape, CLASSES)
    resident = ready.nbytes + x.nbytes + sum(p.nbytes for p in planned.parameters())
    assert resident + peak_above_entry(lambda: planned(x).backward(ready), CPU)[0] <= without


@pytest.mark.parametrize("stated", ["much", "50%", "min", "3y", -1])
def test_malformed_room_is_refused(stated: str | int) -> None:
    with pytest.raises(UsageError, match=str(stated)):
        rematplan.plan_module(large_outputs(), (words(),), budget="1GiB", loss_memory=stated)


def test_a_refusal_says_what_is_set_aside() -> None:
    with pytest.raises(InfeasibleBudget, match=r"1\.76 MiB are set aside .* loss_memory="):
        rematplan.plan_module(
            large_outputs(), (words(),), budget=1000, strategy=rematplan.Auto(time_limit=0.1)
        )
    for model, stated in ((WithLoss(), None), (large_outputs(), "3x")):
        with pytest.raises(InfeasibleBudget) as refused:
            rematplan.plan_module(
                model, (words(),), budget=1000, loss_memory=stated, strategy=rematplan.Auto(time_limit=0.1)
            )
        assert "set aside" not in str(refused.value)


def test_only_what_the_step_must_hold_is_proven() -> None:
    """The room for a loss outside of the model is not, unless it was stated."""
    model, x = large_outputs(), words()

    def refused(budget: int, **options: object) -> InfeasibleBudget:
        with pytest.raises(InfeasibleBudget) as error:
            rematplan.plan_module(
                copy.deepcopy(model), (x,), budget=budget, strategy=rematplan.Auto(time_limit=0.1), **options
            )
        return error.value

    usual, stated = refused(1000), refused(1000, loss_memory="0")
    assert usual.known == stated.known == "proven"
    floor = int(re.search(r"\((\d+) bytes\)", usual.floor)[1])
    assert floor <= stated.smallest < usual.smallest
    assert refused(floor - 1).known == "proven"
    between = (stated.smallest + usual.smallest) // 2
    assert refused(between).known == "room"
    assert "with the room for a loss" in str(refused(between))
    rematplan.plan_module(
        copy.deepcopy(model), (x,), budget=between, loss_memory="0", strategy=rematplan.Auto(time_limit=0.1)
    )


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_saved_plan_leaves_the_same_room(overlap: str, tmp_path: pytest.TempPathFactory) -> None:
    x = images()
    torch.manual_seed(0)
    model = small_outputs()
    plain = copy.deepcopy(model)
    first = rematplan.plan_module(
        model, (x,), budget="70%", strategy=rematplan.Auto(time_limit=0.1, two_lanes=overlap)
    )
    rematplan.save_plan(first.plan, tmp_path / "plan.json")
    again = rematplan.plan_module(
        copy.deepcopy(plain), (x,), strategy=rematplan.SavedPlan(tmp_path / "plan.json", two_lanes=overlap)
    )
    assert again.plan.schedule == first.plan.schedule
    for one in (first, again, plain):
        one(x).pow(2).mean().backward()
    for ours, theirs, eager in zip(first.parameters(), again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)
        assert torch.equal(theirs.grad, eager.grad)


def test_a_compiled_module_leaves_room_too() -> None:
    torch._dynamo.reset()
    model, x = large_outputs(), words()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="set aside"):
        torch.compile(
            model, backend=rematplan.backend(budget="1000", strategy=rematplan.Auto(time_limit=0.1))
        )(x)
    backend = rematplan.backend(budget="90%", loss_memory="2MiB", strategy=rematplan.Auto(time_limit=0.1))
    plain = copy.deepcopy(model)
    for one in (torch.compile(model, backend=backend), plain):
        LARGE["shifted"](one(x)).backward()
    for ours, eager in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


class Bags(nn.Module):
    """The backward of the largest of a bag holds copies of gradients, as many as there are bags with entries."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(100, 16, mode=mode)
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bags(x)).squeeze(1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_step_with_bags_of_embeddings_is_within_its_least_budget(mode: str) -> None:
    model, x = Bags(mode), torch.randint(0, 100, (32, 6), generator=torch.Generator().manual_seed(1))
    planned = rematplan.plan_module(model, (x,), budget=smallest(model, x), strategy="approx_dp")

    def loss(y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(y, torch.ones(()).expand_as(y))

    measured(planned, x, loss)
    assert measured(planned, x, loss) <= planned.plan.budget


def test_gradients_of_outputs_may_stay_until_the_backward_ends() -> None:
    step = capture(large_outputs(), (words(),), "large")
    freed, kept = (
        StepProblems(PlanOptions(budget="100%", costs="roofline"), keeps_tangents=keeps).problem(step)
        for keeps in (False, True)
    )
    (tangent,) = (step.values[i.value].storage for i in step.inputs if i.kind == "tangent")
    assert tangent in set(kept.outputs) - set(freed.outputs)
    assert no_recompute(freed).estimate.peak <= no_recompute(kept).estimate.peak
