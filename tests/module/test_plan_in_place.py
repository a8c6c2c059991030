"""Laws of planning in place: the model is the same object, and its steps are those of eager mode, bit by bit."""

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_bits import same_leaves, saved
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, UsageError
from rematplan.models import build


class Net(nn.Module):
    """Tied weights, dropout, batch norm, a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + layer(h)
        logits = self.head(h)
        return {"logits": logits} | (
            {} if labels is None else {"loss": functional.cross_entropy(logits, labels)}
        )


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(at: int = 0, n: int = 32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(at)
    return torch.randint(11, (n,), generator=made), torch.randint(11, (n,), generator=made)


planned_in_place = partial(
    rematplan.apply, budget="80%", strategy="approx_dp", costs="roofline", refine=False
)

Step = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> Any:
    optimizer.zero_grad()
    loss = model(*batch(at))["loss"]
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(model: nn.Module, step: Step, steps: int) -> tuple[list[Any], dict[str, Tensor]]:
    """Train a model, and return the results of its steps and its state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    return [step(model, optimizer, at) for at in range(steps)], model.state_dict()


@pytest.mark.filterwarnings("error")
def test_it_is_the_same_object() -> None:
    model, before = net(), net()
    assert planned_in_place(model) is model
    assert type(model) is Net
    assert list(model.state_dict()) == list(before.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(before.forward)
    assert not hasattr(model.forward, "__wrapped__")
    assert same_leaves(trained(rematplan.remove(model), plain_step, 2), trained(before, plain_step, 2))
    assert vars(model).keys() == vars(before).keys()


@pytest.mark.filterwarnings("error")
def test_a_model_with_a_refused_budget_trains_after_it_is_removed() -> None:
    model, plain = planned_in_place(net(), budget="1KiB"), net()
    with pytest.raises(InfeasibleBudget):
        model(*batch())
    assert same_leaves(trained(rematplan.remove(model), plain_step, 2), trained(plain, plain_step, 2))


def test_nothing_is_planned_before_the_first_training_call() -> None:
    model = planned_in_place(net())
    model.eval()
    model(*batch())
    model.train()
    with torch.no_grad():
        model(*batch())
    assert rematplan.planning(model).plans == ()
    model(*batch())
    assert len(rematplan.planning(model).plans) == 1


def test_a_network_of_the_zoo_is_captured_once() -> None:
    """Its functions are in the same package as those that plan it, and only its own are guarded."""
    model = planned_in_place(build("unet", width=2), budget="100%")
    for _ in range(3):
        model(torch.randn(2, 3, 16, 16)).square().mean().backward()
        model.zero_grad()
    assert len(rematplan.planning(model).plans) == 1


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(model))
    return found


@pytest.mark.parametrize(("twin_of", "before"), [(copied, 0), (copied, 2), (pickled, 2), (saved, 2)])
def test_a_copy_is_planned_by_itself(twin_of: Callable[[nn.Module], nn.Module], before: int) -> None:
    model, plain = planned_in_place(net()), net()
    trained(model, plain_step, before)
    trained(plain, plain_step, before)
    twin = twin_of(model)
    assert twin.forward.__self__ is twin
    assert rematplan.planning(twin).plans == ()
    assert same_leaves(trained(twin, plain_step, 3), trained(copy.deepcopy(plain), plain_step, 3))
    assert len(rematplan.planning(twin).plans) == 1
    assert same_leaves(model.state_dict(), plain.state_dict())


