"""Laws of copies of planned modules, and of forwards that replace the planned one."""

import copy
import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Event

import pytest
from same_bits import SETTINGS, X, equal_after, planned_and_plain, saved
from stateful_models import Net, copies_of_net, net, step
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError, UsageError


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, saved])
def test_copies_are_planned_modules(copied: Callable[[nn.Module], nn.Module]) -> None:
    planned, plain = planned_and_plain(net())
    inner = copied(nn.Sequential(copied(planned)))
    assert type(inner[0]) is type(planned)
    equal_after(step, inner, nn.Sequential(plain))
    assert inner[0].plan.schedule == planned.plan.schedule
    if copied is not copy.copy:
        assert all(p is not q for p, q in zip(inner.parameters(), planned.parameters(), strict=True))


def test_a_copy_that_has_no_plan_yet_says_so() -> None:
    planned, _ = copies_of_net()
    copied = saved(planned)
    for front, attribute in product((copied, rematplan.planning(copied)), ("plan", "source")):
        with pytest.raises(UsageError, match=r"^Net has no plan yet; .*prepare"):
            getattr(front, attribute)
    assert copied.plans == ()
    assert copied.prepare(X).plan


def test_forward_can_be_replaced_and_has_the_model_s_signature() -> None:
    planned, plain = copies_of_net()
    assert inspect.signature(planned.forward) == inspect.signature(plain.forward)

    def use(model: nn.Module) -> None:
        inner = model.forward
        model.forward = lambda x: inner(x) * 3
        step(model)

    equal_after(use, planned, plain)
    twice = net()
    inner = twice.forward
    twice.forward = lambda x: inner(x) * 3
    planned = rematplan.plan_module(twice, (X,), **SETTINGS)
    plain.zero_grad()
    plain.load_state_dict(twice.state_dict())
    equal_after(step, planned, plain)


def test_a_replaced_forward_that_bypasses_the_plan_causes_a_warning() -> None:
    planned, _ = copies_of_net()
    planned.forward = lambda x: planned.body(x)
    with pytest.warns(UserWarning, match="has no plan and may exceed the budget") as said:
        step(planned)
    assert said[0].filename == step.__code__.co_filename
    with pytest.raises(ModelError, match="replaced since"):
        rematplan.plan_module(planned, (X,), **SETTINGS)
    del planned.forward
    with warnings.catch_warnings(action="error"):
        step(rematplan.plan_module(planned, (X,), **SETTINGS))


def test_a_planned_forward_in_another_thread_does_not_hide_one_that_bypasses_the_plan() -> None:
    planned, _ = copies_of_net()
    other, _ = copies_of_net()
    step(other)
    begun, done = Event(), Event()

    def run_other() -> None:
        assert begun.wait(60)
        step(other)
        done.set()

    def past_the_plan(x: Tensor) -> Tensor:
        begun.set()
        assert done.wait(60)
        return planned.body(x)

    planned.forward = past_the_plan
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(run_other)
        with pytest.warns(UserWarning, match="has no plan and may exceed the budget"):
            step(planned)
        ran.result()


def test_a_planned_part_that_the_new_forward_calls_is_enough() -> None:
    planned, _ = copies_of_net()
    part = rematplan.plan_module(planned.body, (X,), **SETTINGS)
    planned.forward = lambda x: part(x)
    with warnings.catch_warnings(action="error"):
        step(planned)


class Wrapped(Net):
    """As a library leaves it that wraps the forward: another stands there, the former one is an attribute."""

    def wrap(self) -> None:
        self.inner = self.forward
        self.forward = self.tripled

    def tripled(self, x: Tensor) -> Tensor:
        return self.inner(x) * 3


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_copies_have_what_replaced_the_forward(copied: Callable[[nn.Module], nn.Module]) -> None:
    planned, plain = planned_and_plain(Wrapped())
    planned.wrap()
    plain.wrap()
    equal_after(step, copied(planned), copied(plain))


def test_planned_modules_inside_of_what_is_planned() -> None:
    model = nn.Sequential(net(), net())
    plain = copy.deepcopy(model)
    model[0] = rematplan.plan_module(model[0], (X,), **SETTINGS)
    planned = rematplan.plan_module(rematplan.plan_module(model, (X,), **SETTINGS), (X,), **SETTINGS)
    equal_after(step, planned, plain)
    assert str(type(planned)) == str(nn.Sequential)
