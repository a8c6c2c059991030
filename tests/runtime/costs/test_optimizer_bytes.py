"""Laws of what optimizers hold: their state to the byte before it is made, and never less than their step holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn, optim

from rematplan.ir import UsageError
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.optimizer_memory import optimizer_memory
from rematplan.runtime.graph.tensor_storages import plain_tensors

CPU = torch.device("cpu")
SHAPES = ((300, 200), (64, 64), (128,), (17, 33), (8, 3, 3, 3), (1000, 64))
DECAYED: dict[str, Any] = {"weight_decay": 0.1, "maximize": True}
OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, **DECAYED}],
    optim.Adam: [{}, {"amsgrad": True, **DECAYED}],
    optim.AdamW: [{}, {"amsgrad": True}],
    optim.NAdam: [{}, {"weight_decay": 0.1}, {"decoupled_weight_decay": True, **DECAYED}],
    optim.RAdam: [{}, DECAYED],
    optim.Adamax: [{}, DECAYED],
    optim.Adagrad: [{}, DECAYED],
    optim.Adadelta: [{}, DECAYED],
    optim.RMSprop: [{}, {"momentum": 0.9, "centered": True, **DECAYED}],
    optim.Rprop: [{}, {"maximize": True}],
    optim.ASGD: [{}, DECAYED],
    optim.Adafactor: [{}, DECAYED],
}
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
FORMS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}
CASES = [
    pytest.param(kind, {**options, **FORMS[form]}, id=f"{kind.__name__} {k} {form}")
    for kind, several in OPTIONS.items()
    for k, options in enumerate(several)
    for form in FORMS
    if form != "fused" or kind in FUSED
]


def parameters(
    dtype: torch.dtype = torch.float32, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return made


def state_bytes(optimizer: optim.Optimizer) -> int:
    every = (t for state in optimizer.state.values() for t in plain_tensors(state))
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in every}.values())


def check(make: Callable[[list[nn.Parameter]], optim.Optimizer], params: list[nn.Parameter]) -> None:
    """Two steps of an optimizer hold what is said of it before them; its state is then found to be there."""
    optimizer = make(params)
    memory = optimizer_memory(optimizer, CPU)
    before = state_bytes(optimizer)
    for _ in range(2):
        had = state_bytes(optimizer)
        above, _ = peak_above_entry(optimizer.step, CPU)
        assert above - (state_bytes(optimizer) - had) <= memory.transient
    assert before + memory.to_come == state_bytes(optimizer)
    later = optimizer_memory(optimizer, CPU)
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in later.tensors}
    assert sum(held.values()) == state_bytes(optimizer)
    assert later.to_come == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_state_is_known_to_the_byte_and_a_step_holds_no_more_than_is_said(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    check(lambda params: kind(params, **options), parameters(dtype))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_of_muon(dtype: torch.dtype, nesterov: bool) -> None:
    params = parameters(dtype, ((256, 256), (64, 300), (300, 64)))
    check(lambda own: optim.Muon(own, nesterov=nesterov), params)


@pytest.mark.parametrize("options", [{}, {"relative_step": False, "lr": 1e-3, "beta1": 0.9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_of_transformers_adafactor(dtype: torch.dtype, options: dict[str, Any]) -> None:
    from transformers.optimization import Adafactor

    check(lambda params: Adafactor(params, **options), parameters(dtype))


def test_what_is_said_is_not_much_more_than_is_held() -> None:
    """Of parameters of one size, as the blocks of a network are."""
    for kind, options in (
        (optim.AdamW, {}),
        (optim.AdamW, {"foreach": True}),
        (optim.Adadelta, {"foreach": True}),
    ):
        optimizer = kind(parameters(shapes=((200, 200),) * 8), **options)
        transient = optimizer_memory(optimizer, CPU).transient
        optimizer.step()
        above, _ = peak_above_entry(optimizer.step, CPU)
        assert above >= 0.98 * transient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD8bit", {"momentum": 0.9, "weight_decay": 0.1}),
        ("RMSprop8bit", {}),
        ("Lion8bit", {}),
        ("Adam8bit", {"weight_decay": 0.1}),
        ("PagedAdam8bit", {}),
        ("LAMB8bit", {}),
        ("AdEMAMix8bit", {}),
    ],
)
def test_the_step_of_bitsandbytes(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    check(lambda params: getattr(bitsandbytes.optim, kind)(params, lr=1e-3, **options), parameters(dtype))


@pytest.mark.parametrize("bits", [8, 32])
def test_what_is_said_of_bitsandbytes_is_not_much_more(bits: int) -> None:
    optimizer = bitsandbytes.optim.AdamW(parameters(), lr=1e-3, optim_bits=bits)
    transient = optimizer_memory(optimizer, CPU).transient
    optimizer.step()
    assert peak_above_entry(optimizer.step, CPU)[0] >= 0.95 * transient


def test_parameters_elsewhere_and_frozen_ones_do_not_count() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = optim.Adam([*params, nn.Parameter(torch.empty(1000, device="meta"))])
    wanted = 2 * sum(p.nbytes for p in params[1:]) + 4 * (len(params) - 1)
    assert optimizer_memory(optimizer, CPU).to_come == wanted


def test_a_group_may_have_other_options_than_the_optimizer() -> None:
    first, second = parameters()[0], parameters()[1]
    optimizer = optim.SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], lr=0.1)
    assert optimizer_memory(optimizer, CPU).to_come == first.nbytes


class Inheriting(optim.AdamW):
    """A step that it inherits is a step that is known."""


class Overriding(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        held = [p.clone() for group in self.param_groups for p in group["params"]]
        del held
        return super().step(closure)


class Demanding(optim.Optimizer):
    """Requires more than parameters, has an optimizer inside, and an attribute that it counts up."""

    def __init__(self, params: Any, rank: int, inner: optim.Optimizer, table: nn.Embedding) -> None:
        super().__init__(params, {"rank": rank, "lr": 1.0})
        self.inner, self.table, self.log = inner, table, {"steps": [0]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        self.log["steps"][0] += 1
        self.table.weight += 1
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    self.state[p]["low"] = p.new_zeros(p.shape[0], group["rank"], dtype=torch.float64)
                self.state[p]["step"] = torch.tensor(1.0)


def test_the_state_of_an_unknown_class_is_found_by_a_trial_that_changes_nothing() -> None:
    params, table = parameters(), nn.Embedding(3, 2)
    before = [p.detach().clone() for p in (*params, table.weight)]
    inner = optim.SGD(params, momentum=0.9)
    optimizer = Demanding(params, 5, inner, table)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran"))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    memory = optimizer_memory(optimizer, CPU)
    own = sum(8 * 5 * p.shape[0] * (p.dim() > 1) + 4 for p in params)
    assert memory.to_come == own + sum(p.nbytes for p in params)  # the momentum of the one inside
    assert optimizer.log == {"steps": [0]}
    assert schedule.last_epoch == 0
    assert not {**optimizer.state, **inner.state}
    assert all(map(torch.equal, before, (*params, table.weight)))
    assert all(p.grad is not None and not p.is_meta for p in params)


def test_the_memory_of_an_overridden_step_is_found_by_a_trial() -> None:
    params = parameters()
    unknown = Overriding(params)
    assert optimizer_memory(unknown, CPU).to_come == optimizer_memory(Inheriting(params), CPU).to_come > 0
    above, _ = peak_above_entry(unknown.step, CPU)
    memory = optimizer_memory(unknown, CPU)
    assert sum(t.nbytes for t in memory.tensors) == state_bytes(unknown)
    assert above - state_bytes(unknown) <= memory.transient


class Hungry(optim.Optimizer):
    """Keeps state in a list and in an attribute, and makes five copies of all parameters in its later steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"foreach": None})
        self.mean: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            params = group["params"]
            if self.mean is not None:
                made = [torch._foreach_mul(params, k) for k in range(5)]
                torch._foreach_add_(params, made[0])
            for p in params:
                self.state.setdefault(p, {"moments": [torch.zeros_like(p), torch.zeros_like(p)]})
        self.mean = torch.zeros(1000) if self.mean is None else self.mean


def test_a_trial_counts_state_in_lists_and_attributes_and_the_memory_of_later_steps() -> None:
    optimizer = Hungry(parameters())
    every = sum(p.nbytes for p in parameters())
    memory = optimizer_memory(optimizer, CPU)
    assert memory.to_come == 2 * every + 4000
    optimizer.step()
    above = peak_above_entry(optimizer.step, CPU)[0]
    assert 5 * every <= above <= memory.transient < 1.01 * above
    assert sum(t.nbytes for t in optimizer_memory(optimizer, CPU).tensors) == 2 * every


class Reading(optim.Adam):
    def step(self, closure: Any = None) -> Any:
        if float(self.param_groups[0]["params"][0].sum()) > 0:
            return None
        return super().step(closure)


@pytest.mark.parametrize("kind", [optim.LBFGS, Reading])
def test_a_class_that_cannot_be_tried_is_refused(kind: type[optim.Optimizer]) -> None:
    with pytest.raises(UsageError, match=rf"the bytes of a {kind.__name__} are not known.* state its bytes"):
        optimizer_memory(kind(parameters()), CPU)
