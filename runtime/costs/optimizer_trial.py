"""The state of an optimizer of any class after its first step, found by a step of a copy without memory."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

Like: TypeAlias = tuple[int, torch.Size, torch.dtype]
"""The index of a parameter group, and the shape and type of a parameter in it."""
_FORMS = ("foreach", "fused", "capturable")
"""Options that choose the form of a step. Tensors of the device ``meta`` have only the loop; the state is the same."""


def state_by_trial(optimizer: torch.optim.Optimizer) -> Mapping[Like, dict[str, Any]]:
    """Return the state that an optimizer would have for parameters of each shape and type after its first step.

    A copy of the optimizer makes one step on parameters of the device ``meta``, which have no memory. Everything to
    which the optimizer refers is copied, too, so that nothing else changes; tensors are copied to that device.

    Returns:
        By parameter group, shape and type, the entry of the optimizer's ``state``. Its tensors are on the device
            ``meta``, or on the CPU if the optimizer keeps them there for parameters of all devices, such as the number
            of steps.

    Raises:
        Exception: what the step raises, for example because it reads values of parameters or requires a closure.
    """
    twin: Any = object.__new__(type(optimizer))
    state: dict[Any, Any] = defaultdict(dict)
    groups: list[dict[str, Any]] = []
    copies: dict[int, Any] = {id(optimizer.state): state, id(optimizer.param_groups): groups}
    like: dict[Like, torch.nn.Parameter] = {}
    for at, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            one = torch.nn.Parameter(torch.empty_like(p, device="meta"))
            one.grad = torch.empty_like(one)
            copies[id(p)] = like.setdefault((at, p.shape, p.dtype), one)
        params = [one for key, one in like.items() if key[0] == at]
        groups.append({k: v for k, v in group.items() if k not in _FORMS} | {"params": params})
        groups[-1] |= {name: False for name in _FORMS if name in group}
        copies[id(group)] = groups[-1]
    kept = {k: v for k, v in vars(optimizer).items() if k != "step"}  # which learning rate schedules replace
    hooks: dict[str, Any] = {
        k: OrderedDict() for k in kept if k.startswith("_optimizer_") and k.endswith("_hooks")
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with _ToMeta():
            vars(twin).update(
                copy.deepcopy({k: v for k, v in kept.items() if k not in hooks}, copies) | hooks
            )
        type(optimizer).step(twin)
    return {key: state.get(one, {}) for key, one in like.items()}


class _ToMeta(TorchFunctionMode):
    """Lets copies of tensors be on the device ``meta``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))
