"""`apply` and `remove`: plan a module in place, for trainers that own the training loop."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rematplan.ir import NoGradients, UsageError
from rematplan.module.capture_lock import LOCK
from rematplan.module.forward_capture import Original
from rematplan.module.plan_access import IN_PLACE, HasRunner, watch_backwards
from rematplan.parts.find_modules import named_modules
from rematplan.parts.whole_or_parts import WholeOrParts
from rematplan.plan_any_module import ModuleOptions, asked_of, make_first_plans
from rematplan.runtime.capture.flat_module import check_module, flattened_call
from rematplan.runtime.execute.compile import tensors_in_step
from rematplan.runtime.graph.compat import OptimizedModule, disable_dynamo, is_tested

Module = TypeVar("Module", bound=nn.Module)


def apply(
    model: Module,
    budget: str | int | None = None,
    modules: str | Sequence[str] | None = None,
    **options: Any,
) -> Module:
    """Plan ``model`` in place, and return it: the same object, of the same class, with the same names of parameters.

    Nothing is planned yet. The first call in training mode with gradients captures and plans the step, for the types,
    devices and modes of that call; it also turns a percentage into bytes. Other calls, such as evaluation and
    generation, run the model as it is, and so does training in evaluation mode (``model.eval()``). Copies and pickles
    of the model are planned in place, too, and make plans of their own. `rematplan.planning` shows the plans, also of
    a model that DDP or PEFT wraps.

    Apply it to the inner model, before or after that is moved, patched or wrapped: the forward that the model has at a
    call is planned. A wrapper itself (DDP, DataParallel, a compiled module) is refused. A model that is planned in
    place already gets the new budget and options.

    A model that cannot be captured as a whole (its loss matches, its layers are dropped by chance, a router reads
    values) is planned in parts: its largest modules that can be captured. The rest runs as it is. The budget is common
    to all parts and the rest. The first training call runs the model once more, with its state restored afterwards, to
    measure what the rest holds. Parts that do not run in a step count as if they ran. A percentage is then of what all
    parts and the rest need without recomputation.

    Args:
        model: the model.
        budget: as in `plan_module`.
        modules: the names of the modules to plan in parts, such as ``"backbone"``, or patterns such as ``"layers.*"``;
            one or several. None: the whole model if it can be captured, otherwise the largest modules that can be.
        options: the other keywords of `plan_module`, such as ``strategy`` and ``reserved``.

    Raises:
        UsageError: ``model`` is no module, is or contains a scripted one, has parameters without a shape, was made by
            `plan_module`, or runs another module (DDP, `torch.compile`); there is no budget; there is no module of a
            name in ``modules``; or an option is unknown or malformed. The first training call raises the other
            errors of `plan_module`.
    """
    check_module(model)
    if isinstance(model, (DistributedDataParallel, nn.DataParallel, OptimizedModule)):
        raise UsageError(f"a {type(model).__name__} runs another module; plan that one in place")
    if isinstance(model, HasRunner):
        raise UsageError(
            f"this {type(model).__name__} was made by plan_module; plan its model in place instead"
        )
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise UsageError(
            f"{type(model).__name__} has parameters without a shape yet; call it once before planning"
        )
    scripted = next((n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise UsageError(
            f"the module {scripted or type(model).__name__} is scripted; plan it before it is scripted, or call "
            f"apply on modules that do not contain it"
        )
    asked = asked_of(model, budget=budget, **options)
    if modules is not None and not (modules := named_modules(model, modules)):
        raise UsageError("modules is empty; name the modules to plan")
    planned = InPlace(model, asked, modules=modules)
    InPlace.undo(model)
    planned.begin()
    watch_backwards(model)
    return model


def remove(model: Module) -> Module:
    """Undo `apply` for a model and all of its submodules, and return the model. It runs as it did before.

    A function that was set as the model's ``forward`` since, and calls the planned one, stays; it then calls the
    model's own forward.

    Raises:
        UsageError: ``model`` is no module.
    """
    check_module(model)
    for part in model.modules():
        InPlace.undo(part)
    return model


class InPlace(HasRunner):
    """The ``forward`` of a module planned in place: an attribute that looks like a bound method to libraries."""

    __slots__ = ("active", "asked", "model", "modules", "replaced", "seen")

    _rematplan: WholeOrParts

    def __init__(
        self, model: nn.Module, asked: ModuleOptions, *, modules: tuple[str, ...] | None = None
    ) -> None:
        self.model, self.asked, self.modules = model, asked, modules
        #: An earlier attribute ``forward`` of the instance, which is what is planned; None for the forward of
        #: its class.
        self.replaced: Callable[..., Any] | None = None
        #: Whether calls are planned.
        self.active = True
        #: The function that the plans are for; None if there are none.
        self.seen: Callable[..., Any] | None = None
        self._rematplan = asked.runner(model, modules)

    def _without_plans(self) -> None:
        """Begin again without plans."""
        bypasses = self._rematplan.bypasses
        self._rematplan = self._rematplan.twin(with_plans=False)
        self._rematplan.bypasses = bypasses  # its watch ends with `undo`

    def begin(self) -> None:
        """Make this object the forward of its module."""
        self.replaced = vars(self.model).get("forward")
        vars(self.model).update({"forward": self, IN_PLACE: self})

    @staticmethod
    def undo(model: nn.Module) -> None:
        """Undo `begin`, if the module is planned in place."""
        if IN_PLACE not in vars(model):
            return
        planned: InPlace = vars(model).pop(IN_PLACE)
        if planned.model is model:  # not a shallow copy
            planned.active = False
            planned._rematplan.bypasses.end_watch()
        own = vars(model)
        if own.get("forward") is planned:
            del own["forward"]
            own.update({} if planned.replaced is None else {"forward": planned.replaced})

    def own_forward(self) -> Callable[..., Any]:
        """Return the module's own forward, which has no plan."""
        if self.replaced is not None:
            return self.replaced
        kind = type(self.model)
        found: Callable[..., Any] = inspect.getattr_static(kind, "forward").__get__(self.model, kind)
        return found

    def _rematplan_original(self) -> Original:
        return Original(self.model, self.own_forward())

    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module by its plan in training mode with gradients, otherwise as it is; `UsageError` for a shallow
        copy."""
        if _called(sys._getframe(1)) not in (None, self.model):
            raise UsageError(
                f"a shallow copy of a {type(self.model).__name__} that is planned in place was called (copy.copy, "
                f"DataParallel); use copy.deepcopy or DistributedDataParallel, or call rematplan.apply on the copy"
            )
        original = self._rematplan_original()
        trains = self.active and self.model.training and torch.is_grad_enabled()
        if not trains or LOCK.is_mine:  # or a module of which this is a part is captured
            return original.plain(args, kwargs)
        function = getattr(original.forward, "__func__", original.forward)
        if function is not self.seen:  # the first call, or the forward was patched
            self._without_plans()
            self.seen = function
        runner = self._rematplan
        if not runner.has_plans and (
            runner.state_if_planned(original, *flattened_call(args, kwargs)) is not None
        ):
            try:
                self._plan_first(args, kwargs)
            except NoGradients:
                return runner.run_untrained(original, args, kwargs)
        return runner(original, args, kwargs)

    def _plan_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the first plans. Print one line about them if the model is planned as a whole; in parts, the parts have
        printed it."""
        runner = self._rematplan
        runner.planner = replace(runner.planner, named=tensors_in_step(self.model))
        plain = self.model if is_tested(torch.__version__) else remove(copy.deepcopy(self.model))
        make_first_plans(self.model, self.asked, plain, args, kwargs)
        if runner.parts is None:
            assert runner.last
            plan = runner.last.plan
            searching = " so far" if plan.status == "refining" else ""
            runner.say(plan.peak, plan.budget or plan.peak, plan.estimate.overhead, searching)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward."""
        return inspect.signature(self.own_forward())

    @property
    def __self__(self) -> nn.Module:
        """The module."""
        return self.model

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of a module planned in place, as of a bound method, which libraries may wrap and bind again."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            planned = vars(module).get(IN_PLACE)
            run = type(module).forward.__get__(module) if planned is None else planned
            return run(*args, **kwargs)

        own = self.own_forward()
        with suppress(ValueError, TypeError):
            forward.__signature__ = inspect.signature(getattr(own, "__func__", own))  # type: ignore[attr-defined]
        return forward

    def __getstate__(self) -> tuple[Any, ...]:
        """Return what a copy or pickle has: no plans."""
        return self.model, self.asked, self.modules, self.replaced, self.active

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Set what `__getstate__` returned. The module may have no attributes yet."""
        self.model, self.asked, self.modules, self.replaced, self.active = state
        self.seen = None
        self._rematplan = self.asked.runner(self.model, self.modules)


def _called(frame: FrameType | None) -> Any:
    """Return the module whose call has led to a frame directly; None if another function has."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch._compile", "torch._dynamo")
    ):
        frame = frame.f_back  # of `disable_dynamo`
    calls = frame is not None and frame.f_globals is vars(torch.nn.modules.module)
    return frame.f_locals.get("self") if frame is not None and calls else None
