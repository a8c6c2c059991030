"""The weights of a model that FSDP2 (`fully_shard`) shards over processes, and their substitutes in a rehearsal.

A rehearsal communicates nothing: only some processes may need one, and a collective waits for all of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import apply_to_tensors, disable_current_modes

FSDP = "torch.distributed.fsdp"
"""The package whose forward hooks gather weights, free them again, and convert inputs and outputs."""
REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "is divided by tensor parallelism, too": lambda weight: weight.is_dtensor,
    "is gathered by an extension (fsdp_pre_all_gather)": lambda weight: hasattr(
        weight.sharded_param.to_local(), "fsdp_pre_all_gather"
    ),
}
"""Weights that parts cannot have, with a test of each."""


def modules_with_states(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield those of a model's modules that FSDP2 shards, each with the state that FSDP2 has for it; several may share
    one."""
    fsdp = sys.modules.get(FSDP)
    for part in model.modules() if fsdp else ():
        if isinstance(part, fsdp.FSDPModule):  # type: ignore[union-attr]
            yield part, part._get_fsdp_state()


def groups_of(model: nn.Module) -> list[Any]:
    """Return the groups of a model's weights that FSDP2 gathers together."""
    states = dict.fromkeys(state for _, state in modules_with_states(model))
    return [group for state in states for group in _groups(state)]


def outermost_groups(model: nn.Module) -> set[Any]:
    """Return the groups of those sharded modules that are in no other one, as far as is known before a first call.
    FSDP2 does not free their weights after a forward."""
    return {
        group
        for part, state in modules_with_states(model)
        if part is model or state._is_root is not False
        for group in _groups(state)
    }


def _groups(state: Any) -> list[Any]:
    # Before PyTorch 2.13 a module has one group at most.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [one for one in ([state._fsdp_param_group] if groups is None else groups) if one is not None]


def places(weight: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules that have a weight, and its name in each."""
    info = weight._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def gathered_type(weight: Any) -> torch.dtype:
    """Return the type that a weight has in a forward."""
    kept: torch.dtype = weight.sharded_param.dtype
    asked = getattr(weight, "param_dtype", weight.mp_policy.param_dtype)  # set when a step begins
    return asked if asked is not None and kept.is_floating_point else kept


def check_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Raise `ModelError` if FSDP2 does not gather weights as parts need them. It must gather plain tensors, must have
    gathered the model's own weights now, and may gather none separately inside of ``names``, the stated parts."""
    kind = type(model).__name__
    for group in groups_of(model):
        for weight in group.fsdp_params:
            module, name = places(weight)[0]
            for what in (what for what, holds in REFUSED.items() if holds(weight)):
                raise ModelError(
                    f"{kind}: {name} of a {type(module).__name__} {what}; plans under FSDP2 need weights that it "
                    f"gathers as plain tensors"
                )
            if model in group.modules and _is_shard(weight):
                raise ModelError(
                    f"{kind}: FSDP2 gathers its weights only while it is called; plan it in place by rematplan.apply, "
                    f"which makes plans at the first training call"
                )
    sharded = {part for part, _ in modules_with_states(model)}
    for name in names:
        part = model.get_submodule(name)
        if inner := [
            f"{name}.{own}" for own, one in part.named_modules() if one is not part and one in sharded
        ]:
            raise ModelError(
                f"{name} has no plan of its own, since FSDP2 gathers the weights of {inner[0]} inside of it apart: "
                f"name {inner[0]} in modules instead"
            )


def _is_shard(weight: Any) -> bool:
    return getattr(*places(weight)[0]) is weight.sharded_param


def with_shards(model: nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors by name, with this rank's shard in place of each weight that is gathered now."""
    weights = (weight for group in groups_of(model) for weight in group.fsdp_params)
    shards = {id(getattr(*places(weight)[0])): weight.sharded_param for weight in weights}
    return {name: shards.get(id(tensor), tensor) for name, tensor in named.items()}


class Substitutes:
    """Lets the inner modules of a model run as if FSDP2 had gathered their weights, inside of a ``with`` statement. A
    substitute has the shape and type of the gathered weight, and this rank's shard, repeated, as its values. It exists
    while its module runs, and for as long as autograd has saved it."""

    def __init__(self, model: nn.Module, made: Callable[[torch.Tensor], None]) -> None:
        #: ``made``: is called with each new substitute.
        self.model, self.made = model, made
        self._weights: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
        self._gathered: dict[Any, ExitStack] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for part, state in modules_with_states(self.model):
            if part is not self.model:  # its own hook has run
                self._replace(part._forward_pre_hooks, partial(self._before, state))
                self._replace(part._forward_hooks, partial(self._after, state))

    def __exit__(self, *_raised: object) -> None:
        for state in [*self._gathered]:
            self._free(state)
        self._hooks.close()

    def _replace(self, hooks: dict[int, Any], own: Callable[..., Any]) -> None:
        for key, hook in hooks.items():
            if str(getattr(hook, "__module__", "")).startswith(FSDP):
                self._hooks.callback(hooks.__setitem__, key, hook)
                hooks[key] = own

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The substitutes that still exist."""
        return [one for one in (ref() for ref, _ in self._weights.values()) if one is not None]

    def weight(self, leaf: Any) -> Any:
        """Return the weight that a tensor replaces; the tensor itself if it replaces none."""
        ref, weight = self._weights.get(id(leaf), (None, None))
        return leaf if ref is None or ref() is not leaf else weight

    def _before(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put substitutes in place of weights that are shards now, until the module's forward has run. Return the
        arguments, converted as FSDP2 would."""
        del module
        self._free(state)
        stack = self._gathered[state] = ExitStack()
        for weight in (weight for group in _groups(state) for weight in group.fsdp_params):
            where = places(weight)
            if _is_shard(weight):
                one = self._substitute(weight)
                for owner, name in where:
                    stack.callback(owner._parameters.__setitem__, name, weight.sharded_param)
                    owner._parameters[name] = one
        policy = state._mp_policy
        asked = policy.param_dtype if policy.cast_forward_inputs else None
        return _converted(args, asked), _converted(kwargs, asked)

    def _after(self, state: Any, module: nn.Module, given: Any, results: Any) -> Any:
        del module, given
        self._free(state)
        return _converted(results, state._mp_policy.output_dtype)

    def _free(self, state: Any) -> None:
        # A module that raises does not run its second hook. Checkpoints end a recomputation that way.
        if (gathered := self._gathered.pop(state, None)) is not None:
            gathered.close()

    def _substitute(self, weight: Any) -> nn.Parameter:
        """Return a new substitute of a weight, after passing it to ``made``."""
        param, dim = weight.sharded_param, weight.fsdp_placement.dim
        with torch.no_grad(), disable_current_modes():
            whole = torch.zeros(param.shape, dtype=gathered_type(weight), device=weight.device)
            shard = param.to_local()
            for piece in whole.split(shard.shape[dim], dim) if shard.numel() else ():
                piece.copy_(shard.narrow(dim, 0, piece.shape[dim]))
        one = nn.Parameter(whole, requires_grad=param.requires_grad)
        self.made(one)
        self._weights[id(one)] = weakref.ref(one), param
        return one


def _converted(values: Any, dtype: torch.dtype | None) -> Any:
    def to(one: torch.Tensor) -> torch.Tensor:
        return one.to(dtype) if one.is_floating_point() else one

    return values if dtype is None else apply_to_tensors(to, values)
