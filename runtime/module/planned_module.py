"""A module whose forward and backward follow a plan, in any training loop.

The module keeps its class, its parameters and its state. Only its ``forward`` is replaced by one that its
`Runner` executes.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from rematplan.ir import ModelError, UsageError
from rematplan.planner.core.plan import Plan
from rematplan.runtime.capture.capture import check_traceable
from rematplan.runtime.execute.autograd_function import CompiledPlan
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import disable_dynamo
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.module.runner import FORWARDS, LOCK, Planner, Runner
from rematplan.runtime.module.shape_options import ShapeOptions
from rematplan.runtime.statistics.factors import Factors, Statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import Listener, Recorder, shapes

DEFAULT_SHAPES = ShapeOptions()


def planned_module(
    model: nn.Module,
    planner: Planner,
    shapes: ShapeOptions = DEFAULT_SHAPES,
    statistics: Kronecker | None = None,
) -> nn.Module:
    """Return ``model`` with a planned forward and backward: an object of a subclass of its class that shares all its
    state.

    Plans are made at the first call with each kind of arguments.

    Args:
        model: the model. A module that is planned already is planned again.
        planner: makes the plans.
        shapes: which shapes are planned, and how many plans are kept.
        statistics: the Kronecker-factored statistics that the module's steps compute; None for none.

    Raises:
        ModelError: the model is compiled, scripted or sharded, or has a parameter of unknown shape; or it is planned
            and its forward was replaced since; or its class allows no subclass.
    """
    check_traceable(model)
    if isinstance(model, _Planned):
        if model._rematplan_replaced is not None:
            raise ModelError(
                f"{type(model).__name__} is planned, and its forward was replaced since; undo that (del model.forward) "
                f"to plan it again"
            )
        model = model._rematplan_model()
    return _become(
        _blank(type(model)), (model, Runner(type(model).__name__, planner, shapes, statistics), None)
    )


_classes: dict[type[nn.Module], Any] = {}


def _class_of(kind: type[nn.Module]) -> Any:
    if kind not in _classes:
        _classes[kind] = _new_class(kind)
    return _classes[kind]


def _new_class(kind: type[nn.Module]) -> Any:
    # Some code looks classes up by name.
    more = {key: getattr(kind, key) for key in ("__module__", "__qualname__")}
    try:
        ours = {name: _Ours(name) for name in OURS if not hasattr(kind, name)}
        own = {"forward": _Forward(kind), "_rematplan_kind": kind}
        return type(kind.__name__, (_Planned, kind), {**more, **ours, **own})
    except TypeError as error:
        raise ModelError(f"{kind.__name__} allows no planned subclass: {error}") from error


def _blank(kind: Any) -> nn.Module:
    planned: nn.Module = object.__new__(_class_of(kind))
    object.__setattr__(planned, "_rematplan_replaced", None)  # unpickling its attributes may read its forward
    return planned


def _become(planned: nn.Module, state: tuple[nn.Module, Runner, Any]) -> nn.Module:
    """Make a blank object the planned module of a model. It shares the model's attributes, also later ones.

    ``state``: the model, its runner, and the replacement of its forward (None if there is none).
    """
    model, runner, replaced = state
    attributes = {"_rematplan": runner, "_rematplan_origin": model, "_rematplan_replaced": replaced}
    for name, value in {"__dict__": model.__dict__, **attributes}.items():
        object.__setattr__(planned, name, value)
    return planned


class _Forward:
    """The attribute ``forward`` of planned modules.

    A value assigned to it replaces it, and may call it. An entry ``forward`` in the shared ``__dict__``
    belongs to the model.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        @functools.wraps(kind.forward)
        @disable_dynamo
        def forward(self: _Planned, *args: Any, **kwargs: Any) -> Any:
            return self._rematplan(self, args, kwargs)

        self.function = forward

    def __get__(self, planned: _Planned | None, kind: type | None = None) -> Any:
        if planned is None:
            return self.function
        return planned._rematplan_replaced or MethodType(self.function, planned)

    def __set__(self, planned: _Planned, value: Any) -> None:
        planned._rematplan_replaced = value

    def __delete__(self, planned: _Planned) -> None:
        planned._rematplan_replaced = None


