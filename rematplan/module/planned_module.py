"""A module whose forward and backward follow a plan. It keeps its class as a base, and its state."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any, cast

from torch import nn

from rematplan.ir import ModelError
from rematplan.module.bypass_warnings import watched_methods
from rematplan.module.forward_capture import Original
from rematplan.module.plan_access import HasRunner, Planning
from rematplan.module.runner import Runner
from rematplan.runtime.capture.capture import check_traceable
from rematplan.runtime.graph.compat import disable_dynamo, is_compiled_in_place


def planned_module(model: nn.Module, runner: Runner) -> nn.Module:
    """Return an object of a subclass of the model's class, which shares its state and whose calls ``runner`` executes.
    `ModelError` if the model cannot be traced or was compiled in place, its class allows no subclass, or it is planned
    and its forward was replaced."""
    check_traceable(model)
    if isinstance(model, _Planned):
        if model._rematplan_replaced is not None:
            raise ModelError(
                f"{type(model).__name__} is planned, and its forward was replaced since; undo that (del model.forward) "
                f"to plan it again"
            )
        model = model._rematplan_model()
    elif is_compiled_in_place(model):
        raise ModelError(
            f"{type(model).__name__} was compiled in place, and its calls would not reach a plan; plan it before "
            f"compile(), or in place (rematplan.apply)"
        )
    return _become(_blank(type(model)), (model, runner, None))


_classes: dict[type[nn.Module], Any] = {}


def _class_of(kind: type[nn.Module]) -> Any:
    if kind not in _classes:
        _classes[kind] = _new_class(kind)
    return _classes[kind]


def _new_class(kind: type[nn.Module]) -> Any:
    """Return a new subclass of a model's class for planned modules; `ModelError` if the class allows none."""
    # Some code looks classes up by name.
    more = {key: getattr(kind, key) for key in ("__module__", "__qualname__")}
    try:
        ours = {name: _Ours(name) for name in OURS if not hasattr(kind, name)}
        watched = watched_methods(kind, lambda planned: planned._rematplan.bypasses)
        own = {"forward": _Forward(kind), "_rematplan_kind": kind}
        return type(kind.__name__, (_Planned, kind), {**more, **watched, **ours, **own})
    except TypeError as error:
        raise ModelError(f"{kind.__name__} allows no planned subclass: {error}") from error


def _blank(kind: Any) -> nn.Module:
    planned: nn.Module = object.__new__(_class_of(kind))
    object.__setattr__(planned, "_rematplan_replaced", None)  # unpickling its attributes may read its forward
    return planned


def _become(planned: nn.Module, state: tuple[nn.Module, Runner, Any]) -> nn.Module:
    """Make ``planned``, an object without attributes, the planned module of a model; the two share one ``__dict__``.
    ``state``: the model, its runner, and the function that replaces the planned forward, or None."""
    model, runner, replaced = state
    attributes = {"_rematplan": runner, "_rematplan_origin": model, "_rematplan_replaced": replaced}
    for name, value in {"__dict__": model.__dict__, **attributes}.items():
        object.__setattr__(planned, name, value)
    return planned


class _Forward:
    """The attribute ``forward`` of planned modules: the planned forward, or a function that was assigned to replace it.
    An entry ``forward`` in the shared ``__dict__`` is the model's, and does not replace the planned one."""

    def __init__(self, kind: type[nn.Module]) -> None:
        @functools.wraps(kind.forward)
        @disable_dynamo
        def forward(self: _Planned, *args: Any, **kwargs: Any) -> Any:
            return self._rematplan(self._rematplan_original(), args, kwargs)

        self.function = forward

    def __get__(self, planned: _Planned | None, kind: type | None = None) -> Any:
        if planned is None:
            return self.function
        return planned._rematplan_replaced or MethodType(self.function, planned)

    def __set__(self, planned: _Planned, value: Any) -> None:
        planned._rematplan_replaced = value

    def __delete__(self, planned: _Planned) -> None:
        planned._rematplan_replaced = None


OURS = ("plan", "plans", "source", "report", "prepare")


class _Ours:
    """Gives planned modules an attribute of `Planning`, such as ``plan``, unless the model has one of that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, planned: Any, kind: type | None = None) -> Any:
        if planned is None:
            return self
        # Plain attributes come before this descriptor, but nn.Module finds these three kinds only after it.
        for held in ("_parameters", "_buffers", "_modules"):
            if self.name in planned.__dict__[held]:
                return planned.__dict__[held][self.name]
        return getattr(Planning(planned), self.name)


class _Planned(HasRunner):
    """The attributes and methods that a planned module has in addition to its model."""

    __slots__ = ("_rematplan_origin", "_rematplan_replaced")

    _rematplan_kind: type[nn.Module]
    _rematplan_origin: nn.Module
    """The original model. Submodules may have weak references to it."""
    _rematplan_replaced: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing. Without this method, base classes that register their subclasses would register the planned
        class, too."""

    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as usual. If a function that replaced ``forward`` bypasses the planned one, warn."""
        call = functools.partial(super().__call__, *args, **kwargs)  # type: ignore[misc]
        if self._rematplan_replaced is None:
            return call()
        what = f"the function that replaced the forward of {self._rematplan.name}"
        return self._rematplan.bypasses.run_and_warn(cast(nn.Module, self), what, call)

    def _rematplan_model(self) -> nn.Module:
        """Return the original model; this object if its class was changed since, as by a parametrisation."""
        further = type(self) is not _class_of(self._rematplan_kind)
        return cast(nn.Module, self) if further else self._rematplan_origin

    def _rematplan_original(self) -> Original:
        """Return the original model with its own forward, which has no plan."""
        model = self._rematplan_model()
        further = isinstance(model, _Planned) and "forward" not in self.__dict__
        return Original(model, super().forward if further else model.forward)  # type: ignore[misc]

    def __copy__(self) -> Any:
        """Return another planned module with the same parameters, submodules and plans so far."""
        model = copy.copy(self._rematplan_model())
        return _become(
            _blank(self._rematplan_kind), (model, self._rematplan.twin(), self._rematplan_replaced)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a planned module with copies of the weights and the same plans, as for an average of weights."""
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
