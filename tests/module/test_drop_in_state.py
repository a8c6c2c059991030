"""Laws of a planned module's state: what a loop changes on it, hangs on it or asks of its graph twice does what it does
to the model."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from same_bits import SETTINGS, X, equal_after, planned_and_plain
from stateful_models import copies_of_net, net, step
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import rematplan
from rematplan.runtime.costs.measure import peak_above_entry


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "temperature", 3.0),
        lambda m: setattr(m.drop, "p", 0.5),
        lambda m: setattr(m, "mask", torch.arange(16.0)),
        lambda m: setattr(m, "shape", (1, 16)),
        lambda m: setattr(m, "shift", 1.0),
        lambda m: m.weights["masks"].__setitem__(1, torch.zeros(())),
        lambda m: m.mask.mul_(3),
        lambda m: m.recent.rotate(),
        lambda m: m.body.__setitem__(1, nn.ReLU()),
        lambda m: m.body[1].register_forward_hook(lambda _m, _a, y: y * 2),
        lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    ],
)
def test_what_is_changed_after_planning_counts(change: Callable[[nn.Module], Any]) -> None:
    planned, plain = copies_of_net()

    def use(model: nn.Module) -> None:
        step(model)
        change(model)
        step(model)

    equal_after(use, planned, plain)


class Attending(nn.Module):
    """Makes other calls under other settings."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(3, 1, 8, 16).unbind()
        return nn.functional.scaled_dot_product_attention(query, key, value) + torch.tensor(0.3)


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "setting", [lambda: default_type(torch.float64), lambda: sdpa_kernel(SDPBackend.MATH)]
)
def test_each_combination_of_settings_has_a_separate_plan(setting: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    planned, plain = planned_and_plain(Attending())

    def use(model: nn.Module) -> None:
        step(model)
        with setting():
            step(model)
        step(model)

    equal_after(use, planned, plain)
    assert len(planned.plans) == 2


def test_a_lazily_conjugated_tensor_has_a_separate_plan() -> None:
    class Imaginary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.view_as_real(x.resolve_conj())[..., 1])

    given = torch.complex(X, X)
    planned, plain = planned_and_plain(Imaginary(16, 16), given)
    for z in (given, given.conj()):
        assert torch.equal(planned(z), plain(z))


