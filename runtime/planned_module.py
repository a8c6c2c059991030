"""A module whose forward and backward follow a plan, in any training loop.

The module keeps its class, its parameters and its state; only its ``forward`` is another. One plan is made for each
way it is called (shapes, types, modes, autocast), when it is first called so.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rematplan.ir import ModelError
from rematplan.planner.plan import Plan
from rematplan.runtime.capture import capture, check_traceable
from rematplan.runtime.captured_step import CapturedStep
from rematplan.runtime.executor import tensors_and_modes
from rematplan.runtime.planned_function import CompiledPlan

Planner = Callable[[CapturedStep], tuple[CapturedStep, Plan]]
"""Makes the plan of a captured step, and gives the step that it is for: the same, or the same with inverses. The plan
is a schedule of its `turn.turning_problem`."""


@dataclass(frozen=True)
class _Way:
    """One way that the module is called, compiled."""

    plan: Plan
    compiled: CompiledPlan
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    """The flattened outputs, with `_TENSOR` where a tensor goes."""


_TENSOR = object()


def planned_module(model: nn.Module, planner: Planner, dynamic: bool = True) -> nn.Module:
    """``model`` with a planned forward and backward: an object of a subclass of its class, sharing all its state.

    ``dynamic``: whether a call with other shapes, types or modes makes a further plan; else it is refused.

    Raises:
        ModelError: the model is compiled, or the shape of a parameter is not known yet.
    """
    check_traceable(model)
    kind = type(model)
    planned = copy.copy(model)  # the same dictionaries of parameters, buffers and children
    planned.__class__ = type(f"Planned{kind.__name__}", (_Planned, kind), {"__module__": kind.__module__})
    planned.__dict__["_rematplan"] = _Runner(model, planner, dynamic)
    return planned


class _Planned:
    """What a planned module has beyond its model."""

    _rematplan: _Runner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; their backward follows the plan. Without gradients the model itself runs."""
        assert isinstance(self, nn.Module)
        runner = self._rematplan
        if runner.model.training != self.training:
            runner.model.training = (
                self.training
            )  # the root's flag is each object's own; the children are shared
        return runner(args, kwargs)

    @property
    def plan(self) -> Plan:
        """The plan of the last way in which the module was called."""
        return self._rematplan.last.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans made so far."""
        return tuple(way.plan for way in self._rematplan.ways.values())

    @property
    def source(self) -> str:
        """The generated source of `plan`."""
        return self._rematplan.last.compiled.halves.source

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Make the plan for these arguments without running anything; returns the module."""
        self._rematplan.prepare(args, kwargs)
        return self


class _Runner:
    """Plans and runs one model."""

    def __init__(self, model: nn.Module, planner: Planner, dynamic: bool) -> None:
        self.model, self.planner, self.dynamic = model, planner, dynamic
        self.ways: dict[Any, _Way] = {}
        self.last: _Way

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runner:
        """For a copy of the planned module (an average of weights, say): its own model, the same plans."""
        twin = _Runner(copy.deepcopy(self.model, memo), self.planner, self.dynamic)
        twin.ways = dict(self.ways)
        twin.last = self.last
        return twin

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wanted = any(t.requires_grad for t in (*self.model.parameters(), *tensors))
        if not (torch.is_grad_enabled() and wanted):
            return self.model.forward(*args, **kwargs)  # the hooks of a call are the planned module's to run
        named, modes = tensors_and_modes(self.model)
        way = self._way(leaves, spec, tensors, named, modes)
        flat = iter(way.compiled(named, tensors))
        return pytree.tree_unflatten([next(flat) if c is _TENSOR else c for c in way.constants], way.outputs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._way(
            leaves,
            spec,
            [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
            *tensors_and_modes(self.model),
        )

    def _way(
        self,
        leaves: list[Any],
        spec: pytree.TreeSpec,
        tensors: list[torch.Tensor],
        named: Mapping[str, torch.Tensor],
        modes: tuple[bool, ...],
    ) -> _Way:
        casts = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST
        )
        key = (tuple(map(_describe, leaves)), spec, tuple(map(_describe, named.values())), modes, casts)
        if key not in self.ways:
            if self.ways and not self.dynamic:
                raise ModelError(
                    f"{type(self.model).__name__} was planned for other shapes, types or modes; plan it again, or with "
                    f"dynamic=True"
                )
            self.ways[key] = self._compile(leaves, spec, tensors)
        self.last = self.ways[key]
        return self.last

    def _compile(self, leaves: list[Any], spec: pytree.TreeSpec, tensors: list[torch.Tensor]) -> _Way:
        flat = _Flat(self.model, leaves, spec)
        batch = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        step = capture(flat, batch, type(self.model).__name__, self.model)
        _check_constants(flat.constants, step.name)
        step, plan = self.planner(step)
        outputs = [o for o in step.outputs if o.kind == "output"]
        if [int(o.target) for o in outputs] != list(range(sum(c is _TENSOR for c in flat.constants))):
            raise ModelError(f"{step.name}: an output could not be captured")
        compiled = CompiledPlan(step, plan.schedule, plan.lanes)
        return _Way(plan, compiled, flat.outputs, tuple(flat.constants))


_AUTOCAST = ("cpu", "cuda")


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), pickle.dumps(leaf)
    return type(leaf), leaf  # 1, 1.0 and True are equal


def _check_constants(constants: list[Any], name: str) -> None:
    """Raises: ModelError: among the outputs there is an object with tensors that PyTorch does not look into."""
    for one in constants:
        if any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(getattr(one, "__dict__", None))):
            raise ModelError(
                f"{name} gives a {type(one).__name__}, whose tensors PyTorch does not see; give them in a tuple or "
                f"dictionary, or register the class with torch.utils._pytree"
            )


class _Flat(nn.Module):
    """The model as a function from a flat tuple of tensors to a flat tuple of tensors that are nobody's views."""

    def __init__(self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._leaves, self._spec = leaves, spec
        self.outputs: pytree.TreeSpec
        self.constants: list[Any] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        flat, self.outputs = pytree.tree_flatten(self.model.forward(*args, **kwargs))
        self.constants = [_TENSOR if isinstance(o, torch.Tensor) else o for o in flat]
        taken = {id(t) for t in (*tensors, *self.model.parameters(), *self.model.buffers())}
        results = []
        for output in flat:
            if isinstance(output, torch.Tensor):
                # A view, or an output given twice, has a tangent of its own only as a copy.
                results.append(output.clone() if output._is_view() or id(output) in taken else output)
                taken.add(id(output))
        return tuple(results)
