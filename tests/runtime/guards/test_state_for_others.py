"""Laws of what a forward leaves for others: for hooks of its backward, for the owner of a part, for a loss."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_bits import SETTINGS, X, equal_after
from torch import Tensor, nn

import rematplan


class HookReading(nn.Module):
    """Its backward reads, by a hook, what ``change`` made of the forward's state."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.lin, self.change = nn.Linear(16, 16), change
        self.scale, self.flag, self.scales = 2.0, True, [2.0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        y.register_hook(lambda g: g * (self.scale + self.scales[-1]) if self.flag else g)
        self.change(self)
        return y


def scaled(model: Any) -> None:
    model.scale *= 0.5


def flipped(model: Any) -> None:
    model.flag = not model.flag


def appended(model: Any) -> None:
    model.scales.append(len(model.scales))


@pytest.mark.parametrize("change", [scaled, flipped, appended])
def test_a_hook_that_reads_what_the_forward_changes_has_no_plan(change: Callable[[Any], None]) -> None:
    # A traced backward would read the state from before the forward.
    with pytest.warns(UserWarning, match="the backward reads"):
        rematplan.plan_module(HookReading(change), (X,), **SETTINGS)
    still = HookReading(lambda _: None)
    equal_after(lambda m: m(X).sum().backward(), rematplan.plan_module(still, (X,), **SETTINGS), still)


class Owned(nn.Module):
    """Counts in the module that it is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.owner().step += 1
        return x * 2 if self.owner().step % 2 else x


def test_a_part_may_count_in_its_owner() -> None:
    def new() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Owned())
        model.step = 0
        model[1].owner = weakref.ref(model)
        return model

    plain, model = new(), new()
    planned = rematplan.plan_module(model, (X,), **SETTINGS)
    equal_after(lambda m: [m(X).square().sum().backward() for _ in range(5)] and [], planned, plain)
    assert model.step == plain.step == 5


def distilled(model: nn.Module, kept: Any) -> list[Tensor]:
    for x in (X, X, X[:4]):
        y = model(x)
        acts = kept.values() if isinstance(kept, dict) else kept
        (y.square().mean() + sum(a.abs().mean() for a in acts)).backward()
    return []


@pytest.mark.filterwarnings("ignore:.*has hooks on:UserWarning")
@pytest.mark.parametrize("place", ["list", "hook"])
def test_activations_that_a_forward_leaves_for_a_loss_take_part_in_it(place: str) -> None:
    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.acts: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            if place == "list":
                self.acts.clear()
            for layer in self.body:
                x = torch.tanh(layer(x))
                if place == "list":
                    self.acts.append(x)
            return x

    def new() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model, kept = Leaving(), {}
        if place != "hook":
            return model, model.acts
        for at, layer in enumerate(model.body):
            layer.register_forward_hook(keeping(kept, at))
        return model, kept

    def keeping(kept: dict[int, Tensor], at: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _x: Any, y: Tensor) -> None:
            kept[at] = y

        return keep

    (model, kept), (plain, plain_kept) = new(), new()
    planned = rematplan.plan_module(model, (X,), **SETTINGS)
    assert not kept
    held = {id(planned): kept, id(plain): plain_kept}
    equal_after(lambda m: distilled(m, held[id(m)]), planned, plain)
    assert len(kept) == 3


class Extracting(nn.Module):
    """Gives the features that hooks leave in a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.features: dict[str, Tensor] = {}
        for name, layer in self.body.named_children():
            layer.register_forward_hook(self.keeping(name))

    def keeping(self, name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _x: Any, y: Tensor) -> None:
            self.features[name] = y

        return keep

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.body(x)
        return self.features


@pytest.mark.filterwarnings("ignore:.*has hooks on:UserWarning", "ignore:.*a gradient arrived:UserWarning")
def test_features_that_hooks_leave_may_be_the_result() -> None:
    torch.manual_seed(0)
    plain, model = Extracting(), Extracting()
    model.load_state_dict(plain.state_dict())
    planned = rematplan.plan_module(model, (X,), **SETTINGS)

    def use(m: nn.Module) -> list[Tensor]:
        for x in (X, X, X[:4]):
            sum(y.abs().mean() for y in m(x).values()).backward()
        return [y.detach() for y in m.features.values()]

    equal_after(use, planned, plain)
    assert len(planned.plans) == 2
    planned.features["other"] = X  # the result would have it, too
    with pytest.warns(UserWarning, match="changes features and computes with it"):
        planned(X)