class Owned(nn.Module):
    """Reads an attribute of the module that it is a part of."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.owner().by


def test_a_part_may_look_at_its_owner() -> None:
    class Owner(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.part, self.by = Owned(self), 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.part(super().forward(x))

    planned = rematplan.plan_module(Owner(), (X,), **SETTINGS)  # nobody else holds the model
    y = planned(X)
    planned.by = 4.0
    assert torch.equal(planned(X), 2 * y)


@pytest.mark.filterwarnings("default")
def test_numbers_that_change_at_every_step_share_a_schedule_and_cause_a_warning() -> None:
    planned, plain = copies_of_net()

    def use(model: nn.Module) -> None:
        for k in range(9):
            model.temperature = 1 + k / 10
            step(model)

    with pytest.warns(UserWarning, match="captured 8 times for different calls") as said:
        equal_after(use, planned, plain)
    assert said[0].filename == step.__code__.co_filename
    assert len({id(plan.schedule) for plan in planned.plans}) == 1


def test_hooks_of_submodules_cause_a_warning() -> None:
    model = net()
    model.norm.register_forward_pre_hook(lambda _m, _a: None)
    with pytest.warns(UserWarning, match="hooks on norm") as said:
        rematplan.plan_module(model, (X,), **SETTINGS)
    assert said[0].filename == __file__


def test_backward_hooks_of_the_module_run() -> None:
    planned, plain = planned_and_plain(net())
    norms = list[float]()

    def use(model: nn.Module) -> None:
        model.register_full_backward_pre_hook(lambda _m, g: tuple(3 * t for t in g))
        model.register_full_backward_hook(lambda _m, g, _o: tuple(t and 2 * t for t in g))
        model.register_full_backward_hook(lambda _m, _g, outer: norms.append(float(outer[0].norm())))
        step(model)

    for _ in range(3):
        equal_after(use, planned, plain)
    assert rematplan.planning(planned).stats().captures == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_planning_is_the_same_where_gradients_are_off(mode: Callable[[], Any]) -> None:
    model = net()
    plain = copy.deepcopy(model)
    with mode():
        planned = rematplan.plan_module(model, (X,), **SETTINGS)
    equal_after(step, planned, plain)
    assert len(planned.plans) == 1


def test_threads_may_meet_new_shapes_at_once() -> None:
    planned, plain = planned_and_plain(net().eval())
    batches = [X[: k + 2] for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(planned, batches))
    assert all(torch.equal(y, plain(x)) for x, y in zip(batches, results, strict=True))
    assert len(planned.plans) == 5


class Slow(nn.Linear):
    """Takes its time where others could look, once it is told of them."""

    others: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.others:
            self.others()
        return super().forward(x)


def test_threads_may_evaluate_while_another_plans() -> None:
    planned, plain = planned_and_plain(Slow(16, 16))
    with ThreadPoolExecutor(1) as pool:
        meanwhile = []

        def evaluate() -> Tensor:
            with torch.no_grad():
                return planned(X)

        def others() -> None:
            Slow.others = None
            meanwhile.append(pool.submit(evaluate))
            wait(meanwhile, timeout=0.2)

        Slow.others = staticmethod(others)
        y = planned(X[:3])
        assert torch.equal(meanwhile[0].result(), plain(X))
    assert torch.equal(y, plain(X[:3]))


def twice_kept(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    y = model(x)
    rows = [torch.autograd.grad(y[k].sum(), x, retain_graph=True)[0] for k in range(3)]
    last = [p for p in model.parameters() if p.requires_grad][-1]
    rows += torch.autograd.grad(y.pow(2).sum(), last, retain_graph=True)
    y.sum().backward()
    return [*rows, x.grad]


def test_a_graph_that_is_kept_is_gone_through_again() -> None:
    planned, plain = copies_of_net()
    equal_after(twice_kept, planned, plain)
    # Of a step without x's gradient.
    planned, plain = planned_and_plain(net(), budget="200%", strategy="store_all")
    equal_after(twice_kept, planned, plain)


def test_outputs_that_the_backward_reads_are_neither_changed_nor_held_for_ever() -> None:
    planned, _ = planned_and_plain(net(), budget="100%", strategy="store_all")
    y = planned(X)  # its tanh is read
    y.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place"):
        y.sum().backward()

    def calls(n: int) -> None:
        for _ in range(n):
            planned(X)

    calls(1)
    gc.disable()
    try:
        once, often = (peak_above_entry(lambda n=n: calls(n), torch.device("cpu"))[0] for n in (1, 9))
    finally:
        gc.enable()
    assert often <= 2 * once


class Passing(nn.Module):
    """Returns what the caller has already: an argument, a buffer that it changes, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen = nn.Linear(16, 16), nn.Parameter(torch.ones(16), requires_grad=False)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        y = (self.body(x) * self.frozen).tanh() - self.seen
        self.seen += x.mean(0)
        return y, {"given": x}, self.seen, self.frozen


def test_returned_arguments_buffers_and_frozen_parameters_are_themselves() -> None:
    torch.manual_seed(0)
    plain = Passing()
    model = rematplan.apply(copy.deepcopy(plain), "1MiB", costs="roofline", refine=False)
    for rows in (4, 4, 6, 7):  # the third is captured with open sizes
        x = torch.randn(rows, 16)
        for one in (model, plain):
            y, given, seen, frozen = one(x)
            y.square().mean().backward()
            assert given["given"] is x
            assert seen is one.seen
            assert frozen is one.frozen
            with torch.no_grad():  # changes the model
                seen.mul_(0.5)
                frozen.add_(1)
        for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
        assert torch.equal(model.body.weight.grad, plain.body.weight.grad)


class Target(nn.Module):
    """Moves the weights of a frozen copy in its forward, as MoCo and BYOL do."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
            wanted = self.target(x)
        return (self.online(x) - wanted).square().mean()


def test_frozen_weights_that_a_forward_moves_may_be_read_again() -> None:
    torch.manual_seed(0)
    plain = Target()
    model = rematplan.apply(copy.deepcopy(plain), "min", costs="roofline", refine=False)
    for _ in range(3):
        x = torch.randn(32, 16)
        for one in (model, plain):
            one(x).backward()
            with torch.no_grad():
                for p in one.online.parameters():
                    p.sub_(p.grad, alpha=0.1)
        for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
