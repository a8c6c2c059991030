"""What tests of the drop-in compare: two modules' states and gradients, and all that a use of them leaves."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import rematplan

SETTINGS: dict[str, Any] = {"budget": "min", "strategy": "approx_dp", "costs": "roofline"}
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def saved(model: nn.Module) -> nn.Module:
    """The model from a file to which it was saved whole."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def same(a: nn.Module, b: nn.Module) -> bool:
    return list(a.state_dict()) == list(b.state_dict()) and all(
        map(torch.equal, a.state_dict().values(), b.state_dict().values())
    )


def same_leaves(one: Any, other: Any) -> bool:
    """Whether both have one structure and equal tensors, numbers and other objects in it."""
    leaves, of = pytree.tree_flatten(one)
    others, of_others = pytree.tree_flatten(other)
    return of == of_others and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_grads(a: nn.Module, b: nn.Module) -> bool:
    x, y = grads(a), grads(b)
    return list(x) == list(y) and bool(x) and all(torch.equal(x[n], y[n]) for n in x)


def equal_after(use: Callable[[nn.Module], Any], planned: nn.Module, plain: nn.Module) -> None:
    """What ``use`` gives, and the gradients, buffers and random state that it leaves, are the same."""
    left = []
    for model in (planned, plain):
        torch.manual_seed(5)
        given = use(model) or []
        grads = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
        left.append([*given, *grads, *model.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def planned_and_plain(model: nn.Module, *args: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model, planned for these arguments or `X` as `SETTINGS` and ``options`` say, and a copy of it."""
    plain = copy.deepcopy(model)
    return rematplan.plan_module(model, args or (X,), **SETTINGS | options), plain