@dataclass(frozen=True)
class PlanningStats:
    """Figures about the plans, searches and captures of a planned module.

    ``plans``: the number of plans in use. ``gaps``: for each plan, its overhead minus its proven lower bound, as a
    share of the step's time without recomputation; None without a bound. ``searching``: the number of plans for which
    a better one is being searched. ``seconds``: the duration of these background searches so far. ``swaps``: how
    often a better plan has replaced another. ``captures``: the number of shapes that were captured separately.
    ``open_captures``: the number of captures with open sizes, each of which serves several shapes. ``instances``: how
    often a shape got its step from a capture with open sizes. ``dropped``: the number of plans that were dropped
    because ``max_plans`` others were used later. ``reasons``: why shapes are captured separately; empty if there is
    no reason.
    """

    plans: int
    gaps: tuple[float | None, ...]
    searching: int
    seconds: float
    swaps: int
    captures: int = 0
    open_captures: int = 0
    instances: int = 0
    dropped: int = 0
    reasons: tuple[str, ...] = ()


class Planning:
    """The plans of a planned module, and the statistics that its steps compute.

    Planned modules also have `plan`, `plans`, `source` and `prepare` as attributes, unless their model uses these
    names itself.

    Raises:
        UsageError: the module is not planned.
    """

    def __init__(self, planned: nn.Module) -> None:
        if not isinstance(planned, _Planned):
            raise UsageError(f"a {type(planned).__name__} is not planned; see rematplan.plan_module")
        self._planned: _Planned = planned

    @property
    def plan(self) -> Plan:
        """The plan of the most recent call (before any call: the plan made last). Its status is ``refining`` while a
        better plan is being searched for.

        Raises:
            AttributeError: no plan was made yet.
        """
        return self._planned._rematplan.last.running.shown

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans in use, one for each combination of argument shapes and types, modes and conditions that was
        planned. Plans that were dropped or replaced are not among them."""
        return tuple(entry.plan for entry in self._planned._rematplan.entries())

    @property
    def source(self) -> str:
        """The Python source code of the forward and the backward, as generated from `plan`."""
        return self._planned._rematplan.last.compiled.halves.source

    def wait(self, seconds: float | None = None) -> Planning:
        """Wait until all background searches for better plans have ended. Plans found take effect at the next
        step.

        ``seconds``: the longest time to wait; None for no limit.

        Returns:
            This object.
        """
        end = None if seconds is None else time.monotonic() + seconds
        for entry in self._planned._rematplan.entries():
            if entry.running.refinement is not None:
                entry.running.refinement.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self

    def stats(self) -> PlanningStats:
        """Return figures about the plans in use, background searches and captures."""
        entries = self._planned._rematplan.entries()
        shapes = self._planned._rematplan.shapes.values()
        later = [r for entry in entries if (r := entry.running.refinement) is not None]
        return PlanningStats(
            plans=len(entries),
            gaps=tuple(entry.running.shown.gap for entry in entries),
            searching=sum(r.working for r in later),
            seconds=sum(r.seconds for r in later),
            swaps=sum(entry.running.swaps for entry in entries),
            captures=sum(one.fixed for one in shapes),
            open_captures=sum(len(one.forwards) for one in shapes),
            instances=sum(one.served for one in shapes),
            dropped=self._planned._rematplan.recent.dropped,
            reasons=tuple(dict.fromkeys(reason for one in shapes for reason in one.reasons)),
        )

    def statistics(self) -> Statistics:
        """Return the Kronecker-factored statistics of the present training step: the sum over its backwards so far.
        They are available until the next training step's first forward. A training step that computes no statistics
        has no factors.

        Raises:
            UsageError: the module was planned without statistics.
        """
        return self._recorder.statistics()

    def statistics_layers(self) -> dict[str, Factors]:
        """Return the Kronecker factors that the plans in use compute, by the name of the layer's weight, as tensors
        on the device ``meta`` (shapes and types only). Empty if no step with statistics was planned yet.

        Raises:
            UsageError: the module was planned without statistics.
        """
        assert self._recorder
        plain = (entry for entries in self._planned._rematplan.cache.values() for entry in entries)
        found = (shapes(other.statistics) for entry in plain for other in entry.measured if other.statistics)
        return {name: factors for one in found for name, factors in one.items()}

    def take_statistics(self, wanted: bool | None = True) -> None:
        """End the present training step, and decide whether the following training steps compute statistics. (A step
        of an optimizer over the module's parameters ends the training step, too.)

        ``wanted``: True for all following training steps, False for none, None for every n-th (``Kronecker.every``).

        Raises:
            UsageError: the module was planned without statistics.
        """
        self._recorder.take(wanted)

    def listen_to_statistics(self, listener: Listener) -> None:
        """Register a method that is called with a layer's factors as soon as a backward has completed them.

        ``listener``: see `Recorder.listen`.

        Raises:
            UsageError: the module was planned without statistics.
        """
        self._recorder.listen(listener)

    @property
    def statistics_options(self) -> Kronecker:
        """The options with which the module's statistics were planned.

        Raises:
            UsageError: the module was planned without statistics.
        """
        return self._recorder.options

    @property
    def statistics_state(self) -> tuple[int, int]:
        """The number of the present training step, and the number of label draws so far: all that must be
        saved, and set again, to resume training exactly.

        Raises:
            UsageError: the module was planned without statistics.
        """
        return self._recorder.step, self._recorder.draws.count

    @statistics_state.setter
    def statistics_state(self, state: tuple[int, int]) -> None:
        self._recorder.step, self._recorder.draws.count = state

    @property
    def _recorder(self) -> Recorder:
        found = self._planned._rematplan.recorder
        if found is None:
            name = self._planned._rematplan.name
            raise UsageError(
                f"{name} was planned without statistics; see plan_module(statistics=Kronecker())"
            )
        return found

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Make the plan for these arguments, unless there is one, without running the model. Return the planned
        module.

        Raises:
            ModelError: the forward cannot be captured.
            InfeasibleBudget: no plan fits the budget.
        """
        self._planned._rematplan.prepare(self._planned, args, kwargs)
        return self._planned


def compiled_plan(planned: nn.Module) -> CompiledPlan:
    """Return the compiled plan of a planned module's most recent call (before any call: of the plan made last).

    Raises:
        UsageError: the module is not planned.
    """
    return Planning(planned)._planned._rematplan.last.compiled


def step_of(planned: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedStep:
    """Return the captured training step for these arguments of a planned module, before planning.

    Args:
        planned: the planned module.
        args: the positional arguments of a call.
        kwargs: its keyword arguments.

    Raises:
        UsageError: the module is not planned.
        ModelError: the forward cannot be captured.
    """
    module = Planning(planned)._planned
    runner: Runner = module._rematplan
    return runner.step(module, args, kwargs)


OURS = ("plan", "plans", "source", "prepare")


class _Ours:
    """An attribute of `Planning` on planned modules. A submodule, parameter, buffer or plain attribute of
    that name in the model has priority."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, planned: Any, kind: type | None = None) -> Any:
        if planned is None:
            return self
        for held in ("_parameters", "_buffers", "_modules"):
            if self.name in planned.__dict__[held]:
                return planned.__dict__[held][self.name]
        return getattr(Planning(planned), self.name)


class _Planned:
    """The attributes and methods that a planned module has in addition to its model."""

    __slots__ = ("_rematplan", "_rematplan_origin", "_rematplan_replaced")

    _rematplan_kind: type[nn.Module]
    _rematplan: Runner
    _rematplan_origin: nn.Module
    """The original model. Submodules may have weak references to it."""
    _rematplan_replaced: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing, so that base classes do not register the planned class as a new one."""

    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as usual. Warn if a replaced forward does not use the plan."""
        before = FORWARDS.begun
        results = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._rematplan_replaced is not None and FORWARDS.begun == before and torch.is_grad_enabled():
            warn(
                f"the forward of {self._rematplan.name} was replaced after it was planned, and the new one does not "
                f"call the planned one: this step has no plan and may exceed the budget; plan what it calls"
            )
        return results

    def _rematplan_model(self) -> nn.Module:
        """Return the model, which shares this object's attributes; or this object, if its class was changed
        after planning."""
        further = type(self) is not _class_of(self._rematplan_kind)
        return cast(nn.Module, self) if further else self._rematplan_origin

    def _rematplan_forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """Return the forward of the model itself, without a plan."""
        further = isinstance(model, _Planned) and "forward" not in self.__dict__
        return cast(Callable[..., Any], super().forward if further else model.forward)  # type: ignore[misc]

    def _rematplan_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with LOCK.shared():
            return self._rematplan_forward_of(self._rematplan_model())(*args, **kwargs)

    def __copy__(self) -> Any:
        """Return another object with the same submodules and plans."""
        model = copy.copy(self._rematplan_model())
        return _become(
            _blank(self._rematplan_kind), (model, self._rematplan.twin(), self._rematplan_replaced)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with separate weights and the same plans, for an average of weights, for example."""
        memo[id(self)] = twin = _blank(self._rematplan_kind)
        model, replaced = (
            copy.deepcopy(one, memo) for one in (self._rematplan_model(), self._rematplan_replaced)
        )
        return _become(twin, (model, self._rematplan.twin(), replaced))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model and the options of planning, without plans. The copy makes its plans in its first
        call."""
        del protocol
        return (
            _blank,
            (self._rematplan_kind,),
            (self._rematplan_model(), self._rematplan.twin({}), self._rematplan_replaced),
            None,
            None,
            _become,
        )
