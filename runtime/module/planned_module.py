"""A module whose forward and backward follow a rematerialisation plan, in any training loop.

The module keeps its class (as a base class), its parameters and its state. Only its ``forward`` is replaced by one that
its `Runner` executes.
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
from rematplan.runtime.module.cached_plans import CacheEntry
from rematplan.runtime.module.planner_interface import Planner
from rematplan.runtime.module.runner import FORWARDS, LOCK, Runner
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

    Plans are made by calls: the first call with a new combination of shapes, types and modes makes a plan for it.

    Args:
        model: the model. A module that is planned already is planned again.
        planner: makes the plans.
        shapes: which shapes are planned, and how many plans are kept.
        statistics: the Kronecker-factored statistics that the module's steps compute; None for none.

    Raises:
        ModelError: the model is compiled, scripted or sharded, or has a parameter of unknown shape; or it is planned
            and its forward was replaced after planning; or its class allows no subclass.
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
    """Make ``planned``, an object without attributes, the planned module of a model, and return it. It shares the
    ``__dict__`` of the model, so that an attribute set on one of them later is also set on the other.

    ``state``: the model, its runner, and the function that replaces the planned forward (None if there is none).
    """
    model, runner, replaced = state
    attributes = {"_rematplan": runner, "_rematplan_origin": model, "_rematplan_replaced": replaced}
    for name, value in {"__dict__": model.__dict__, **attributes}.items():
        object.__setattr__(planned, name, value)
    return planned


class _Forward:
    """The descriptor of the attribute ``forward`` of planned modules. Without an assignment, the attribute is the
    planned forward.

    Assigning a function to ``forward`` replaces the planned forward; the function may call the planned one. A planned
    module and its model share one ``__dict__``; an entry ``forward`` in it is the model's and does not replace the
    planned one.
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
    share of the step's time without recomputation; None without a bound. ``searching``: the number of plans for which a
    better one is being searched. ``seconds``: the total duration of these background searches so far. ``swaps``: how
    often a better plan has replaced another.

    ``captures``: the number of shapes that were captured separately. ``open_captures``: the number of captures with
    symbolic sizes, each of which serves several shapes. ``instances``: how often a shape got its step from a capture
    with symbolic sizes. ``carried``: how many of these steps needed no search, because a plan made at other sizes was
    used. ``sources``: the number of compiled sources that serve all sizes. ``dropped``: the number of plans that were
    dropped because there were more than ``max_plans``. ``reasons``: why shapes were captured separately; empty if there
    is no reason.
    """

    plans: int
    gaps: tuple[float | None, ...]
    searching: int
    seconds: float
    swaps: int
    captures: int = 0
    open_captures: int = 0
    instances: int = 0
    carried: int = 0
    sources: int = 0
    dropped: int = 0
    reasons: tuple[str, ...] = ()


class Planning:
    """Access to the plans of a planned module, and to the statistics that its steps compute.

    Planned modules also have the attributes `plan`, `plans`, `source` and `prepare` of this class, unless their model
    uses these names itself.

    Raises:
        UsageError: the module is not planned.
    """

    def __init__(self, planned: nn.Module) -> None:
        if not isinstance(planned, _Planned):
            raise UsageError(f"a {type(planned).__name__} is not planned; see rematplan.plan_module")
        self._planned: _Planned = planned
        if recorder := planned._rematplan.recorder:
            recorder.watch_shards(planned.parameters())

    @property
    def plan(self) -> Plan:
        """The plan of the most recent call (before any call: the plan made last). Its status is ``refining`` while a
        better plan is being searched for.

        Raises:
            UsageError: no plan was made yet, as in a copy from a pickle before its first call.
        """
        return _last(self._planned).running.shown

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans in use. There is one for each combination of argument shapes and types, modes and module state that
        was planned. Further ones are for steps with statistics, and for steps during which gradients of earlier steps
        exist. Plans that were dropped or replaced are not among them."""
        return tuple(entry.plan for entry in self._planned._rematplan.plans.all())

    @property
    def source(self) -> str:
        """The Python source code that was generated from `plan`: the functions that execute the forward and the
        backward.

        Raises:
            UsageError: no plan was made yet.
        """
        return _last(self._planned).compiled.halves.source

    def wait(self, seconds: float | None = None) -> Planning:
        """Wait until all background searches for better plans have ended. The plans that they found are used from the
        next training step on.

        ``seconds``: the longest time to wait; None for no limit.

        Returns:
            This object.
        """
        end = None if seconds is None else time.monotonic() + seconds
        for entry in self._planned._rematplan.plans.all():
            if entry.running.refinement is not None:
                entry.running.refinement.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self

    def stats(self) -> PlanningStats:
        """Return figures about the plans in use, background searches and captures."""
        entries = self._planned._rematplan.plans.all()
        shapes = self._planned._rematplan.captures.shapes.values()
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
            carried=sum(one.carried for one in shapes),
            sources=sum(one.sources for one in shapes),
            dropped=self._planned._rematplan.plans.recent.dropped,
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
        plain = self._planned._rematplan.plans.plain()
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
        """Register a method that receives the Kronecker factors of layers during each backward, as soon as they are
        complete. A method that was registered before is replaced.

        ``listener``: a bound method that takes a dictionary from weight names to factors (it may be empty) and the
        number of the training step. Its object is referenced weakly. See `Recorder.listen`.

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
        """A pair: the number of the present training step, and how many times labels have been drawn so far. To resume
        training with exactly the same statistics, save this pair and assign it later.

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
        """Make the plan for a call with these arguments, without running the model, and return the planned module. If
        there is a plan for such a call, keep it.

        Raises:
            ModelError: the forward cannot be captured.
            InfeasibleBudget: no plan fits the budget.
            UsageError: an argument has a size outside of the ranges with which the module was planned.
        """
        self._planned._rematplan.prepare(self._planned, args, kwargs)
        return self._planned


