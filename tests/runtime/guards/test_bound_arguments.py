"""Laws of what a partial function, a default argument or a method binds: what a planned forward's hooks leave there
is left, and what its code reads there is guarded."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_bits import SETTINGS, X, same_grads
from torch import Tensor, nn

import rematplan
from rematplan.module.plan_access import runner_of

Left = dict[int, Tensor]


def store(left: Left, at: int, module: nn.Module, given: Any, result: Tensor) -> None:
    left[at] = result


def store_by_keyword(module: nn.Module, given: Any, result: Tensor, *, left: Left, at: int) -> None:
    left[at] = result


def default(left: Left, at: int) -> Any:
    def hook(module: nn.Module, given: Any, result: Tensor, left: Left = left) -> None:
        left[at] = result

    return hook


class Storing:
    def store(self, left: Left, at: int, module: nn.Module, given: Any, result: Tensor) -> None:
        left[at] = result


HOOKS: dict[str, Callable[[Left, int], Any]] = {
    "a partial function": lambda left, at: partial(store, left, at),
    "its keyword": lambda left, at: partial(store_by_keyword, left=left, at=at),
    "a partial method": lambda left, at: partial(Storing().store, left, at),
    "a default": default,
    "an expression": lambda left, at: lambda _m, _a, y: left.__setitem__(at, y),
    "an update": lambda left, at: lambda _m, _a, y: left.update({at: y}),
}


def with_hooks(hook: Callable[[Left, int], Any]) -> tuple[nn.Module, Left]:
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU()))
    model, left = nn.Sequential(*layers), Left()
    for at in (1, 3):
        model[at].register_forward_hook(hook(left, at))
    return model, left


@pytest.mark.filterwarnings("ignore:.*has hooks on:UserWarning")
@pytest.mark.parametrize("how", HOOKS)
def test_a_loss_reads_what_hooks_leave_in_what_they_bind(how: str) -> None:
    models = [with_hooks(HOOKS[how]) for _ in range(2)]
    (eager, _), (ours, _) = models
    planned = rematplan.apply(ours, **SETTINGS)
    for step in range(3):
        for model, left in models:
            model.zero_grad()
            loss = model(X + step).square().mean()
            sum((one.abs().mean() for one in left.values()), loss).backward()
        assert same_grads(eager, ours)
    assert len(rematplan.planning(planned).plans) == 1


def count(calls: list[int], x: Tensor) -> Tensor:
    calls.append(len(calls))
    return x * calls[-1]


class Scaled(nn.Module):
    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.rule = [rule]

    def forward(self, x: Tensor) -> Tensor:
        return self.rule[0](self.inner(x)).square().mean()


def test_a_forward_that_computes_with_what_it_changes_there_is_planned_in_parts() -> None:
    eager = Scaled(partial(count, []))
    planned = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    for _ in range(3):
        for model in (eager, planned):
            model.zero_grad()
            model(X).backward()
        assert same_grads(eager, planned)
    assert runner_of(planned).parts
    assert planned.rule[0].args == eager.rule[0].args == ([0, 1, 2],)


def test_what_a_partial_function_binds_may_change_between_calls() -> None:
    scales = [2.0]
    eager = Scaled(partial(lambda by, x: x * by[0], scales))
    planned = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    others = planned.rule[0].args[0]  # of the copy
    for by in (2.0, 3.0, 2.0):
        scales[0] = others[0] = by
        for model in (eager, planned):
            model.zero_grad()
            model(X).backward()
        assert same_grads(eager, planned)
    assert len(rematplan.planning(planned).plans) == 2
