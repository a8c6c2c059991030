"""A module whose forward and backward follow a plan, in any training loop.

The module keeps its class, its parameters and its state; only its ``forward`` is another, which its runner does.
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
from rematplan.runtime.graph.compat import disable_dynamo
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.module.runner import FORWARDS, LOCK, Planner, Runner
from rematplan.runtime.statistics.factors import Factors, Statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import Listener, Recorder, shapes


def planned_module(
    model: nn.Module, planner: Planner, dynamic: bool = True, statistics: Kronecker | None = None
) -> nn.Module:
    """``model`` with a planned forward and backward: an object of a subclass of its class, sharing all its state.

    ``dynamic``: whether a call with other shapes, types or modes makes a further plan; else it is refused.
    ``statistics``: those to take in its steps.

    Raises:
        ModelError: the model is compiled, the shape of a parameter is not known yet, or the model is planned and its
            forward was replaced since.
    """
    check_traceable(model)
    if isinstance(model, _Planned):
        if model._rematplan_replaced is not None:
            raise ModelError(
                f"{type(model).__name__} is planned, and its forward was replaced since; take that back (del "
                f"model.forward) to plan it once more"
            )
        model = model._rematplan_model()
    return _become(
        _blank(type(model)), (model, Runner(type(model).__name__, planner, dynamic, statistics), None)
    )


_classes: dict[type[nn.Module], Any] = {}


def _class_of(kind: type[nn.Module]) -> Any:
    if kind not in _classes:
        _classes[kind] = _new_class(kind)
    return _classes[kind]


def _new_class(kind: type[nn.Module]) -> Any:
    more = {key: getattr(kind, key) for key in ("__module__", "__qualname__")}  # some look classes up by name
    try:
        ours = {name: _Ours(name) for name in OURS if not hasattr(kind, name)}
        own = {"forward": _Forward(kind), "_rematplan_kind": kind}
        return type(kind.__name__, (_Planned, kind), {**more, **ours, **own})
    except TypeError as error:
        raise ModelError(f"{kind.__name__} leaves no room for a planned subclass: {error}") from error


def _blank(kind: Any) -> nn.Module:
    planned: nn.Module = object.__new__(_class_of(kind))
    object.__setattr__(planned, "_rematplan_replaced", None)  # what it is to hold may ask for its forward
    return planned


def _become(planned: nn.Module, state: tuple[nn.Module, Runner, Any]) -> nn.Module:
    """A blank becomes the planned module of a model, whose attributes it shares, later ones too. ``state``: the model,
    its runner, and what has been assigned to its forward, if anything."""
    model, runner, replaced = state
    attributes = {"_rematplan": runner, "_rematplan_origin": model, "_rematplan_replaced": replaced}
    for name, value in {"__dict__": model.__dict__, **attributes}.items():
        object.__setattr__(planned, name, value)
    return planned


class _Forward:
    """``forward`` of planned modules. What somebody assigns to it goes in its place, and may call it; what stands in
    the attributes that it shares with the model is the model's."""

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
    """What the planning of a module has come to.

    ``plans``: how many are in use. ``gaps``: of each the overhead beyond its proven floor, a share of the step's time;
    None without a floor. ``searching``: for how many of them a better one is searched for. ``seconds``: that these
    searches have taken in the background. ``swaps``: how often a better plan has taken a plan's place.
    """

    plans: int
    gaps: tuple[float | None, ...]
    searching: int
    seconds: float
    swaps: int


