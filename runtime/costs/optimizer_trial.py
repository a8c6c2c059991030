"""The memory of an optimizer of any class, found by two steps of a copy on parameters without memory."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.compat import TorchDispatchMode, pytree

_NOT_ON_META = ("fused", "capturable")
"""Options of a step that tensors of the device ``meta`` do not have. Without them, the state is the same and the
temporary memory is not less."""
DECOMPOSITION = 2.25
"""Temporary memory of a decomposition, in bytes of its results, as measured for ``eigh``; others need less."""


@dataclass(frozen=True)
class Trial:
    """What two steps of a copy of an optimizer allocated."""

    kept: int
    """Bytes that stay allocated after a step, wherever the optimizer keeps them."""
    transient: int
    """Temporary bytes at the peak of a step, in addition to parameters, gradients and what is kept."""


def try_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> Trial:
    """Return the memory of an optimizer's step, from two steps of a copy without state whose tensors are on ``meta``;
    the step's exceptions pass through. Memory inside of kernels is not seen; for matrix decompositions it is assumed
    (`DECOMPOSITION`)."""
    twin: Any = object.__new__(type(optimizer))
    groups: list[dict[str, Any]] = []
    copies: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): groups}
    for group in optimizer.param_groups:
        params = []
        for p in group["params"]:
            one = torch.nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            one.grad = torch.empty_like(one) if p.requires_grad else None
            copies[id(p)] = one
            params.append(one)
        options = {name: False for name in _NOT_ON_META if name in group}
        if group.get("foreach", False) is None and any(p.device.type != "cpu" for p in group["params"]):
            options["foreach"] = True  # the default on accelerators
        groups.append({**group, **options, "params": params})
        copies[id(group)] = groups[-1]
    kept = {k: v for k, v in vars(optimizer).items() if k != "step"}  # which learning rate schedules replace
    hooks: dict[str, Any] = {
        k: OrderedDict() for k in kept if k.startswith("_optimizer_") and k.endswith("_hooks")
    }
    transient = 0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with _ToMeta():
            vars(twin).update(
                copy.deepcopy({k: v for k, v in kept.items() if k not in hooks}, copies) | hooks
            )
        with _Allocated(device) as memory:
            # The first step may only allocate the state.
            for _ in range(2):
                memory.peak = memory.live
                type(optimizer).step(twin)
                transient = max(transient, memory.peak - memory.live)
    return Trial(memory.live, transient)


class _Allocated(TorchDispatchMode):
    """Counts the bytes of the storages that ops allocate on ``meta`` or on a device of the type of ``device``: those
    ``live`` now, and at the ``peak``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; add the storages that it allocates to ``live`` until they are freed, and raise ``peak`` to that.
        Linear algebra counts the share `DECOMPOSITION` of its results in addition."""
        del types
        result = func(*args, **(kwargs or {}))
        new = func is torch.ops.aten.lift_fresh.default  # of `torch.tensor`
        given = {} if new else _storages((args, kwargs))
        before = self.live
        for key, storage in _storages(result).items():
            counts = storage.device.type in ("meta", self._device.type)
            if counts and key not in given:  # neither changed in place nor a view
                size = allocated(storage.nbytes(), self._device)
                self.live += size
                weakref.finalize(storage, self._free, size)
        inside = int(DECOMPOSITION * (self.live - before)) if "linalg" in func.__name__ else 0
        self.peak = max(self.peak, self.live + inside)
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors in a nested structure by their addresses."""
    found = (t.untyped_storage() for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))
    return {storage._cdata: storage for storage in found}


class _ToMeta(TorchFunctionMode):
    """Makes each copy of a tensor, by ``clone`` or ``deepcopy``, an uninitialised tensor on the device ``meta``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))