def test_a_later_patch_of_the_forward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Net.forward

    def doubled(self: Net, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {name: 2 * one for name, one in plain(self, ids, labels).items()}

    model, other = planned_in_place(net()), net()
    trained(model, plain_step, 2)
    trained(other, plain_step, 2)
    monkeypatch.setattr(Net, "forward", doubled)
    assert same_leaves(trained(model, plain_step, 2), trained(other, plain_step, 2))


def test_a_library_may_wrap_its_function_or_itself() -> None:
    """As accelerate does for autocast: it wraps ``forward.__func__``, and binds the result again."""

    def wrapped(model: nn.Module) -> nn.Module:
        function = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
        model.forward = function.__get__(model)
        return model

    model, plain = wrapped(planned_in_place(net())), wrapped(net())
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert same_leaves(trained(model, plain_step, 3), trained(plain, plain_step, 3))
    twin = copy.deepcopy(model)
    assert same_leaves(trained(twin, plain_step, 2), trained(copy.deepcopy(plain), plain_step, 2))
    assert len(rematplan.planning(twin).plans) == 1
    rematplan.remove(model)
    assert same_leaves(trained(model, plain_step, 2), trained(plain, plain_step, 2))


def test_a_planned_model_in_a_wrapper_is_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = planned_in_place(net())
    model(*batch())
    assert rematplan.planning(Wrapper(model)).plan is rematplan.planning(model).plan
    with pytest.raises(UsageError, match="several submodules"):
        rematplan.planning(nn.ModuleList([model, planned_in_place(net())]))


def test_it_is_a_part_of_another_planned_module() -> None:
    inner = planned_in_place(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    outer = nn.Sequential(inner, nn.Linear(8, 1))
    plain = rematplan.remove(copy.deepcopy(outer))
    x = torch.randn(16, 8)
    planned = rematplan.plan_module(outer, (x,), budget="100%", strategy="approx_dp", costs="roofline")
    for one in (planned, plain):
        one(x).sum().backward()
    assert same_leaves([p.grad for p in outer.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("training", [True, False])
def test_a_shallow_copy_is_refused_until_it_is_planned_itself(training: bool) -> None:
    model = planned_in_place(net())
    twin = copy.copy(model).train(training)
    with pytest.raises(UsageError, match=r"shallow copy of a Net .* use copy.deepcopy"):
        twin(*batch())
    planned_in_place(twin)
    found = []
    for one in (twin, net().train(training)):
        torch.manual_seed(1)
        found.append(one(*batch())["logits"])
    assert same_leaves(*found)
    assert twin.forward.__self__ is twin
    assert model.forward.__self__ is model
    assert len(rematplan.planning(twin).plans) == training
    model(*batch())
    assert len(rematplan.planning(model).plans) == model.training


def test_the_first_planned_step_says_in_one_line_what_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    model = planned_in_place(net())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        plain_step(model, optimizer, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rematplan: Net trains with a peak of")
    assert line.endswith("not counted: the optimizer (reserved=[optimizer]) and what is outside of the model")
    plain_step(planned_in_place(net(), reserved=[optimizer]), optimizer, 0)
    assert capsys.readouterr().err.endswith("not counted: what is outside of the model\n")


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_module_that_runs_another_one_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(UsageError, match="runs another module"):
        rematplan.apply(wrap(net()), "1GiB")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_a_scripted_submodule_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.ReLU())))
    with pytest.raises(UsageError, match="the module 1 is scripted"):
        rematplan.apply(model, "1GiB")


def test_a_second_call_of_apply_changes_the_budget() -> None:
    model = planned_in_place(net())
    model(*batch())
    other = planned_in_place(model, budget="100%")
    other(*batch())
    assert rematplan.planning(model).plan.estimate.reruns == 0
    rematplan.remove(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no budget"),
        ({"budget": "much"}, "not understood"),
        ({"budget": "1GiB", "tme_limit": 3}, "unknown option tme_limit"),
        ({"budget": "1GiB", "strategy": "best"}, "best"),
    ],
)
def test_mistakes_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rematplan.apply(net(), **options)


def test_a_module_made_by_plan_module_is_refused() -> None:
    planned = rematplan.plan_module(net(), batch(), budget="1GiB", strategy="approx_dp", costs="roofline")
    with pytest.raises(UsageError, match="made by plan_module"):
        rematplan.apply(planned, "1GiB")


@pytest.mark.parametrize("function", [rematplan.remove, rematplan.planning])
@pytest.mark.parametrize("model", [None, "model", [nn.Linear(2, 2)], nn.Linear])
def test_what_is_no_module_is_refused(function: Any, model: Any) -> None:
    with pytest.raises(UsageError, match="it must be a torch"):
        function(model)


def test_names_of_modules_that_are_no_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="modules is 5; name modules by texts"):
        rematplan.apply(nn.Sequential(nn.Linear(2, 2)), budget="60%", modules=5)
