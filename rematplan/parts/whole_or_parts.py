"""`WholeOrParts`: execute a module by one plan, or in parts under one common budget if it cannot be captured whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from rematplan.ir import (
    CapturedAnew,
    InfeasibleBudget,
    ModelError,
    NoGradients,
    NotCaptured,
    RematplanError,
    UsageError,
    show_bytes,
)
from rematplan.module.cached_plans import CachedPlans, CacheEntry
from rematplan.module.capture_lock import LOCK
from rematplan.module.captures import MANY
from rematplan.module.changing_state import MovingTensors, replaced_tensors
from rematplan.module.forward_capture import Original, Tracing
from rematplan.module.runner import Runner
from rematplan.module.shape_options import ShapeOptions
from rematplan.module.state_tensors import StateTensors
from rematplan.parts.find_modules import modules_of_names, modules_to_try
from rematplan.parts.planned_parts import PlannedParts
from rematplan.plans.held_by_others import GRADIENTS
from rematplan.plans.options import FUSED, NOT_IN_STAGES, SPLIT
from rematplan.plans.planner import Planner
from rematplan.plans.progress import LOG
from rematplan.plans.replicas import HeldByReplica, in_replica
from rematplan.runtime.capture.flat_module import flattened_call
from rematplan.runtime.graph.compat import replicating
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.guards.snapshots import PLAIN
from rematplan.runtime.statistics.options import Kronecker

T = TypeVar("T")
COUNTER = "num_batches_tracked"


class WholeOrParts(Runner):
    """Executes the calls of a module by one plan; in parts if a user names them, or if the whole cannot be captured.
    ``modules``: the names of the parts; None if a user states none."""

    def __init__(
        self,
        name: str,
        planner: Planner,
        asked: ShapeOptions,
        statistics: Kronecker | None = None,
        modules: tuple[str, ...] | None = None,
    ) -> None:
        """Make a runner without plans; `UsageError` for ``modules`` together with options that parts do not support."""
        super().__init__(name, planner, asked, statistics)
        self.modules = modules
        self.state = StateTensors()
        """The attributes that planned calls of the whole get as arguments."""
        self.parts: PlannedParts | None = None
        """Runs the parts; None if the whole is planned, or nothing is planned yet."""
        self.stays_whole = False
        """Whether the whole stays planned although each call may need another capture, since parts were refused or need
        more memory."""
        self.settings: tuple[Any, ...] | None = None
        """The model's settings (`settings_of`) before the first call in parts; empty from the second call on."""
        if modules is not None:
            self._check_parts()

    def twin(self, *, with_plans: bool = True) -> WholeOrParts:
        """Return a runner for a copy of the module, with the present plan of the whole or none, not those of parts."""
        twin = super().twin(with_plans=with_plans)
        assert isinstance(twin, WholeOrParts)
        twin.parts = None
        return twin

    @property
    def has_plans(self) -> bool:
        """Whether a call has been planned."""
        return bool(self.plans) or self.parts is not None

    @property
    def runners(self) -> Sequence[Runner]:
        """The runners that have the plans: those of the parts once the budget is divided among them, else this one,
        which has no plans if no part can be planned."""
        planned = self.parts and self.parts.last
        return (planned and [*planned.runners.values()]) or (self,)

    def __call__(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model by its plan or the plans of its parts. Calls without gradients, and those that another tracer
        traces, run without a plan."""
        if not torch.is_grad_enabled():
            return original.plain(args, kwargs)
        self._count_replica(original.model)
        if self._is_whole:
            try:
                return self._with_state(super().__call__, original, args, kwargs)
            except CapturedAnew as error:
                self._try_parts(original, args, kwargs, error)
                if self._is_whole:
                    return self._with_state(super().__call__, original, args, kwargs)
            except ModelError as error:
                self._plan_in_parts(original, error)
        leaves, spec = flattened_call(args, kwargs)
        state = self.state_if_planned(original, leaves, spec)
        if state is None:
            return self._unplanned(original, args, kwargs)
        if self._is_whole_now(original, args, kwargs):
            return self._with_state(super().__call__, original, args, kwargs)
        self.bypasses.begin_planned_call()
        if self.prepared is not None:
            self._begin_training(Tracing(self.name, original, leaves, spec, state))
        self._prepare_parts(original, args, kwargs)
        assert self.parts
        return self.parts(original, args, kwargs)

    def prepare(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for these arguments, or the plans of the parts, which takes a run of the model."""
        self._count_replica(original.model)
        if self._is_whole:
            try:
                return self._with_state(super().prepare, original, args, kwargs)
            except CapturedAnew as error:
                self._try_parts(original, args, kwargs, error)
                if self._is_whole:
                    return self._with_state(super().prepare, original, args, kwargs)
            except ModelError as error:
                self._plan_in_parts(original, error)
        with torch.inference_mode(False), torch.enable_grad():
            if self._prepare_parts(original, args, kwargs):
                self._note_prepared(original, args, kwargs)
        return None

    def _with_state(
        self,
        run: Callable[[Original, tuple[Any, ...], dict[str, Any]], T],
        original: Original,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> T:
        """Call ``run`` for a call of the whole. Tensors that the forward keeps for its next call become arguments when
        a capture finds them."""
        while True:
            try:
                return run(*self.state.among_arguments(original, args, kwargs))
            except MovingTensors as found:
                if found.places <= self.state.places:
                    raise
                self.state = StateTensors(self.state.places | found.places)

    def _count_replica(self, model: nn.Module) -> None:
        """If DDP calls the model, and plans do not count what DDP holds, let them count it and drop earlier plans; a
        percentage is then of the step with DDP. A saved plan stays as it is."""
        options, wrapper = self.planner.options, replicating()
        if wrapper is None or options.saved is not None:
            return
        if (counted := in_replica(options, wrapper, model)) is options:
            return
        with LOCK.alone():
            self.planner = replace(self.planner.of_training() or self.planner, options=counted)
            self._drop_plans()
            self.parts = self.parts and self.parts.of(self.planner)

    @property
    def _is_whole(self) -> bool:
        return self.modules is None and self.parts is None

    @property
    def may_pack(self) -> bool:
        """Whether a forward that calls RNNs with packed sequences is captured, instead of planned in parts."""
        return super().may_pack or self.stays_whole

    def _begin_training(self, call: Tracing) -> None:
        planner = self.planner
        super()._begin_training(call)
        if self.planner is not planner and self.parts is not None:
            self.parts = self.parts.of(self.planner)

    def _plan_in_parts(self, original: Original, error: ModelError) -> None:
        """Set `parts`, since the whole cannot be captured, and drop the plans of the whole, if any. If parts are
        impossible, raise ``error``, or an error of its type that also says why."""
        captured, has_graph = bool(self.plans), not isinstance(error, NotCaptured)
        if isinstance(error, NoGradients) or (has_graph and (captured or not modules_to_try(original.model))):
            raise error
        try:
            self.parts = self._parts(error)
        except (ModelError, UsageError) as why:
            raise type(error)(f"{error}; nor in parts: {why}") from error.__cause__
        LOG.info("%s is planned in parts: %s", self.name, error)
        if captured:
            self._drop_plans()

    def _new(self, tracing: Tracing) -> CacheEntry:
        """Return a new entry for a call. Raise `MovingTensors` if attributes have other tensors than for several known
        entries. Unless the model stays whole, raise `CapturedAnew` after `MANY` graphs of known sizes, or separate
        captures of as many sizes as plans are kept."""
        guards = [one.guard for one in self.plans.plain()]
        replaced = replaced_tensors(tracing.model, tracing.state, guards) - self.state.places
        if replaced:
            told = ", ".join(sorted(".".join(place).lstrip(".") for place in replaced))
            raise MovingTensors(f"{self.name}: {told} became other tensors after they were planned", replaced)
        why = ""
        if self.captures.repeated >= MANY:
            why = (
                f"had another graph in {MANY} calls of known sizes (it decides by values, or reads numbers or Python "
                f"state that keep changing)"
            )
        elif self.captures.separate >= self.asked.max_plans:
            why = f"was captured for each of {self.captures.separate} sizes, and no more plans are kept"
        if why and not self.stays_whole:
            raise CapturedAnew(f"{self.name} {why}")
        return super()._new(tracing)

    def _try_parts(
        self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any], error: CapturedAnew
    ) -> None:
        """Plan the model in parts, which are captured once. It stays whole if no part can be planned, or parts need
        more than the largest budget so far (their budget if there was no plan). Warn of the outcome."""
        known, needed, text = (self.plans, self.captures), 0, ""
        most = max((one.plan.budget or one.plan.peak for one in self.plans.plain()), default=0)
        try:
            self._plan_in_parts(original, error)
            assert self.parts
            with torch.inference_mode(False), torch.enable_grad():
                plan = self.parts.prepare(original, args, kwargs)
            needed, text = plan.peak, plan.text()
            most = most or needed  # without plans of the whole, parts are preferred if they fit
        except InfeasibleBudget as why:
            needed = why.smallest
        except RematplanError as why:
            LOG.info("%s; it is not planned in parts: %s", error, why)
        if self.parts is not None and 0 < needed <= most:
            warn(f"{error}; from now on it is {text}")
            return
        self.parts, self.stays_whole, (self.plans, self.captures) = None, True, known
        why_not = f"parts need {show_bytes(needed)}" if needed else "it has no part to plan instead"
        warn(
            f"{error}; each new graph is captured and planned, since {why_not}: pad what changes to a few sizes, make "
            f"numbers tensors, or plan only modules that have one graph (rematplan.apply of these)"
        )

    def _is_whole_now(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """At the second call in parts, plan the whole if only the first call, which changed settings, could not be
        captured. Keep it if it fits the budget, and return whether it is kept."""
        parts, before = self.parts, self.settings
        if self.modules is not None or parts is None or before == () or isinstance(parts.error, CapturedAnew):
            return False
        now = settings_of(original.model)
        self.settings = now if before is None else ()
        if before is None or now == before:
            return False
        self.parts = None
        try:
            self._with_state(super().prepare, original, args, kwargs)
            assert self.last
            plan = self.last.plan
            if plan.peak <= (plan.budget or plan.peak):
                self.say(
                    plan.peak, plan.budget or plan.peak, plan.estimate.overhead, " (as a whole from now on)"
                )
                return True
        except RematplanError as why:
            LOG.info("%s is still planned in parts: %s", self.name, why)
        self.parts, self.plans = parts, CachedPlans(self.asked.max_plans)
        self.captures = self.captures.copy(with_shapes=False)
        return False

    def _check_parts(self) -> None:
        """Raise `UsageError` for options that parts cannot have, since parts are planned as a pipeline's stages are."""
        options = self.planner.options
        excluded = {
            "statistics": self.recorder is not None,
            "policy": bool(options.policy),
            "dynamic_shapes": self.asked != ShapeOptions(),
            "inverses": options.inverting,
            "several calls in flight": options.several,
            **{one.name: one.holds(options) for one in (SPLIT, FUSED, *NOT_IN_STAGES)},
            "a percentage of activations": options.budget is not None
            and options.stated_budget().kind == "activations",
        }
        if name := next((name for name, stated in excluded.items() if stated), None):
            raise UsageError(f"{name} cannot be combined with plans of several modules")

    def _parts(self, error: ModelError | None = None) -> PlannedParts:
        """Return what runs the model in parts. ``error``: why the whole model cannot be captured, if it was tried."""
        self._check_parts()
        find = partial(modules_of_names, names=self.modules) if self.modules else modules_to_try
        return PlannedParts(self.planner, find, error)

    def _prepare_parts(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Make the plans for a call of the parts. Return whether they are the first, for which one line is printed."""
        parts = self.parts = self.parts or self._parts()
        is_first = parts.last is None
        plan = parts.prepare(original, args, kwargs)
        if is_first:
            self.say(plan.peak, plan.budget, plan.overhead, f" ({plan.text()})")
        return is_first

    def say(self, peak: int, budget: int, overhead: float, more: str) -> None:
        """Print one line about the first plan on standard error, in distributed training only in the process of rank 0.
        ``overhead``: as a share; ``more``: text to append to it."""
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
            return
        uncounted = "what is outside of the model"
        reserved = self.planner.options.reserved.items
        if all(one == GRADIENTS or isinstance(one, HeldByReplica) for one in reserved):
            uncounted = f"the optimizer (reserved=[optimizer]) and {uncounted}"
        print(
            f"rematplan: {self.name} trains with a peak of {show_bytes(peak)} within "
            f"{show_bytes(budget)}, {100 * overhead:.1f} % overhead{more}; not counted: {uncounted}",
            file=sys.stderr,
        )


def settings_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the plain attributes of a model's modules, and its buffers of one element, such as a flag that the first
    forward sets. The counters of batch norms are left out."""
    plain = (value for part in model.modules() for value in vars(part).values() if type(value) in PLAIN)
    single = (b for name, b in model.named_buffers() if b.numel() == 1 and not name.endswith(COUNTER))
    return (*plain, *(repr(b.item()) for b in single))