class Planning:
    """What a planned module is planned to do.

    Planned modules have these as attributes of their own, but for names that their model uses itself.

    Raises:
        UsageError: the module is not planned.
    """

    def __init__(self, planned: nn.Module) -> None:
        if not isinstance(planned, _Planned):
            raise UsageError(f"a {type(planned).__name__} is not planned; see rematplan.plan_module")
        self._planned: _Planned = planned

    @property
    def plan(self) -> Plan:
        """The plan of the last way in which the module was called."""
        return self._planned._rematplan.last.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans made so far."""
        return tuple(entry.plan for entry in self._planned._rematplan.entries())

    @property
    def source(self) -> str:
        """The generated source of `plan`."""
        return self._planned._rematplan.last.compiled.halves.source

    def wait(self, seconds: float | None = None) -> Planning:
        """Wait until no better plan is searched for any more, so many seconds at most; the last plans found take effect
        at the next step. Returns itself."""
        end = None if seconds is None else time.monotonic() + seconds
        for entry in self._planned._rematplan.entries():
            if entry.running.refinement is not None:
                entry.running.refinement.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self

    def stats(self) -> PlanningStats:
        """What planning has come to so far."""
        entries = self._planned._rematplan.entries()
        later = [r for entry in entries if (r := entry.running.refinement) is not None]
        return PlanningStats(
            plans=len(entries),
            gaps=tuple(entry.plan.gap for entry in entries),
            searching=sum(r.working for r in later),
            seconds=sum(r.seconds for r in later),
            swaps=sum(entry.running.swaps for entry in entries),
        )

    def statistics(self) -> Statistics:
        """The statistics of the present training step: of its backwards so far, until the next step's first forward;
        without factors in a step that takes none.

        Raises:
            UsageError: the module was planned without statistics.
        """
        return self._recorder.statistics()

    def statistics_layers(self) -> dict[str, Factors]:
        """By weight name the factors that the planned ways of calling the module give, as tensors of the device
        ``meta``.

        Raises:
            UsageError: the module was planned without statistics.
        """
        assert self._recorder
        plain = (way for ways in self._planned._rematplan.ways.values() for way in ways)
        found = (shapes(other.statistics) for way in plain for other in way.measured if other.statistics)
        return {name: factors for one in found for name, factors in one.items()}

    def take_statistics(self, wanted: bool | None = True) -> None:
        """End the present training step; whether the coming ones have statistics. None: every n-th has them, as
        planned. An optimizer that steps over the module's parameters ends a step by itself.

        Raises:
            UsageError: the module was planned without statistics.
        """
        self._recorder.take(wanted)

    def listen_to_statistics(self, listener: Listener) -> None:
        """Call a method with the factors of each layer as soon as a backward has completed them.

        See `Recorder.listen`.

        Raises:
            UsageError: the module was planned without statistics.
        """
        self._recorder.listen(listener)

    @property
    def statistics_options(self) -> Kronecker:
        """What was asked of the statistics.

        Raises:
            UsageError: the module was planned without statistics.
        """
        return self._recorder.options

    @property
    def statistics_state(self) -> tuple[int, int]:
        """The number of the present training step, and of draws of labels so far: all that has to be saved and set
        again for training to resume as it would have gone on.

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
        """Make the plan for these arguments without running anything; returns the module."""
        self._planned._rematplan.prepare(self._planned, args, kwargs)
        return self._planned


def compiled_plan(planned: nn.Module) -> CompiledPlan:
    """The compiled plan of the last way in which a planned module was called.

    Raises:
        UsageError: the module is not planned.
    """
    return Planning(planned)._planned._rematplan.last.compiled


OURS = ("plan", "plans", "source", "prepare")


class _Ours:
    """An attribute of `Planning` on planned modules whose class has none of that name. What the model holds under it,
    as a part, parameter, buffer or plain attribute, goes before."""

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
    """What a planned module has beyond its model."""

    __slots__ = ("_rematplan", "_rematplan_origin", "_rematplan_replaced")

    _rematplan_kind: type[nn.Module]
    _rematplan: Runner
    _rematplan_origin: nn.Module
    """The model that it was made of: parts may hold a weak reference to it."""
    _rematplan_replaced: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that is planned is not announced as a further one to those that its bases register."""

    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As any module is called. That a forward put in our place goes past the plan is remarked upon."""
        before = FORWARDS.begun
        results = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._rematplan_replaced is not None and FORWARDS.begun == before and torch.is_grad_enabled():
            warn(
                f"the forward of {self._rematplan.name} was replaced after it was planned, and the new one does not "
                f"call it: this step has no plan and keeps no budget; plan what it calls"
            )
        return results

    def _rematplan_model(self) -> nn.Module:
        """The model, sharing this one's attributes; or this one, where somebody has given it a further class."""
        further = type(self) is not _class_of(self._rematplan_kind)
        return cast(nn.Module, self) if further else self._rematplan_origin

    def _rematplan_forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """The model's own forward."""
        further = isinstance(model, _Planned) and "forward" not in self.__dict__
        return cast(Callable[..., Any], super().forward if further else model.forward)  # type: ignore[misc]

    def _rematplan_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with LOCK.shared():
            return self._rematplan_forward_of(self._rematplan_model())(*args, **kwargs)

    def __copy__(self) -> Any:
        """A further object with the same parts and plans."""
        model = copy.copy(self._rematplan_model())
        return _become(
            _blank(self._rematplan_kind), (model, self._rematplan.twin(), self._rematplan_replaced)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy (for an average of weights, say) with weights of its own and the same plans."""
        memo[id(self)] = twin = _blank(self._rematplan_kind)
        model, replaced = (
            copy.deepcopy(one, memo) for one in (self._rematplan_model(), self._rematplan_replaced)
        )
        return _become(twin, (model, self._rematplan.twin(), replaced))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled with the wish for a plan, not with the plan: it is made anew in the first call."""
        del protocol
        return (
            _blank,
            (self._rematplan_kind,),
            (self._rematplan_model(), self._rematplan.twin({}), self._rematplan_replaced),
            None,
            None,
            _become,
        )