def compiled_plan(planned: nn.Module) -> CompiledPlan:
    """Return the compiled plan of a planned module's most recent call (before any call: of the plan made last).

    Raises:
        UsageError: the module is not planned, or has no plan yet.
    """
    return _last(Planning(planned)._planned).compiled


def _last(planned: _Planned) -> CacheEntry:
    runner = planned._rematplan
    if not hasattr(runner, "last"):
        raise UsageError(
            f"{runner.name} has no plan yet; call it, or prepare a plan: planned.prepare(*arguments)"
        )
    return runner.last


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
    """A descriptor that gives planned modules an attribute of `Planning`, such as ``plan``. If the model has a
    submodule, parameter, buffer or plain attribute of that name, reading the name returns the model's."""

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
        """Do nothing. Without this method, base classes that register their subclasses would register the planned
        class, too."""

    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as usual. If a function was assigned to ``forward`` after planning and it did not call the
        planned forward, warn that this step had no plan."""
        before = FORWARDS.begun
        results = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._rematplan_replaced is not None and FORWARDS.begun == before and torch.is_grad_enabled():
            warn(
                f"the forward of {self._rematplan.name} was replaced after it was planned, and the new one does not "
                f"call the planned one: this step has no plan and may exceed the budget; plan what it calls"
            )
        return results

    def _rematplan_model(self) -> nn.Module:
        """Return the original model, which shares this object's attributes. If this object's class was changed after
        planning (a parametrisation does that), return this object instead, since only it has the new class."""
        further = type(self) is not _class_of(self._rematplan_kind)
        return cast(nn.Module, self) if further else self._rematplan_origin

    def _rematplan_forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """Return the original forward, which has no plan, bound to its object. ``model``: the result of
        `_rematplan_model`."""
        further = isinstance(model, _Planned) and "forward" not in self.__dict__
        return cast(Callable[..., Any], super().forward if further else model.forward)  # type: ignore[misc]

    def _rematplan_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with LOCK.shared():
            return self._rematplan_forward_of(self._rematplan_model())(*args, **kwargs)

    def __copy__(self) -> Any:
        """Return another planned module with the same parameters, submodules and plans. Plans made later are
        separate."""
        model = copy.copy(self._rematplan_model())
        return _become(
            _blank(self._rematplan_kind), (model, self._rematplan.twin(), self._rematplan_replaced)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a planned module with copies of the weights and with the same plans, for example for an average of
        weights."""
        memo[id(self)] = twin = _blank(self._rematplan_kind)
        model, replaced = (
            copy.deepcopy(one, memo) for one in (self._rematplan_model(), self._rematplan_replaced)
        )
        return _become(twin, (model, self._rematplan.twin(), replaced))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model and the options of planning, without plans. The unpickled module makes its plans when it is
        called."""
        del protocol
        return (
            _blank,
            (self._rematplan_kind,),
            (self._rematplan_model(), self._rematplan.twin(with_plans=False), self._rematplan_replaced),
            None,
            None,
            _become,
        )
